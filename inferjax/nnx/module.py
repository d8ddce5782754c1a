"""A reference decoder in flax.nnx: plain, trainable, in the names that checkpoints use.

It computes as a training code would, on whole sequences and without a cache. `from_nnx` hands its
weights to the engine's functions; the two agree to rounding.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from inferjax.config import MLP, Attention, LayerSpec, ModelConfig, Norm
from inferjax.errors import UnsupportedModel
from inferjax.layers.mlp import ACTIVATIONS
from inferjax.layers.rope import rotate, rotation


class Decoder(nnx.Module):
    """A decoder of the Llama kind with random weights, made from a `ModelConfig`.

    It has grouped attention with rope (windows, biases and norms of queries and keys included) and
    a gated block, each behind an RMSNorm: what Llama, Mistral, Qwen 2 and 3 and SmolLM 2 are.

    Raises: UnsupportedModel for a config that calls for anything else.
    """

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs, dtype: Any = jnp.float32) -> None:
        _check(config)
        self.config = config
        self.model = _Body(config, rngs, dtype)
        self.lm_head = (
            None
            if config.tied
            else nnx.Linear(
                config.model_dim, config.vocab_size, use_bias=False, param_dtype=dtype, rngs=rngs
            )
        )

    def __call__(self, tokens: Int[Array, "B S"]) -> Float[Array, "B S V"]:
        """Return the logits of the next token at every position."""
        hidden = self.model(tokens)
        head = self.model.embed_tokens.attend if self.lm_head is None else self.lm_head
        return head(hidden).astype(jnp.float32)


class _Body(nnx.Module):
    def __init__(self, config: ModelConfig, rngs: nnx.Rngs, dtype: Any) -> None:
        self.embed_tokens = nnx.Embed(
            config.vocab_size, config.model_dim, param_dtype=dtype, rngs=rngs
        )
        self.layers = nnx.List(
            [_Layer(spec, config.model_dim, rngs, dtype) for spec in config.layers]
        )
        self.norm = _norm(config.final_norm, config.model_dim, rngs)

    def __call__(self, tokens: Int[Array, "B S"]) -> Float[Array, "B S D"]:
        x = self.embed_tokens(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)


class _Layer(nnx.Module):
    def __init__(self, spec: LayerSpec, dim: int, rngs: nnx.Rngs, dtype: Any) -> None:
        self.input_layernorm = _norm(spec.norm, dim, rngs)
        self.self_attn = _Attention(spec.attention, dim, rngs, dtype)
        self.post_attention_layernorm = _norm(spec.norm, dim, rngs)
        self.mlp = _Gated(spec.ffn, dim, rngs, dtype)

    def __call__(self, x: Float[Array, "B S D"]) -> Float[Array, "B S D"]:
        x = x + self.self_attn(self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))


class _Attention(nnx.Module):
    def __init__(self, spec: Any, dim: int, rngs: nnx.Rngs, dtype: Any) -> None:
        self.spec: Attention = spec
        wide, narrow = spec.num_q_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim

        def linear(dim_in: int, dim_out: int, biased: bool) -> nnx.Linear:
            return nnx.Linear(dim_in, dim_out, use_bias=biased, param_dtype=dtype, rngs=rngs)

        self.q_proj = linear(dim, wide, spec.qkv_bias)
        self.k_proj = linear(dim, narrow, spec.qkv_bias)
        self.v_proj = linear(dim, narrow, spec.qkv_bias)
        self.o_proj = linear(wide, dim, spec.out_bias)
        self.q_norm = None if spec.qk_norm is None else _norm(spec.qk_norm, spec.head_dim, rngs)
        self.k_norm = None if spec.qk_norm is None else _norm(spec.qk_norm, spec.head_dim, rngs)

    def __call__(self, x: Float[Array, "B S D"]) -> Float[Array, "B S D"]:
        spec = self.spec
        batch, length, _ = x.shape
        q = self.q_proj(x).reshape(batch, length, spec.num_q_heads, spec.head_dim)
        k = self.k_proj(x).reshape(batch, length, spec.num_kv_heads, spec.head_dim)
        v = self.v_proj(x).reshape(batch, length, spec.num_kv_heads, spec.head_dim)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if spec.rope is not None:
            positions = jnp.tile(jnp.arange(length)[None], (batch, 1))
            turn = rotation(positions, spec.rope)
            q, k = rotate(q, turn), rotate(k, turn)
        out = jax.nn.dot_product_attention(
            q, k, v, mask=_visible(length, spec.window)[None, None], scale=spec.scale
        )
        return self.o_proj(out.reshape(batch, length, -1))


class _Gated(nnx.Module):
    def __init__(self, spec: Any, dim: int, rngs: nnx.Rngs, dtype: Any) -> None:
        self.spec: MLP = spec

        def linear(dim_in: int, dim_out: int) -> nnx.Linear:
            return nnx.Linear(dim_in, dim_out, use_bias=spec.bias, param_dtype=dtype, rngs=rngs)

        self.gate_proj = linear(dim, spec.ffn_dim)
        self.up_proj = linear(dim, spec.ffn_dim)
        self.down_proj = linear(spec.ffn_dim, dim)

    def __call__(self, x: Float[Array, "B S D"]) -> Float[Array, "B S D"]:
        gate = ACTIVATIONS[self.spec.activation](self.gate_proj(x))
        return self.down_proj(gate * self.up_proj(x))


def _visible(length: int, window: int | None) -> Bool[Array, "S S"]:
    """Let a token see itself and, within the window, those before it."""
    distance = jnp.arange(length)[:, None] - jnp.arange(length)[None]
    near = distance >= 0
    return near if window is None else near & (distance < window)


# The facts that the module computes with, or that have no part in a forward pass.
_COMPUTED: dict[type, frozenset[str]] = {
    ModelConfig: frozenset(
        [
            "family",
            "vocab_size",
            "model_dim",
            "max_context",
            "layers",
            "final_norm",
            "tied",
            "dtype",
            "bos_id",
            "eos_ids",
            "pad_id",
        ]
    ),
    LayerSpec: frozenset({"attention", "ffn", "norm", "group"}),
    Attention: frozenset(
        [
            "num_q_heads",
            "num_kv_heads",
            "head_dim",
            "scale",
            "rope",
            "window",
            "qkv_bias",
            "out_bias",
            "qk_norm",
        ]
    ),
    MLP: frozenset({"ffn_dim", "activation", "bias"}),
    Norm: frozenset({"eps"}),
}


def _check(config: ModelConfig) -> None:
    """Refuse every fact of the config that differs from its default and is not computed here."""
    blocks = [part for spec in config.layers for part in (spec, spec.attention, spec.ffn)]
    norms = [config.final_norm] + [spec.norm for spec in config.layers]
    norms += [getattr(spec.attention, "qk_norm", None) for spec in config.layers]
    for part in (config, *blocks, *(norm for norm in norms if norm is not None)):
        computed = _COMPUTED.get(type(part), frozenset())
        for field in dataclasses.fields(part):
            value = getattr(part, field.name)
            if field.name not in computed and value != field.default:
                raise UnsupportedModel(
                    f"the reference module computes no {type(part).__name__}.{field.name}={value}",
                    why="it has RMSNorm before each block, grouped attention and a gated block",
                    fix="write a module with the checkpoint's parameter names: from_nnx takes any",
                )


def _norm(spec: Norm | None, dim: int, rngs: nnx.Rngs) -> nnx.RMSNorm:
    return nnx.RMSNorm(dim, epsilon=1e-6 if spec is None else spec.eps, rngs=rngs)
