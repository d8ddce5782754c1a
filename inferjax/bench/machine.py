"""Measures this machine as a chip that plans can be made for.

Three things are measured, none of them the model itself: products with weights of its shapes and
format, read from memory; attention; and what a step costs beside both. For the last two a model
with the same layers, heads and vocabulary decodes whose other widths are next to nothing.
"""

import dataclasses
import math
import os
import statistics
import time
from typing import Any

import jax
import jax.numpy as jnp

from inferjax.bench import limits
from inferjax.bench.latency import greedy_state, zero_cache
from inferjax.config import Exec, LatentAttention, LayerSpec, ModelConfig, MoE
from inferjax.models.params import ArraySpec, param_spec
from inferjax.models.quantized import PackedForm, abstract_leaf
from inferjax.planner import Chip, Model, measured_chip
from inferjax.planner.cache import read_bytes
from inferjax.planner.hardware import Measured
from inferjax.planner.leaves import Leaf, is_product, loaded_leaves
from inferjax.planner.model import largest_leaf
from inferjax.quant.linear import linear
from inferjax.runtime.steps import decode

# Enough weights that none is left in a cache when it is read again.
_MOST_BYTES = 512 << 20
_SMALL_WIDTH = 64
_STEPS = 16
_CONTEXTS = (64, 1024)
# How a head reads an embedding.
_BY_ROWS = "BD,VD->BV"


def measure_chip(
    model: Model,
    *,
    rows: tuple[int, ...] = (1, 32),
    exec: Exec = Exec(),
    repeats: int = 5,
    watts: float | None = None,
) -> Chip:
    """Measure this machine at steps of some numbers of rows; nothing else should run.

    The cache has the dtype of the model's.
    """
    exec = dataclasses.replace(exec, kv_dtype=model.kv_dtype)
    dtype = "float32" if model.activation_bytes == 4 else "bfloat16"
    bandwidth = limits.measure_bandwidth_gbps() * 1e9
    flops = limits.measure_matmul_gflops(dtype=dtype) * 1e9
    steps = [_measure_rows(model, n, exec, repeats, bandwidth) for n in rows]
    return measured_chip(
        memory_bytes=memory_bytes(),
        bandwidth=bandwidth,
        flops=flops,
        measured=tuple(steps),
        watts=watts,
    )


def memory_bytes() -> int:
    """Return the memory of the device, or of the machine for a CPU."""
    facts = jax.devices()[0].memory_stats() or {}
    if "bytes_limit" in facts:
        return facts["bytes_limit"]
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _measure_rows(model: Model, rows: int, exec: Exec, repeats: int, bandwidth: float) -> Measured:
    product_bytes_s = measure_products(model, rows, repeats=repeats)
    small, params = small_model(model)
    longest = min(_CONTEXTS[1], small.max_context - _STEPS)
    short = min(_CONTEXTS[0], longest)
    short_s = _decode_s(params, small, rows, short, exec, repeats)
    long_s = _decode_s(params, small, rows, longest, exec, repeats)
    dtype = model.kv_dtype
    more = rows * (read_bytes(small, longest, dtype) - read_bytes(small, short, dtype))
    kv_bytes_s = more / (long_s - short_s) if more and long_s > short_s else bandwidth
    small_bytes = sum(leaf.num_bytes for leaf in loaded_leaves(small, params))
    known_s = small_bytes / product_bytes_s + rows * read_bytes(small, short, dtype) / kv_bytes_s
    return Measured(
        rows=rows,
        product_bytes_s=product_bytes_s,
        kv_bytes_s=kv_bytes_s,
        step_s=max(0.0, short_s - known_s),
    )


