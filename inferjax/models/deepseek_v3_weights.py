"""The tensors of DeepSeek-V3: rotary rows reordered, kv_b split, experts stacked."""

from typing import cast

import numpy as np
from einops import rearrange
from jaxtyping import Shaped

from inferjax.config import MLP, LatentAttention, LayerSpec, ModelConfig, MoE
from inferjax.models.sources import (
    Tensor,
    decoder,
    gated_mlp,
    linear,
    norm,
    plain,
    reshaped,
    source,
)
from inferjax.params import LatentParams, LayerParams, MoEParams, Params


def weights(config: ModelConfig) -> Params:
    """Return where every weight comes from."""
    return decoder(config, _layer)


def _layer(name: str, spec: LayerSpec, dim: int) -> LayerParams:
    ffn = spec.ffn
    return LayerParams(
        attention=_latent(f"{name}.self_attn", cast(LatentAttention, spec.attention), dim),
        ffn=gated_mlp(f"{name}.mlp", ffn, dim)
        if isinstance(ffn, MLP)
        else _experts(f"{name}.mlp", ffn, dim),
        attention_in=norm(f"{name}.input_layernorm", dim, spec.norm),
        ffn_in=norm(f"{name}.post_attention_layernorm", dim, spec.norm),
    )


def _latent(name: str, spec: LatentAttention, dim: int) -> LatentParams:
    """Reorder the rotary rows, and split kv_b into what expands keys and what expands values."""
    heads, rank = spec.num_q_heads, spec.kv_rank
    nope, value, q_in = spec.nope_dim, spec.value_dim, spec.q_rank or dim
    down, q_down = f"{name}.kv_a_proj_with_mqa", f"{name}.q_a_proj"
    q_up = f"{name}.q_proj.weight" if spec.q_rank is None else f"{name}.q_b_proj.weight"
    up = (Tensor(f"{name}.kv_b_proj.weight", (heads * (nope + value), rank)),)
    biased, factored = spec.bias, spec.q_rank is not None

    def build_wq(w: Shaped[np.ndarray, "out R"]) -> Shaped[np.ndarray, "R N H"]:
        return rearrange(_halves(rearrange(w, "(n h) r -> h n r", n=heads), spec), "h n r -> r n h")

    def build_wk(w: Shaped[np.ndarray, "out R"]) -> Shaped[np.ndarray, "N H R"]:
        return rearrange(w, "(n h) r -> n h r", n=heads)[:, :nope]

    def build_wv(w: Shaped[np.ndarray, "out R"]) -> Shaped[np.ndarray, "N R H"]:
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
    rows: Shaped[np.ndarray, "rows *rest"], spec: LatentAttention
) -> Shaped[np.ndarray, "rows *rest"]:
    """Move the last `rope_dim` rows from neighbouring pairs into two halves."""
    if not spec.rope.interleaved:
        return rows
    kept, rotary = rows[: -spec.rope_dim], rows[-spec.rope_dim :]
    return np.concatenate([kept, rotary[0::2], rotary[1::2]])


def _experts(name: str, spec: MoE, dim: int) -> MoEParams:
    count, ffn = spec.router.num_experts, spec.ffn_dim

    def stored(part: str, *shape: int) -> tuple[Tensor, ...]:
        names = (f"{name}.experts.{i}.{part}_proj.weight" for i in range(count))
        return tuple(Tensor(tensor, shape) for tensor in names)

    return MoEParams(
        router=linear(f"{name}.gate.weight", count, dim),
        score_bias=plain(f"{name}.gate.e_score_correction_bias", count),
        w_in=source(stored("gate", ffn, dim) + stored("up", ffn, dim), _stack_gate_up),
        w_down=source(stored("down", dim, ffn), _stack_down),
        shared=gated_mlp(f"{name}.shared_experts", cast(MLP, spec.shared), dim),
    )


def _stack_gate_up(
    *weights: Shaped[np.ndarray, "F D"],
) -> Shaped[np.ndarray, "E D 2 F"]:
    """Stack all experts' gates, then all experts' ups, as `Params` lays them out."""
    return rearrange(np.stack(weights), "(p e) f d -> e d p f", p=2)


def _stack_down(*weights: Shaped[np.ndarray, "D F"]) -> Shaped[np.ndarray, "E F D"]:
    return rearrange(np.stack(weights), "e d f -> e f d")
