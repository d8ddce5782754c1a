import json
import sys

import pytest
from engines import shared_engine
from made_up import tiny_roofline
from tiny_models import tiny_model

from inferjax.bench import plot, sweep
from inferjax.bench.throughput import Load
from inferjax.bench.workload import Mix
from inferjax.errors import MissingPackage


@pytest.fixture(scope="module")
def result() -> dict:
    loads = [Load(max_concurrency=1), Load(max_concurrency=2), Load(request_rate=500.0)]
    return sweep.measure_levels(
        shared_engine(),
        tiny_roofline(),
        Mix(num_requests=5, input_len=12, output_len=4),
        loads,
        vocab_size=tiny_model("llama").config.vocab_size,
        goals={"ttft": 1e9},
    )


def test_sweep_runs_every_load_with_a_cold_cache(result):
    levels = result["levels"]
    assert [level["requests"] for level in levels] == [5, 8, 5]
    assert [level["prefill"]["hit_tokens"] for level in levels] == [0, 0, 0]
    one, two, _ = (level["pages"]["peak_live"][0] for level in levels)
    assert one == 2 < two <= 4
    assert result["mix"]["input_len"] == 12
    assert json.loads(json.dumps(result))["levels"][2]["load"]["request_rate"] == 500.0


def test_sweep_curve_bounds_every_level(result):
    limits = result["limits"]
    assert [point["batch"] for point in limits] == sorted({p["batch"] for p in limits})
    rates = [point["output_tok_s"] for point in limits]
    assert len(rates) > 1
    assert rates == sorted(rates)
    for level in result["levels"]:
        assert 0 < level["roofline"]["reached_share"] < 1


def test_sweep_table_has_a_line_per_load(result):
    lines = sweep.table(result).splitlines()[2:]
    assert [line[:16].strip() for line in lines] == ["1 at a time", "2 at a time", "500 requests/s"]
    assert sweep.load_name({"request_rate": None, "max_concurrency": None}) == "all at once"


def test_plot_is_a_png(result, tmp_path):
    path = tmp_path / "sweep.png"
    plot.draw(result, path, title="tiny")
    assert path.read_bytes().startswith(b"\x89PNG\r\n")


def test_plot_without_matplotlib_names_the_extra(result, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MissingPackage, match=r"inferjax\[plots\]"):
        plot.draw(result, tmp_path / "sweep.png", title="tiny")
    assert not list(tmp_path.iterdir())
