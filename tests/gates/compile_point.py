"""Compiles one kernel for a GPU that is not here and prints what the compiler made of it, as JSON.

A process of its own a kernel: a wrong target aborts it, and dumps are asked for by environment.
"""

import json
import os
import re
import sys
import tempfile
from pathlib import Path


def main(name: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        os.environ.update(
            JAX_PLATFORMS="cpu",
            JAX_SKIP_CUDA_CONSTRAINTS_CHECK="1",
            MOSAIC_GPU_DUMP_TO=folder,
            MOSAIC_GPU_DUMP_PTX="1",
            MOSAIC_GPU_DUMP_PTXAS="1",
        )
        compile_point(name)
        print(json.dumps(measure(Path(folder))))


def compile_point(name: str) -> None:
    """Compile the op as a program has it; nothing is run."""
    import jax
    import jax.numpy as jnp
    from jax.experimental.mosaic.gpu import utils

    from pallas_kernels.paged_attention import gpu
    from tests.gates import topologies
    from tests.gates.points import POINTS

    (point,) = (point for point in POINTS if point.name == name)
    # Mosaic asks the default device, which is a CPU here, and would then take sm_90.
    utils._infer_arch = lambda: (topologies.GPUS[point.target]["major"], 0)
    where = topologies.sharding(point.target)

    def array(*shape: int, dtype: str = "int32") -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype), sharding=where)

    batch, tokens, heads, num_pages = point.batch, point.tokens, 8, 2**18 // point.page_size
    pages = (2, num_pages, heads, 2, point.page_size)
    arrays = {
        "q": array(batch, tokens, heads, point.q_per_kv, point.width, dtype=point.dtype),
        "pool": array(*pages, point.width, dtype=point.pool_dtype or point.dtype),
        "factors": array(*pages, dtype="bfloat16") if point.pool_dtype else None,
        "layer": array(),
        "block_table": array(batch, 8192 // point.page_size),
        "positions": array(batch, tokens),
        "lengths": array(batch),
        "sinks": array(heads, point.q_per_kv, dtype="float32") if point.sinks else None,
    }
    static = {"scale": point.width**-0.5, "value_dim": point.width, "target": point.target}

    def run(arrays):
        return gpu.paged_attention(**arrays, window=point.window, softcap=point.softcap, **static)

    jax.jit(run).lower(arrays).compile()


def measure(folder: Path) -> dict:
    """Read registers, spills and shared memory from the compiler's report, products from PTX."""
    (report,) = folder.glob("*.ptxas")
    (resources,) = folder.glob("*.resources.txt")
    (ptx,) = folder.glob("*.ptx")
    text, code = report.read_text(errors="replace"), ptx.read_text()
    instructions = {
        "wgmma": r"\bwgmma\.mma_async",
        "mma": r"\bmma\.sync",
        "tma": r"\bcp\.async\.bulk\.tensor",
        "cp.async": r"\bcp\.async\.c[ag]",
    }
    return {
        "registers": max(int(n) for n in re.findall(r"[Uu]sed (\d+) registers", text)),
        "spilled": sum(int(n) for n in re.findall(r"(\d+) bytes spill", text)),
        "shared_memory": int(
            re.findall(r"smem_scratch_bytes=(\d+)", resources.read_text(errors="replace"))[0]
        ),
        "instructions": {
            name: n for name, what in instructions.items() if (n := len(re.findall(what, code)))
        },
    }


if __name__ == "__main__":
    main(sys.argv[1])
