import dataclasses
import json

import jax
import pytest

from inferjax.bench import latency
from inferjax.config import MLP, Attention, Exec, LayerSpec, ModelConfig, Norm, Rope
from inferjax.errors import InvalidInput
from inferjax.models.params import random_params
from inferjax.models.quantized import quantize

ATTENTION = Attention(
    num_q_heads=2, num_kv_heads=1, head_dim=8, scale=0.35, rope=Rope(theta=1e4, dim=8)
)
LAYER = LayerSpec(attention=ATTENTION, ffn=MLP(ffn_dim=16), norm=Norm())
CONFIG = ModelConfig(
    family="llama",
    vocab_size=32,
    model_dim=16,
    max_context=64,
    layers=(LAYER,),
    final_norm=Norm(),
    tied=True,
)
EXEC = Exec(page_size=8, prefill_chunk=8)
PLAN = latency.Plan(batches=(1, 2), context=12, prefills=(20,), steps=4, repeats=3)


def make_work(**changes):
    return latency.Work(**{"num_tokens": 8, "num_bytes": 4e9, "flops": 1e9} | changes)


def test_latency_measures_every_case_of_the_plan():
    result = latency.measure(random_params(CONFIG, jax.random.key(0)), CONFIG, plan=PLAN, exec=EXEC)
    rows = result["rows"]
    assert [(r["kind"], r["batch"], r["context"]) for r in rows] == [
        ("prefill", 1, 20),
        ("decode", 1, 12),
        ("decode", 2, 12),
    ]
    for row in rows:
        assert 0 < row["slowest_tok_s"] <= row["tok_s"] <= row["fastest_tok_s"]
        assert 0 < row["limit_share"] < 1
        assert row["limit_share"] == pytest.approx(row["tok_s"] / row["limit_tok_s"])
    assert json.loads(json.dumps(result)) == json.loads(json.dumps(result))
    text = latency.table(result)
    assert text.startswith("float32 weights; ")
    assert text.count("decode") == 2
    assert "prefill" in text


def test_latency_says_that_weights_are_packed():
    params = quantize(random_params(CONFIG, jax.random.key(0)), CONFIG, "int8")
    plan = dataclasses.replace(PLAN, batches=(1,), repeats=1)
    result = latency.measure(params, CONFIG, plan=plan, exec=EXEC)
    assert latency.table(result).startswith("weights packed as int8; ")


def test_latency_limit_is_the_slower_of_memory_and_compute():
    memory = latency._row("decode", 8, 0, [2.0], make_work(), 4.0, 2.0)
    assert (memory.bound, memory.limit_tok_s, memory.limit_share) == ("memory", 8.0, 0.5)
    compute = latency._row("decode", 8, 0, [2.0], make_work(flops=3e9), 4.0, 2.0)
    assert (compute.bound, compute.limit_share) == ("compute", 0.75)


def test_latency_reports_the_median_and_the_range():
    row = latency._row("decode", 8, 0, [1.0, 4.0, 2.0], make_work(), 4.0, 2.0)
    assert (row.slowest_tok_s, row.tok_s, row.fastest_tok_s) == (2.0, 4.0, 8.0)


@pytest.mark.parametrize(
    ("changes", "text"), [({"steps": 0}, "size"), ({"context": 61}, "65 tokens of context")]
)
def test_latency_refuses_a_plan_that_does_not_fit(changes, text):
    plan = latency.Plan(**{"batches": (1,), "context": 8, "prefills": (8,), "steps": 4} | changes)
    with pytest.raises(InvalidInput, match=text):
        latency._check(plan, CONFIG)
