"""Loading beside its limit: reading the file's bytes, and writing as many bytes as stay.

Every measurement has a process of its own, so that its peak of memory is its own too. Pages of the
files are dropped first for a cold run; in a warm one they are in the system's cache.
"""

import dataclasses
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from inferjax.checkpoint.memory import aligned_empty
from inferjax.checkpoint.opened import find_model, open_checkpoint
from inferjax.checkpoint.orbax import is_saved
from inferjax.checkpoint.reading import MAX_THREADS
from inferjax.errors import InvalidInput

_CHUNK = 2**20


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What to load, and how often with the files in the system's cache and without."""

    source: str
    dtype: str | None = None
    quantize: str | None = None
    cache_dir: Path
    rounds: int = 3

    def __post_init__(self) -> None:
        """Refuse what measures nothing."""
        if self.rounds < 1:
            raise InvalidInput(f"rounds is {self.rounds}", fix="measure at least once")


def measure(plan: Plan) -> dict[str, Any]:
    """Return the medians of warm and cold loads beside limits that were measured in between.

    Raises: InvalidInput if the loading process fails, and the errors of finding a model.
    """
    path = find_model(plan.source, plan.cache_dir, progress=False)
    files = weight_files(path)
    rows = []
    for kind in ("cold", "warm"):
        runs = [
            _measure_once(plan, str(path), files, cold=kind == "cold") for _ in range(plan.rounds)
        ]
        rows.append({"files": kind, **_median(runs)})
    return {"file_bytes": sum(file.stat().st_size for file in files), "rows": rows}


def weight_files(path: Path) -> list[Path]:
    """Return the files that are read when `path` is loaded."""
    if is_saved(path):
        return sorted(file for file in path.rglob("*") if file.is_file())
    file = open_checkpoint(path).file
    file.close()
    return list(file.paths)


def table(result: dict[str, Any]) -> str:
    """Return the figures for people."""
    warm = result["rows"][-1]
    lines = [
        f"{result['file_bytes'] / 1e6:,.0f} MB of files become {warm['stays_bytes'] / 1e6:,.0f} MB "
        f"of weights, {warm['resident_bytes'] / 1e6:,.0f} MB resident beside the "
        f"{warm['base_bytes'] / 1e6:,.0f} MB that jax itself takes",
        "files  seconds   MB/s  read s  write s  limit/seconds  peak MB  peak/stays",
    ]
    for row in result["rows"]:
        lines.append(
            f"{row['files']:5}  {row['seconds']:7.2f}  {row['stays_mb_s']:5,.0f}  "
            f"{row['read_s']:6.2f}  {row['write_s']:7.2f}  {row['limit_share']:13.0%}  "
            f"{row['peak_bytes'] / 1e6:7,.0f}  {row['peak_share']:10.2f}"
        )
    return "\n".join(lines)


def _measure_once(plan: Plan, path: str, files: Sequence[Path], *, cold: bool) -> dict[str, float]:
    """Load once, and measure the limit under the same conditions."""
    _prepare(files, cold=cold)
    run = _load_apart(plan, path)
    _prepare(files, cold=cold)
    read, write = _read_seconds(files), _write_seconds(int(run["stays_bytes"]))
    return {
        **run,
        "read_s": read,
        "write_s": write,
        "limit_share": (read + write) / run["seconds"],
        "stays_mb_s": run["stays_bytes"] / 1e6 / run["seconds"],
        "peak_share": run["peak_bytes"] / run["stays_bytes"],
    }


def _load_apart(plan: Plan, path: str) -> dict[str, float]:
    command = [sys.executable, "-m", "inferjax.bench.load_process"]
    command += [path, plan.dtype or "", plan.quantize or "", str(plan.cache_dir)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        last = " ".join(done.stderr.strip().splitlines()[-3:]) or "it said nothing"
        raise InvalidInput(
            f"{plan.source} was not loaded by a process of its own",
            why=last[-300:],
            fix="load it in this process to see more",
        )
    return json.loads(done.stdout.splitlines()[-1])


def _prepare(files: Sequence[Path], *, cold: bool) -> None:
    """Drop the files from the system's cache, where that can be asked for, or read them into it."""
    if not cold:
        _read_seconds(files)
        return
    for file in files:
        with file.open("rb") as handle:
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(handle.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _read_seconds(files: Sequence[Path]) -> float:
    """Time reading every byte into small buffers, with as many threads as loading has."""
    pieces = [(file, at) for file in files for at in range(0, file.stat().st_size, 16 * _CHUNK)]

    def read(piece: tuple[Path, int]) -> None:
        buffer = memoryview(bytearray(_CHUNK))
        with piece[0].open("rb", buffering=0) as handle:
            handle.seek(piece[1])
            for _ in range(16):
                if not handle.readinto(buffer):
                    break

    return _timed(read, pieces)


def _write_seconds(num_bytes: int) -> float:
    """Time filling new memory from the cache."""
    chunk = np.ones(_CHUNK, np.uint8)

    def write(size: int) -> None:
        out = aligned_empty((size,), chunk.dtype)
        for at in range(0, size, _CHUNK):
            out[at : at + _CHUNK] = chunk[: min(_CHUNK, size - at)]

    full, rest = divmod(num_bytes, 16 * _CHUNK)
    return _timed(write, [16 * _CHUNK] * full + [rest] * bool(rest))


def _timed(work: Any, pieces: Sequence[Any]) -> float:
    with ThreadPoolExecutor(max_workers=min(MAX_THREADS, os.cpu_count() or 1)) as pool:
        start = time.perf_counter()
        list(pool.map(work, pieces))
        return time.perf_counter() - start


def _median(runs: Sequence[dict[str, float]]) -> dict[str, float]:
    """Return each figure's median; the peak is the highest of all runs."""
    found = {name: float(np.median([run[name] for run in runs])) for name in runs[0]}
    return found | {name: max(r[name] for r in runs) for name in ("peak_bytes", "peak_share")}
