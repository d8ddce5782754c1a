"""What a step does at least, on every chip: bytes read, operations, and messages to other chips.

Sums of products count two operations a value: one multiplication and one addition. Routers are
taken to choose every expert equally often.
"""

import dataclasses
from typing import Literal

from inferjax.config import Attention, LatentAttention, LayerSpec, MoE, Router
from inferjax.planner.cache import chip_read_bytes
from inferjax.planner.leaves import Leaf, is_head, is_product, is_table
from inferjax.planner.mesh import Mesh, chip_bytes, chip_values, head_share
from inferjax.planner.model import Model


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """`count` equal collectives among `num_chips` chips; `num_bytes` is what a chip brings.

    `span` counts the chips from the first of them to the last, those in between included.
    """

    kind: Literal["all_reduce", "all_to_all"]
    count: int
    num_chips: int
    span: int
    num_bytes: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What one chip does in a step.

    `product_flops` are those of products with weights, `attention_flops` those of scores and of
    sums of values.
    """

    weight_bytes: float
    kv_bytes: float
    product_flops: float
    attention_flops: float
    messages: tuple[Message, ...] = ()


def decode_work(
    model: Model, mesh: Mesh, *, batch: int, context: int, tokens_per_sequence: int = 1
) -> Work:
    """Return the work of a step in which `batch` sequences take a token each, or several to verify.

    `batch` counts the sequences of all chips. `context` is how many tokens each attends to.
    """
    config = model.config
    sequences = -(-batch // mesh.num_groups)
    tokens = sequences * tokens_per_sequence
    attended = sum(_pairs_at(spec, context) * _score_flops(spec, mesh) for spec in config.layers)
    return Work(
        weight_bytes=weight_bytes(model, mesh, tokens),
        kv_bytes=chip_read_bytes(config, mesh, context, model.kv_dtype, sequences=sequences),
        product_flops=tokens * (body_flops(model, mesh) + head_flops(model, mesh)),
        attention_flops=tokens * attended,
        messages=messages(model, mesh, tokens),
    )


def prefill_work(model: Model, mesh: Mesh, *, start: int, stop: int, last: bool = True) -> Work:
    """Return the work of a prompt's tokens from `start` to `stop`, those before being in the cache.

    Each group of chips computes a prompt of its own. The `last` part ends in logits.
    """
    config, tokens = model.config, stop - start
    pairs = sum(
        (_pairs_until(spec, stop) - _pairs_until(spec, start)) * _score_flops(spec, mesh)
        for spec in config.layers
    )
    return Work(
        weight_bytes=weight_bytes(model, mesh, tokens),
        kv_bytes=chip_read_bytes(config, mesh, start, model.kv_dtype, sequences=1),
        product_flops=tokens * body_flops(model, mesh) + last * head_flops(model, mesh),
        attention_flops=pairs,
        messages=messages(model, mesh, tokens),
    )


def weight_bytes(model: Model, mesh: Mesh, tokens: int) -> float:
    """Return the bytes of weights that a chip reads for `tokens` tokens of its group.

    Of tables the tokens' rows, of experts those that some token of the expert axis chooses.
    """
    total = 0.0
    for leaf in model.leaves:
        size = chip_bytes(leaf, mesh)
        if is_table(leaf, model.config):
            total += size * min(1.0, tokens / leaf.spec.shape[0])
        elif leaf.experts is not None:
            total += size * share_of_experts(leaf.experts.router, tokens * mesh.ep)
        else:
            total += size
    return total


def share_of_experts(router: Router, tokens: int) -> float:
    """Return the share of experts that tokens choose between them, on average.

    A token leaves one out with probability 1 - X/E, all tokens with that to the power of T.
    """
    return 1.0 - (1.0 - router.experts_per_token / router.num_experts) ** tokens


def body_flops(model: Model, mesh: Mesh) -> float:
    """Return a chip's operations for one token of its group, without those of the head."""
    return sum(
        2.0 * _used_values(leaf, mesh)
        for leaf in model.leaves
        if is_product(leaf, model.config) and not is_head(leaf, model.config)
    )


