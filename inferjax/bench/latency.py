"""Prefill and decode speed of a model, each beside the limit that this machine sets.

The limit of a step is the longer of two times: reading what it must read at the measured bandwidth,
and multiplying what it must multiply at the measured matrix speed.
"""

import dataclasses
import statistics
import time
from typing import Any

import jax
import jax.numpy as jnp

from inferjax.bench import costs, limits
from inferjax.config import Exec, ModelConfig
from inferjax.errors import InvalidInput
from inferjax.kv.cache import KVCache, init_cache
from inferjax.models.quantized import packed_formats
from inferjax.params import Params
from inferjax.runtime.inputs import DecodeState, make_inputs
from inferjax.runtime.steps import decode, extend
from inferjax.sampling import make_sampling, make_state


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What to measure: decode at each batch, `context` tokens deep; prefill of each length.

    `steps` tokens are decoded per dispatch; a figure is the median of `repeats` runs.
    """

    batches: tuple[int, ...] = (1, 8, 32)
    context: int = 128
    prefills: tuple[int, ...] = (512,)
    steps: int = 16
    repeats: int = 5


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One measurement; `limit_tok_s` is what memory and matrix speed allow, `bound` the tighter."""

    kind: str
    batch: int
    context: int
    tok_s: float
    slowest_tok_s: float
    fastest_tok_s: float
    gbps: float
    gflops: float
    limit_tok_s: float
    limit_share: float
    bound: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What a timed call does at least."""

    num_tokens: int
    num_bytes: float
    flops: float


def measure(params: Params, config: ModelConfig, *, plan: Plan, exec: Exec) -> dict[str, Any]:
    """Run the plan and return plain values: the two limits, and one row per measurement.

    Raises: InvalidInput for a plan that does not fit the model.
    """
    _check(plan, config)
    dtype = str(params.embed.dtype)
    bandwidth = limits.measure_bandwidth_gbps()
    matmul = limits.measure_matmul_gflops(dtype=dtype)
    rows = [_prefill_row(params, config, n, plan, exec, bandwidth, matmul) for n in plan.prefills]
    rows += [_decode_row(params, config, b, plan, exec, bandwidth, matmul) for b in plan.batches]
    return {
        "dtype": dtype,
        "packed": packed_formats(params),
        "exact": exec.exact,
        "plan": dataclasses.asdict(plan),
        "limits": {"bandwidth_gbps": bandwidth, "matmul_gflops": matmul},
        "rows": [dataclasses.asdict(row) for row in rows],
    }


def table(result: dict[str, Any]) -> str:
    """Return a result of `measure` for people."""
    found = result["limits"]
    lines = [
        f"{_kinds(result)}; limits measured now: {found['bandwidth_gbps']:.1f} GB/s of "
        f"memory, {found['matmul_gflops']:.0f} GFLOP/s of matrix products",
        "",
        "          batch  context  tokens/s     range            GB/s  GFLOP/s  limit  reached",
    ]
    for row in result["rows"]:
        spread = f"{row['slowest_tok_s']:.1f}-{row['fastest_tok_s']:.1f}"
        lines.append(
            f"{row['kind']:8}{row['batch']:7}{row['context']:9}{row['tok_s']:10.1f}     "
            f"{spread:15}{row['gbps']:6.1f}{row['gflops']:9.1f}{row['limit_tok_s']:7.0f}  "
            f"{row['limit_share']:.0%} of {row['bound']}"
        )
    return "\n".join(lines)


def _kinds(result: dict[str, Any]) -> str:
    """Say what weights are stored as."""
    packed = result["packed"]
    return f"weights packed as {', '.join(packed)}" if packed else f"{result['dtype']} weights"


def _check(plan: Plan, config: ModelConfig) -> None:
    sizes = (*plan.batches, *plan.prefills, plan.context, plan.steps, plan.repeats)
    longest = max(plan.context + plan.steps, *plan.prefills)
    if min(sizes) < 1:
        raise InvalidInput(
            f"a size of the benchmark is {min(sizes)}",
            why="batches, context, prompt lengths, steps and repeats count from 1",
            fix="give positive numbers",
        )
    if longest > config.max_context:
        raise InvalidInput(
            f"the benchmark needs {longest} tokens of context",
            why=f"the model's context is {config.max_context} tokens",
            fix="choose a smaller context, fewer steps or a shorter prompt",
        )


def _prefill_row(
    params: Params,
    config: ModelConfig,
    length: int,
    plan: Plan,
    exec: Exec,
    bandwidth: float,
    matmul: float,
) -> Row:
    cache, pages = zero_cache(params, config, batch=1, length=length, exec=exec)
    chunks = [
        make_inputs(
            (jnp.arange(start, min(start + exec.prefill_chunk, length)) % config.vocab_size)[None],
            starts=start,
            block_tables=pages,
        )
        for start in range(0, length, exec.prefill_chunk)
    ]

    def run(cache: KVCache) -> tuple[float, KVCache]:
        start = time.perf_counter()
        for inputs in chunks:
            output, cache = extend(params, config, cache, inputs, exec=exec)
            jax.block_until_ready(output.values)
        return time.perf_counter() - start, cache

    inner = costs.matmul_flops_per_token(config) - costs.head_flops(config)
    work = Work(
        num_tokens=length,
        num_bytes=len(chunks) * costs.weight_bytes_per_step(params, config, batch=length),
        flops=length * inner + len(chunks) * costs.head_flops(config),
    )
    seconds, cache = _repeat(run, cache, plan.repeats)
    return _row("prefill", 1, length, seconds, work, bandwidth, matmul)


def _decode_row(
    params: Params,
    config: ModelConfig,
    batch: int,
    plan: Plan,
    exec: Exec,
    bandwidth: float,
    matmul: float,
) -> Row:
    length = plan.context + plan.steps
    cache, pages = zero_cache(params, config, batch=batch, length=length, exec=exec)

    def run(cache: KVCache) -> tuple[float, KVCache]:
        state = jax.block_until_ready(greedy_state(batch, plan.context, pages))
        start = time.perf_counter()
        output, _, cache = decode(params, config, cache, state, steps=plan.steps, exec=exec)
        jax.block_until_ready(output.values)
        return time.perf_counter() - start, cache

    kv_bytes = costs.kv_bytes_per_step(cache, config, plan.context + plan.steps // 2)
    step_bytes = costs.weight_bytes_per_step(params, config, batch=batch) + batch * kv_bytes
    work = Work(
        num_tokens=batch * plan.steps,
        num_bytes=plan.steps * step_bytes,
        flops=plan.steps * batch * costs.matmul_flops_per_token(config),
    )
    seconds, cache = _repeat(run, cache, plan.repeats)
    return _row("decode", batch, plan.context, seconds, work, bandwidth, matmul)


def zero_cache(
    params: Params, config: ModelConfig, *, batch: int, length: int, exec: Exec
) -> tuple[KVCache, tuple[jax.Array, ...]]:
    """Allocate a cache of zeros; speed does not depend on the values in it."""
    per_row = -(-length // exec.page_size)
    dtype = exec.kv_dtype or str(params.embed.dtype)
    cache = init_cache(config, num_pages=1 + batch * per_row, exec=exec, dtype=dtype)
    table = 1 + jnp.arange(batch * per_row, dtype=jnp.int32).reshape(batch, per_row)
    return cache, (table,) * len(cache.groups)


def greedy_state(batch: int, context: int, pages: tuple[jax.Array, ...]) -> DecodeState:
    """Greedy rows that never end, about to draw the token after `context` cached ones."""
    return DecodeState(
        tokens=jnp.ones((batch,), jnp.int32),
        done=jnp.zeros((batch,), jnp.bool_),
        sample=make_state(jax.random.split(jax.random.key(0), batch), context + 1),
        sampling=make_sampling(batch, temperature=0.0, ignore_eos=True),
        block_tables=pages,
    )


def _repeat(run: Any, cache: KVCache, repeats: int) -> tuple[list[float], KVCache]:
    """Time `run` after one call that compiles; the cache is handed from call to call."""
    _, cache = run(cache)
    seconds = []
    for _ in range(repeats):
        spent, cache = run(cache)
        seconds.append(spent)
    return seconds, cache


def _row(
    kind: str,
    batch: int,
    context: int,
    seconds: list[float],
    work: Work,
    bandwidth: float,
    matmul: float,
) -> Row:
    median = statistics.median(seconds)
    memory_s, compute_s = work.num_bytes / bandwidth / 1e9, work.flops / matmul / 1e9
    limit_s = max(memory_s, compute_s)
    return Row(
        kind=kind,
        batch=batch,
        context=context,
        tok_s=work.num_tokens / median,
        slowest_tok_s=work.num_tokens / max(seconds),
        fastest_tok_s=work.num_tokens / min(seconds),
        gbps=work.num_bytes / median / 1e9,
        gflops=work.flops / median / 1e9,
        limit_tok_s=work.num_tokens / limit_s,
        limit_share=limit_s / median,
        bound="memory" if memory_s >= compute_s else "compute",
    )
