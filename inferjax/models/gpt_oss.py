"""gpt-oss: attention sinks, alternating windows, and experts with a clamped SwiGLU."""

import functools

from inferjax.config import Attention, LayerSpec, ModelConfig, MoE, Norm, Router, assign_groups
from inferjax.models.family import Family
from inferjax.models.gpt_oss_gguf import GPT_OSS_GGUF
from inferjax.models.hf import (
    MAX_CONTEXT,
    MAX_EXPERTS,
    MAX_LAYERS,
    ConfigReader,
    read_context,
    read_dtype,
    read_heads,
    read_layer_types,
    read_token_ids,
)
from inferjax.models.rope_config import read_rope
from inferjax.models.sources import decoder, decoder_layer, linear, plain, reshaped
from inferjax.params import MoEParams, Params

_DEFAULT_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
    "rope_theta": 150_000.0,
}


def _config(reader: ConfigReader) -> ModelConfig:
    dim, vocab = reader.integer("hidden_size"), reader.integer("vocab_size")
    num_layers = reader.integer("num_hidden_layers", high=MAX_LAYERS)
    heads, kv_heads, head_dim = read_heads(reader, dim)
    rope = read_rope(
        reader, dim=head_dim, declared=read_context(reader), theta=150_000.0, default=_DEFAULT_ROPE
    )
    unlimited = reader.given("sliding_window", 128) is None
    window = None if unlimited else reader.integer("sliding_window", 128, high=MAX_CONTEXT)
    biased = reader.flag("attention_bias", True)
    rms = Norm(eps=reader.number("rms_norm_eps", 1e-5, high=1.0))
    moe = _read_experts(reader)

    def layer(slides: bool) -> LayerSpec:
        attention = Attention(
            num_q_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            scale=head_dim**-0.5,
            rope=rope,
            window=window if slides else None,
            sinks=True,
            qkv_bias=biased,
            out_bias=biased,
        )
        return LayerSpec(attention=attention, ffn=moe, norm=rms)

    return ModelConfig(
        family="gpt_oss",
        vocab_size=vocab,
        model_dim=dim,
        max_context=rope.max_context,
        layers=assign_groups(tuple(map(layer, read_layer_types(reader, num_layers, 2)))),
        final_norm=rms,
        tied=reader.flag("tie_word_embeddings", False),
        dtype=read_dtype(reader),
        **read_token_ids(reader, vocab),
    )


def _read_experts(reader: ConfigReader) -> MoE:
    num_experts = reader.integer("num_local_experts", high=MAX_EXPERTS)
    reader.expect("num_experts", num_experts)
    per_token = reader.integer("num_experts_per_tok", high=num_experts)
    reader.expect("experts_per_token", per_token)
    # The activation is the clamped SwiGLU whatever the key says; "silu" is what every release has.
    reader.expect("hidden_act", "silu")
    return MoE(
        router=Router(
            kind="softmax_topk", num_experts=num_experts, experts_per_token=per_token, bias=True
        ),
        ffn_dim=reader.integer("intermediate_size"),
        bias=True,
        clamp=reader.positive("swiglu_limit", 7.0),
        alpha=reader.positive("swiglu_alpha", 1.702),
    )


def _weights(config: ModelConfig) -> Params:
    return decoder(config, functools.partial(decoder_layer, ffn=_experts))


def _experts(name: str, spec: MoE, dim: int) -> MoEParams:
    """Take experts that are stored stacked, gate and up alternating along the last axis."""
    count, ffn = spec.router.num_experts, spec.ffn_dim
    experts = f"{name}.experts"
    return MoEParams(
        router=linear(f"{name}.router.weight", count, dim),
        router_bias=plain(f"{name}.router.bias", count),
        w_in=reshaped(
            f"{experts}.gate_up_proj", (count, dim, 2 * ffn), "e d (f p) -> e d p f", p=2
        ),
        b_in=reshaped(f"{experts}.gate_up_proj_bias", (count, 2 * ffn), "e (f p) -> e p f", p=2),
        w_down=plain(f"{experts}.down_proj", count, ffn, dim),
        b_down=plain(f"{experts}.down_proj_bias", count, dim),
    )


FAMILY = Family(
    name="gpt_oss",
    model_types=("gpt_oss",),
    architectures=("GptOssForCausalLM",),
    config=_config,
    weights=_weights,
    # Training losses of the router; the context of the original release, stated again in the rope.
    ignored_keys=frozenset(
        {"router_aux_loss_coef", "output_router_logits", "initial_context_length"}
    ),
    gguf=GPT_OSS_GGUF,
)
