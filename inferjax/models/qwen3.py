"""Qwen 3: every head's queries and keys are normalised; late layers may slide."""

from inferjax.config import ModelConfig
from inferjax.models.family import Family
from inferjax.models.hf import ConfigReader
from inferjax.models.qwen_config import read_decoder, read_late_windows
from inferjax.models.qwen_gguf import QWEN3_GGUF
from inferjax.models.settings import read_attention, read_mlp, read_norm
from inferjax.models.sources import decoder, decoder_layer
from inferjax.params import Params


def _config(reader: ConfigReader) -> ModelConfig:
    windows = read_late_windows(reader)
    biased = reader.flag("attention_bias", False)
    attention = read_attention(
        reader,
        kv_heads=32,
        head_dim=128,
        qkv_bias=biased,
        out_bias=biased,
        qk_norm=read_norm(reader),
    )
    return read_decoder(reader, "qwen3", attention, windows, [read_mlp(reader)] * len(windows))


def _weights(config: ModelConfig) -> Params:
    return decoder(config, decoder_layer)


FAMILY = Family(
    name="qwen3",
    model_types=("qwen3",),
    architectures=("Qwen3ForCausalLM",),
    config=_config,
    weights=_weights,
    gguf=QWEN3_GGUF,
)
