"""How a checkpoint's tensors become the leaves of `Params`.

A `Source` names the tensors a leaf is made of, with the shapes they must have, and a pure function
from them to the leaf, which moves values and changes none. It takes NumPy's arrays as well as
JAX's: the loader copies its result once, into the leaf's final place and dtype, and weights that
live on a device already are rearranged there, under `jit` and backwards too.
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import jax
import numpy as np
from einops import rearrange
from jaxtyping import Shaped

from inferjax.config import MLP, Attention, LayerSpec, ModelConfig, MoE, Norm
from inferjax.params import AttentionParams, LayerParams, MLPParams, MoEParams, NormParams, Params

AnyArray = np.ndarray | jax.Array
Values = Shaped[AnyArray, "..."]

# Which tensor holds each of a layer's norms: with one before each block, and with one after it too.
PRE_NORMS = {"attention_in": "input_layernorm", "ffn_in": "post_attention_layernorm"}
SANDWICH_NORMS = {
    "attention_in": "input_layernorm",
    "attention_out": "post_attention_layernorm",
    "ffn_in": "pre_feedforward_layernorm",
    "ffn_out": "post_feedforward_layernorm",
}


@dataclasses.dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor that a checkpoint must hold, under Hugging Face's name and in its layout."""

    name: str
    shape: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Source:
    """Where one leaf comes from."""

    tensors: tuple[Tensor, ...]
    build: Callable[..., Values]


def decoder(
    config: ModelConfig,
    layer: Callable[[str, LayerSpec, int], LayerParams],
    *,
    head: str = "lm_head",
) -> Params:
    """Return the sources of a decoder in the naming that most families share."""
    dim, vocab = config.model_dim, config.vocab_size
    return Params(
        embed=plain("model.embed_tokens.weight", vocab, dim),
        layers=tuple(layer(f"model.layers.{i}", spec, dim) for i, spec in enumerate(config.layers)),
        final_norm=norm("model.norm", dim, config.final_norm),
        head=None if config.tied else plain(f"{head}.weight", vocab, dim),
    )


def decoder_layer(
    name: str,
    spec: LayerSpec,
    dim: int,
    *,
    ffn: Callable[[str, Any, int], Any] = lambda *block: gated_mlp(*block),
    attention: Callable[[str, Any, int], Any] = lambda *block: grouped_attention(*block),
    norms: Mapping[str, str] = PRE_NORMS,
) -> LayerParams:
    """Return the sources of a layer; by default in Llama's naming, with norms before each block."""
    return LayerParams(
        attention=attention(f"{name}.self_attn", spec.attention, dim),
        ffn=ffn(f"{name}.mlp", spec.ffn, dim),
        **{field: norm(f"{name}.{part}", dim, spec.norm) for field, part in norms.items()},
    )


def source(tensors: Iterable[Tensor], build: Callable[..., Values]) -> Any:
    """Return a leaf of `Params` before its values exist."""
    return Source(tuple(tensors), build)


def plain(name: str, *shape: int) -> Any:
    """Take a tensor as it is stored."""
    return source([Tensor(name, shape)], lambda values: values)


def reshaped(name: str, shape: tuple[int, ...], pattern: str, **sizes: int) -> Any:
    """Rearrange one tensor."""
    return source([Tensor(name, shape)], lambda values: rearrange(values, pattern, **sizes))


def linear(name: str, dim_out: int, dim_in: int) -> Any:
    """Transpose the weight of a linear layer, stored [out, in]."""
    return reshaped(name, (dim_out, dim_in), "o i -> i o")


def norm(name: str, dim: int, spec: Norm | None) -> Any:
    """Take what a normalisation has of weight and bias; None for no normalisation."""
    if spec is None:
        return None
    weight = plain(f"{name}.weight", dim) if spec.weight else None
    return NormParams(weight=weight, bias=plain(f"{name}.bias", dim) if spec.bias else None)


def grouped_attention(
    name: str, spec: Attention, dim: int, *, out: str = "o_proj"
) -> AttentionParams:
    """Fuse q_proj, k_proj and v_proj; take the output's projection and the optional parts."""
    kv_heads, width = spec.num_kv_heads, spec.head_dim
    counts = {"q": spec.num_q_heads, "k": kv_heads, "v": kv_heads}
    weights = [Tensor(f"{name}.{p}_proj.weight", (n * width, dim)) for p, n in counts.items()]
    biases = [Tensor(f"{name}.{p}_proj.bias", (n * width,)) for p, n in counts.items()]
    return AttentionParams(
        wqkv=source(weights, partial(fuse_qkv, spec=spec)),
        bqkv=source(biases, partial(fuse_qkv_bias, spec=spec)) if spec.qkv_bias else None,
        q_norm=_qk_norm(f"{name}.q_norm", spec, spec.num_q_heads, "(k g) h -> k g h"),
        k_norm=_qk_norm(f"{name}.k_norm", spec, kv_heads, "k h -> k h"),
        sinks=reshaped(f"{name}.sinks", (spec.num_q_heads,), "(k g) -> k g", k=kv_heads)
        if spec.sinks
        else None,
        **output_projection(f"{name}.{out}", spec, dim),
    )


