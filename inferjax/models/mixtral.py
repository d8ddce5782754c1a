"""Mixtral: Mistral's attention, and experts weighed by a softmax over the chosen ones."""

import functools

from inferjax.config import LayerSpec, ModelConfig, MoE
from inferjax.models.family import Family
from inferjax.models.hf import ConfigReader
from inferjax.models.llama_gguf import MIXTRAL_GGUF
from inferjax.models.settings import (
    expect_one_kind,
    read_attention,
    read_experts,
    read_mlp,
    read_model,
    read_norm,
    read_num_layers,
    read_window,
)
from inferjax.models.sources import decoder, decoder_layer, experts
from inferjax.params import MoEParams, Params


def _config(reader: ConfigReader) -> ModelConfig:
    num_layers, window = read_num_layers(reader), read_window(reader)
    expect_one_kind(reader, num_layers, window)
    norm = read_norm(reader, default=1e-5)
    moe = read_experts(
        reader,
        read_mlp(reader),
        count=("num_local_experts", "num_experts"),
        width="intermediate_size",
        router={"kind": "softmax_topk"},
    )
    layer = LayerSpec(
        attention=read_attention(reader, kv_heads=8, theta=1_000_000.0, window=window),
        ffn=moe,
        norm=norm,
    )
    return read_model(reader, "mixtral", [layer] * num_layers, norm, bos=1, eos=2)


def _weights(config: ModelConfig) -> Params:
    return decoder(config, functools.partial(decoder_layer, ffn=_experts))


def _experts(name: str, spec: MoE, dim: int) -> MoEParams:
    """Take the experts under the names of Mixtral's own: gate w1, up w3, down w2."""
    block = f"{name.removesuffix('.mlp')}.block_sparse_moe"
    return experts(block, spec, dim, parts=("w1", "w3", "w2"))


FAMILY = Family(
    name="mixtral",
    model_types=("mixtral",),
    architectures=("MixtralForCausalLM",),
    config=_config,
    weights=_weights,
    # Training: the router's loss, and noise on its input.
    ignored_keys=frozenset({"output_router_logits", "router_aux_loss_coef", "router_jitter_noise"}),
    gguf=MIXTRAL_GGUF,
)
