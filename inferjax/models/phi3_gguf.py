"""Phi-3 and Phi-4 in GGUF files: fused projections, and the factors of LongRoPE as tensors."""

from collections.abc import Mapping
from typing import Any

from inferjax.models.gguf_format import Facts, GgufFormat, Setting

# Before files stated the window, the releases of this context had the one here, and the others one
# that is no shorter than their context.
_OLD_CONTEXT, _OLD_WINDOW = 4096, 2047


def _window(facts: Facts, config: Mapping[str, Any]) -> dict[str, Any]:
    old = _OLD_WINDOW if config["max_position_embeddings"] == _OLD_CONTEXT else 0
    window = facts.reader.integer("attention.sliding_window", old, low=0, high=2**30)
    return {"sliding_window": window or None}


PHI3_GGUF = GgufFormat(
    architecture="phi3",
    settings=(
        Setting(
            "rope.scaling.original_context_length",
            "original_max_position_embeddings",
            "count",
            default=None,
        ),
    ),
    derive=_window,
    rotated="partial_rotary_factor",
    parts={
        "self_attn.qkv_proj": "attn_qkv",
        "self_attn.o_proj": "attn_output",
        "mlp.gate_up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
    },
)
