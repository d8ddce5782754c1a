"""Granite in GGUF files: multipliers under other names."""

from collections.abc import Mapping
from typing import Any

from inferjax.models.gguf_format import PERMUTED, Facts, GgufFormat, Setting


def _multipliers(facts: Facts, config: Mapping[str, Any]) -> dict[str, Any]:
    """Read the multipliers, of which a zero stands for none."""
    # What is a note to trainers elsewhere turns the rope off here.
    facts.reader.expect("rope.scaling.finetuned", True)
    number = facts.reader.number
    return {
        "attention_multiplier": number("attention.scale", 0.0) or config["head_dim"] ** -0.5,
        "embedding_multiplier": number("embedding_scale", 0.0) or 1.0,
        "residual_multiplier": number("residual_scale", 0.0) or 1.0,
    }


GRANITE_GGUF = GgufFormat(
    architecture="granite",
    settings=(Setting("logit_scale", "logits_scaling"),),
    present={"attention_bias": "attn_q.bias", "mlp_bias": "ffn_up.bias"},
    derive=_multipliers,
    undo=PERMUTED,
)
