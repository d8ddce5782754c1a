"""How long a step takes at least: each thing it does at the rate that the chip's maker states.

Memory and arithmetic overlap: the longer one counts. Messages between chips do not, as the next
product waits for their sum.
"""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence

from inferjax.planner.hardware import Chip, Link, Measured
from inferjax.planner.model import Model, largest_leaf
from inferjax.planner.work import Message, Work


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """The least time of a step, and what it is made of, in seconds.

    `weights_s` and `kv_s` are memory's, `compute_s` arithmetic's, `link_s` that of messages,
    `fixed_s` what a measured machine adds. `binds` names the part that a faster chip would have to
    shorten first.
    """

    weights_s: float
    kv_s: float
    compute_s: float
    link_s: float
    fixed_s: float
    seconds: float
    binds: str


def step_time(chip: Chip, model: Model, work: Work, *, rows: int) -> StepTime:
    """Return the floor of a step; `rows` is how many tokens its products multiply."""
    weights_s, kv_s = work.weight_bytes / chip.bandwidth, work.kv_bytes / chip.bandwidth
    fast = chip.f32_flops if model.activation_bytes == 4 else chip.bf16_flops
    products_s = work.product_flops / product_rate(chip, model)
    attention_s = work.attention_flops / fast
    link_s = sum(m.count * message_s(chip, m) for m in work.messages)
    if chip.measured:
        return _measured_time(chip, work, max(weights_s, products_s), link_s, rows)
    memory_s, compute_s = weights_s + kv_s, products_s + attention_s
    parts = {"weights": weights_s, "kv": kv_s, "compute": compute_s, "links": link_s}
    hidden = ("compute",) if memory_s >= compute_s else ("weights", "kv")
    return StepTime(
        weights_s=weights_s,
        kv_s=kv_s,
        compute_s=compute_s,
        link_s=link_s,
        fixed_s=0.0,
        seconds=max(memory_s, compute_s) + link_s,
        binds=_largest({name: s for name, s in parts.items() if name not in hidden}),
    )


def _measured_time(chip: Chip, work: Work, products_s: float, link_s: float, rows: int) -> StepTime:
    """Return the time by measured steps; more rows than were measured run at `products_s`."""
    at = measured_at(chip, rows)
    if rows <= chip.measured[-1].rows:
        products_s = work.weight_bytes / at.product_bytes_s
    kv_s = work.kv_bytes / at.kv_bytes_s
    parts = {"weights": products_s, "kv": kv_s, "links": link_s, "fixed": at.step_s}
    return StepTime(
        weights_s=products_s,
        kv_s=kv_s,
        compute_s=0.0,
        link_s=link_s,
        fixed_s=at.step_s,
        seconds=sum(parts.values()),
        binds=_largest(parts),
    )


def total_time(steps: Sequence[StepTime]) -> StepTime:
    """Return steps one after the other; what binds most of their time binds them."""
    spent: dict[str, float] = {}
    for step in steps:
        spent[step.binds] = spent.get(step.binds, 0.0) + step.seconds
    names = ("weights_s", "kv_s", "compute_s", "link_s", "fixed_s", "seconds")
    sums = {name: sum(getattr(step, name) for step in steps) for name in names}
    return StepTime(**sums, binds=_largest(spent))


def product_rate(chip: Chip, model: Model) -> float:
    """Return the operations a second of products with weights, by what is multiplied.

    Packed weights are widened to float32 on the way into the product, and so is the other factor
    where it is rounded to integers: bits of weights are saved memory, not saved arithmetic.
    """
    return chip.f32_flops if largest_leaf(model).dtype == "float32" else chip.bf16_flops


def message_s(chip: Chip, message: Message) -> float:
    """Return the least time of one collective.

    An all-reduce sends what a chip holds twice, less its own part: 2 (n - 1) / n of it. All to all
    sends (n - 1) / n once; on a ring everything travels n / 4 of the way round on average.

    Source: jax-ml/scaling-book, chapter 3; Thakur, Rabenseifner and Gropp, "Optimization of
    collective communication operations in MPICH" (2005).
    """
    link, n = link_among(chip, message.span), message.num_chips
    if message.kind == "all_reduce":
        hops = {"switch": 2, "torus": n, "ring": 2 * (n - 1)}[link.kind]
        sent = 2 * (n - 1) / n * message.num_bytes
    else:
        hops = {"switch": 1, "torus": n // 2, "ring": n - 1}[link.kind]
        far = n / 4 if link.kind == "torus" else (n - 1) / n
        sent = far * message.num_bytes
    return link.start_s + hops * link.hop_s + sent / link.bytes_s


def link_among(chip: Chip, num_chips: int) -> Link:
    """Return what joins this many neighbours: the slower network where the links do not reach."""
    if num_chips <= chip.link.num_chips:
        return chip.link
    slower = min(chip.link.bytes_s, chip.network.bytes_s)
    return dataclasses.replace(chip.network, bytes_s=slower)


def measured_at(chip: Chip, rows: int) -> Measured:
    """Return what a step of this many rows does: times grow evenly between two measured ones."""
    found = chip.measured
    for low, high in itertools.pairwise(found):
        if low.rows <= rows <= high.rows:
            share = (rows - low.rows) / (high.rows - low.rows)
            return Measured(
                rows=rows,
                product_bytes_s=_between(low.product_bytes_s, high.product_bytes_s, share),
                kv_bytes_s=_between(low.kv_bytes_s, high.kv_bytes_s, share),
                step_s=(1 - share) * low.step_s + share * high.step_s,
            )
    return found[0] if rows < found[0].rows else found[-1]


def _between(low: float, high: float, share: float) -> float:
    """Return a rate whose time lies between the times of two rates."""
    return 1 / ((1 - share) / low + share / high)


def _largest(parts: Mapping[str, float]) -> str:
    return max(parts, key=lambda name: parts[name])
