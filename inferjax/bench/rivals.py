"""The same shapes on several engines, in rounds: every engine once, then every engine again.

Each measurement has a process of its own, in the Python that has the engine installed. All run
greedily with the same number of threads, on tokens drawn beforehand; none stops early. Medians over
the rounds are compared, since a shared machine's speed changes from minute to minute.
"""

import contextlib
import dataclasses
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tqdm

from inferjax.bench import limits
from inferjax.checkpoint.load import config_only, load
from inferjax.checkpoint.opened import find_model
from inferjax.checkpoint.save import save
from inferjax.errors import InvalidInput

SCRIPTS = Path(__file__).parent / "peers"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """A script, the module it needs, and the weights that it can be asked for.

    `files` says what it reads: the model as it is, or a folder of bfloat16 safetensors made of it.
    """

    script: str
    module: str
    files: str
    weights: tuple[str, ...]


ENGINES = {
    "inferjax": Engine(
        script="run_inferjax.py",
        module="inferjax",
        files="model",
        weights=("", "bfloat16", "int8", "int8-w8a8", "int4", "int4-w4a8"),
    ),
    "llama.cpp": Engine(
        script="run_llama_cpp.py", module="llama_cpp", files="model", weights=("", "bf16", "q8_0")
    ),
    "transformers": Engine(
        script="run_transformers.py",
        module="transformers",
        files="folder",
        weights=("bfloat16", "float32"),
    ),
    "vllm": Engine(script="run_vllm.py", module="vllm", files="folder", weights=("bfloat16",)),
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What to measure: prefill of one prompt, and decode at each batch behind `context` tokens.

    `runs` are names `engine` or `engine:weights`; empty means every engine found, with every kind
    of weights. `pythons` are interpreters that have engines installed. A process that takes longer
    than `most_s` seconds is ended and reported.
    """

    source: str
    cache_dir: Path
    pythons: tuple[str, ...] = ()
    runs: tuple[str, ...] = ()
    batches: tuple[int, ...] = (1, 8, 32)
    context: int = 128
    steps: int = 128
    prefill: int = 512
    rounds: int = 3
    most_s: int = 600
    kv: str = ""
    threads: int = dataclasses.field(default_factory=lambda: os.cpu_count() or 1)

    def __post_init__(self) -> None:
        """Refuse what measures nothing."""
        sizes = (self.context, self.prefill, self.rounds, self.most_s, self.threads)
        if min(*self.batches, *sizes) < 1:
            raise InvalidInput("a size of the comparison is below 1", fix="give positive numbers")
        if self.steps < 16 or self.steps % 16:
            raise InvalidInput(f"steps is {self.steps}", fix="give a multiple of 16")


@dataclasses.dataclass(frozen=True, slots=True)
class Run:
    """One engine with one kind of weights, and the Python that has it."""

    name: str
    engine: Engine
    weights: str
    python: str


def measure(plan: Plan) -> dict[str, Any]:
    """Return every run's rounds and medians, and the bandwidth measured before each round.

    An engine that fails is reported in its place. An interrupt ends the comparison: what has been
    measured by then is returned, marked as interrupted.

    Raises: InvalidInput for an unknown run, or an engine that no Python has.
    """
    runs = _runs(plan)
    path = find_model(plan.source, plan.cache_dir, progress=False)
    results: dict[str, list[dict[str, Any]]] = {run.name: [] for run in runs}
    bandwidths = []
    tokens = _tokens(plan, config_only(path).vocab_size)
    bar = tqdm.tqdm(total=plan.rounds * len(runs), desc="comparing", disable=None)
    is_interrupted = False
    with bar, tempfile.TemporaryDirectory() as scratch:
        folder = _folder(path, runs, Path(scratch))
        try:
            for _ in range(plan.rounds):
                bandwidths.append(limits.measure_bandwidth_gbps())
                for run in runs:
                    bar.set_postfix_str(run.name)
                    files = folder if run.engine.files == "folder" else path
                    results[run.name].append(_run(plan, run, files, tokens, Path(scratch)))
                    bar.update()
        except KeyboardInterrupt:
            if not any(results.values()):
                raise
            is_interrupted = True
    return {
        "plan": {k: str(v) if k == "cache_dir" else v for k, v in dataclasses.asdict(plan).items()},
        "bandwidth_gbps": bandwidths,
        "medians": {name: _medians(found) for name, found in results.items()},
        "rounds": results,
        "interrupted": is_interrupted,
    }


def table(result: dict[str, Any]) -> str:
    """Return the medians for people, and what failed."""
    batches = result["plan"]["batches"]
    columns = ["prefill", *(f"decode_{batch}" for batch in batches), "start_s", "memory_mb"]
    titles = ["prefill", *(f"decode {batch}" for batch in batches), "start s", "memory MB"]
    rounds = ", ".join(f"{gbps:.1f}" for gbps in result["bandwidth_gbps"])
    lines = [
        f"tokens/s, medians of {len(result['bandwidth_gbps'])} rounds"
        f"{', the last one interrupted' if result['interrupted'] else ''}; memory {rounds} GB/s",
        f"{'':24}" + "".join(f"{title:>11}" for title in titles),
    ]
    for name, medians in result["medians"].items():
        cells = [_cell(column, medians.get(column)) for column in columns]
        lines.append(f"{name:24}" + "".join(f"{cell:>11}" for cell in cells))
        failed = [found["error"] for found in result["rounds"][name] if "error" in found]
        lines += [f"  failed {len(failed)} times: {failed[0]}"] if failed else []
    return "\n".join(lines)


def _cell(column: str, value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.1f}" if column == "start_s" or value < 100 else f"{value:,.0f}"


def _runs(plan: Plan) -> list[Run]:
    """Return what to run, each in the first Python that has its engine."""
    owners = {name: _owner(engine, plan.pythons) for name, engine in ENGINES.items()}
    wanted = plan.runs or tuple(
        f"{name}:{weights}" if weights else name
        for name, engine in ENGINES.items()
        for weights in engine.weights
        if owners[name]
    )
    return [_named(name, owners) for name in wanted]


def _named(name: str, owners: dict[str, str | None]) -> Run:
    engine_name, _, weights = name.partition(":")
    engine = ENGINES.get(engine_name)
    if engine is None:
        raise InvalidInput(f"no engine {engine_name!r:.40}", fix=f"one of {', '.join(ENGINES)}")
    if engine.files == "folder" and not weights:
        weights = engine.weights[0]
    python = owners[engine_name]
    if python is None:
        raise InvalidInput(
            f"{engine_name} is not installed",
            why=f"no interpreter given with --python has the module {engine.module}",
            fix="install it in an environment of its own and give that one's Python",
        )
    return Run(name, engine, weights, python)


def _owner(engine: Engine, pythons: Sequence[str]) -> str | None:
    """Return the first Python that has the engine's module; inferjax is in this one."""
    if engine.module == "inferjax":
        return sys.executable
    code = f"import importlib.util as u, sys; sys.exit(u.find_spec({engine.module!r}) is None)"
    for python in pythons:
        try:
            if subprocess.run([python, "-c", code], capture_output=True).returncode == 0:
                return python
        except OSError as error:
            raise InvalidInput(f"{python} does not run", why=str(error)) from error
    return None


def _folder(path: Path, runs: Sequence[Run], scratch: Path) -> Path:
    """Return a folder of safetensors that other engines read, written if one of them runs."""
    if path.is_dir() or all(run.engine.files == "model" for run in runs):
        return path
    target = scratch / "model"
    save(load(path, dtype="bfloat16"), target, format="safetensors")
    return target


def _tokens(plan: Plan, vocab_size: int) -> list[int]:
    """Draw a prompt for every shape; special tokens, mostly in front, are left out."""
    draw = random.Random(0)
    count = max(plan.prefill, plan.context + max(plan.batches), plan.steps) + 1
    return [draw.randrange(min(1000, vocab_size // 2), vocab_size) for _ in range(count)]


def _run(plan: Plan, run: Run, files: Path, tokens: list[int], scratch: Path) -> dict[str, Any]:
    """Measure once in a new process."""
    shape = {
        "model": str(files),
        "weights": run.weights,
        "scratch": str(scratch / "other.gguf"),
        "kv": plan.kv,
        "threads": plan.threads,
        "tokens": tokens,
        **{name: getattr(plan, name) for name in ("batches", "context", "steps", "prefill")},
    }
    command = [run.python, str(SCRIPTS / run.engine.script), json.dumps(shape)]
    code, out, err = _run_group(command, plan.most_s)
    if code is None:
        return {"error": f"not finished after {plan.most_s} s"}
    try:
        return json.loads(out.strip().splitlines()[-1])
    except (IndexError, ValueError):
        said = " ".join(err.strip().splitlines()[-2:])
        return {"error": f"exit code {code}: {said[-300:]}"}


def _run_group(command: Sequence[str], most_s: int) -> tuple[int | None, str, str]:
    """Run a program that may start others; end all of them after a time, or when interrupted."""
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command, stdout=pipe, stderr=pipe, text=True, start_new_session=True
    ) as process:
        try:
            out, err = process.communicate(timeout=most_s)
        except subprocess.TimeoutExpired:
            return None, "", ""
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    return process.returncode, out, err


def _medians(found: Sequence[dict[str, Any]]) -> dict[str, float]:
    names = {name for run in found for name in run if name != "error"}
    return {
        name: statistics.median(run[name] for run in found if name in run) for name in sorted(names)
    }
