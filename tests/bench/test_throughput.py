import dataclasses
import json

import pytest
from engines import SMALL, make_engine, random_prompt, shared_engine
from made_up import MACHINE, failed, served, tiny_roofline
from tiny_models import tiny_model

from inferjax.bench.roofline import Roofline, Step
from inferjax.bench.serving import Run
from inferjax.bench.throughput import Load, figures, mean_step, measure, table, warm_up
from inferjax.bench.workload import Mix, draw_asks
from inferjax.engine import Counters
from inferjax.sampling import SamplingParams

COUNTED = Counters(
    prompt_tokens=100,
    prefix_hit_tokens=80,
    prefill_tokens=20,
    padded_tokens=60,
    decode_rows=30,
    padded_rows=10,
    decode_dispatches=4,
    preemptions=2,
)


def run_of(*requests, seconds: float = 2.0) -> Run:
    return Run(served=requests, seconds=seconds, counted=COUNTED, peak_live=(3,))


def test_figures_are_rates_and_shares_of_what_was_counted():
    stats = shared_engine().stats()
    found = figures(run_of(served(), served(), failed()), stats, {"ttft": 200.0})
    assert (found["requests"], found["failed"]) == (3, 1)
    # Two good requests of 4 prompt and 5 output tokens in two seconds.
    assert found["requests_s"] == 1.0
    assert found["output_tok_s"] == 5.0
    assert found["total_tok_s"] == 9.0
    assert found["goodput_requests_s"] == 0.0
    assert found["prefill"]["hit_share"] == 0.8
    assert found["prefill"]["padding_share"] == 0.75
    assert found["decode"]["padding_share"] == 0.25
    assert (found["preemptions"], found["pages"]["peak_live"]) == (2, (3,))


def test_goodput_is_only_shown_when_asked_for():
    assert "goodput_requests_s" not in figures(run_of(served()), shared_engine().stats(), {})


def test_figures_of_nothing_are_zeros():
    found = figures(run_of(failed()), shared_engine().stats(), {})
    assert (found["requests_s"], found["output_tok_s"], found["latency_ms"]) == (0, 0, {})


def test_mean_step_is_the_average_over_time():
    # Each is out of the queue for 0.6 s of 0.3 s, and attends to 4 + 5 / 2 tokens on average.
    step = mean_step(run_of(served(), served(), seconds=0.3))
    assert step.batch == pytest.approx(4.0)
    assert step.context == pytest.approx(6.5)
    assert step.prefill == pytest.approx(2.0)


def test_roofline_is_the_slower_of_memory_and_matrix_products():
    model, roofline = tiny_model("llama"), tiny_roofline()
    weights = sum(leaf.nbytes for leaf in [model.params.embed])
    alone = roofline.limit(Step(batch=1, context=0))
    assert alone.bound == "memory"
    assert alone.seconds >= weights / 1e10
    assert roofline.limit(Step(batch=1, context=64)).seconds > alone.seconds
    crowd = roofline.limit(Step(batch=1000, context=0))
    assert crowd.bound == "compute"
    loaded = roofline.limit(Step(batch=1000, context=0, prefill=3))
    assert crowd.seconds < loaded.seconds <= 4 * crowd.seconds


def test_roofline_of_a_faster_machine_is_higher():
    model = tiny_model("llama")
    fast = dataclasses.replace(MACHINE, bandwidth_gbps=20.0)
    step = Step(batch=1, context=8)
    twice = Roofline(model.params, model.config, fast).limit(step).seconds
    assert tiny_roofline().limit(step).seconds == pytest.approx(2 * twice)


def test_measure_shows_what_a_shared_prefix_saves():
    mix = Mix(num_requests=6, input_len=3, output_len=4, shared_prefix=24)
    asks = draw_asks(mix, tiny_model("llama").config.vocab_size)
    found = measure(
        shared_engine(),
        tiny_roofline(),
        asks,
        Load(max_concurrency=1),
        goals={"e2el": 1e9},
        cache_salt="measure",
    )
    prefill = found["prefill"]
    assert prefill["asked_tokens"] == 6 * 27
    # All but the first find the prefix.
    assert (prefill["hit_tokens"], prefill["computed_tokens"]) == (5 * 24, 27 + 5 * 3)
    assert found["goodput_requests_s"] == found["requests_s"] > 0
    assert found["compilations"] == 0
    assert found["roofline"]["reached_share"] == pytest.approx(
        found["output_tok_s"] / found["roofline"]["output_tok_s"]
    )
    assert set(found["latency_ms"]) == {"queue", "prefill", "ttft", "tpot", "e2el", "itl"}
    assert json.loads(json.dumps(found))["load"]["max_concurrency"] == 1
    text = table(found)
    assert "goodput" in text
    assert "74.1% found in the cache" in text
    assert max(map(len, text.splitlines())) < 200


def test_settings_of_the_engine_become_json():
    assert json.loads(json.dumps(dataclasses.asdict(SMALL)))["max_running"] == 4


def test_warm_up_compiles_everything_and_leaves_nothing_to_find():
    engine = make_engine()
    warm_up(engine)
    sampling = SamplingParams(max_tokens=5, temperature=0.5, prompt_logprobs=1)
    (found,) = engine.generate([random_prompt(40)], sampling)
    stats = engine.stats()
    engine.close()
    assert found.error is None
    assert (stats.late_compilations, stats.totals.prefix_hit_tokens) == (0, 0)