def output_projection(name: str, spec: Attention, dim: int) -> dict[str, Any]:
    """Return `wo` and `bo`: heads side by side, back to the model's width."""
    heads, width = spec.num_q_heads, spec.head_dim
    pattern = "d (k g h) -> k g h d"
    shape = (dim, heads * width)
    return {
        "wo": reshaped(f"{name}.weight", shape, pattern, k=spec.num_kv_heads, h=width),
        "bo": plain(f"{name}.bias", dim) if spec.out_bias else None,
    }


def fused_attention(
    name: str, spec: Attention, dim: int, *, fused: str = "qkv_proj", out: str = "o_proj"
) -> AttentionParams:
    """Take one projection whose rows are all queries, then all keys, then all values."""
    rows = (spec.num_q_heads + 2 * spec.num_kv_heads) * spec.head_dim

    def split(build: Callable[..., Values], w: Values) -> Values:
        keys = spec.num_q_heads * spec.head_dim
        values = keys + spec.num_kv_heads * spec.head_dim
        return build(w[:keys], w[keys:values], w[values:], spec)

    return AttentionParams(
        wqkv=source([Tensor(f"{name}.{fused}.weight", (rows, dim))], partial(split, fuse_qkv)),
        bqkv=source([Tensor(f"{name}.{fused}.bias", (rows,))], partial(split, fuse_qkv_bias))
        if spec.qkv_bias
        else None,
        **output_projection(f"{name}.{out}", spec, dim),
    )


def _qk_norm(name: str, spec: Attention, heads: int, pattern: str) -> Any:
    """Take the norm of queries or keys, its weights in the order that the rope is given."""
    if spec.qk_norm is None:
        return None
    width, sizes = spec.head_dim, {"k": spec.num_kv_heads}
    shapes = {"head": (width,), "each_head": (heads, width), "all_heads": (heads * width,)}
    shape = shapes[spec.qk_norm_span]
    if spec.qk_norm_span == "head":
        pattern, sizes = "1 h -> h", {}

    def build(values: Values) -> Values:
        return rearrange(pair_halves(values.reshape(-1, width), spec), pattern, **sizes)

    bias = source([Tensor(f"{name}.bias", shape)], build) if spec.qk_norm.bias else None
    return NormParams(weight=source([Tensor(f"{name}.weight", shape)], build), bias=bias)


def pair_halves(
    heads: Shaped[AnyArray, "N H *rest"], spec: Attention
) -> Shaped[AnyArray, "N H *rest"]:
    """Move neighbours that the rope rotates as a pair half of the rotated dimensions apart."""
    if spec.rope is None or not spec.rope.interleaved:
        return heads
    size = spec.rope.dim
    parts = [heads[:, 0:size:2], heads[:, 1:size:2], heads[:, size:]]
    return namespace(heads).concatenate(parts, axis=1)


def fuse_qkv(
    q: Shaped[AnyArray, "q_out D"],
    k: Shaped[AnyArray, "kv_out D"],
    v: Shaped[AnyArray, "kv_out D"],
    spec: Attention,
) -> Shaped[AnyArray, "D K C H"]:
    """Put every key/value head's queries, key and value side by side; query head n = k G + g."""
    q, k, v = (rearrange(w, "(n h) d -> n h d", h=spec.head_dim) for w in (q, k, v))
    q, k = pair_halves(q, spec), pair_halves(k, spec)
    parts = [
        rearrange(q, "(k g) h d -> k g h d", k=spec.num_kv_heads),
        rearrange(k, "k h d -> k 1 h d"),
        rearrange(v, "k h d -> k 1 h d"),
    ]
    return rearrange(namespace(q).concatenate(parts, axis=1), "k c h d -> d k c h")


