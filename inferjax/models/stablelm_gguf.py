"""StableLM in GGUF files: the norms of its heads are stacked."""

from collections.abc import Mapping
from typing import Any

from inferjax.models.gguf_format import LAYER_EPS, LAYER_PARTS, Facts, GgufFormat


def _residual(facts: Facts, _config: Mapping[str, Any]) -> dict[str, Any]:
    """Tell the kind of residual by whether there is a second norm, as the format's own reader does.

    Converters have written that it is parallel where a config said nothing, which means serial.
    """
    parallel = not facts.has("ffn_norm.weight")
    if parallel:
        facts.reader.expect("use_parallel_residual", True)
    facts.reader.flag("use_parallel_residual", default=parallel)
    return {"use_parallel_residual": parallel}


STABLELM_GGUF = GgufFormat(
    architecture="stablelm",
    eps=LAYER_EPS,
    present={"use_qkv_bias": "attn_q.bias", "qk_layernorm": "attn_q_norm.weight"},
    derive=_residual,
    rotated="partial_rotary_factor",
    parts={
        **LAYER_PARTS,
        "self_attn.q_layernorm.norms.*": "attn_q_norm",
        "self_attn.k_layernorm.norms.*": "attn_k_norm",
    },
)
