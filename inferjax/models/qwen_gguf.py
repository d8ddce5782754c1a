"""Qwen 2 and 3, with and without experts, in GGUF files."""

from collections.abc import Mapping
from typing import Any

from inferjax.models.gguf_format import (
    EXPERT_PARTS,
    EXPERTS,
    LAYER_PARTS,
    QK_NORMS,
    Facts,
    GgufFormat,
    Setting,
)

_ATTENTION_BIAS = {"attention_bias": "attn_q.bias"}


def _experts(facts: Facts, config: Mapping[str, Any]) -> dict[str, Any]:
    """Read the width of experts, by default their share of a dense block, and who has none."""
    reader, used = facts.reader, config["num_experts_per_tok"]
    if not 1 <= used <= config["num_experts"]:
        reader.refuse("expert_used_count", used, f"there are {config['num_experts']} experts")
    layers = range(config["num_hidden_layers"])
    width = max(config["intermediate_size"] // used, 1)
    return {
        "moe_intermediate_size": reader.integer("expert_feed_forward_length", width),
        "mlp_only_layers": [i for i in layers if facts.has("ffn_gate.weight", i)],
    }


def _experts_and_shared(facts: Facts, config: Mapping[str, Any]) -> dict[str, Any]:
    key, width = "expert_shared_feed_forward_length", config["intermediate_size"]
    shared = facts.reader.integer(key, width)
    return {**_experts(facts, config), "shared_expert_intermediate_size": shared}


QWEN2_GGUF = GgufFormat(architecture="qwen2")
QWEN3_GGUF = GgufFormat(
    architecture="qwen3", present=_ATTENTION_BIAS, parts={**LAYER_PARTS, **QK_NORMS}
)
QWEN2_MOE_GGUF = GgufFormat(
    architecture="qwen2moe",
    settings=(*EXPERTS, Setting("expert_weights_norm", "norm_topk_prob", "flag", default=False)),
    expected={},
    present={"qkv_bias": "attn_q.bias"},
    derive=_experts_and_shared,
    parts={
        **LAYER_PARTS,
        **EXPERT_PARTS,
        "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
        "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
        "mlp.shared_expert.up_proj": "ffn_up_shexp",
        "mlp.shared_expert.down_proj": "ffn_down_shexp",
    },
)
QWEN3_MOE_GGUF = GgufFormat(
    architecture="qwen3moe",
    # Unlike those of the generation before, all of its releases normalise the experts' weights.
    settings=(*EXPERTS, Setting("expert_weights_norm", "norm_topk_prob", "flag", default=True)),
    expected={},
    present=_ATTENTION_BIAS,
    derive=_experts,
    parts={**LAYER_PARTS, **EXPERT_PARTS, **QK_NORMS},
)
