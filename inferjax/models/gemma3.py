"""Gemma 3, text only: local and global layers, sandwich norms, normalised queries and keys."""

import functools
import math

from inferjax.config import Attention, LayerSpec, ModelConfig, assign_groups
from inferjax.models.family import Family
from inferjax.models.gemma_gguf import GEMMA3_GGUF
from inferjax.models.hf import (
    MAX_LAYERS,
    ConfigReader,
    read_context,
    read_dtype,
    read_heads,
    read_layer_types,
    read_token_ids,
)
from inferjax.models.rope_config import read_layer_ropes
from inferjax.models.settings import read_mlp, read_norm, read_window
from inferjax.models.sources import SANDWICH_NORMS, decoder, decoder_layer
from inferjax.params import Params


def _config(reader: ConfigReader) -> ModelConfig:
    dim, vocab = reader.integer("hidden_size"), reader.integer("vocab_size", 262_208)
    num_layers = reader.integer("num_hidden_layers", high=MAX_LAYERS)
    declared = read_context(reader)
    heads, kv_heads, head_dim = read_heads(reader, dim, kv_heads=4, head_dim=256)
    full, sliding = read_layer_ropes(
        reader,
        dim=head_dim,
        declared=declared,
        theta=reader.number("rope_theta", 1_000_000.0, low=1.001),
        local_theta=reader.number("rope_local_base_freq", 10_000.0, low=1.001),
    )
    window = read_window(reader, 4096)
    reader.expect("use_bidirectional_attention", False)
    # Hugging Face's Gemma 3 reads this key and never applies it: the trained models have none.
    reader.number("attn_logit_softcapping", None)
    rms = read_norm(reader, unit_offset=True)
    mlp = read_mlp(reader, "hidden_activation", "gelu_pytorch_tanh")
    scale = reader.positive("query_pre_attn_scalar", 256.0) ** -0.5
    biased = reader.flag("attention_bias", False)

    def layer(slides: bool) -> LayerSpec:
        attention = Attention(
            num_q_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            scale=scale,
            rope=sliding if slides else full,
            window=window if slides else None,
            qkv_bias=biased,
            out_bias=biased,
            qk_norm=rms,
        )
        return LayerSpec(attention=attention, ffn=mlp, norm=rms, norm_out=True)

    pattern = reader.integer("sliding_window_pattern", 6, high=MAX_LAYERS)
    pattern = reader.integer("_sliding_window_pattern", pattern, high=MAX_LAYERS)
    return ModelConfig(
        family="gemma3_text",
        vocab_size=vocab,
        model_dim=dim,
        max_context=full.max_context,
        layers=assign_groups(tuple(map(layer, read_layer_types(reader, num_layers, pattern)))),
        final_norm=rms,
        tied=reader.flag("tie_word_embeddings", True),
        dtype=read_dtype(reader),
        embed_scale=math.sqrt(dim),
        final_softcap=reader.number("final_logit_softcapping", None, low=1e-3),
        **read_token_ids(reader, vocab, bos=2, eos=1),
    )


def _weights(config: ModelConfig) -> Params:
    return decoder(config, functools.partial(decoder_layer, norms=SANDWICH_NORMS))


FAMILY = Family(
    name="gemma3_text",
    model_types=("gemma3_text",),
    # The second is a name that only its classifier and its bare model derive from.
    architectures=("Gemma3ForCausalLM", "Gemma3TextForCausalLM"),
    config=_config,
    weights=_weights,
    gguf=GEMMA3_GGUF,
)
