"""Qwen 2 and 2.5: Llama's layers with biases on queries, keys and values; late layers may slide."""

from inferjax.config import ModelConfig
from inferjax.models.family import Family
from inferjax.models.hf import ConfigReader
from inferjax.models.qwen_config import read_decoder, read_late_windows
from inferjax.models.qwen_gguf import QWEN2_GGUF
from inferjax.models.settings import read_attention, read_mlp
from inferjax.models.sources import decoder, decoder_layer
from inferjax.params import Params


def _config(reader: ConfigReader) -> ModelConfig:
    # Rotates by three positions at once, as the models that also see pictures do.
    reader.expect("use_mrope", False)
    windows = read_late_windows(reader)
    attention = read_attention(reader, kv_heads=32, qkv_bias=True)
    return read_decoder(reader, "qwen2", attention, windows, [read_mlp(reader)] * len(windows))


def _weights(config: ModelConfig) -> Params:
    return decoder(config, decoder_layer)


FAMILY = Family(
    name="qwen2",
    model_types=("qwen2",),
    architectures=("Qwen2ForCausalLM",),
    config=_config,
    weights=_weights,
    gguf=QWEN2_GGUF,
)
