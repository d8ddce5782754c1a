"""DeepSeek-V2 and V3 in GGUF files, which are one architecture there."""

from collections.abc import Collection, Mapping
from typing import Any, cast

import numpy as np
from einops import rearrange

from inferjax.config import LatentAttention, LayerSpec
from inferjax.models.gguf_format import (
    EXPERT_PARTS,
    EXPERTS,
    LAYER_PARTS,
    Facts,
    GgufFormat,
    Part,
    Setting,
    Stored,
    Values,
)
from inferjax.models.hf import MAX_EXPERTS

_SIGMOID = 2
# Number of experts -> groups, and groups per token: what files older than the keys for them leave
# out. V2 has the first, V3 and its descendants of the same size the second, others no groups.
_OLD_GROUPS = {160: (8, 3), 256: (8, 4)}


def _latent_heads(facts: Facts, _dim: int) -> dict[str, Any]:
    """Return the parts of a head; old files state them as plain attention's, new ones apart."""
    reader = facts.reader
    heads = reader.integer("attention.head_count", high=65_536)
    rank, rope_dim = (
        reader.integer("attention.kv_lora_rank"),
        reader.integer("rope.dimension_count"),
    )
    new = reader.value("attention.key_length_mla") is not None
    suffix = "_mla" if new else ""
    width = reader.integer(f"attention.key_length{suffix}", low=rope_dim + 1)
    value = reader.integer(f"attention.value_length{suffix}")
    if new:
        reader.expect("attention.key_length", rank + rope_dim)
        reader.expect("attention.value_length", rank)
    reader.expect("attention.head_count_kv", 1 if new else heads)
    return {
        "num_key_value_heads": heads,
        "head_dim": rope_dim,
        "q_lora_rank": reader.integer("attention.q_lora_rank", None),
        "kv_lora_rank": rank,
        "qk_nope_head_dim": width - rope_dim,
        "qk_rope_head_dim": rope_dim,
        "v_head_dim": value,
    }


def _scaling(config: Mapping[str, Any]) -> dict[str, Any] | None:
    """Correct YaRN's multiplier, of which these files store a tenth; both of its uses are equal."""
    scaling = config["rope_scaling"]
    if scaling is None or "mscale_all_dim" not in scaling:
        return scaling
    mscale = scaling["mscale_all_dim"] / 0.1
    return {**scaling, "mscale": mscale, "mscale_all_dim": mscale}


def _groups(facts: Facts, config: Mapping[str, Any]) -> dict[str, int]:
    """Return how many groups experts form, and how many of them a token keeps."""
    groups, kept = _OLD_GROUPS.get(config["n_routed_experts"], (1, 1))
    groups = facts.reader.integer("expert_group_count", groups, high=MAX_EXPERTS)
    key = "expert_group_used_count"
    return {
        "n_group": groups,
        "topk_group": facts.reader.integer(key, min(kept, groups), high=groups),
    }


def _v2(facts: Facts, config: Mapping[str, Any]) -> dict[str, Any]:
    facts.reader.expect("expert_gating_func", 1)
    groups = _groups(facts, config)
    method = "group_limited_greedy" if groups["n_group"] > 1 else "greedy"
    return {"rope_scaling": _scaling(config), "topk_method": method, **groups}


def _v3(facts: Facts, config: Mapping[str, Any]) -> dict[str, Any]:
    facts.reader.expect("expert_gating_func", _SIGMOID)
    return {"rope_scaling": _scaling(config), **_groups(facts, config)}


def _expansion(
    block: str, shape: tuple[int, ...], spec: LayerSpec, names: Collection[str]
) -> Stored:
    """Join what expands a latent to keys, which is stored transposed, and to values."""
    attention, rank = cast(LatentAttention, spec.attention), shape[1]
    whole = f"{block}attn_kv_b.weight"
    if whole in names:
        return Stored((Part(whole, shape, shape),))
    heads = attention.num_q_heads
    key, value = (heads, rank, attention.nope_dim), (heads, attention.value_dim, rank)
    parts = (
        Part(f"{block}attn_k_b.weight", key, key),
        Part(f"{block}attn_v_b.weight", value, value),
    )
    return Stored(parts, _joined)


def _joined(keys: Values, values: Values) -> Values:
    both = np.concatenate([keys.swapaxes(1, 2), values], axis=1)
    return rearrange(both, "n h r -> (n h) r")


def _bias_of_choice(
    block: str, shape: tuple[int, ...], _spec: LayerSpec, _names: Collection[str]
) -> Stored:
    return Stored((Part(f"{block}exp_probs_b.bias", shape, shape),))


_FORMAT: Mapping[str, Any] = {
    "architecture": "deepseek2",
    "settings": (
        Setting("expert_count", "n_routed_experts", "count"),
        EXPERTS[1],
        Setting("leading_dense_block_count", "first_k_dense_replace", "count", 0),
        Setting("expert_feed_forward_length", "moe_intermediate_size", "count"),
        Setting("expert_shared_count", "n_shared_experts", "count"),
        Setting("expert_weights_scale", "routed_scaling_factor", default=1.0),
        Setting("expert_weights_norm", "norm_topk_prob", "flag", default=False),
    ),
    # Layers that predict further tokens.
    "expected": {"nextn_predict_layers": 0},
    "heads": _latent_heads,
    "parts": {
        **LAYER_PARTS,
        **EXPERT_PARTS,
        "self_attn.q_a_proj": "attn_q_a",
        "self_attn.q_a_layernorm": "attn_q_a_norm",
        "self_attn.q_b_proj": "attn_q_b",
        "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
        "self_attn.kv_a_layernorm": "attn_kv_a_norm",
        "mlp.shared_experts.gate_proj": "ffn_gate_shexp",
        "mlp.shared_experts.up_proj": "ffn_up_shexp",
        "mlp.shared_experts.down_proj": "ffn_down_shexp",
    },
    "special": {
        "self_attn.kv_b_proj.weight": _expansion,
        "mlp.gate.e_score_correction_bias": _bias_of_choice,
    },
}
DEEPSEEK_V2_GGUF = GgufFormat(
    **_FORMAT, when=lambda own: own.get("expert_gating_func") != _SIGMOID, derive=_v2
)
DEEPSEEK_V3_GGUF = GgufFormat(
    **_FORMAT, when=lambda own: own.get("expert_gating_func") == _SIGMOID, derive=_v3
)
