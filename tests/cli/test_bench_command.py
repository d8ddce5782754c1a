import json
import sys

import pytest

from inferjax.bench.workload import Mix
from inferjax.cli import main as cli
from inferjax.cli.bench import KINDS
from inferjax.cli.benchmarks.flags import MIX_HELP

SMALL = (
    *("--num-requests=3", "--input-len=5", "--output-len=3", "--max-len=64", "--max-running=1"),
    *("--num-pages=20", "--token-budget=32", "--decode-steps=4", "--max-logprobs=0"),
)


def bench(*words: str) -> int:
    return cli.main(["bench", *words])


@pytest.mark.parametrize("kind", KINDS)
def test_bench_help_of_every_kind_explains_its_flags(kind, capsys):
    with pytest.raises(SystemExit) as caught:
        bench(kind, "--help")
    assert caught.value.code == 0
    out = capsys.readouterr().out
    assert f"usage: inferjax bench {kind}" in out
    assert "--json" in out


def test_every_field_of_a_mix_has_a_flag():
    assert set(MIX_HELP) == set(Mix.__dataclass_fields__)


def test_bench_policy_prints_a_table_and_json(capsys):
    assert bench("policy", "--running=4", "--waiting=0,30", "--steps=5", "--json") == 0
    *text, last = capsys.readouterr().out.splitlines()
    assert "cores" in text[0]
    result = json.loads(last)
    assert [row["waiting"] for row in result["rows"]] == [0, 30, 30]
    assert result["kind"] == "policy"
    assert "jax" in result["versions"]
    assert result["hardware"]["platform"] == "cpu"


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["throughput", "--num-requests=0"], "num_requests"),
        (["throughput", "--goodput", "ttft"], "goodput"),
        (["throughput", "--max-concurrency=0"], "concurrency"),
        (["throughput", "--input=none.jsonl"], "cannot be read"),
        (["throughput", "--input=none.jsonl", "--input-len=3"], "--input-len"),
        (["throughput", "--max-running=0"], "max_running"),
        (["throughput", "--request-rate=0"], "request rate"),
        (["sweep", "--request-rates=1,-1"], "request rate"),
        (["sweep", "--concurrency=0"], "concurrency"),
        (["sweep", "-o", "none/here"], "no folder"),
        (["policy", "--running=0"], "sizes"),
        (["peers", "--run", "ollama"], "no engine"),
    ],
    ids=lambda value: "" if isinstance(value, str) else " ".join(value),
)
def test_bench_explains_what_cannot_be_measured(words, text, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert bench(*words) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert text in err
    assert "Fix: " in err


def test_bench_sweep_that_must_plot_needs_matplotlib_at_once(monkeypatch, tmp_path, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert bench("sweep", "--plot", "-o", str(tmp_path / "s")) == 2
    assert "inferjax[plots]" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.usefixtures("cache")
def test_bench_throughput_reads_a_file(model, tmp_path, capsys):
    path = tmp_path / "in.jsonl"
    path.write_text('{"prompt": "hello", "max_tokens": 2}\n{"prompt": [5, 6]}\n')
    words = [word for word in SMALL if "-len=5" not in word and "requests" not in word]
    assert bench("throughput", "--model", str(model), "--input", str(path), *words, "--json") == 0
    *text, last = capsys.readouterr().out.splitlines()
    result = json.loads(last)
    assert result["latency_ms"]["ttft"]["p50"] > 0
    assert result["prefill"]["asked_tokens"] == 7
    assert (result["requests"], result["compilations"]) == (2, 0)
    assert result["engine"]["max_running"] == 1
    assert any("before the measurement" in line for line in text)


@pytest.mark.slow
@pytest.mark.usefixtures("cache")
@pytest.mark.parametrize("plots", [True, False])
def test_bench_sweep_writes_json_and_a_plot_where_it_can(
    model, tmp_path, capsys, monkeypatch, plots
):
    if not plots:
        monkeypatch.setitem(sys.modules, "matplotlib", None)
    prefix = tmp_path / "s.1"
    loads = ["--request-rates=100,1000", "--goodput", "ttft:1000", "e2el:2000"]
    assert bench("sweep", "--model", str(model), *loads, "-o", str(prefix), *SMALL) == 0
    out = capsys.readouterr().out
    result = json.loads((tmp_path / "s.1.json").read_text())
    assert [level["load"]["request_rate"] for level in result["levels"]] == [100, 1000]
    assert "jax" in result["versions"]
    assert (tmp_path / "s.1.png").exists() == plots
    assert ("pip install 'inferjax[plots]'" in out) != plots