def measure_products(
    model: Model, rows: int, *, most_bytes: int = _MOST_BYTES, repeats: int = 5
) -> float:
    """Return the bytes a second of weights in products with `rows` rows, one after the other.

    There are as many weights as the model has, in its shapes and format, or the same share of each
    kind where they are more than `most_bytes`.
    """
    products = [leaf for leaf in model.leaves if is_product(leaf, model.config)]
    share = min(1.0, most_bytes / sum(leaf.num_bytes for leaf in products))
    chosen = [leaf for leaf in products for _ in range(_some(leaf.count, share))]
    weights = [_zero_matrix(leaf) for leaf in chosen]
    specs = [_BY_ROWS if leaf.spec.num_in_axes < 0 else "BD,DF->BF" for leaf in chosen]
    dtype = jnp.dtype("float32" if model.activation_bytes == 4 else "bfloat16")

    @jax.jit
    def run(weights: list[Any]) -> jax.Array:
        carry = jnp.zeros((rows, 1), dtype)
        for weight, spec in zip(weights, specs, strict=True):
            x = jnp.broadcast_to(carry, (rows, weight.shape[1 if spec == _BY_ROWS else 0]))
            carry = linear(x, weight, spec)[:, :1]
        return carry

    size = sum(weight.nbytes for weight in weights)
    return size / limits.median_seconds(lambda: run(weights), repeats)


def _some(count: int, share: float) -> int:
    return max(1, round(count * share))


def _zero_matrix(leaf: Leaf) -> Any:
    """Return one weight as the matrix, or as the first of the stack, that products read."""
    spec = leaf.spec
    if spec.num_in_axes < 0:
        flat = ArraySpec((math.prod(spec.shape[:-1]), spec.shape[-1]), (None, None), num_in_axes=-1)
        return _zeros(flat, leaf.form, leaf.dtype)
    first = spec.num_batch_axes
    inner = first + max(1, spec.num_in_axes)
    shape = (math.prod(spec.shape[first:inner]), math.prod(spec.shape[inner:]))
    return _zeros(ArraySpec(shape, (None, None), num_in_axes=1), leaf.form, leaf.dtype)


def small_model(model: Model) -> tuple[ModelConfig, Any]:
    """Return a model of the same layers, heads and vocabulary with narrow weights, all of them 0.

    They are stored as the model's are.
    """
    config = dataclasses.replace(
        model.config,
        model_dim=_SMALL_WIDTH,
        embed_dim=None if model.config.embed_dim is None else _SMALL_WIDTH,
        layers=tuple(_narrow(spec) for spec in model.config.layers),
    )
    form = largest_leaf(model).form
    dtype = next(leaf.dtype for leaf in model.leaves if leaf.form is None)
    return config, jax.tree.map(
        lambda spec: _zeros(spec, form if spec.num_in_axes else None, spec.dtype or dtype),
        param_spec(config),
        is_leaf=lambda node: isinstance(node, ArraySpec),
    )


def _narrow(spec: LayerSpec) -> LayerSpec:
    attention, ffn = spec.attention, dataclasses.replace(spec.ffn, ffn_dim=_SMALL_WIDTH)
    if isinstance(attention, LatentAttention) and attention.q_rank is not None:
        attention = dataclasses.replace(attention, q_rank=_SMALL_WIDTH)
    if isinstance(ffn, MoE) and ffn.shared is not None:
        shared = dataclasses.replace(ffn.shared, ffn_dim=_SMALL_WIDTH)
        ffn = dataclasses.replace(ffn, shared=shared)
    return dataclasses.replace(spec, attention=attention, ffn=ffn)


def _zeros(spec: ArraySpec, form: PackedForm | None, dtype: str) -> Any:
    if form is None:
        return jnp.zeros(spec.shape, dtype)
    empty = abstract_leaf(spec, form)
    return jax.tree.map(lambda array: jnp.zeros(array.shape, array.dtype), empty)


def _decode_s(
    params: Any, config: ModelConfig, rows: int, context: int, exec: Exec, repeats: int
) -> float:
    """Return the median seconds of a step."""
    cache, pages = zero_cache(params, config, batch=rows, length=context + _STEPS, exec=exec)
    state = greedy_state(rows, context, pages)
    seconds = []
    for _ in range(1 + repeats):
        start = time.perf_counter()
        output, _, cache = decode(params, config, cache, state, steps=_STEPS, exec=exec)
        jax.block_until_ready(output.values)
        seconds.append((time.perf_counter() - start) / _STEPS)
    return statistics.median(seconds[1:])
