"""Mixture of experts: route every row, sort rows by expert into tiles, run one expert per tile."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from inferjax.config import MLP, MoE, Router
from inferjax.layers.mlp import ACTIVATIONS, mlp
from inferjax.params import MLPParams, MoEParams
from inferjax.quant.leaf import PackedLeaf, Split, is_packed
from inferjax.quant.linear import grouped_linear, linear
from inferjax.quant.split import local_leaf, mesh_of, on_each_device, rows_of, specs_of
from inferjax.shapes import align_last


def moe(
    x: Float[Array, "B T D"], w: MoEParams, spec: MoE, tile: int | None = None
) -> Float[Array, "B T D"]:
    """Mix each token's experts by their weights, summed in the order of the token's own ranking.

    Rows of one expert fill tiles of `tile` rows; each tile is a matmul of the same shape wherever
    it stands, so a token's result does not depend on which tokens share its experts. Without a
    tile size, tiles are about as large as an expert's share of the rows.
    """
    result = _mix_on_mesh(x, w, spec, tile).astype(x.dtype)
    if w.shared is not None and spec.shared is not None:
        result = result + _shared(x, w, w.shared, spec.shared)
    return result


def _mix_on_mesh(
    x: Float[Array, "B T D"], w: MoEParams, spec: MoE, tile: int | None
) -> Float[Array, "B T D"]:
    """Mix experts; where they are packed and cut, each device runs what it holds for its rows.

    One sum over devices brings the experts, or the parts of each one's hidden axis, together.
    """
    first, last, mesh = w.w_in, w.w_down, mesh_of(w.w_in)
    if not isinstance(first, PackedLeaf) or not isinstance(last, PackedLeaf) or mesh is None:
        return _mix(x, w, spec, tile)
    split = first.split or Split(axes=(None,) * first.ndim)
    sizes = dict(mesh.shape)
    experts, _, _, hidden = split.axes
    routed = dataclasses.replace(w, shared=None, shared_gate=None)
    specs = dataclasses.replace(
        jax.tree.map(lambda _: PartitionSpec(), routed, is_leaf=is_packed),
        w_in=specs_of(first),
        w_down=specs_of(last),
        b_in=None if w.b_in is None else PartitionSpec(experts, None, hidden),
        b_down=None if w.b_down is None else PartitionSpec(experts),
    )
    over = tuple(name for name in (experts, hidden) if name is not None)

    def local(x: Array, w: Any) -> Array:
        held = w.replace(w_in=local_leaf(w.w_in, sizes), w_down=local_leaf(w.w_down, sizes))
        part = _mix(x, held, spec, tile, experts, hidden)
        return lax.psum(part, over) if over else part

    rows = PartitionSpec(rows_of(split.rows, x.shape[0], sizes))
    return on_each_device(local, mesh, (rows, specs), rows)(x, routed)


def _mix(
    x: Float[Array, "B T D"],
    w: MoEParams,
    spec: MoE,
    tile: int | None,
    experts_axis: str | None = None,
    hidden_axis: str | None = None,
) -> Float[Array, "B T D"]:
    """Route rows to experts and sum what these return, in float32.

    The axes of a mesh, if any, are those that cut the experts, or each one's hidden axis.
    """
    batch, tokens, dim = x.shape
    rows = x.reshape(batch * tokens, dim)
    weights, experts = route(rows, w, spec.router)
    tile = tile or _fitting_tile(experts.size // spec.router.num_experts)
    slots, tile_expert, tile_rows = _assign_tiles(experts, spec.router.num_experts, tile)
    num_tiles = tile_expert.shape[0]
    picked = jnp.repeat(rows, spec.router.experts_per_token, axis=0, total_repeat_length=slots.size)
    tiles = jnp.zeros((num_tiles * tile, dim), x.dtype).at[slots.reshape(-1)].set(picked)
    tiles = tiles.reshape(num_tiles, tile, dim)
    if experts_axis is not None:
        tile_expert, tile_rows = _held(tile_expert, tile_rows, w.w_in.shape[0], experts_axis)
    out = _experts(tiles, w, spec, tile_expert, tile_rows, hidden_axis)
    chosen = out.reshape(num_tiles * tile, dim)[slots].astype(jnp.float32)  # [R, X, D]
    parts = [chosen[:, i] * weights[:, i, None] for i in range(slots.shape[1])]
    return functools.reduce(jnp.add, parts).reshape(batch, tokens, dim)


def _held(
    tile_expert: Int[Array, " N"], tile_rows: Int[Array, " N"], num_held: int, axis: str
) -> tuple[Int[Array, " N"], Int[Array, " N"]]:
    """Count experts from the first that this device holds, and leave other devices' tiles empty."""
    index = tile_expert - lax.axis_index(axis) * num_held
    is_held = (index >= 0) & (index < num_held)
    return index.clip(0, num_held - 1), jnp.where(is_held, tile_rows, 0)


def _shared(x: Array, w: MoEParams, weights: MLPParams, spec: MLP) -> Float[Array, "B T D"]:
    """Run the expert that every token shares, weighed by its gate where it has one."""
    out = mlp(x, weights, spec)
    if w.shared_gate is None:
        return out
    gate = linear(x, w.shared_gate, "BTD,DO->BTO", dtype=jnp.float32)
    return (jax.nn.sigmoid(gate) * out).astype(x.dtype)


