"""Llama and the many models that share its architecture and its name."""

import functools

from inferjax.config import MLP, Attention, LayerSpec, ModelConfig, Norm, assign_groups
from inferjax.models.family import Family
from inferjax.models.hf import (
    ACTIVATIONS,
    MAX_LAYERS,
    ConfigReader,
    read_context,
    read_dtype,
    read_heads,
    read_token_ids,
)
from inferjax.models.llama_gguf import LLAMA_GGUF
from inferjax.models.rope_config import read_rope
from inferjax.models.sources import decoder, gated_mlp, pre_norm_layer
from inferjax.params import Params


def _config(reader: ConfigReader) -> ModelConfig:
    dim, vocab = reader.integer("hidden_size"), reader.integer("vocab_size")
    heads, kv_heads, head_dim = read_heads(reader, dim)
    rope = read_rope(reader, dim=head_dim, declared=read_context(reader))
    # Slicing for tensor-parallel pre-training: another order of summation than the one run here.
    reader.expect("pretraining_tp", 1)
    reader.expect("rope_interleaved", False)
    biased = reader.flag("attention_bias", False)
    attention = Attention(
        num_q_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        scale=head_dim**-0.5,
        rope=rope,
        qkv_bias=biased,
        out_bias=biased,
    )
    mlp = MLP(
        ffn_dim=reader.integer("intermediate_size"),
        activation=reader.choice("hidden_act", ACTIVATIONS, "silu"),
        bias=reader.flag("mlp_bias", False),
    )
    rms = Norm(eps=reader.number("rms_norm_eps", 1e-6, high=1.0))
    layer = LayerSpec(attention=attention, ffn=mlp, norm=rms)
    return ModelConfig(
        family="llama",
        vocab_size=vocab,
        model_dim=dim,
        max_context=rope.max_context,
        layers=assign_groups((layer,) * reader.integer("num_hidden_layers", high=MAX_LAYERS)),
        final_norm=rms,
        tied=reader.flag("tie_word_embeddings", False),
        dtype=read_dtype(reader),
        **read_token_ids(reader, vocab, bos=1, eos=2),
    )


def _weights(config: ModelConfig) -> Params:
    return decoder(config, functools.partial(pre_norm_layer, ffn=gated_mlp))


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
