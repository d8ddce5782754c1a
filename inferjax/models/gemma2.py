"""Gemma 2: Gemma with every other layer local, sandwich norms, and capped scores and logits."""

import dataclasses
import functools
import math

from inferjax.config import LayerSpec, ModelConfig
from inferjax.models.family import Family
from inferjax.models.gemma import expect_activation
from inferjax.models.gemma_gguf import GEMMA2_GGUF
from inferjax.models.hf import ConfigReader, read_layer_types
from inferjax.models.settings import (
    read_attention,
    read_mlp,
    read_model,
    read_norm,
    read_num_layers,
    read_window,
)
from inferjax.models.sources import SANDWICH_NORMS, decoder, decoder_layer
from inferjax.params import Params


def _config(reader: ConfigReader) -> ModelConfig:
    reader.expect("use_bidirectional_attention", False)
    biased = reader.flag("attention_bias", False)
    norm = read_norm(reader, unit_offset=True)
    mlp = read_mlp(reader, "hidden_activation", "gelu_pytorch_tanh")
    expect_activation(reader, "hidden_act", mlp.activation)
    window = read_window(reader, 4096)
    # The same number under the name that the first releases give beside it.
    reader.expect("sliding_window_size", window)
    attention = read_attention(
        reader,
        kv_heads=4,
        head_dim=256,
        scale=reader.positive("query_pre_attn_scalar", 256.0) ** -0.5,
        softcap=_cap(reader, "attn_logit_softcapping", 50.0),
        qkv_bias=biased,
        out_bias=biased,
    )
    full = LayerSpec(attention=attention, ffn=mlp, norm=norm, norm_out=True)
    sliding = dataclasses.replace(full, attention=dataclasses.replace(attention, window=window))
    kinds = read_layer_types(reader, read_num_layers(reader), 2)
    return read_model(
        reader,
        "gemma2",
        [sliding if slides else full for slides in kinds],
        norm,
        tied=True,
        bos=2,
        eos=1,
        embed_scale=math.sqrt(reader.integer("hidden_size")),
        final_softcap=_cap(reader, "final_logit_softcapping", 30.0),
    )


def _cap(reader: ConfigReader, key: str, default: float) -> float | None:
    """Return the bound of a tanh; null stands for none."""
    unbound = reader.given(key, default) is None
    return None if unbound else reader.number(key, default, low=1e-3)


def _weights(config: ModelConfig) -> Params:
    return decoder(config, functools.partial(decoder_layer, norms=SANDWICH_NORMS))


FAMILY = Family(
    name="gemma2",
    model_types=("gemma2",),
    architectures=("Gemma2ForCausalLM",),
    config=_config,
    weights=_weights,
    gguf=GEMMA2_GGUF,
)
