"""How a mesh divides a model: the part of every weight and of the cache that one chip holds.

A mesh is `dp` x `ep` x `tp` chips. Tensor parallel chips share heads, feed-forward width and
vocabulary of one model. Expert parallel chips each hold some experts, and the other weights again:
the batch is divided among them, and tokens travel to their experts. Data parallel chips hold
everything again and share nothing.
"""

import dataclasses
import math
from collections.abc import Iterator

from inferjax.config import Attention, CacheGroup, LatentAttention, ModelConfig, MoE, cache_groups
from inferjax.errors import ShardingError
from inferjax.planner.leaves import Leaf, shard_bytes


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Mesh:
    """Chips along each axis; neighbours along `tp` are closest."""

    tp: int = 1
    dp: int = 1
    ep: int = 1

    @property
    def num_chips(self) -> int:
        """All chips."""
        return self.tp * self.dp * self.ep

    @property
    def num_groups(self) -> int:
        """The groups of tensor parallel chips, each with sequences of its own."""
        return self.dp * self.ep

    def __str__(self) -> str:
        """Return the axes that are longer than one."""
        axes = (("dp", self.dp), ("ep", self.ep), ("tp", self.tp))
        return " x ".join(f"{name} {size}" for name, size in axes if size > 1) or "one chip"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class HeadShare:
    """What a chip computes of one kind of attention.

    `copies` chips hold the same key/value head. A part that does not divide is `whole`: every chip
    computes all of it. `by_sequence` means that chips share the cache by sequences.
    """

    num_q_heads: int
    num_kv_heads: int
    copies: int = 1
    whole: bool = False
    by_sequence: bool = False


def check_mesh(config: ModelConfig, mesh: Mesh, num_chips: int) -> None:
    """Refuse a mesh that is not made of these chips, or whose experts do not divide.

    Raises: ShardingError.
    """
    if min(mesh.tp, mesh.dp, mesh.ep) < 1 or mesh.num_chips != num_chips:
        raise ShardingError(
            f"a mesh of tp {mesh.tp} x dp {mesh.dp} x ep {mesh.ep} is no mesh of {num_chips} chips",
            why="the axes multiply to the number of chips",
            fix="change an axis, or leave them all out: the best mesh is then looked for",
        )
    counts = _expert_counts(config)
    if mesh.ep > 1 and (not counts or any(count % mesh.ep for count in counts)):
        shown = " and ".join(str(count) for count in sorted(counts)) or "no"
        raise ShardingError(
            f"{mesh.ep} chips cannot share {shown} experts",
            why="every chip of the expert axis holds as many experts as the others",
            fix="use an ep that divides them" if counts else "use tp and dp: the model is dense",
        )


