"""One description of a model's weights: it yields shapes, logical axes and random weights."""

import dataclasses
import math
from collections.abc import Callable
from itertools import zip_longest
from typing import Any

import jax
import jax.numpy as jnp
from jax.tree_util import keystr
from jaxtyping import Array

from inferjax.config import MLP, Attention, LatentAttention, LayerSpec, ModelConfig, MoE, Norm
from inferjax.errors import ShapeError
from inferjax.params import (
    AttentionParams,
    LatentParams,
    LayerParams,
    MLPParams,
    MoEParams,
    NormParams,
    Params,
)
from inferjax.quant.leaf import is_packed


@dataclasses.dataclass(frozen=True, slots=True)
class ArraySpec:
    """One weight before it exists: its shape, its axes' logical names, how random ones look.

    `dtype` is given only for a weight that is never rounded to the model's dtype. `num_in_axes`
    marks a weight that may be packed for its product: its first axes that are contracted, -1 for
    the last one; 0 keeps it an array. `num_batch_axes` come before those: each of their entries,
    an expert or a head, is a matrix of its own.
    """

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    init: str = "normal"
    dtype: str | None = None
    num_in_axes: int = 0
    num_batch_axes: int = 0


def param_spec(config: ModelConfig) -> Params:
    """Return the tree of `ArraySpec` that `config` calls for."""
    dim, vocab = config.model_dim, config.vocab_size
    learned, width = config.learned_positions, config.embed_dim or dim
    wide = "model" if config.embed_dim is None else None
    headless = config.tied or config.head != "vocabulary"
    return Params(
        embed=_spec((vocab, width), ("vocab", wide), num_in_axes=-1),
        layers=tuple(_layer_spec(spec, dim) for spec in config.layers),
        final_norm=None if config.final_norm is None else _norm_spec(config.final_norm, dim),
        head=None if headless else _spec((vocab, width), ("vocab", wide), num_in_axes=-1),
        positions=None if learned is None else _spec((learned, dim), (None, "model")),
        project_in=None if wide else _spec((width, dim), (None, "model")),
        project_out=None if wide else _spec((dim, width), ("model", None)),
        labels=_spec((len(config.labels), width), (None, wide))
        if config.head == "labels"
        else None,
    )


def abstract_params(config: ModelConfig, dtype: str | None = None) -> Params:
    """Return the weights as `jax.ShapeDtypeStruct`, for compiling without having them."""
    return _map_spec(
        lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype or dtype or config.dtype), config
    )


def random_params(config: ModelConfig, key: jax.Array, dtype: str | None = None) -> Params:
    """Draw weights of a trained model's scale: normal(0, 1/sqrt(fan_in)), norms near one."""
    specs, treedef = jax.tree.flatten(param_spec(config), is_leaf=_is_spec)
    keys = jax.random.split(key, len(specs))
    leaves = [
        _draw(s, k, s.dtype or dtype or config.dtype) for s, k in zip(specs, keys, strict=True)
    ]
    return jax.tree.unflatten(treedef, leaves)


def check_params(params: Params, config: ModelConfig) -> None:
    """Refuse weights of another model; costs nothing in a compiled call.

    Raises: ShapeError naming the first weight that differs.
    """
    wanted = jax.tree_util.tree_leaves_with_path(param_spec(config), is_leaf=_is_spec)
    found = jax.tree_util.tree_leaves_with_path(params, is_leaf=is_packed)
    for (path, spec), (other, leaf) in zip_longest(wanted, found, fillvalue=((), None)):
        if path != other or spec is None or leaf is None or spec.shape != leaf.shape:
            raise ShapeError(
                f"params{keystr(other or path)} is {getattr(leaf, 'shape', 'missing')}",
                why=f"config wants params{keystr(path)} {getattr(spec, 'shape', 'to be absent')}",
                fix="pass the params and the config of one loaded model",
            )


def num_parameters(config: ModelConfig) -> int:
    """Count the weights' values."""
    specs = jax.tree.leaves(param_spec(config), is_leaf=_is_spec)
    return sum(math.prod(s.shape) for s in specs)


def _is_spec(node: Any) -> bool:
    return isinstance(node, ArraySpec)


def _map_spec(f: Callable[[ArraySpec], Any], config: ModelConfig) -> Params:
    return jax.tree.map(f, param_spec(config), is_leaf=_is_spec)


def _draw(spec: ArraySpec, key: jax.Array, dtype: str) -> Array:
    noise = jax.random.normal(key, spec.shape, jnp.float32)
    match spec.init:
        case "ones":
            values = 1.0 + 0.1 * noise
        case "zeros":
            values = 0.1 * noise
        case _:
            values = noise / math.sqrt(spec.shape[0])
    return values.astype(dtype)


def _spec(
    shape: tuple[int, ...],
    axes: tuple[str | None, ...],
    init: str = "normal",
    dtype: str | None = None,
    num_in_axes: int = 0,
    num_batch_axes: int = 0,
) -> Any:
    return ArraySpec(shape, axes, init, dtype, num_in_axes, num_batch_axes)


def _stack_spec(shape: tuple[int, ...], axes: tuple[str | None, ...]) -> Any:
    """Describe one matrix for each entry of the first axis, whose rows are the second."""
    return _spec(shape, axes, num_in_axes=1, num_batch_axes=1)


