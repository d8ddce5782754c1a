"""`inferjax launch` with real processes: they run together, end together, and leave nothing."""

import os
import re
import signal
import subprocess
import sys
import time

import jax
import pytest
from launched import PROGRAM, are_gone, launch, launching, script

from inferjax.cli import launch as launch_command
from inferjax.cli import launch_processes, launch_rank, main
from inferjax.cli.launch import program_of
from inferjax.errors import InvalidInput

# What users were promised; the first test of a lost rank asks for less.
LIMIT_S = 60.0

SUM = """
import sys
import jax, numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec
import beside

count = jax.device_count()
mesh = jax.make_mesh((count,), ("x",), axis_types=(AxisType.Auto,))
where = NamedSharding(mesh, PartitionSpec("x"))
x = jax.make_array_from_callback((count,), where, lambda i: np.arange(1.0, count + 1)[i])
total = jax.jit(lambda x: x.sum(), out_shardings=NamedSharding(mesh, PartitionSpec()))(x)
print("sum", float(total), "of", count, "in", jax.process_index(), sys.argv[1:], beside.WORD)
print("to stderr", file=sys.stderr)
sys.exit(0)
"""

# Ranks that wait for ever, each with a child; rank 0 waits inside a collective.
WAIT = """
import os, signal, subprocess, sys, time
import jax
from jax.experimental.multihost_utils import sync_global_devices
{before}
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
sync_global_devices("all are here")
print("pids", jax.process_index(), os.getpid(), child.pid)
if jax.process_index() == 0:
    sync_global_devices("never")
time.sleep(600)
"""


def read_pids(process: subprocess.Popen[str], count: int) -> dict[int, list[int]]:
    """Return the processes of each rank, once all have said theirs."""
    found: dict[int, list[int]] = {}
    while len(found) < count:
        line = process.stdout.readline()
        assert line, process.stderr.read()
        if match := re.match(r"\[\d+\] pids (\d+) (\d+) (\d+)$", line):
            found[int(match[1])] = [int(match[2]), int(match[3])]
    return found


