"""A process that opens mutated checkpoints, so that a crash or a hang is seen and counted.

It reads lines `target seed` and answers each with a line of JSON: what came out, how long it took,
and by how much memory rose, as the system counts it.
"""

import faulthandler
import json
import os
import shutil
import sys
import tempfile
import time
import traceback
from pathlib import Path


def main() -> None:
    """Answer until the input ends."""
    os.environ["JAX_PLATFORMS"] = "cpu"
    faulthandler.enable()
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    import mutated_checkpoints

    warm: set[str] = set()
    for line in sys.stdin:
        name, seed = line.split()
        target = mutated_checkpoints.TARGETS[name]
        if name not in warm:
            for index in range(min(2, target.num_originals)):
                _in_folder(lambda folder, i=index, t=target: t.use(t.open(t.write(folder, i))))
            warm.add(name)
        print(json.dumps(_answer(target, int(seed))), file=out)


def _in_folder(work) -> object:
    folder = Path(tempfile.mkdtemp(prefix="mutated-"))
    try:
        return work(folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _answer(target, seed: int) -> dict:
    def work(folder: Path) -> dict:
        path = target.write_mutated(folder, seed)
        before, start = _start_of_peak(), time.process_time()
        outcome, opened = _outcome(lambda: target.open(path))
        answer = {
            "seed": seed,
            "seconds": time.process_time() - start,
            "peak_bytes": _status_bytes("VmHWM") - before,
            "file_bytes": sum(f.stat().st_size for f in folder.rglob("*") if f.is_file()),
        }
        if opened is not None:
            outcome, _ = _outcome(lambda: target.use(opened))
        return answer | outcome

    return _in_folder(work)


def _outcome(work) -> tuple[dict, object]:
    from inferjax.errors import InferjaxError

    try:
        made = work()
    except InferjaxError as error:
        if len(str(error)) > 5000:
            return {"outcome": "failed", "detail": f"a text of {len(str(error))} characters"}, None
        return {"outcome": type(error).__name__}, None
    except BaseException as error:
        last = "".join(traceback.format_exception(error)[-3:])[-1500:]
        detail = f"{type(error).__name__}: {str(error)[:300]}\n{last}"
        return {"outcome": "failed", "detail": detail}, None
    return {"outcome": "loaded"}, made


def _start_of_peak() -> int:
    """Forget the highest memory so far; return what is in use."""
    Path("/proc/self/clear_refs").write_text("5")
    return _status_bytes("VmRSS")


def _status_bytes(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    return 0


if __name__ == "__main__":
    main()
