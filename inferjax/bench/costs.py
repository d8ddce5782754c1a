"""What one step of a model costs at least: weight bytes read and floating-point operations."""

import math

import jax

from inferjax.config import ModelConfig, MoE, cache_groups
from inferjax.kv.cache import KVCache, dtype_of, group_bytes
from inferjax.models.params import num_parameters
from inferjax.params import MoEParams, Params
from inferjax.quant.leaf import size_of


def weight_bytes_per_step(params: Params, config: ModelConfig, *, batch: int) -> int:
    """Return the bytes of weights that a decode step of `batch` sequences reads.

    An embedding that is not also the head is read only at the tokens' rows, and so are learned
    positions. Of a mixture of experts, those that `batch` tokens choose are read, as many as
    uniform choices hit on average.
    """
    total = _num_bytes(params)
    for table in (None if params.head is None else params.embed, params.positions):
        if table is not None:
            unread = table.shape[0] - min(batch, table.shape[0])
            total -= size_of(table) * unread // table.shape[0]
    for spec, layer in zip(config.layers, params.layers, strict=True):
        if isinstance(spec.ffn, MoE) and isinstance(layer.ffn, MoEParams):
            total -= round(_expert_bytes(layer.ffn) * (1 - _experts_hit(spec.ffn, batch)))
    return total


def kv_bytes_per_step(cache: KVCache, config: ModelConfig, context: int) -> int:
    """Return the bytes of keys and values that one sequence's next token attends to."""
    total = 0
    for group in cache_groups(config):
        seen = context if group.window is None else min(context, group.window)
        total += group_bytes(group, seen, dtype_of(cache))
    return total


def matmul_flops_per_token(config: ModelConfig) -> int:
    """Return the operations of one token's matrix products, attention scores left out."""
    used = num_parameters(config)
    if not config.tied:
        used -= config.vocab_size * config.model_dim
    used -= (config.learned_positions or 0) * config.model_dim
    for spec in config.layers:
        if isinstance(spec.ffn, MoE):
            router = spec.ffn.router
            idle = router.num_experts - router.experts_per_token
            used -= idle * 3 * config.model_dim * spec.ffn.ffn_dim
    return 2 * used


def head_flops(config: ModelConfig) -> int:
    """Return the operations of one token's logits."""
    return 2 * config.vocab_size * config.model_dim


def _num_bytes(tree: object) -> int:
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(tree))


def _expert_bytes(ffn: MoEParams) -> int:
    return _num_bytes((ffn.w_in, ffn.w_down, ffn.b_in, ffn.b_down))


def _experts_hit(moe: MoE, batch: int) -> float:
    share = moe.router.experts_per_token / moe.router.num_experts
    return 1 - (1 - share) ** batch