def head_flops(model: Model, mesh: Mesh) -> float:
    """Return a chip's operations for the logits of one token of its group."""
    return sum(
        2.0 * chip_values(leaf, mesh) for leaf in model.leaves if is_head(leaf, model.config)
    )


def messages(model: Model, mesh: Mesh, tokens: int) -> tuple[Message, ...]:
    """Return what a step sends: 2 L + 1 sums over the tensor parallel chips, and what else travels.

    Attention and feed-forward of a layer end in a sum each, and so does looking up an embedding
    whose rows the chips share. A latent cache that is shared by sequences sends queries to where
    the sequences are, and their values back. Tokens travel to their experts and back. What
    sampling exchanges, a few numbers a token, is left out.
    """
    config, tp, size = model.config, mesh.tp, model.activation_bytes
    width = tokens * config.model_dim * size
    found = []
    sums = int(config.vocab_size % tp == 0)
    sums += sum(not head_share(s.attention, tp).whole for s in config.layers)
    sums += sum(s.ffn.ffn_dim % tp == 0 for s in config.layers)
    if tp > 1 and sums:
        found.append(Message(kind="all_reduce", count=sums, num_chips=tp, span=tp, num_bytes=width))
    for a in (s.attention for s in config.layers):
        if isinstance(a, LatentAttention) and head_share(a, tp).by_sequence:
            heads = tokens * a.num_q_heads // tp * size
            query = heads * (a.kv_rank + a.rope_dim)
            found += [_to_all(tp, tp, query), _to_all(tp, tp, heads * a.kv_rank)]
    for moe in (s.ffn for s in config.layers if isinstance(s.ffn, MoE) and mesh.ep > 1):
        # A token goes to a chip once, however many of its experts are there.
        copies = min(moe.router.experts_per_token, mesh.ep)
        found += [_to_all(mesh.ep, mesh.ep * tp, width * copies / tp)] * 2
    return _merged(found)


def _to_all(num_chips: int, span: int, num_bytes: float) -> Message:
    return Message(kind="all_to_all", count=1, num_chips=num_chips, span=span, num_bytes=num_bytes)


def _merged(found: list[Message]) -> tuple[Message, ...]:
    """Count equal messages together."""
    counts: dict[Message, int] = {}
    for message in found:
        one = dataclasses.replace(message, count=1)
        counts[one] = counts.get(one, 0) + message.count
    return tuple(dataclasses.replace(one, count=n) for one, n in counts.items())


def _used_values(leaf: Leaf, mesh: Mesh) -> float:
    """Return the values that a token is multiplied with; of experts, the chosen ones."""
    values = chip_values(leaf, mesh)
    if leaf.experts is None:
        return values
    # A chip holds one of `ep` parts and computes for the tokens of all of them.
    router = leaf.experts.router
    return values * mesh.ep * router.experts_per_token / router.num_experts


def _score_flops(spec: LayerSpec, mesh: Mesh) -> float:
    """Return a chip's operations for one token attending to one other."""
    a, share = spec.attention, head_share(spec.attention, mesh.tp)
    if isinstance(a, Attention):
        return 4.0 * share.num_q_heads * a.head_dim
    return 2.0 * share.num_q_heads * (2 * a.kv_rank + a.rope_dim)


def _window(spec: LayerSpec) -> int | None:
    return spec.attention.window if isinstance(spec.attention, Attention) else None


def _pairs_at(spec: LayerSpec, context: int) -> int:
    window = _window(spec)
    return context if window is None else min(context, window)


def _pairs_until(spec: LayerSpec, length: int) -> int:
    """Return the sum of attended tokens, each its own included, over the first tokens of a text."""
    window = _window(spec)
    if window is None or length <= window:
        return length * (length + 1) // 2
    return window * (window + 1) // 2 + (length - window) * window


def weight_size(model: Model, mesh: Mesh) -> int:
    """Return the bytes of weights that a chip holds."""
    return sum(chip_bytes(leaf, mesh) for leaf in model.leaves)
