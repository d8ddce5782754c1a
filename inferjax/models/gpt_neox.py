"""GPT-NeoX and Pythia: LayerNorms, both blocks side by side, and heads that are partly rotated."""

import re
from typing import cast

from inferjax.config import MLP, Attention, LayerSpec, ModelConfig
from inferjax.models.family import Family
from inferjax.models.gpt_gguf import GPT_NEOX_GGUF
from inferjax.models.hf import ConfigReader
from inferjax.models.settings import (
    read_attention,
    read_mlp,
    read_model,
    read_norm,
    read_num_layers,
)
from inferjax.models.sources import norm, output_projection, plain, plain_mlp, reshaped
from inferjax.params import AttentionParams, LayerParams, Params


def _config(reader: ConfigReader) -> ModelConfig:
    layer_norm = read_norm(reader, "layer_norm_eps", 1e-5, kind="layer", bias=True)
    parallel = reader.flag("use_parallel_residual", True)
    layer = LayerSpec(
        attention=_attention(reader),
        ffn=read_mlp(reader, default="gelu", gated=False, bias=True),
        norm=layer_norm,
        residual="parallel" if parallel else "serial",
    )
    layers = [layer] * read_num_layers(reader)
    return read_model(reader, "gpt_neox", layers, layer_norm, bos=0, eos=2)


def _attention(reader: ConfigReader) -> Attention:
    """Read what transformers 4 stores under the old names and, in some versions, the new ones."""
    dim, heads = reader.integer("hidden_size"), reader.integer("num_attention_heads", high=65_536)
    if dim % heads:
        reader.refuse("num_attention_heads", heads, f"it must divide hidden_size ({dim})")
    reader.expect("num_key_value_heads", heads)
    reader.expect("head_dim", dim // heads)
    theta = reader.number("rotary_emb_base", 10_000.0, low=1.001)
    reader.expect("rope_theta", theta)
    rotated = reader.number("rotary_pct", 0.25, high=1.0)
    reader.expect("partial_rotary_factor", rotated)
    biased = reader.flag("attention_bias", True)
    return read_attention(reader, theta=theta, rotated=rotated, qkv_bias=biased, out_bias=biased)


def _weights(config: ModelConfig) -> Params:
    dim, vocab = config.model_dim, config.vocab_size
    return Params(
        embed=plain("gpt_neox.embed_in.weight", vocab, dim),
        layers=tuple(_layer(i, spec, dim) for i, spec in enumerate(config.layers)),
        final_norm=norm("gpt_neox.final_layer_norm", dim, config.final_norm),
        head=None if config.tied else plain("embed_out.weight", vocab, dim),
    )


def _layer(index: int, spec: LayerSpec, dim: int) -> LayerParams:
    name, attention = f"gpt_neox.layers.{index}", cast(Attention, spec.attention)
    fused, heads = f"{name}.attention.query_key_value", attention.num_q_heads
    # Every head's query, key and value lie side by side.
    return LayerParams(
        attention=AttentionParams(
            wqkv=reshaped(f"{fused}.weight", (3 * dim, dim), "(k c h) d -> d k c h", c=3, k=heads),
            bqkv=reshaped(f"{fused}.bias", (3 * dim,), "(k c h) -> k c h", c=3, k=heads)
            if attention.qkv_bias
            else None,
            **output_projection(f"{name}.attention.dense", attention, dim),
        ),
        ffn=plain_mlp(
            f"{name}.mlp", cast(MLP, spec.ffn), dim, up="dense_h_to_4h", down="dense_4h_to_h"
        ),
        attention_in=norm(f"{name}.input_layernorm", dim, spec.norm),
        ffn_in=norm(f"{name}.post_attention_layernorm", dim, spec.norm),
    )


# The causal mask and its fill value, which old versions saved as if they were weights.
_MASK = re.compile(r"gpt_neox\.layers\.\d+\.attention\.(bias|masked_bias)")

FAMILY = Family(
    name="gpt_neox",
    model_types=("gpt_neox",),
    architectures=("GPTNeoXForCausalLM",),
    config=_config,
    weights=_weights,
    base_prefix="gpt_neox.",
    # Dropout, under three more names.
    ignored_keys=frozenset(
        {"attention_probs_dropout_prob", "classifier_dropout", "hidden_dropout_prob"}
    ),
    skips=lambda name, _config: _MASK.fullmatch(name) is not None,
    gguf=GPT_NEOX_GGUF,
)
