"""Runs mutated checkpoints in a process of their own and counts what comes of them."""

import collections
import dataclasses
import json
import os
import select
import subprocess
import sys
import tempfile
from pathlib import Path

MAX_SECONDS = 20.0  # of waiting for one case on a busy machine, the kind's first use included


@dataclasses.dataclass
class Tally:
    """What came of the cases of one kind."""

    outcomes: collections.Counter = dataclasses.field(default_factory=collections.Counter)
    failures: list[str] = dataclasses.field(default_factory=list)
    slowest_s: float = 0.0
    most_bytes: int = 0  # beyond twice the files' size

    def add(self, target: str, answer: dict) -> None:
        where = f"{target} {answer['seed']}"
        self.outcomes[answer["outcome"]] += 1
        if answer["outcome"] in ("failed", "hang", "crash"):
            self.failures.append(f"{where}: {answer['outcome']}: {answer.get('detail', '')}")
        self.slowest_s = max(self.slowest_s, answer.get("seconds", 0.0))
        beyond = answer.get("peak_bytes", 0) - 2 * answer.get("file_bytes", 0)
        self.most_bytes = max(self.most_bytes, beyond)


class Worker:
    """A process that is started again when it has crashed or hangs."""

    def __init__(self) -> None:
        self._process: subprocess.Popen | None = None

    def run(self, target: str, seed: int) -> dict:
        """Return what came of one case."""
        process = self._process or self._start()
        try:
            process.stdin.write(f"{target} {seed}\n")
            process.stdin.flush()
            if not select.select([process.stdout], [], [], MAX_SECONDS)[0]:
                self.stop()
                return {"seed": seed, "outcome": "hang"}
            line = process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            process.wait()
            log = Path(self._log.name).read_text(errors="replace")[:3000]
            self.stop()
            return {"seed": seed, "outcome": "crash", "detail": f"{process.returncode}\n{log}"}
        return json.loads(line)

    def stop(self) -> None:
        """End the process, if it runs."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process.stdin.close()
            self._process.stdout.close()
            self._log.close()
            self._folder.cleanup()
            self._process = None

    def _start(self) -> subprocess.Popen:
        # What a process that is killed leaves behind goes with its folder.
        self._folder = tempfile.TemporaryDirectory(prefix="mutation-worker-", delete=True)
        self._log = (Path(self._folder.name) / "log").open("w")
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("mutation_worker.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env={**os.environ, "TMPDIR": self._folder.name},
        )
        return self._process


def run_cases(worker: Worker, target: str, num_cases: int, first: int = 0) -> Tally:
    tally = Tally()
    for seed in range(first, first + num_cases):
        tally.add(target, worker.run(target, seed))
    return tally


if __name__ == "__main__":
    import time

    names, count = sys.argv[1].split(","), int(sys.argv[2])
    first = int(sys.argv[3]) if len(sys.argv) > 3 else 0
    worker = Worker()
    for name in names:
        start = time.monotonic()
        tally = run_cases(worker, name, count, first)
        print(
            f"{name}: {count} in {time.monotonic() - start:.0f} s, {dict(tally.outcomes)}, "
            f"slowest {tally.slowest_s:.2f} s, most {tally.most_bytes / 2**20:.1f} MiB",
            flush=True,
        )
        kinds = collections.Counter(f.split("\n")[0].split(": ", 1)[1][:90] for f in tally.failures)
        print(
            f"   seeds {[f.split(': ')[0] for f in tally.failures[:20]]}" * bool(kinds), flush=True
        )
        for kind, times in kinds.most_common(12):
            example = next(f for f in tally.failures if kind in f)
            print(f"   {times} x {example[-1100:]}", flush=True)
    worker.stop()
