"""The tensors of DeepSeek's models: rotary rows reordered, kv_b split."""

import functools

from einops import rearrange
from jaxtyping import Shaped

from inferjax.config import LatentAttention, ModelConfig
from inferjax.models.sources import (
    AnyArray,
    Tensor,
    decoder,
    decoder_layer,
    dense_or_experts,
    linear,
    namespace,
    norm,
    plain,
    reshaped,
    source,
)
from inferjax.params import LatentParams, Params


def weights(config: ModelConfig) -> Params:
    """Return where every weight comes from."""
    return decoder(
        config, functools.partial(decoder_layer, attention=_latent, ffn=dense_or_experts)
    )


def _latent(name: str, spec: LatentAttention, dim: int) -> LatentParams:
    """Reorder the rotary rows, and split kv_b into what expands keys and what expands values."""
    heads, rank = spec.num_q_heads, spec.kv_rank
    nope, value, q_in = spec.nope_dim, spec.value_dim, spec.q_rank or dim
    down, q_down = f"{name}.kv_a_proj_with_mqa", f"{name}.q_a_proj"
    q_up = f"{name}.q_proj.weight" if spec.q_rank is None else f"{name}.q_b_proj.weight"
    up = (Tensor(f"{name}.kv_b_proj.weight", (heads * (nope + value), rank)),)
    biased, factored = spec.bias, spec.q_rank is not None

    def build_wq(w: Shaped[AnyArray, "out R"]) -> Shaped[AnyArray, "R N H"]:
        return rearrange(_halves(rearrange(w, "(n h) r -> h n r", n=heads), spec), "h n r -> r n h")

    def build_wk(w: Shaped[AnyArray, "out R"]) -> Shaped[AnyArray, "N H R"]:
        return rearrange(w, "(n h) r -> n h r", n=heads)[:, :nope]

    def build_wv(w: Shaped[AnyArray, "out R"]) -> Shaped[AnyArray, "N R H"]:
        return rearrange(w, "(n h) r -> n r h", n=heads)[:, :, nope:]

    down_shape = (rank + spec.rope_dim, dim)
    return LatentParams(
        wq_a=linear(f"{q_down}.weight", q_in, dim) if factored else None,
        bq_a=plain(f"{q_down}.bias", q_in) if factored and biased else None,
        q_norm=norm(f"{name}.q_a_layernorm", q_in, spec.norm) if factored else None,
        wq=source((Tensor(q_up, (heads * (nope + spec.rope_dim), q_in)),), build_wq),
        wkv_a=source((Tensor(f"{down}.weight", down_shape),), lambda w: _halves(w, spec).T),
        bkv_a=source((Tensor(f"{down}.bias", down_shape[:1]),), lambda b: _halves(b, spec))
        if biased
        else None,
        kv_norm=norm(f"{name}.kv_a_layernorm", rank, spec.norm),
        wk_b=source(up, build_wk),
        wv_b=source(up, build_wv),
        wo=reshaped(f"{name}.o_proj.weight", (dim, heads * value), "d (n h) -> n h d", n=heads),
        bo=plain(f"{name}.o_proj.bias", dim) if biased else None,
    )


def _halves(
    rows: Shaped[AnyArray, "rows *rest"], spec: LatentAttention
) -> Shaped[AnyArray, "rows *rest"]:
    """Move the last `rope_dim` rows from neighbouring pairs into two halves."""
    if not spec.rope.interleaved:
        return rows
    kept, rotary = rows[: -spec.rope_dim], rows[-spec.rope_dim :]
    return namespace(rows).concatenate([kept, rotary[0::2], rotary[1::2]])
