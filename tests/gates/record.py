"""Compiles every kernel of the table, says which break their budget, and records what was seen."""

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version

from tests.gates.points import POINTS, RECORDED, ROOT, Point, digest
from tests.gates.verdict import complaints

PROCESSES = 2


def measure(point: Point) -> dict:
    command = [sys.executable, "-m", "tests.gates.compile_point", point.name]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    if done.returncode:
        raise SystemExit(f"{point.name} does not compile:\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    found, points = [], {}
    with ThreadPoolExecutor(PROCESSES) as pool:
        for point, measured in zip(POINTS, pool.map(measure, POINTS), strict=True):
            points[point.name] = measured
            found += complaints(point, measured)
            print(point.name, json.dumps(measured), flush=True)
    record = {"sources": digest(), "jax": version("jax"), "points": points}
    RECORDED.write_text(json.dumps(record, indent=1) + "\n")
    if found:
        raise SystemExit("\n".join(found))


if __name__ == "__main__":
    main()