def _norm_spec(norm: Norm, dim: int, axis: str | None = "model") -> Any:
    bias = _spec((dim,), (axis,), "zeros") if norm.bias else None
    init = "zeros" if norm.unit_offset else "ones"
    return NormParams(weight=_spec((dim,), (axis,), init) if norm.weight else None, bias=bias)


def _layer_spec(spec: LayerSpec, dim: int) -> LayerParams:
    norm_in = _norm_spec(spec.norm, dim) if spec.norm_in else None
    norm_out = _norm_spec(spec.norm, dim) if spec.norm_out or spec.norm_sum else None
    attention, ffn = spec.attention, spec.ffn
    return LayerParams(
        attention=_attention_spec(attention, dim)
        if isinstance(attention, Attention)
        else _latent_spec(attention, dim),
        ffn=_mlp_spec(ffn, dim) if isinstance(ffn, MLP) else _moe_spec(ffn, dim),
        attention_in=norm_in,
        attention_out=norm_out,
        ffn_in=None if spec.residual == "parallel_shared" else norm_in,
        ffn_out=norm_out,
    )


def _attention_spec(a: Attention, dim: int) -> AttentionParams:
    kv, group, head = a.num_kv_heads, a.q_per_kv, a.head_dim
    return AttentionParams(
        wqkv=_spec((dim, kv, group + 2, head), ("model", "kv_heads", None, None), num_in_axes=1),
        wo=_spec((kv, group, head, dim), ("kv_heads", None, None, "model"), num_in_axes=3),
        bqkv=_spec((kv, group + 2, head), ("kv_heads", None, None), "zeros")
        if a.qkv_bias
        else None,
        bo=_spec((dim,), ("model",), "zeros") if a.out_bias else None,
        q_norm=_qk_norm_spec(a, (kv, group, head)),
        k_norm=_qk_norm_spec(a, (kv, head)),
        sinks=_spec((kv, group), ("kv_heads", None), "zeros") if a.sinks else None,
    )


def _qk_norm_spec(a: Attention, shape: tuple[int, ...]) -> Any:
    if a.qk_norm is None:
        return None
    if a.qk_norm_span == "head":
        return _norm_spec(a.qk_norm, a.head_dim, None)
    axes = ("kv_heads", *(None for _ in shape[1:]))
    bias = _spec(shape, axes, "zeros") if a.qk_norm.bias else None
    init = "zeros" if a.qk_norm.unit_offset else "ones"
    return NormParams(weight=_spec(shape, axes, init), bias=bias)


def _latent_spec(a: LatentAttention, dim: int) -> LatentParams:
    heads, head = a.num_q_heads, a.nope_dim + a.rope_dim
    low = a.q_rank is not None
    biased = a.bias
    return LatentParams(
        wq_a=_spec((dim, a.q_rank or 0), ("model", None), num_in_axes=1) if low else None,
        bq_a=_spec((a.q_rank or 0,), (None,), "zeros") if low and biased else None,
        q_norm=_norm_spec(a.norm, a.q_rank or 0, None) if low else None,
        wq=_spec(
            (a.q_rank or dim, heads, head),
            (None if low else "model", "heads", None),
            num_in_axes=1,
        ),
        wkv_a=_spec((dim, a.kv_rank + a.rope_dim), ("model", None), num_in_axes=1),
        bkv_a=_spec((a.kv_rank + a.rope_dim,), (None,), "zeros") if biased else None,
        kv_norm=_norm_spec(a.norm, a.kv_rank, None),
        wk_b=_stack_spec((heads, a.nope_dim, a.kv_rank), ("heads", None, None)),
        wv_b=_stack_spec((heads, a.kv_rank, a.value_dim), ("heads", None, None)),
        wo=_spec((heads, a.value_dim, dim), ("heads", None, "model"), num_in_axes=2),
        bo=_spec((dim,), ("model",), "zeros") if biased else None,
    )


def _mlp_spec(m: MLP, dim: int) -> MLPParams:
    parts = 2 if m.gated else 1
    return MLPParams(
        w_in=_spec((dim, parts, m.ffn_dim), ("model", None, "ffn"), num_in_axes=1),
        w_down=_spec((m.ffn_dim, dim), ("ffn", "model"), num_in_axes=1),
        b_in=_spec((parts, m.ffn_dim), (None, "ffn"), "zeros") if m.bias else None,
        b_down=_spec((dim,), ("model",), "zeros") if m.bias else None,
    )


def _moe_spec(m: MoE, dim: int) -> MoEParams:
    experts, ffn = m.router.num_experts, m.ffn_dim
    return MoEParams(
        router=_spec((dim, experts), ("model", None)),
        router_bias=_spec((experts,), (None,), "zeros") if m.router.bias else None,
        # Its steps are too small for bfloat16 beside scores near one: rounding changes the choice.
        score_bias=_spec((experts,), (None,), "zeros", "float32") if m.router.score_bias else None,
        w_in=_stack_spec((experts, dim, 2, ffn), ("experts", "model", None, "ffn")),
        w_down=_stack_spec((experts, ffn, dim), ("experts", "ffn", "model")),
        b_in=_spec((experts, 2, ffn), ("experts", None, "ffn"), "zeros") if m.bias else None,
        b_down=_spec((experts, dim), ("experts", "model"), "zeros") if m.bias else None,
        shared=None if m.shared is None else _mlp_spec(m.shared, dim),
        shared_gate=_spec((dim, 1), ("model", None)) if m.shared_gate else None,
    )
