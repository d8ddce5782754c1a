"""How a checkpoint's tensors become the leaves of `Params`.

A `Source` names the tensors a leaf is made of, with the shapes they must have, and a pure NumPy
function from them to the leaf. That function may return a transposed view: the loader copies once,
into the leaf's final place and dtype.
"""

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any, cast

import numpy as np
from einops import rearrange
from jaxtyping import Shaped

from inferjax.config import MLP, Attention, LayerSpec, ModelConfig, Norm
from inferjax.params import AttentionParams, LayerParams, MLPParams, NormParams, Params

Values = Shaped[np.ndarray, "..."]


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


def decoder(config: ModelConfig, layer: Callable[[str, LayerSpec, int], LayerParams]) -> Params:
    """Return the sources of a decoder in the naming that most families share."""
    dim, vocab = config.model_dim, config.vocab_size
    return Params(
        embed=plain("model.embed_tokens.weight", vocab, dim),
        layers=tuple(layer(f"model.layers.{i}", spec, dim) for i, spec in enumerate(config.layers)),
        final_norm=norm("model.norm", dim, config.final_norm),
        head=None if config.tied else plain("lm_head.weight", vocab, dim),
    )


def pre_norm_layer(
    name: str, spec: LayerSpec, dim: int, *, ffn: Callable[[str, Any, int], Any]
) -> LayerParams:
    """Return the sources of a layer with grouped attention that normalises each block's input."""
    return LayerParams(
        attention=grouped_attention(f"{name}.self_attn", cast(Attention, spec.attention), dim),
        ffn=ffn(f"{name}.mlp", spec.ffn, dim),
        attention_in=norm(f"{name}.input_layernorm", dim, spec.norm),
        ffn_in=norm(f"{name}.post_attention_layernorm", dim, spec.norm),
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


def norm(name: str, dim: int, spec: Norm) -> NormParams:
    """Take a normalisation's weight and, where it has one, its bias."""
    bias = plain(f"{name}.bias", dim) if spec.bias else None
    return NormParams(weight=plain(f"{name}.weight", dim), bias=bias)


def grouped_attention(name: str, spec: Attention, dim: int) -> AttentionParams:
    """Fuse q_proj, k_proj and v_proj; take o_proj and the optional norms and sinks."""
    heads, kv_heads, width = spec.num_q_heads, spec.num_kv_heads, spec.head_dim
    weights = [
        Tensor(f"{name}.{part}_proj.weight", (count * width, dim))
        for part, count in (("q", heads), ("k", kv_heads), ("v", kv_heads))
    ]
    biases = [Tensor(t.name.removesuffix("weight") + "bias", t.shape[:1]) for t in weights]
    return AttentionParams(
        wqkv=source(weights, lambda q, k, v: fuse_qkv(q, k, v, kv_heads)),
        bqkv=source(biases, lambda q, k, v: fuse_qkv_bias(q, k, v, kv_heads))
        if spec.qkv_bias
        else None,
        wo=reshaped(
            f"{name}.o_proj.weight",
            (dim, heads * width),
            "d (k g h) -> k g h d",
            k=kv_heads,
            h=width,
        ),
        bo=plain(f"{name}.o_proj.bias", dim) if spec.out_bias else None,
        q_norm=norm(f"{name}.q_norm", width, spec.qk_norm) if spec.qk_norm else None,
        k_norm=norm(f"{name}.k_norm", width, spec.qk_norm) if spec.qk_norm else None,
        sinks=reshaped(f"{name}.sinks", (heads,), "(k g) -> k g", k=kv_heads)
        if spec.sinks
        else None,
    )


def fuse_qkv(
    q: Shaped[np.ndarray, "q_out D"],
    k: Shaped[np.ndarray, "kv_out D"],
    v: Shaped[np.ndarray, "kv_out D"],
    num_kv_heads: int,
) -> Shaped[np.ndarray, "D K C H"]:
    """Put every key/value head's queries, key and value side by side; query head n = k G + g."""
    parts = [
        rearrange(q, "(k g h) d -> k g h d", k=num_kv_heads, h=len(k) // num_kv_heads),
        rearrange(k, "(k h) d -> k 1 h d", k=num_kv_heads),
        rearrange(v, "(k h) d -> k 1 h d", k=num_kv_heads),
    ]
    return rearrange(np.concatenate(parts, axis=1), "k c h d -> d k c h")


def fuse_qkv_bias(
    q: Shaped[np.ndarray, " q_out"],
    k: Shaped[np.ndarray, " kv_out"],
    v: Shaped[np.ndarray, " kv_out"],
    num_kv_heads: int,
) -> Shaped[np.ndarray, "K C H"]:
    """Put the biases beside each other as `fuse_qkv` does the weights."""
    return fuse_qkv(q[:, None], k[:, None], v[:, None], num_kv_heads)[0]


def gated_mlp(name: str, spec: MLP, dim: int) -> MLPParams:
    """Fuse gate_proj and up_proj; take down_proj."""
    gate, up, ffn = f"{name}.gate_proj", f"{name}.up_proj", spec.ffn_dim
    weights = tuple(Tensor(f"{part}.weight", (ffn, dim)) for part in (gate, up))
    biases = tuple(Tensor(f"{part}.bias", (ffn,)) for part in (gate, up))
    return MLPParams(
        w_in=source(weights, stack_transposed),
        b_in=source(biases, lambda *parts: np.stack(parts)) if spec.bias else None,
        w_down=linear(f"{name}.down_proj.weight", dim, ffn),
        b_down=plain(f"{name}.down_proj.bias", dim) if spec.bias else None,
    )


def stack_transposed(
    *parts: Shaped[np.ndarray, "out D"],
) -> Shaped[np.ndarray, "D parts out"]:
    """Stack linear weights of one shape and put the contracted axis first."""
    return rearrange(np.stack(parts), "p o d -> d p o")
