"""Cohere's Command R and Aya: attention and feed-forward side by side, after one LayerNorm."""

import functools

from inferjax.config import LayerSpec, ModelConfig
from inferjax.models.cohere_gguf import COHERE_GGUF
from inferjax.models.family import Family
from inferjax.models.hf import ConfigReader
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
    if reader.given("logit_scale", 0.0625) is None:
        reader.refuse("logit_scale", None, "the logits are a multiple of it")
    norm = read_norm(reader, "layer_norm_eps", 1e-5, kind="layer")
    biased = reader.flag("attention_bias", False)
    attention = read_attention(
        reader,
        theta=500_000.0,
        interleaved=True,
        qkv_bias=biased,
        out_bias=biased,
        qk_norm=norm if reader.flag("use_qk_norm", False) else None,
        qk_norm_span="each_head",
    )
    layer = LayerSpec(
        attention=attention, ffn=read_mlp(reader), norm=norm, residual="parallel_shared"
    )
    return read_model(
        reader,
        "cohere",
        [layer] * read_num_layers(reader),
        norm,
        tied=True,
        bos=5,
        eos=255_001,
        logit_scale=reader.positive("logit_scale", 0.0625),
    )


def _weights(config: ModelConfig) -> Params:
    norms = {"attention_in": "input_layernorm"}
    return decoder(config, functools.partial(decoder_layer, norms=norms))


FAMILY = Family(
    name="cohere",
    model_types=("cohere",),
    architectures=("CohereForCausalLM",),
    config=_config,
    weights=_weights,
    # A limit of the tokenizer's; the model's context is max_position_embeddings.
    ignored_keys=frozenset({"model_max_length"}),
    gguf=COHERE_GGUF,
)