def meshes(config: ModelConfig, num_chips: int) -> Iterator[Mesh]:
    """Yield the meshes of all chips; axes of experts only where experts divide."""
    counts = _expert_counts(config)
    for tp in _divisors(num_chips):
        for ep in _divisors(num_chips // tp):
            if ep == 1 or (counts and all(count % ep == 0 for count in counts)):
                yield Mesh(tp=tp, ep=ep, dp=num_chips // tp // ep)


def head_share(attention: Attention | LatentAttention, tp: int) -> HeadShare:
    """Return what one of `tp` chips computes of an attention."""
    heads = attention.num_q_heads
    if isinstance(attention, LatentAttention):
        # Its one latent belongs to all heads.
        if heads % tp:
            return HeadShare(num_q_heads=heads, num_kv_heads=1, whole=True)
        return HeadShare(num_q_heads=heads // tp, num_kv_heads=1, by_sequence=tp > 1)
    kv = attention.num_kv_heads
    if kv % tp == 0:
        return HeadShare(num_q_heads=heads // tp, num_kv_heads=kv // tp)
    if tp % kv == 0 and heads % tp == 0:
        return HeadShare(num_q_heads=heads // tp, num_kv_heads=1, copies=tp // kv)
    return HeadShare(num_q_heads=heads, num_kv_heads=kv, whole=True)


def shard_shape(leaf: Leaf, mesh: Mesh) -> tuple[int, ...]:
    """Return the shape of a chip's part of a weight; an axis that does not divide stays whole."""
    shape = list(leaf.spec.shape)
    for i, axis in enumerate(leaf.spec.axes):
        if axis == "experts" and leaf.experts is not None:
            shape[i] //= mesh.ep
        elif axis in ("vocab", "ffn", "heads") and shape[i] % mesh.tp == 0:
            shape[i] //= mesh.tp
        elif axis == "kv_heads":
            _share_heads(shape, i, leaf, mesh.tp)
    return tuple(shape)


def _share_heads(shape: list[int], axis: int, leaf: Leaf, tp: int) -> None:
    """Divide key/value heads, or the queries of each where chips outnumber them."""
    kv = shape[axis]
    if kv % tp == 0:
        shape[axis] = kv // tp
        return
    name = leaf.name.rsplit(".", 1)[-1]
    if tp % kv or "k_norm" in leaf.name:
        shape[axis] = kv if tp % kv else 1
        return
    # Of [.., K, G+2, ..] the last two are the head's key and value, which every copy has.
    extra = 2 if name in ("wqkv", "bqkv") else 0
    queries, copies = shape[axis + 1] - extra, tp // kv
    if queries % copies == 0:
        shape[axis], shape[axis + 1] = 1, queries // copies + extra


def chip_bytes(leaf: Leaf, mesh: Mesh) -> int:
    """Return the bytes that one chip holds of a kind of weight."""
    return leaf.count * shard_bytes(leaf, shard_shape(leaf, mesh))


def chip_values(leaf: Leaf, mesh: Mesh) -> int:
    """Return the values that one chip holds of a kind of weight."""
    return leaf.count * math.prod(shard_shape(leaf, mesh))


def group_share(config: ModelConfig, index: int, tp: int) -> HeadShare:
    """Return what a chip holds of a cache group."""
    return head_share(next(s.attention for s in config.layers if s.group == index), tp)


def shared_groups(config: ModelConfig, tp: int) -> tuple[tuple[CacheGroup, HeadShare], ...]:
    """Return every cache group as one chip holds it: with its own heads only."""
    found = []
    for index, group in enumerate(cache_groups(config)):
        share = group_share(config, index, tp)
        heads = share.num_kv_heads
        found.append((dataclasses.replace(group, num_kv_heads=heads), share))
    return tuple(found)


def notes(config: ModelConfig, mesh: Mesh) -> tuple[str, ...]:
    """Say what a mesh does not divide, and what happens there."""
    found, tp = [], mesh.tp
    for attention in dict.fromkeys(spec.attention for spec in config.layers):
        share = head_share(attention, tp)
        if share.whole and tp > 1:
            found.append(
                f"{tp} does not divide {_heads_of(attention)}: every chip computes all of attention"
            )
        elif share.copies > 1:
            heads = getattr(attention, "num_kv_heads", 1)
            found.append(
                f"{heads} key/value head{'s' * (heads > 1)} on {tp} chips: each is held "
                f"{share.copies} times, with its cache"
            )
        elif share.by_sequence:
            found.append("the latent belongs to all heads: chips share the cache by sequences")
    for width in dict.fromkeys(spec.ffn.ffn_dim for spec in config.layers):
        if width % tp:
            found.append(f"{tp} does not divide a feed-forward width of {width}: it is not shared")
    if config.vocab_size % tp:
        found.append(f"{tp} does not divide {config.vocab_size} vocabulary entries: not shared")
    return tuple(dict.fromkeys(found))


def _heads_of(attention: Attention | LatentAttention) -> str:
    if isinstance(attention, LatentAttention):
        return f"{attention.num_q_heads} heads"
    return f"{attention.num_q_heads} query heads on {attention.num_kv_heads} key/value heads"


def _expert_counts(config: ModelConfig) -> set[int]:
    return {s.ffn.router.num_experts for s in config.layers if isinstance(s.ffn, MoE)}


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]
