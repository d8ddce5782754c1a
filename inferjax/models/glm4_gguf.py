"""GLM-4 (0414) in GGUF files."""

from inferjax.models.gguf_format import LAYER_PARTS, GgufFormat

GLM4_GGUF = GgufFormat(
    architecture="glm4",
    present={"attention_bias": "attn_q.bias"},
    rotated="partial_rotary_factor",
    parts={
        **LAYER_PARTS,
        "mlp.gate_up_proj": "ffn_up",
        "post_self_attn_layernorm": "post_attention_norm",
        "post_mlp_layernorm": "post_ffw_norm",
    },
)
