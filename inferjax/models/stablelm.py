"""StableLM: LayerNorm, a rope on a quarter of each head, and optionally a parallel residual."""

import dataclasses
import functools

from einops import rearrange
from jaxtyping import Shaped

from inferjax.config import Attention, LayerSpec, ModelConfig
from inferjax.models.family import Family
from inferjax.models.hf import ConfigReader
from inferjax.models.settings import (
    read_attention,
    read_mlp,
    read_model,
    read_norm,
    read_num_layers,
)
from inferjax.models.sources import (
    PRE_NORMS,
    AnyArray,
    Tensor,
    decoder,
    decoder_layer,
    grouped_attention,
    namespace,
    source,
)
from inferjax.models.stablelm_gguf import STABLELM_GGUF
from inferjax.params import AttentionParams, NormParams, Params


def _config(reader: ConfigReader) -> ModelConfig:
    norm = read_norm(reader, "layer_norm_eps", 1e-5, kind="layer", bias=True)
    attention = read_attention(
        reader,
        kv_heads=32,
        rotated=0.25,
        qkv_bias=reader.flag("use_qkv_bias", False),
        qk_norm=read_norm(reader, "layer_norm_eps", 1e-5, kind="layer")
        if reader.flag("qk_layernorm", False)
        else None,
        qk_norm_span="each_head",
    )
    # Hugging Face's heads divide the model's width between them, whatever this key says.
    reader.expect("head_dim", reader.integer("hidden_size") / attention.num_q_heads)
    layer = LayerSpec(
        attention=attention,
        ffn=read_mlp(reader),
        norm=norm,
        residual="parallel_shared" if reader.flag("use_parallel_residual", False) else "serial",
    )
    return read_model(reader, "stablelm", [layer] * read_num_layers(reader), norm, bos=0, eos=0)


def _weights(config: ModelConfig) -> Params:
    shared = config.layers[0].residual == "parallel_shared"
    norms = {"attention_in": PRE_NORMS["attention_in"]} if shared else PRE_NORMS
    return decoder(config, functools.partial(decoder_layer, attention=_attention, norms=norms))


def _attention(name: str, spec: Attention, dim: int) -> AttentionParams:
    """Take attention whose query and key heads each have a norm of their own, stored apart."""
    attention = grouped_attention(name, spec, dim)
    if spec.qk_norm is None:
        return attention
    return dataclasses.replace(
        attention,
        q_norm=_norms(f"{name}.q_layernorm", spec, spec.num_q_heads, "(k g) h -> k g h"),
        k_norm=_norms(f"{name}.k_layernorm", spec, spec.num_kv_heads, "k h -> k h"),
    )


def _norms(name: str, spec: Attention, heads: int, pattern: str) -> NormParams:
    stored = [Tensor(f"{name}.norms.{i}.weight", (spec.head_dim,)) for i in range(heads)]

    def build(*weights: Shaped[AnyArray, " H"]) -> Shaped[AnyArray, "K *G H"]:
        stacked = namespace(weights[0]).stack(weights)
        return rearrange(stacked, pattern, k=spec.num_kv_heads)

    return NormParams(weight=source(stored, build))


FAMILY = Family(
    name="stablelm",
    model_types=("stablelm",),
    architectures=("StableLmForCausalLM",),
    config=_config,
    weights=_weights,
    gguf=STABLELM_GGUF,
)
