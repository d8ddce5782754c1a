"""OPT: learned positions, LayerNorm before or after each block, perhaps a narrower embedding."""

from typing import cast

from inferjax.config import MLP, Attention, LayerSpec, ModelConfig, Norm
from inferjax.models.family import Family
from inferjax.models.hf import ACTIVATIONS, ConfigReader, read_context
from inferjax.models.settings import read_model, read_num_layers
from inferjax.models.sources import (
    Tensor,
    grouped_attention,
    linear,
    norm,
    plain,
    plain_mlp,
    source,
)
from inferjax.params import LayerParams, Params

# The table of positions starts with rows that only padding ever used.
_PADDING_ROWS = 2


def _config(reader: ConfigReader) -> ModelConfig:
    dim, heads = reader.integer("hidden_size"), reader.integer("num_attention_heads", high=65_536)
    if dim % heads:
        reader.refuse("num_attention_heads", heads, f"it must divide hidden_size ({dim})")
    # Facts of OPT that Galactica's configs spell out.
    reader.expect("learned_embeddings", True)
    reader.expect("scale_embeddings", False)
    biased = reader.flag("enable_bias", True)
    affine = reader.flag("layer_norm_elementwise_affine", True)
    layer_norm = Norm(kind="layer", eps=1e-5, weight=affine, bias=affine)
    before = reader.flag("do_layer_norm_before", True)
    without_final = reader.flag("_remove_final_layer_norm", False) or not before
    layer = LayerSpec(
        attention=Attention(
            num_q_heads=heads,
            num_kv_heads=heads,
            head_dim=dim // heads,
            scale=(dim // heads) ** -0.5,
            qkv_bias=biased,
            out_bias=biased,
        ),
        ffn=MLP(
            ffn_dim=reader.integer("ffn_dim"),
            activation=reader.choice("activation_function", ACTIVATIONS, "relu"),
            gated=False,
            bias=biased,
        ),
        norm=layer_norm,
        norm_in=before,
        norm_sum=not before,
    )
    width = reader.integer("word_embed_proj_dim", dim)
    return read_model(
        reader,
        "opt",
        [layer] * read_num_layers(reader),
        None if without_final else layer_norm,
        tied=True,
        bos=2,
        eos=2,
        learned_positions=read_context(reader),
        embed_dim=None if width == dim else width,
    )


def _weights(config: ModelConfig) -> Params:
    name, dim, vocab = "model.decoder", config.model_dim, config.vocab_size
    rows, width = config.learned_positions or 0, config.embed_dim or dim
    table = Tensor(f"{name}.embed_positions.weight", (rows + _PADDING_ROWS, dim))
    same = config.embed_dim is None
    return Params(
        embed=plain(f"{name}.embed_tokens.weight", vocab, width),
        positions=source([table], lambda values: values[_PADDING_ROWS:]),
        layers=tuple(
            _layer(f"{name}.layers.{i}", spec, dim) for i, spec in enumerate(config.layers)
        ),
        final_norm=norm(f"{name}.final_layer_norm", dim, config.final_norm),
        head=None if config.tied else plain("lm_head.weight", vocab, width),
        project_in=None if same else linear(f"{name}.project_in.weight", dim, width),
        project_out=None if same else linear(f"{name}.project_out.weight", width, dim),
    )


def _layer(name: str, spec: LayerSpec, dim: int) -> LayerParams:
    """Take one layer's weights; its norms have the same names before a block and after it."""
    attention, ffn = cast(Attention, spec.attention), cast(MLP, spec.ffn)
    place = "in" if spec.norm_in else "out"
    norms = {
        f"attention_{place}": norm(f"{name}.self_attn_layer_norm", dim, spec.norm),
        f"ffn_{place}": norm(f"{name}.final_layer_norm", dim, spec.norm),
    }
    return LayerParams(
        attention=grouped_attention(f"{name}.self_attn", attention, dim, out="out_proj"),
        ffn=plain_mlp(name, ffn, dim, up="fc1", down="fc2"),
        **norms,
    )


FAMILY = Family(
    name="opt",
    model_types=("opt",),
    architectures=("OPTForCausalLM",),
    config=_config,
    weights=_weights,
    # Dropout of units and of whole layers, and the spread of initial weights.
    ignored_keys=frozenset({"dropout", "activation_dropout", "layerdrop", "init_std"}),
)
