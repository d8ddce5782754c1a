"""GPT-2, GPT-NeoX and StarCoder2 in GGUF files: LayerNorms, and feed-forward without a gate."""

from collections.abc import Mapping
from typing import Any

from einops import rearrange

from inferjax.config import ModelConfig
from inferjax.models.gguf_format import (
    LAYER_EPS,
    LAYER_PARTS,
    TRANSPOSED,
    Facts,
    GgufFormat,
    Setting,
    Undo,
    Values,
    first_attention,
)


def _even_heads(facts: Facts, dim: int) -> Mapping[str, Any]:
    """Check that heads share the width evenly, as the config takes for granted."""
    heads = facts.reader.integer("attention.head_count", high=65_536)
    for key in ("attention.key_length", "attention.value_length"):
        facts.reader.expect(key, dim / heads)
    facts.reader.expect("attention.head_count_kv", heads)
    return {}


_GPT2_LINEAR = {
    "attn.c_attn": "attn_qkv",
    "attn.c_proj": "attn_output",
    "mlp.c_fc": "ffn_up",
    "mlp.c_proj": "ffn_down",
}
GPT2_GGUF = GgufFormat(
    architecture="gpt2",
    eps=Setting("attention.layer_norm_epsilon", "layer_norm_epsilon"),
    renamed={
        "hidden_size": "n_embd",
        "num_hidden_layers": "n_layer",
        "num_attention_heads": "n_head",
        "intermediate_size": "n_inner",
        "max_position_embeddings": "n_positions",
    },
    heads=_even_heads,
    rope=False,
    layers="transformer.h.",
    top={
        "transformer.wte": "token_embd",
        "transformer.wpe": "position_embd",
        "transformer.ln_f": "output_norm",
        "lm_head": "output",
    },
    parts={**_GPT2_LINEAR, "ln_1": "attn_norm", "ln_2": "ffn_norm"},
    undo=dict.fromkeys(_GPT2_LINEAR, TRANSPOSED),
)


def _heads_first(values: Values, config: ModelConfig) -> Values:
    heads = first_attention(config).num_q_heads
    return rearrange(values, "(c n h) ... -> (n c h) ...", c=3, n=heads)


GPT_NEOX_GGUF = GgufFormat(
    architecture="gptneox",
    eps=LAYER_EPS,
    settings=(Setting("use_parallel_residual", "use_parallel_residual", "flag", default=None),),
    present={"attention_bias": "attn_qkv.bias"},
    renamed={"rope_theta": "rotary_emb_base"},
    rotated="rotary_pct",
    layers="gpt_neox.layers.",
    top={
        "gpt_neox.embed_in": "token_embd",
        "gpt_neox.final_layer_norm": "output_norm",
        "embed_out": "output",
    },
    parts={
        "attention.query_key_value": "attn_qkv",
        "attention.dense": "attn_output",
        "mlp.dense_h_to_4h": "ffn_up",
        "mlp.dense_4h_to_h": "ffn_down",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
    },
    undo={"attention.query_key_value": Undo(_heads_first)},
)
STARCODER2_GGUF = GgufFormat(
    architecture="starcoder2",
    eps=Setting("attention.layer_norm_epsilon", "norm_epsilon"),
    # Converters leave the window out; this is what every release has.
    settings=(Setting("attention.sliding_window", "sliding_window", "window", 4096),),
    present={"use_bias": "attn_q.bias"},
    parts={**LAYER_PARTS, "mlp.c_fc": "ffn_up", "mlp.c_proj": "ffn_down"},
)
