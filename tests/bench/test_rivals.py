"""Comparisons with other engines, which stand-ins for their Python play here."""

import json
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from launched import are_gone

from inferjax.bench import rivals
from inferjax.bench.rivals import Plan, measure, table
from inferjax.errors import InvalidInput
from tests.tiny_models import TINY

MODEL = TINY / "llama"

# Says that it has llama_cpp only; speeds grow from call to call, and the third call fails.
STAND_IN = """#!{python}
import json, pathlib, sys
if sys.argv[1] == "-c":
    sys.exit("llama_cpp" not in sys.argv[2])
calls = pathlib.Path({calls!r})
before = calls.read_text().splitlines() if calls.exists() else []
shape = json.loads(sys.argv[2])
calls.write_text("\\n".join([*before, json.dumps([sys.argv[1], shape])]))
if len(before) == 2:
    sys.exit("out of luck")
print("loading ...")
print(json.dumps({{"prefill": 100.0 * len(before), "decode_1": 7.5}}))
"""


@pytest.fixture
def other(tmp_path):
    """Return a stand-in and the file of its calls."""
    python, calls = tmp_path / "python", tmp_path / "calls"
    python.write_text(STAND_IN.format(python=sys.executable, calls=str(calls)))
    python.chmod(python.stat().st_mode | stat.S_IEXEC)
    return str(python), calls


def plan(tmp_path, python, **changes):
    settings = {"batches": (1,), "rounds": 3, "runs": ("llama.cpp",), "context": 4, "steps": 16}
    settings["pythons"] = (python,)
    return Plan(source=str(MODEL), cache_dir=tmp_path, **{**settings, **changes})


def test_a_peer_gets_the_shapes_and_its_failures_are_shown(tmp_path, other):
    python, calls = other
    result = measure(plan(tmp_path, python, prefill=9))
    script, shape = json.loads(calls.read_text().splitlines()[0])
    assert script.endswith("run_llama_cpp.py")
    assert (shape["prefill"], shape["context"], shape["steps"]) == (9, 4, 16)
    assert len(shape["tokens"]) >= 17
    assert shape["model"] == str(MODEL)
    assert result["medians"]["llama.cpp"] == {"prefill": 50.0, "decode_1": 7.5}
    assert len(result["bandwidth_gbps"]) == 3
    text = table(result)
    assert "failed 1 times: exit code 1: out of luck" in text
    assert "7.5" in text


def test_engines_take_turns(tmp_path, other):
    python, calls = other
    measure(plan(tmp_path, python, runs=("llama.cpp:bf16", "llama.cpp:q8_0"), rounds=2))
    found = [json.loads(line)[1]["weights"] for line in calls.read_text().splitlines()]
    assert found == ["bf16", "q8_0", "bf16", "q8_0"]


def test_an_interrupt_keeps_what_was_measured(tmp_path, other, monkeypatch):
    before = rivals._run

    def interrupted(plan, run, *rest):
        if run.name == "llama.cpp:q8_0":
            raise KeyboardInterrupt
        return before(plan, run, *rest)

    monkeypatch.setattr(rivals, "_run", interrupted)
    result = measure(plan(tmp_path, other[0], runs=("llama.cpp:bf16", "llama.cpp:q8_0")))
    assert result["interrupted"]
    assert len(result["rounds"]["llama.cpp:bf16"]) == 1
    assert "medians of 1 rounds, the last one interrupted" in table(result)
    with pytest.raises(KeyboardInterrupt):
        measure(plan(tmp_path, other[0], runs=("llama.cpp:q8_0",)))


HANGS = """#!{python}
import pathlib, subprocess, sys, time
if sys.argv[1] != "-c":
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    pathlib.Path({pids!r}).write_text(str(child.pid))
    time.sleep(600)
"""


def test_a_process_that_hangs_is_ended_with_what_it_started(tmp_path, other):
    python, pids = other[0], tmp_path / "pids"
    Path(python).write_text(HANGS.format(python=sys.executable, pids=str(pids)))
    result = measure(plan(tmp_path, python, rounds=1, most_s=2))
    assert result["rounds"]["llama.cpp"] == [{"error": "not finished after 2 s"}]
    assert are_gone([int(pids.read_text())], limit_s=5.0)


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the parent counts elsewhere")
def test_the_memory_of_a_process_is_its_own(tmp_path):
    held = bytearray(b"1") * (256 << 20)
    code = "import peak; print(peak.peak_mb())"
    found = subprocess.run(
        [sys.executable, "-c", code], cwd=rivals.SCRIPTS, capture_output=True, text=True, check=True
    )
    assert 1 < float(found.stdout) < 100 < len(held) >> 20


def test_inferjax_runs_the_same_shapes(tmp_path):
    result = measure(
        plan(tmp_path, sys.executable, runs=("inferjax:int8",), rounds=1, prefill=8, kv="float32")
    )
    [found] = result["rounds"]["inferjax:int8"]
    assert set(found) == {"start_s", "prefill", "decode_1", "memory_mb"}, found
    assert min(found.values()) > 0


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"runs": ("ollama",)}, "no engine"),
        ({"runs": ("vllm",)}, "not installed"),
        ({"pythons": ("/nowhere/python",)}, "does not run"),
        ({"batches": (0,)}, "below 1"),
        ({"steps": 8}, "multiple of 16"),
        ({"most_s": 0}, "below 1"),
    ],
)
def test_what_cannot_be_measured_is_refused(changes, text, tmp_path, other):
    with pytest.raises(InvalidInput, match=text):
        measure(plan(tmp_path, other[0], **changes))
