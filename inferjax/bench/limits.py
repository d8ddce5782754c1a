"""What the device can do at best: streaming bandwidth and matrix products, measured in this run."""

import statistics
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp

# An array must be far larger than the caches, and take long enough for the clock.
STREAM_BYTES = {"cpu": 256 << 20}
STREAM_BYTES_ACCELERATOR = 4 << 30
MATMUL_SIZE = {"cpu": 1024}
MATMUL_SIZE_ACCELERATOR = 8192


def measure_bandwidth_gbps(num_bytes: int | None = None, *, repeats: int = 9) -> float:
    """Return the median speed of reading a large float32 array once, in GB/s (1e9 bytes).

    Row maxima are the cheapest reduction that XLA splits over all cores; on two CPU cores it reads
    as fast as an OpenMP loop in C (within 3 %).
    """
    if num_bytes is None:
        num_bytes = STREAM_BYTES.get(jax.default_backend(), STREAM_BYTES_ACCELERATOR)
    rows = jnp.zeros((16, num_bytes // 64), jnp.float32)
    read = jax.jit(lambda x: jnp.max(x, axis=1))
    return rows.nbytes / median_seconds(lambda: read(rows), repeats) / 1e9


def measure_matmul_gflops(
    size: int | None = None, *, dtype: str = "float32", repeats: int = 5
) -> float:
    """Return the median speed of a square matrix product in GFLOP/s."""
    if size is None:
        size = MATMUL_SIZE.get(jax.default_backend(), MATMUL_SIZE_ACCELERATOR)
    left = jnp.ones((size, size), jnp.dtype(dtype))
    product = jax.jit(lambda x: x @ x)
    return 2 * size**3 / median_seconds(lambda: product(left), repeats) / 1e9


def median_seconds(call: Callable[[], object], repeats: int) -> float:
    """Time `call` until its result is ready; the first call compiles and is not counted."""
    jax.block_until_ready(call())
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(call())
        times.append(time.perf_counter() - start)
    return statistics.median(times)
