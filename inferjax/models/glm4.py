"""GLM-4 (0414): sandwich norms, and heads whose first half is rotated in neighbouring pairs."""

import functools

from inferjax.config import LayerSpec, ModelConfig
from inferjax.models.family import Family
from inferjax.models.glm4_gguf import GLM4_GGUF
from inferjax.models.hf import ConfigReader
from inferjax.models.settings import (
    read_attention,
    read_mlp,
    read_model,
    read_norm,
    read_num_layers,
)
from inferjax.models.sources import decoder, decoder_layer, fused_mlp
from inferjax.params import Params

_NORMS = {
    "attention_in": "input_layernorm",
    "attention_out": "post_self_attn_layernorm",
    "ffn_in": "post_attention_layernorm",
    "ffn_out": "post_mlp_layernorm",
}
# The end of a text, of a user's turn, and of a call of a tool.
_EOS = [151_329, 151_336, 151_338]


def _config(reader: ConfigReader) -> ModelConfig:
    norm = read_norm(reader, default=1.5625e-7)
    attention = read_attention(
        reader,
        kv_heads=2,
        head_dim=128,
        interleaved=True,
        rotated=0.5,
        qkv_bias=reader.flag("attention_bias", True),
    )
    layer = LayerSpec(attention=attention, ffn=read_mlp(reader), norm=norm, norm_out=True)
    return read_model(reader, "glm4", [layer] * read_num_layers(reader), norm, eos=_EOS)


def _weights(config: ModelConfig) -> Params:
    return decoder(config, functools.partial(decoder_layer, norms=_NORMS, ffn=fused_mlp))


FAMILY = Family(
    name="glm4",
    model_types=("glm4",),
    architectures=("Glm4ForCausalLM",),
    config=_config,
    weights=_weights,
    gguf=GLM4_GGUF,
)
