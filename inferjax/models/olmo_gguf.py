"""OLMo 2 and 3 in GGUF files, which are one architecture there."""

from collections.abc import Mapping
from typing import Any

from inferjax.models.gguf_config import read_layer_types
from inferjax.models.gguf_format import LAYER_PARTS, QK_NORMS, WINDOW, Facts, GgufFormat

_PARTS = {
    **LAYER_PARTS,
    **QK_NORMS,
    "post_attention_layernorm": "post_attention_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
_BIASES = {"attention_bias": "attn_q.bias"}


def _local_layers(facts: Facts, config: Mapping[str, Any]) -> dict[str, Any]:
    """Give each kind of layer its rope: the scaling is for the global ones alone."""
    theta, scaling = config["rope_theta"], config["rope_scaling"]
    local = facts.reader.number("rope.freq_base_swa", theta)
    return {
        "layer_types": read_layer_types(facts.reader, config["num_hidden_layers"], 4),
        "rope_parameters": {
            "full_attention": {"rope_theta": theta, **(scaling or {})},
            "sliding_attention": {"rope_theta": local},
        },
        "rope_theta": None,
        "rope_scaling": None,
    }


OLMO2_GGUF = GgufFormat(
    architecture="olmo2",
    when=lambda own: not own.get("attention.sliding_window"),
    expected={"attention.sliding_window": 0},
    present=_BIASES,
    parts=_PARTS,
)
OLMO3_GGUF = GgufFormat(
    architecture="olmo2",
    when=lambda own: bool(own.get("attention.sliding_window")),
    settings=(WINDOW,),
    present=_BIASES,
    derive=_local_layers,
    parts=_PARTS,
)
