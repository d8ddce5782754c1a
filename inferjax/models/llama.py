"""Llama and the many models that share its architecture and its name."""

from inferjax.config import LayerSpec, ModelConfig
from inferjax.models.family import Family
from inferjax.models.hf import ConfigReader
from inferjax.models.llama_gguf import LLAMA_GGUF
from inferjax.models.settings import (
    read_attention,
    read_mlp,
    read_model,
    read_norm,
    read_num_layers,
)
from inferjax.models.sources import decoder, decoder_layer
from inferjax.params import Params


def _config(reader: ConfigReader) -> ModelConfig:
    # Slicing for tensor-parallel pre-training: another order of summation than the one run here.
    reader.expect("pretraining_tp", 1)
    reader.expect("rope_interleaved", False)
    biased = reader.flag("attention_bias", False)
    norm = read_norm(reader)
    layer = LayerSpec(
        attention=read_attention(reader, qkv_bias=biased, out_bias=biased),
        ffn=read_mlp(reader, bias=reader.flag("mlp_bias", False)),
        norm=norm,
    )
    return read_model(reader, "llama", [layer] * read_num_layers(reader), norm, bos=1, eos=2)


def _weights(config: ModelConfig) -> Params:
    return decoder(config, decoder_layer)


FAMILY = Family(
    name="llama",
    model_types=("llama",),
    architectures=("LlamaForCausalLM",),
    config=_config,
    weights=_weights,
    # A mark of converters, without meaning for the model.
    ignored_keys=frozenset({"is_llama_config"}),
    gguf=LLAMA_GGUF,
)
