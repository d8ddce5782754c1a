"""The least time of a step of many sequences: what must be read, and what must be multiplied."""

import dataclasses
from typing import Literal

import jax

from inferjax.bench import costs, limits
from inferjax.config import Exec, ModelConfig
from inferjax.kv.cache import KVCache, init_cache
from inferjax.params import Params


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What was measured: GB/s of streaming, GFLOP/s of matrix products."""

    bandwidth_gbps: float
    matmul_gflops: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A step that decodes `batch` sequences of `context` tokens, one token each.

    `prefill` is how many prompt tokens are computed per decoded token: a server that decodes for
    ever must also prefill for ever.
    """

    batch: float
    context: float
    prefill: float = 0.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """The least time of a step, and which of the two sets it."""

    seconds: float
    bound: Literal["memory", "compute"]


class Roofline:
    """Limits of one model on one machine; weights are read once a step, everything overlaps."""

    def __init__(
        self, params: Params, config: ModelConfig, machine: Machine, exec: Exec = Exec()
    ) -> None:
        self._params, self._config, self.machine = params, config, machine
        dtype = exec.kv_dtype or str(params.embed.dtype)
        self._cache: KVCache = jax.eval_shape(
            lambda: init_cache(config, num_pages=2, exec=exec, dtype=dtype)
        )

    def limit(self, step: Step) -> Limit:
        """Return the longer of the times that memory and matrix products take."""
        config, rows = self._config, max(1, round(step.batch))
        weights = costs.weight_bytes_per_step(self._params, config, batch=rows)
        kv_bytes = costs.kv_bytes_per_step(self._cache, config, round(step.context))
        memory_s = (weights + step.batch * kv_bytes) / self.machine.bandwidth_gbps / 1e9
        per_token = costs.matmul_flops_per_token(config)
        # A prompt needs the logits of its last token only.
        flops = per_token + step.prefill * (per_token - costs.head_flops(config))
        compute_s = step.batch * flops / self.machine.matmul_gflops / 1e9
        bound = "memory" if memory_s >= compute_s else "compute"
        return Limit(seconds=max(memory_s, compute_s), bound=bound)


def measure_machine(dtype: str) -> Machine:
    """Measure both limits now; nothing else should run."""
    return Machine(
        bandwidth_gbps=limits.measure_bandwidth_gbps(),
        matmul_gflops=limits.measure_matmul_gflops(dtype=dtype),
    )
