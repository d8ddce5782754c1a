"""Runs `inferjax launch` as users do: in a process of its own, and leaves none behind."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PROGRAM = [sys.executable, "-c", "import sys; from inferjax.cli.main import main; sys.exit(main())"]


@contextlib.contextmanager
def launching(*words: str) -> Iterator[subprocess.Popen[str]]:
    """Start a launcher; at the end it is ended, and its ranks with it."""
    process = subprocess.Popen(
        [*PROGRAM, "launch", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}"},
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        process.communicate()


def launch(*words: str) -> tuple[int, str, str]:
    """Return the exit code of a launcher, and what it printed."""
    with launching(*words) as process:
        out, err = process.communicate(timeout=300)
        return process.returncode, out, err


def script(folder: Path, text: str) -> str:
    """Write a program for ranks; return its path."""
    path = folder / "program.py"
    path.write_text(text)
    return str(path)


def are_gone(pids: list[int], limit_s: float) -> bool:
    """Wait until processes have ended; one that nobody has collected yet has ended too."""
    deadline = time.monotonic() + limit_s
    while any(map(_is_running, pids)):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def _is_running(pid: int) -> bool:
    done = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True)
    return done.stdout.strip()[:1] not in ("", "Z")
