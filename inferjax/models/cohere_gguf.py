"""Command R and Aya in GGUF files."""

from inferjax.models.gguf_format import LAYER_EPS, LAYER_PARTS, QK_NORMS, GgufFormat, Setting

COHERE_GGUF = GgufFormat(
    architecture="command-r",
    eps=LAYER_EPS,
    settings=(Setting("logit_scale", "logit_scale", default=1.0),),
    present={"attention_bias": "attn_q.bias", "use_qk_norm": "attn_q_norm.weight"},
    parts={**LAYER_PARTS, **QK_NORMS},
)
