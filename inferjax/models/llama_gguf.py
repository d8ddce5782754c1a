"""Llama, Mistral and Mixtral in GGUF files, one architecture there, and SmolLM3."""

from collections.abc import Mapping
from typing import Any

from inferjax.models.gguf_format import (
    EXPERTS,
    LAYER_PARTS,
    PERMUTED,
    WINDOW,
    Facts,
    GgufFormat,
    Setting,
)


def _has_window(own: Mapping[str, object]) -> bool:
    return bool(own.get("attention.sliding_window"))


def _has_experts(own: Mapping[str, object]) -> bool:
    return bool(own.get("expert_count"))


LLAMA_GGUF = GgufFormat(
    architecture="llama",
    when=lambda own: not _has_experts(own) and not _has_window(own),
    expected={"expert_count": 0, "expert_used_count": 0, "attention.sliding_window": 0},
    present={"attention_bias": "attn_q.bias", "mlp_bias": "ffn_up.bias"},
    undo=PERMUTED,
)
# Converters write no window, and files without one are read as Llama's: a model of theirs differs
# in nothing else. The first Mistral, which had one, cannot be told from the later ones.
MISTRAL_GGUF = GgufFormat(
    architecture="llama",
    when=lambda own: not _has_experts(own) and _has_window(own),
    settings=(WINDOW,),
    undo=PERMUTED,
)


def _one_width(facts: Facts, config: Mapping[str, Any]) -> dict[str, Any]:
    facts.reader.expect("expert_feed_forward_length", config["intermediate_size"])
    return {}


MIXTRAL_GGUF = GgufFormat(
    architecture="llama",
    when=_has_experts,
    settings=(Setting("expert_count", "num_local_experts", "count"), EXPERTS[1], WINDOW),
    expected={},
    derive=_one_width,
    parts={
        **LAYER_PARTS,
        "block_sparse_moe.gate": "ffn_gate_inp",
        "block_sparse_moe.experts.*.w1": "ffn_gate_exps",
        "block_sparse_moe.experts.*.w3": "ffn_up_exps",
        "block_sparse_moe.experts.*.w2": "ffn_down_exps",
    },
    undo=PERMUTED,
)
SMOLLM3_GGUF = GgufFormat(
    architecture="smollm3",
    present={"attention_bias": "attn_q.bias", "mlp_bias": "ffn_up.bias"},
    # What the format's own reader takes for granted.
    constants={"no_rope_layer_interval": 4},
    undo=PERMUTED,
)
