"""What drafts and shared prefixes would save."""

import dataclasses

from inferjax.errors import InvalidInput


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Speculation:
    """Drafting `draft_len` tokens and verifying them in one step.

    `accept` is the probability that a drafted token stands, `tokens_per_step` how many tokens a
    step yields on average. `step_s` is the time of drafting and verifying, `speedup` how much
    sooner a token comes than without.
    """

    accept: float
    draft_len: int
    tokens_per_step: float
    step_s: float
    speedup: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SharedPrefix:
    """Prompts that begin with the same `num_tokens`, which are computed and stored once.

    `prefill_s` is what is left of a prompt's computation, `saved_s` what is not done. `users` fit
    with it, `users_without` if each stored the prefix itself. Decoding still reads it for every
    sequence.
    """

    num_tokens: int
    prefill_s: float
    saved_s: float
    users: int
    users_without: int


def expected_tokens(accept: float, draft_len: int) -> float:
    """Return the tokens that a verifying step yields: (1 - a^(n + 1)) / (1 - a).

    Raises: InvalidInput for a probability outside [0, 1] or a negative length.

    Source: Leviathan, Kalman and Matias, arXiv 2211.17192, equation 1.
    """
    if not 0 <= accept <= 1 or draft_len < 0:
        raise InvalidInput(
            f"drafts of {draft_len} tokens that stand with probability {accept}",
            why="a probability lies between 0 and 1, and a length is no less than 0",
            fix="give an acceptance such as 0.7 and a length such as 4",
        )
    if accept == 1:
        return float(draft_len + 1)
    return (1 - accept ** (draft_len + 1)) / (1 - accept)


def speculation(
    *, accept: float, draft_len: int, plain_s: float, verify_s: float, draft_s: float
) -> Speculation:
    """Return what drafting brings where a plain step takes `plain_s`.

    Verifying all drafts takes `verify_s`, which is about a plain step as long as memory is the
    limit, and much more where arithmetic is. Drafting one token takes `draft_s`.

    Source: arXiv 2211.17192, theorem 3.8, with the time of verifying kept apart.
    """
    tokens = expected_tokens(accept, draft_len)
    step_s = verify_s + draft_len * draft_s
    return Speculation(
        accept=accept,
        draft_len=draft_len,
        tokens_per_step=tokens,
        step_s=step_s,
        speedup=plain_s * tokens / step_s,
    )
