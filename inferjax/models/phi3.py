"""Phi-3 and Phi-4: Llama with fused projections, partly rotated heads, and LongRoPE."""

import functools

from inferjax.config import Attention, LayerSpec, ModelConfig
from inferjax.models.family import Family
from inferjax.models.hf import ConfigReader, read_context, read_heads
from inferjax.models.phi3_gguf import PHI3_GGUF
from inferjax.models.rope_config import read_rope, rope_settings
from inferjax.models.settings import (
    read_mlp,
    read_model,
    read_norm,
    read_num_layers,
    read_window,
)
from inferjax.models.sources import decoder, decoder_layer, fused_attention, fused_mlp
from inferjax.params import Params

# LongRoPE is the only scaling, and had two other names before it had this one.
_RULES = {"default": "default", "longrope": "longrope", "su": "longrope", "yarn": "longrope"}


def _config(reader: ConfigReader) -> ModelConfig:
    # What the original code had switches for, none of which a release uses.
    for key in ("attention_bias", "mlp_bias", "lm_head_bias"):
        reader.expect(key, False)
    for key in ("full_attn_mod", "interpolate_factor"):
        reader.expect(key, 1)
    norm = read_norm(reader, default=1e-5)
    layer = LayerSpec(attention=_attention(reader), ffn=read_mlp(reader), norm=norm)
    return read_model(reader, "phi3", [layer] * read_num_layers(reader), norm, bos=1, eos=32_000)


def _attention(reader: ConfigReader) -> Attention:
    heads, kv_heads, head_dim = read_heads(reader, reader.integer("hidden_size"))
    key = "original_max_position_embeddings"
    original = reader.integer(key, 4096)
    within = rope_settings(reader).get(key)
    if within not in (None, original):
        # The reference takes the number beside the rope, whatever the one within.
        reader.refuse(key, original, f"the rope settings say {str(within)[:40]}")
    rope = read_rope(
        reader,
        dim=head_dim,
        declared=read_context(reader),
        rotated=1.0,
        original_context=original,
        rules=_RULES,
    )
    return Attention(
        num_q_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        scale=head_dim**-0.5,
        rope=rope,
        window=read_window(reader),
    )


def _weights(config: ModelConfig) -> Params:
    return decoder(
        config, functools.partial(decoder_layer, attention=fused_attention, ffn=fused_mlp)
    )


FAMILY = Family(
    name="phi3",
    model_types=("phi3",),
    architectures=("Phi3ForCausalLM",),
    config=_config,
    weights=_weights,
    # Dropout.
    ignored_keys=frozenset({"embd_pdrop", "resid_pdrop"}),
    gguf=PHI3_GGUF,
)
