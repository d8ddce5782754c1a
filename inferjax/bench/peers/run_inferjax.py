"""inferjax's pure functions, greedy, each reply drawn by the sampler and fed back."""

import json
import statistics
import sys
import time

from peak import peak_mb

START = time.time()

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402

import inferjax as ij  # noqa: E402
from inferjax.bench.latency import greedy_state, zero_cache  # noqa: E402
from inferjax.config import Exec  # noqa: E402
from inferjax.runtime.inputs import make_inputs  # noqa: E402
from inferjax.runtime.steps import decode, extend  # noqa: E402

STEPS = 16


def main(shape: dict) -> dict:
    """Measure every shape."""
    model = ij.load(shape["model"], quantize=shape["weights"] or None)
    exec = Exec(kv_dtype=shape["kv"] or None, prefill_chunk=512)
    prefill_rate(model, exec, shape, 16)
    found = {"start_s": time.time() - START}
    found["prefill"] = prefill_rate(model, exec, shape, shape["prefill"])
    for batch in shape["batches"]:
        found[f"decode_{batch}"] = decode_rate(model, exec, shape, batch)
        if batch == 1:
            found["memory_mb"] = peak_mb()
    return found


def prefill_rate(model: ij.Model, exec: Exec, shape: dict, length: int) -> float:
    """Return tokens/s of one prompt, the median of three runs behind one that compiles."""
    params, config = model.params, model.config
    cache, pages = zero_cache(params, config, batch=1, length=length, exec=exec)
    tokens = jnp.asarray([shape["tokens"][:length]], jnp.int32)
    inputs = make_inputs(tokens, starts=0, block_tables=pages)
    seconds = []
    for _ in range(4):
        begin = time.perf_counter()
        output, cache = extend(params, config, cache, inputs, exec=exec)
        jax.block_until_ready(output.values)
        seconds.append(time.perf_counter() - begin)
    return length / statistics.median(seconds[1:])


def decode_rate(model: ij.Model, exec: Exec, shape: dict, batch: int) -> float:
    """Return tokens/s over all sequences; the cache's values do not change the speed."""
    params, config = model.params, model.config
    length = shape["context"] + shape["steps"]
    cache, pages = zero_cache(params, config, batch=batch, length=length, exec=exec)
    begin = 0.0
    for dispatches in (1, shape["steps"] // STEPS):  # the first one compiles
        state = jax.block_until_ready(greedy_state(batch, shape["context"], pages))
        begin = time.perf_counter()
        for _ in range(dispatches):
            _, state, cache = decode(params, config, cache, state, steps=STEPS, exec=exec)
        jax.block_until_ready(state)
    return batch * shape["steps"] / (time.perf_counter() - begin)


if __name__ == "__main__":
    print(json.dumps(main(json.loads(sys.argv[1]))))