@pytest.mark.parametrize("count", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_ranks_are_one_mesh(count, tmp_path):
    (tmp_path / "beside.py").write_text("WORD = 'beside'")
    program = script(tmp_path, SUM)
    flags = ("-n", str(count), "--devices-per-process", "2")
    code, out, err = launch(*flags, "--", program, "--lr", "1")
    assert code == 0, err
    devices = 2 * count
    total = devices * (devices + 1) / 2
    for rank in range(count):
        assert (
            f"[{rank}] sum {total} of {devices} in {rank} ['--lr', '1'] beside" in out.splitlines()
        )
        assert f"[{rank}] to stderr" in err.splitlines()


def test_a_command_prints_in_rank_0_only():
    code, out, err = launch("-n", "2", "models")
    assert code == 0, err
    assert "[0] name" in out
    assert "[1]" not in out


def test_a_killed_rank_ends_all(tmp_path):
    with launching("-n", "2", "--", script(tmp_path, WAIT.format(before=""))) as process:
        pids = read_pids(process, 2)
        begin = time.monotonic()
        os.kill(pids[1][0], signal.SIGKILL)
        _, err = process.communicate(timeout=LIMIT_S)
        assert time.monotonic() - begin < 15.0
    assert process.returncode == 2
    assert "inferjax: rank 1 of 2 was killed by signal 9 (SIGKILL)" in err
    assert are_gone([*pids[0], *pids[1]], 0.0)


FAILURES = {
    "an error": ("raise LookupError('of rank 1')", 1, "LookupError: of rank 1"),
    "a code": ("sys.exit(7)", 7, ""),
    "words": ("sys.exit('no luck')", 1, "no luck"),
}


@pytest.mark.parametrize(
    "name", ["an error", *(pytest.param(n, marks=pytest.mark.slow) for n in ("a code", "words"))]
)
def test_a_rank_that_fails_ends_those_that_wait_for_it(name, tmp_path):
    how, number, text = FAILURES[name]
    program = script(tmp_path, WAIT.format(before=f"if jax.process_index() == 1: {how}"))
    begin = time.monotonic()
    code, _, err = launch("-n", "2", "--", program)
    assert time.monotonic() - begin < LIMIT_S
    assert code == 2
    assert f"rank 1 of 2 exited with code {number}" in err
    assert text in err


def test_a_rank_that_never_joins_ends_those_that_wait_for_it(capfd):
    """Rank 0 waits for ten minutes for the others; rank 1 crashes before it gets there."""

    def command(rank: int, guard: int) -> list[str]:
        if rank:
            return [sys.executable, "-c", "import os; os.abort()"]
        words = ["--coordinator=127.0.0.1:0", "--rank=0", "--count=2", "--devices=1"]
        module = [sys.executable, "-m", "inferjax.cli.launch_rank"]
        return [*module, *words, "--start-timeout=600", f"--guard={guard}", "module", "this"]

    begin = time.monotonic()
    end = launch_processes.supervise(command, 2, grace_s=5.0)
    assert time.monotonic() - begin < LIMIT_S
    assert end == launch_processes.Ended(1, -signal.SIGABRT)


@pytest.mark.parametrize(
    ("number", "code"),
    [
        (signal.SIGINT, 130),
        (signal.SIGTERM, 143),
        pytest.param(signal.SIGHUP, 129, marks=pytest.mark.slow),
    ],
)
def test_a_signal_ends_all_ranks(number, code, tmp_path):
    """Also those that do not listen to SIGTERM."""
    before = "signal.signal(signal.SIGTERM, signal.SIG_IGN)"
    program = script(tmp_path, WAIT.format(before=before))
    with launching("-n", "2", "--grace", "0.5", "--", program) as process:
        pids = read_pids(process, 2)
        process.send_signal(number)
        process.communicate(timeout=LIMIT_S)
    assert process.returncode == code
    assert are_gone([*pids[0], *pids[1]], 0.0)


def test_a_launcher_that_is_killed_leaves_no_orphans(tmp_path):
    with launching("-n", "2", "--", script(tmp_path, WAIT.format(before=""))) as process:
        pids = read_pids(process, 2)
        process.kill()
    assert are_gone([*pids[0], *pids[1]], LIMIT_S)


@pytest.mark.slow
def test_a_rank_that_hangs_is_missed(tmp_path):
    with launching("-n", "4", "--", script(tmp_path, WAIT.format(before=""))) as process:
        pids = read_pids(process, 4)
        os.kill(pids[2][0], signal.SIGSTOP)
        _, err = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 2
    assert re.search(r"rank \d of 4 (was killed|exited)", err)
    assert are_gone([pid for both in pids.values() for pid in both], 0.0)


WRONG = {
    "no ranks": (["-n", "0", "--", "models"], "--processes is 0"),
    "no devices": (["-n", "2", "--devices-per-process", "0", "models"], "--devices-per-process"),
    "no time": (["-n", "2", "--start-timeout", "0", "models"], "--start-timeout is 0"),
    "no number": (["-n", "2", "--grace", "nan", "models"], "--grace is nan"),
    "nothing to run": (["-n", "2"], "launch has nothing to run"),
    "no such program": (["-n", "2", "--", "nowhere.py"], "launch cannot run 'nowhere.py'"),
    "launchers of launchers": (["-n", "2", "--", "launch", "-n", "2"], "cannot run 'launch'"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments_start_nothing(name, monkeypatch, capsys):
    words, text = WRONG[name]
    monkeypatch.setattr(subprocess, "Popen", None)
    assert main.main(["launch", *words]) == 2
    assert text in capsys.readouterr().err


def test_programs_are_understood_as_they_are_written(tmp_path):
    path = script(tmp_path, "")
    assert program_of(["--", path, "--lr", "1"]) == ["script", path, "--lr", "1"]
    assert program_of(["python", path]) == ["script", path]
    assert program_of(["python3", "-m", "a.b", "-x"]) == ["module", "a.b", "-x"]
    assert program_of(["--", "-m", "a.b"]) == ["module", "a.b"]
    assert program_of(["inferjax", "models", "--json"]) == ["command", "models", "--json"]
    assert program_of(["python", "-m", "inferjax", "models"])[0] == "module"
    with pytest.raises(InvalidInput, match="cannot run 'nothing'"):
        program_of(["inferjax"])


LINES = r"""
import sys
sys.stdout.buffer.write(b"\xc3\xa9\n")
for _ in range(4000):
    print("x" * 100)
"""


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no device that is always full")
def test_a_full_disk_ends_the_ranks(tmp_path):
    with open("/dev/full", "w") as full:
        command = [*PROGRAM, "launch", "-n", "1", "--", script(tmp_path, LINES)]
        done = subprocess.run(
            command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=LIMIT_S
        )
    assert done.returncode == 2
    assert "cannot be written" in done.stderr
    assert "No space left" in done.stderr


def test_an_output_without_some_characters_gets_their_numbers(tmp_path):
    done = subprocess.run(
        [*PROGRAM, "launch", "-n", "1", "--", script(tmp_path, LINES)],
        stdout=subprocess.PIPE,
        text=True,
        timeout=LIMIT_S,
        env=os.environ | {"PYTHONIOENCODING": "ascii"},
    )
    assert done.returncode == 0
    assert done.stdout.splitlines()[0] == r"[0] \xe9"
    assert len(done.stdout.splitlines()) == 4001


@pytest.mark.parametrize(("code", "text"), [(-9, "signal 9 (SIGKILL)"), (-40, "signal 40\n")])
def test_a_signal_is_named_where_it_has_a_name(code, text):
    assert text in str(launch_command._lost(launch_processes.Ended(0, code), 2))


def test_ranks_talk_on_this_machine_only_and_may_end_far_apart(monkeypatch):
    seen = {}
    monkeypatch.setattr(jax.distributed, "initialize", lambda *a, **words: seen.update(words))
    monkeypatch.setattr(jax.config, "update", lambda *_: None)
    words = "--coordinator=127.0.0.1:9 --rank=1 --count=2 --devices=1 --start-timeout=3 --guard=0"
    launch_rank._join(launch_rank._parser().parse_args([*words.split(), "script", "x.py"]))
    assert seen["coordinator_bind_address"] == "127.0.0.1:9"
    assert seen["shutdown_timeout_seconds"] > 24 * 3600
