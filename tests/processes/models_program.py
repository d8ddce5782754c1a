"""What each rank runs: load over all devices, score, generate, serve; rank 0 writes the results.

Arguments: checkpoint, scheme or "none", devices on the data axis, "functions" or "all" (the engine
too), folder of compiled programs, file of the results.
"""

import json
import sys

import jax
import numpy as np
from jax.sharding import AxisType

import inferjax as ij


def results(model: ij.Model, parts: str) -> dict[str, list]:
    """Return what one process and several must agree on."""
    tokens = np.array([[3, 5, 7, 11], [4, 9, 2, 6]], np.int32)
    of = (model.params, model.config)
    greedy = ij.generate(
        *of,
        tokens,
        key=jax.random.key(0),
        max_new_tokens=8,
        sampling=ij.SamplingParams(temperature=0.0),
    )
    drawn = ij.generate(
        *of,
        tokens,
        key=jax.random.key(1),
        max_new_tokens=8,
        sampling=ij.SamplingParams(temperature=1.0),
    )
    found = {
        "scores": host(ij.score(*of, tokens)),
        "greedy": host(greedy.tokens),
        "drawn": host(drawn.tokens),
    }
    return found if parts == "functions" else {**found, "engine": served(model)}


def served(model: ij.Model) -> list[list[int]]:
    """Return the engine's replies."""
    config = ij.EngineConfig(max_running=2, num_pages=32, max_len=64)
    prompts = [[3, 5, 7, 11], [4, 9, 2, 6], [8, 8, 1]]
    with ij.Engine(model, config) as engine:
        done = engine.generate(prompts, ij.SamplingParams(temperature=0.0, max_tokens=8))
    return [list(one.samples[0].tokens.ids) for one in done]


def host(array: jax.Array) -> list:
    return np.asarray(jax.device_get(array)).tolist()


def main() -> None:
    """Run in one rank of several."""
    source, scheme, data, parts, cache, target = sys.argv[1:]
    jax.config.update("jax_compilation_cache_dir", cache)
    shape = (int(data), jax.device_count() // int(data))
    mesh = jax.make_mesh(shape, ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    model = ij.load(source, mesh=mesh, quantize=None if scheme == "none" else scheme)
    found = results(model, parts)
    print("ran in", jax.process_index(), json.dumps(found))
    if jax.process_index() == 0:
        with open(target, "w") as file:
            json.dump(found, file)


if __name__ == "__main__":
    main()