def fuse_qkv_bias(
    q: Shaped[AnyArray, " q_out"],
    k: Shaped[AnyArray, " kv_out"],
    v: Shaped[AnyArray, " kv_out"],
    spec: Attention,
) -> Shaped[AnyArray, "K C H"]:
    """Put the biases beside each other as `fuse_qkv` does the weights."""
    return fuse_qkv(q[:, None], k[:, None], v[:, None], spec)[0]


def gated_mlp(name: str, spec: MLP, dim: int) -> MLPParams:
    """Fuse gate_proj and up_proj; take down_proj."""
    gate, up, ffn = f"{name}.gate_proj", f"{name}.up_proj", spec.ffn_dim
    weights = tuple(Tensor(f"{part}.weight", (ffn, dim)) for part in (gate, up))
    biases = tuple(Tensor(f"{part}.bias", (ffn,)) for part in (gate, up))
    return MLPParams(
        w_in=source(weights, stack_transposed),
        b_in=source(biases, lambda *parts: namespace(parts[0]).stack(parts)) if spec.bias else None,
        w_down=linear(f"{name}.down_proj.weight", dim, ffn),
        b_down=plain(f"{name}.down_proj.bias", dim) if spec.bias else None,
    )


def fused_mlp(name: str, spec: MLP, dim: int) -> MLPParams:
    """Take gate_up_proj, whose rows are all gates, then all ups, and down_proj."""
    shape = (2 * spec.ffn_dim, dim)
    return MLPParams(
        w_in=reshaped(f"{name}.gate_up_proj.weight", shape, "(p f) d -> d p f", p=2),
        w_down=linear(f"{name}.down_proj.weight", dim, spec.ffn_dim),
    )


def plain_mlp(name: str, spec: MLP, dim: int, *, up: str, down: str) -> MLPParams:
    """Take the two layers of a block without a gate."""
    ffn = spec.ffn_dim
    return MLPParams(
        w_in=reshaped(f"{name}.{up}.weight", (ffn, dim), "(p f) d -> d p f", p=1),
        b_in=reshaped(f"{name}.{up}.bias", (ffn,), "(p f) -> p f", p=1) if spec.bias else None,
        w_down=linear(f"{name}.{down}.weight", dim, ffn),
        b_down=plain(f"{name}.{down}.bias", dim) if spec.bias else None,
    )


def stack_transposed(*parts: Shaped[AnyArray, "out D"]) -> Shaped[AnyArray, "D parts out"]:
    """Stack linear weights of one shape and put the contracted axis first."""
    return rearrange(namespace(parts[0]).stack(parts), "p o d -> d p o")


def experts(
    name: str,
    spec: MoE,
    dim: int,
    *,
    parts: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
    shared: str = "shared_experts",
) -> MoEParams:
    """Stack experts that are stored one by one; `parts` name their gate, up and down."""
    router, ffn = spec.router, spec.ffn_dim
    count = router.num_experts

    def stored(part: str, *shape: int) -> tuple[Tensor, ...]:
        return tuple(Tensor(f"{name}.experts.{i}.{part}.weight", shape) for i in range(count))

    gate, up, down = parts
    return MoEParams(
        router=linear(f"{name}.gate.weight", count, dim),
        score_bias=plain(f"{name}.gate.e_score_correction_bias", count)
        if router.score_bias
        else None,
        w_in=source(stored(gate, ffn, dim) + stored(up, ffn, dim), _stack_gate_up),
        w_down=source(stored(down, dim, ffn), _stack_down),
        shared=gated_mlp(f"{name}.{shared}", spec.shared, dim) if spec.shared else None,
        shared_gate=linear(f"{name}.{shared}_gate.weight", 1, dim) if spec.shared_gate else None,
    )


def dense_or_experts(
    name: str, spec: MLP | MoE, dim: int, *, moe: Callable[[str, Any, int], Any] = experts
) -> MLPParams | MoEParams:
    """Take the feed-forward block of a model that has both kinds."""
    return gated_mlp(name, spec, dim) if isinstance(spec, MLP) else moe(name, spec, dim)


def _stack_gate_up(*weights: Shaped[AnyArray, "F D"]) -> Shaped[AnyArray, "E D 2 F"]:
    """Stack all experts' gates, then all experts' ups, as `Params` lays them out."""
    return rearrange(namespace(weights[0]).stack(weights), "(p e) f d -> e d p f", p=2)


def _stack_down(*weights: Shaped[AnyArray, "D F"]) -> Shaped[AnyArray, "E F D"]:
    return rearrange(namespace(weights[0]).stack(weights), "e d f -> e f d")


def namespace(values: Any) -> Any:
    """Return the functions that work on these arrays: NumPy's or JAX's."""
    return values.__array_namespace__()
