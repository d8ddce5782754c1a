"""GPT-2: learned positions, LayerNorm with bias, a plain feed-forward block, tied embeddings."""

import re
from typing import cast

from inferjax.config import MLP, Attention, LayerSpec, ModelConfig, Norm, assign_groups
from inferjax.models.family import Family
from inferjax.models.gpt_gguf import GPT2_GGUF
from inferjax.models.hf import (
    ACTIVATIONS,
    MAX_LAYERS,
    ConfigReader,
    read_context,
    read_dtype,
    read_token_ids,
    served_context,
)
from inferjax.models.sources import norm, plain, reshaped
from inferjax.params import AttentionParams, LayerParams, MLPParams, Params


def _config(reader: ConfigReader) -> ModelConfig:
    dim, vocab = reader.integer("n_embd"), reader.integer("vocab_size")
    heads = reader.integer("n_head", high=65_536)
    if dim % heads:
        reader.refuse("n_head", heads, f"it must divide n_embd ({dim})")
    positions = read_context(reader, "n_positions")
    reader.expect("n_ctx", positions)
    layer_norm = Norm(
        kind="layer", eps=reader.number("layer_norm_epsilon", 1e-5, high=1.0), bias=True
    )
    mlp = MLP(
        ffn_dim=reader.integer("n_inner", 4 * dim),
        activation=reader.choice("activation_function", ACTIVATIONS, "gelu_new"),
        gated=False,
        bias=True,
    )
    scaled = reader.flag("scale_attn_weights", True)
    by_layer = reader.flag("scale_attn_by_inverse_layer_idx", False)
    # Only about half precision in training: attention scores are float32 here in any case.
    reader.flag("reorder_and_upcast_attn", False)

    def layer(index: int) -> LayerSpec:
        scale = (dim // heads) ** -0.5 if scaled else 1.0
        attention = Attention(
            num_q_heads=heads,
            num_kv_heads=heads,
            head_dim=dim // heads,
            scale=scale / (index + 1) if by_layer else scale,
            qkv_bias=True,
            out_bias=True,
        )
        return LayerSpec(attention=attention, ffn=mlp, norm=layer_norm)

    num_layers = reader.integer("n_layer", high=MAX_LAYERS)
    return ModelConfig(
        family="gpt2",
        vocab_size=vocab,
        model_dim=dim,
        max_context=served_context(reader, positions),
        layers=assign_groups(tuple(layer(i) for i in range(num_layers))),
        final_norm=layer_norm,
        tied=reader.flag("tie_word_embeddings", True),
        dtype=read_dtype(reader),
        learned_positions=positions,
        **read_token_ids(reader, vocab, bos=50_256, eos=50_256),
    )


def _weights(config: ModelConfig) -> Params:
    dim, vocab, positions = config.model_dim, config.vocab_size, config.learned_positions
    return Params(
        embed=plain("transformer.wte.weight", vocab, dim),
        positions=plain("transformer.wpe.weight", positions or 0, dim),
        layers=tuple(_layer(i, spec, dim) for i, spec in enumerate(config.layers)),
        final_norm=norm("transformer.ln_f", dim, config.final_norm),
        head=None if config.tied else plain("lm_head.weight", vocab, dim),
    )


def _layer(index: int, spec: LayerSpec, dim: int) -> LayerParams:
    """Take one layer's weights, which are stored [in, out], unlike other families'."""
    name, ffn = f"transformer.h.{index}", cast(MLP, spec.ffn)
    attn, mlp = f"{name}.attn", f"{name}.mlp"
    heads = cast(Attention, spec.attention).num_q_heads
    return LayerParams(
        attention=AttentionParams(
            wqkv=reshaped(
                f"{attn}.c_attn.weight", (dim, 3 * dim), "d (c k h) -> d k c h", c=3, k=heads
            ),
            bqkv=reshaped(f"{attn}.c_attn.bias", (3 * dim,), "(c k h) -> k c h", c=3, k=heads),
            wo=reshaped(f"{attn}.c_proj.weight", (dim, dim), "(k g h) d -> k g h d", k=heads, g=1),
            bo=plain(f"{attn}.c_proj.bias", dim),
        ),
        ffn=MLPParams(
            w_in=reshaped(f"{mlp}.c_fc.weight", (dim, ffn.ffn_dim), "d (p f) -> d p f", p=1),
            b_in=reshaped(f"{mlp}.c_fc.bias", (ffn.ffn_dim,), "(p f) -> p f", p=1),
            w_down=plain(f"{mlp}.c_proj.weight", ffn.ffn_dim, dim),
            b_down=plain(f"{mlp}.c_proj.bias", dim),
        ),
        attention_in=norm(f"{name}.ln_1", dim, spec.norm),
        ffn_in=norm(f"{name}.ln_2", dim, spec.norm),
    )


# The causal mask, which old versions saved as if it were a weight.
_MASK = re.compile(r"transformer\.h\.\d+\.attn\.(bias|masked_bias)")
_SUMMARY = ("activation", "first_dropout", "proj_to_labels", "type", "use_proj")

FAMILY = Family(
    name="gpt2",
    model_types=("gpt2",),
    architectures=("GPT2LMHeadModel",),
    config=_config,
    weights=_weights,
    base_prefix="transformer.",
    in_first=True,
    # Dropout, and the head that summarises a sequence for classification.
    ignored_keys=frozenset(
        {"attn_pdrop", "embd_pdrop", "resid_pdrop"} | {f"summary_{part}" for part in _SUMMARY}
    ),
    skips=lambda name, _config: _MASK.fullmatch(name) is not None,
    gguf=GPT2_GGUF,
)
