"""What a config amounts to, in numbers and words that people ask for."""

import dataclasses
import math
from collections import Counter
from collections.abc import Iterator

import jax

from inferjax.config import MLP, LatentAttention, LayerSpec, ModelConfig, MoE
from inferjax.kv.cache import token_bytes
from inferjax.models.hf import DTYPES
from inferjax.models.params import abstract_params, num_parameters


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LayerKind:
    """Layers that are alike: `attention` is full, sliding or latent; widths are of one head.

    `num_kv_heads` and `head_dim` of latent attention are those of the latent that is cached.
    """

    num_layers: int
    attention: str
    num_heads: int
    num_kv_heads: int
    head_dim: int
    window: int | None
    ffn_dim: int
    num_experts: int = 0
    experts_per_token: int = 0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """A model by its config.

    `weight_bytes` is the memory of the weights by their dtype. `num_active_parameters` leaves out
    the experts that a token does not visit. `pooling` is None for what is no embedding model.
    """

    architecture: str
    num_parameters: int
    num_active_parameters: int
    context: int
    num_layers: int
    model_dim: int
    vocab_size: int
    dtype: str
    tied: bool
    head: str
    labels: tuple[str, ...]
    pooling: str | None
    weight_bytes: dict[str, int]
    cache_bytes_per_token: int
    layers: tuple[LayerKind, ...]
    features: tuple[str, ...]


def model_facts(config: ModelConfig) -> ModelFacts:
    """Return what a config amounts to."""
    count = num_parameters(config)
    pooling = config.pooling
    return ModelFacts(
        architecture=config.family,
        num_parameters=count,
        num_active_parameters=count - sum(map(_idle_parameters, _with_dim(config))),
        context=config.max_context,
        num_layers=config.num_layers,
        model_dim=config.model_dim,
        vocab_size=config.vocab_size,
        dtype=config.dtype,
        tied=config.tied,
        head=config.head,
        labels=config.labels,
        pooling=pooling and pooling.kind + (", normalized" if pooling.normalize else ""),
        weight_bytes={dtype: _weight_bytes(config, dtype) for dtype in DTYPES},
        cache_bytes_per_token=token_bytes(config, config.dtype),
        layers=_layer_kinds(config),
        features=tuple(dict.fromkeys(_features(config))),
    )


def _with_dim(config: ModelConfig) -> list[tuple[LayerSpec, int]]:
    return [(spec, config.model_dim) for spec in config.layers]


def _idle_parameters(layer: tuple[LayerSpec, int]) -> int:
    """Count the weights of the experts that one token does not visit."""
    spec, dim = layer
    if isinstance(spec.ffn, MLP):
        return 0
    router, ffn = spec.ffn.router, spec.ffn.ffn_dim
    one = 3 * dim * ffn + (2 * ffn + dim if spec.ffn.bias else 0)
    return (router.num_experts - router.experts_per_token) * one


def _weight_bytes(config: ModelConfig, dtype: str) -> int:
    leaves = jax.tree.leaves(abstract_params(config, dtype))
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in leaves)


def _layer_kinds(config: ModelConfig) -> tuple[LayerKind, ...]:
    kinds = Counter(map(_layer_kind, config.layers))
    return tuple(dataclasses.replace(kind, num_layers=n) for kind, n in kinds.items())


def _layer_kind(spec: LayerSpec) -> LayerKind:
    a, moe = spec.attention, spec.ffn if isinstance(spec.ffn, MoE) else None
    latent = isinstance(a, LatentAttention)
    window = None if latent else a.window
    return LayerKind(
        num_layers=1,
        attention="latent" if latent else "sliding" if window else "full",
        num_heads=a.num_q_heads,
        num_kv_heads=1 if latent else a.num_kv_heads,
        head_dim=a.kv_rank + a.rope_dim if latent else a.head_dim,
        window=window,
        ffn_dim=spec.ffn.ffn_dim,
        num_experts=moe.router.num_experts if moe else 0,
        experts_per_token=moe.router.experts_per_token if moe else 0,
    )


def _features(config: ModelConfig) -> Iterator[str]:
    """Name what sets the model apart from a plain decoder."""
    if config.learned_positions:
        yield "learned positions"
    if config.final_softcap:
        yield "capped logits"
    for spec in config.layers:
        a = spec.attention
        if a.rope is not None:
            yield "rope" if a.rope.scaling == "none" else f"{a.rope.scaling} rope"
        elif not config.learned_positions:
            yield "layers without positions"
        if not isinstance(a, LatentAttention):
            parts = {
                "attention sinks": a.sinks,
                "capped attention": a.softcap is not None,
                "normalized queries and keys": a.qk_norm is not None,
                "biased queries, keys and values": a.qkv_bias,
            }
            yield from (name for name, given in parts.items() if given)
        if isinstance(spec.ffn, MoE) and spec.ffn.shared is not None:
            yield "shared expert"
        if spec.residual != "serial":
            yield "parallel blocks"
