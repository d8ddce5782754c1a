"""The quality table: the original beside itself, schemes in the order of their bits, caches."""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from tiny_models import expected, tiny_model

import inferjax as ij
from inferjax.bench import quality
from inferjax.errors import InvalidInput, UnsupportedConfig, UnsupportedModel
from inferjax.models.quantized import quantize

MODEL = tiny_model("llama")
WINDOWS = expected("llama")["tokens"].astype(np.int32)
PLAN = quality.Plan(schemes=("bfloat16", "int8", "int4-g64"), recipes=("rtn",), kv=("float32",))


@pytest.fixture(scope="module")
def result():
    return quality.measure(MODEL.params, MODEL.config, WINDOWS, None, PLAN)


def test_the_original_is_what_score_says(result):
    row = result["rows"][0]
    scores = ij.score(MODEL.params, MODEL.config, WINDOWS)
    assert row["nll"] == pytest.approx(-float(np.mean(scores)), abs=1e-5)
    assert row["perplexity"] == pytest.approx(np.exp(row["nll"]))
    assert row["kl_mean"] == pytest.approx(0, abs=1e-6)
    assert row["top1_agreement"] == 1.0
    assert row["bytes_per_weight"] == 4.0
    assert result["num_predicted"] == scores.size


def test_divergence_and_agreement_are_those_of_the_logits(result):
    packed = quantize(MODEL.params, MODEL.config, "int4-g64")
    p, q = (
        np.asarray(ij.forward(weights, MODEL.config, WINDOWS), np.float64)[:, :-1]
        for weights in (MODEL.params, packed)
    )
    p, q = (x - np.log(np.exp(x).sum(-1, keepdims=True)) for x in (p, q))
    row = next(row for row in result["rows"] if row["scheme"] == "int4-g64")
    divergence = (np.exp(p) * (p - q)).sum(-1)
    assert row["kl_mean"] == pytest.approx(divergence.mean(), rel=1e-3)
    assert row["kl_p99"] == pytest.approx(np.quantile(divergence, 0.99), rel=1e-3)
    assert row["top1_agreement"] == pytest.approx(np.mean(p.argmax(-1) == q.argmax(-1)))


def test_fewer_bits_diverge_more_and_take_less(result):
    rows = [row for row in result["rows"] if row["recipe"]]
    assert [row["scheme"] for row in rows] == list(PLAN.schemes)
    sizes = [row["bytes_per_weight"] for row in rows]
    assert sizes == sorted(sizes, reverse=True)
    # Groups of this tiny model's 64 inputs are as large as whole columns.
    assert sizes[-1] < 0.7
    assert rows[0]["kl_mean"] < rows[1]["kl_mean"] < rows[2]["kl_mean"]


def test_a_cache_in_float32_changes_nothing(result):
    row = result["rows"][-1]
    assert (row["kv"], row["recipe"]) == ("float32", "")
    assert row["kl_mean"] == pytest.approx(0, abs=1e-6)


def test_the_table_has_a_line_a_row(result):
    lines = quality.table(result).splitlines()
    assert len(lines) == 3 + len(result["rows"])
    assert lines[3].startswith("float32 (the original)")
    assert lines[-1].startswith("keys and values in float32")


def test_variants_are_those_that_have_a_choice():
    plan = quality.Plan(
        schemes=("bfloat16", "int4"), recipes=("rtn", "awq", "gptq"), kv=("float16",)
    )
    assert [quality.title(v) for v in quality.variants_of(plan)] == [
        "bfloat16",
        "int4",
        "int4, awq",
        "int4, gptq",
        "keys and values in float16",
    ]


def gemma(num_layers):
    """Return a tiny Gemma's last layers: a window, none; less sure of itself than it is."""
    model = tiny_model("gemma3_text")
    layers = tuple(
        dataclasses.replace(layer, group=i)
        for i, layer in enumerate(model.config.layers[-num_layers:])
    )
    # Its random table is its head too: every token would be followed by itself for certain.
    norm: Any = model.params.final_norm
    norm = dataclasses.replace(norm, weight=jnp.full_like(norm.weight, -0.9))
    return (
        dataclasses.replace(
            model.params, layers=model.params.layers[-num_layers:], final_norm=norm
        ),
        dataclasses.replace(model.config, layers=layers),
    )


RANDOM = np.random.default_rng(0).integers(3, 200, (6, 40)).astype(np.int32)


def rows_of(params, config, plan):
    result = quality.measure(params, config, RANDOM[:2], RANDOM[2:], plan)
    assert all(np.isfinite(row["perplexity"]) for row in result["rows"])
    return {quality.title(row): row for row in result["rows"]}


def test_caches_in_eight_bits_have_rows():
    params, config = gemma(2)
    attention: list[Any] = [layer.attention for layer in config.layers]
    assert [layer.window for layer in attention] == [8, None]
    rows = rows_of(params, config, quality.Plan(schemes=(), kv=("float32", "int8", "fp8")))
    cost = {
        kind: rows[f"keys and values in {kind}"]["kl_mean"] for kind in ("float32", "int8", "fp8")
    }
    # Its attention weighs little beside its blocks, and eight bits of it less.
    assert abs(cost["float32"]) < 0.1 * cost["int8"]
    assert cost["int8"] < cost["fp8"] < 1e-4


def test_recipes_have_rows_in_groups_of_both_lengths():
    params, config = gemma(1)
    plan = quality.Plan(schemes=("int4-g64", "int4-g128"))
    rows = rows_of(params, config, plan)
    names = [f"{s}{r}" for s in plan.schemes for r in ("", ", awq", ", gptq")]
    assert list(rows) == ["float32 (the original)", *names]
    for scheme in plan.schemes:
        costs = {row["kl_mean"] for name, row in rows.items() if row["scheme"] == scheme}
        assert len(costs) == 3
        assert min(costs) > 0
    assert rows["int4-g128"]["num_bytes"] < rows["int4-g64"]["num_bytes"]


@pytest.mark.parametrize("change", [{"schemes": ("int3",)}, {"recipes": ("hqq",)}, {"kv": ("x",)}])
def test_unknown_names_are_refused_before_anything_runs(change):
    with pytest.raises(UnsupportedConfig):
        quality.variants_of(dataclasses.replace(PLAN, **change))


def test_a_recipe_without_a_text_and_a_model_without_a_head_are_refused():
    plan = quality.Plan(schemes=("int8",), recipes=("gptq",))
    with pytest.raises(InvalidInput, match="calibration"):
        quality.measure(MODEL.params, MODEL.config, WINDOWS, None, plan)
    labels = tiny_model("llama_classifier")
    with pytest.raises(UnsupportedModel):
        quality.measure(labels.params, labels.config, WINDOWS, None, PLAN)


def test_packed_weights_are_an_original_too():
    packed = quantize(MODEL.params, MODEL.config, "int8")
    plan = quality.Plan(schemes=("float32",), recipes=("rtn",))
    result = quality.measure(packed, MODEL.config, WINDOWS, None, plan)
    assert result["rows"][1]["kl_mean"] == pytest.approx(0, abs=1e-6)
    assert jnp.dtype(packed.embed.dtype) == jnp.float32