def route(
    rows: Float[Array, "R D"], w: MoEParams, router: Router
) -> tuple[Float[Array, "R X"], Int[Array, "R X"]]:
    """Return each row's expert weights (float32) and expert ids, best first."""
    logits = linear(rows.astype(jnp.float32), w.router.astype(jnp.float32), "RD,DE->RE")
    if w.router_bias is not None:
        logits = logits + align_last(w.router_bias.astype(jnp.float32), 2)
    if router.kind == "softmax_topk":
        top, experts = lax.top_k(logits, router.experts_per_token)
        return jax.nn.softmax(top, axis=-1) * router.scale, experts
    scores = jax.nn.sigmoid(logits) if router.kind == "sigmoid" else jax.nn.softmax(logits, axis=-1)
    choice = (
        scores if w.score_bias is None else scores + align_last(w.score_bias.astype(jnp.float32), 2)
    )
    if router.num_groups > 1:
        choice = _limit_groups(choice, router)
    experts = lax.top_k(choice, router.experts_per_token)[1]
    weights = jnp.take_along_axis(scores, experts, axis=1)
    if router.normalize:
        weights = weights / (weights.sum(-1, keepdims=True) + 1e-20)
    return weights * router.scale, experts


def _fitting_tile(rows_per_expert: int) -> int:
    """Return a power of two between 8 and 128: large tiles read an expert's weights less often."""
    return min(128, max(8, 1 << rows_per_expert.bit_length()))


def _limit_groups(choice: Float[Array, "R E"], router: Router) -> Float[Array, "R E"]:
    """Keep the experts of the best groups."""
    grouped = choice.reshape(choice.shape[0], router.num_groups, -1)
    num_best = 2 if router.group_score == "best_two" else 1
    group_scores = lax.top_k(grouped, num_best)[0].sum(-1)
    best = lax.top_k(group_scores, router.groups_per_token)[1]
    kept = jnp.any(jax.nn.one_hot(best, router.num_groups, dtype=jnp.bool_), axis=1)
    return jnp.where(kept[:, :, None], grouped, -jnp.inf).reshape(choice.shape)


def _assign_tiles(
    experts: Int[Array, "R X"], num_experts: int, tile: int
) -> tuple[Int[Array, "R X"], Int[Array, " N"], Int[Array, " N"]]:
    """Give every (row, expert) pair a slot so that each tile holds rows of one expert only.

    Returns the slots, and for each tile its expert and how many of its rows are in use.
    """
    flat = experts.reshape(-1)
    num_pairs = flat.shape[0]
    # As many as there can be: each expert in use may leave one tile with a single row.
    num_tiles = (num_pairs + min(num_experts, num_pairs) * (tile - 1)) // tile
    member = jax.nn.one_hot(flat, num_experts, dtype=jnp.int32)
    rank = jnp.take_along_axis(jnp.cumsum(member, axis=0), flat[:, None], axis=1)[:, 0] - 1
    count = member.sum(0)
    ends = jnp.cumsum((count + tile - 1) // tile)
    starts = ends - (count + tile - 1) // tile
    slots = starts[flat] * tile + rank
    index = jnp.arange(num_tiles, dtype=jnp.int32)
    owner = jnp.searchsorted(ends, index, side="right")
    tile_expert = jnp.minimum(owner, num_experts - 1).astype(jnp.int32)
    rows = count[tile_expert] - (index - starts[tile_expert]) * tile
    return slots.reshape(experts.shape), tile_expert, rows.clip(0, tile)


def _experts(
    tiles: Float[Array, "N R D"],
    w: MoEParams,
    spec: MoE,
    tile_expert: Int[Array, " N"],
    tile_rows: Int[Array, " N"],
    hidden_axis: str | None,
) -> Float[Array, "N R D"]:
    """Run an expert on each tile. Tiles out of use are zero; other rows that are may be anything.

    Where `hidden_axis` cuts the hidden axis, the sum over its devices is the result.
    """
    num_experts, _, parts, ffn = w.w_in.shape
    hidden = grouped_linear(tiles, w.w_in, tile_expert, tile_rows)
    if w.b_in is not None:
        bias = w.b_in.reshape(num_experts, parts * ffn)[tile_expert]
        hidden = hidden + bias[:, None].astype(hidden.dtype)
    active = _gate(hidden[:, :, :ffn], hidden[:, :, ffn:], spec)
    out = grouped_linear(active, w.w_down, tile_expert, tile_rows)
    if w.b_down is None:
        return out
    is_used = tile_rows > 0
    if hidden_axis is not None:  # one device adds it for all
        is_used &= lax.axis_index(hidden_axis) == 0
    bias = jnp.where(is_used[:, None], w.b_down[tile_expert], 0)
    return out + bias[:, None].astype(out.dtype)


def _gate(gate: Array, up: Array, spec: MoE) -> Array:
    if spec.clamp is None:
        return ACTIVATIONS[spec.activation](gate) * up
    gate = jnp.minimum(gate, spec.clamp)
    up = jnp.clip(up, -spec.clamp, spec.clamp)
    return (up + 1.0) * gate * jax.nn.sigmoid(spec.alpha * gate)
