"""How long a request waits before its first token: on the network, for its turn, for its prompt."""

import dataclasses

from inferjax.errors import InvalidInput


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FirstToken:
    """The terms of the time to the first token, in seconds.

    `network_s` is the way there and back. `queue_s` is the rest of the step under way, and the
    prompts that came earlier. `prefill_s` is the prompt's own computation, which `prefill_binds`.
    """

    network_s: float
    queue_s: float
    prefill_s: float
    prefill_binds: str

    @property
    def seconds(self) -> float:
        """The sum of the terms."""
        return self.network_s + self.queue_s + self.prefill_s


def queue_s(*, step_s: float, prefill_s: float, arrivals_s: float, num_groups: int) -> float:
    """Return the mean time that a prompt waits for its turn, `arrivals_s` requests coming a second.

    It comes at any moment of a step, so half of one is left. Prompts are computed one at a time by
    each of `num_groups` groups of chips; arrivals at random find 1/2 rho / (1 - rho) of a prefill
    before them, at a load of rho.

    Raises: InvalidInput where prompts come faster than they are computed.

    Source: the Pollaczek-Khinchine formula for constant service times (M/D/1).
    """
    load = arrivals_s / num_groups * prefill_s
    if load >= 1:
        raise InvalidInput(
            f"{arrivals_s:g} requests a second cannot be served",
            why=f"a prompt takes {prefill_s * 1e3:.1f} ms, so at most "
            f"{num_groups / prefill_s:.2f} requests a second get through, and the queue grows",
            fix="let fewer requests in, or use more chips",
        )
    return step_s / 2 + load * prefill_s / (2 * (1 - load))
