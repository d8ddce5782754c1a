"""Loads a model in a process of its own, which prints how long it took and how much memory.

`python -m inferjax.bench.load_process SOURCE DTYPE QUANTIZE CACHE_DIR`; "" is the default of the
second and third.
"""

import gc
import json
import resource
import sys
import time
from pathlib import Path


def main(source: str, dtype: str, quantize: str, cache_dir: str) -> dict[str, float]:
    """Load a model and return seconds and bytes; what jax itself takes is `base_bytes`.

    `resident_bytes` is what the process has in memory afterwards beside that.
    """
    import jax

    from inferjax.checkpoint.load import load

    jax.block_until_ready(jax.numpy.zeros(3))
    base = _reset_peak()
    start = time.perf_counter()
    model = load(source, dtype=dtype or None, quantize=quantize or None, cache_dir=Path(cache_dir))
    jax.block_until_ready(model.params)
    seconds = time.perf_counter() - start
    gc.collect()
    return {
        "seconds": seconds,
        "base_bytes": base,
        "resident_bytes": _memory("VmRSS") - base,
        "peak_bytes": _memory("VmHWM") - base,
        "stays_bytes": sum(leaf.nbytes for leaf in jax.tree.leaves(model.params)),
    }


def _reset_peak() -> int:
    """Let the peak begin anew where the system can; return the memory in use."""
    try:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
        return _memory("VmRSS")
    except OSError:
        return _memory("VmHWM")


def _memory(name: str) -> int:
    """Return a line of /proc/self/status in bytes; elsewhere the peak since the process began."""
    try:
        lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    except OSError:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


if __name__ == "__main__":
    print(json.dumps(main(*sys.argv[1:5])))
