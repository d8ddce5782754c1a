"""Measuring this machine as a chip, with sizes so small that only the bookkeeping is looked at."""

import dataclasses

import jax
import numpy as np
import pytest

from inferjax.bench import machine, prediction
from inferjax.checkpoint.opened import read_model_config
from inferjax.config import Exec
from inferjax.models.params import abstract_params, check_params, random_params
from inferjax.models.quantized import quantize
from inferjax.planner import make_model
from inferjax.planner.leaves import loaded_leaves
from inferjax.quant.leaf import is_packed, size_of

EXEC = Exec(page_size=8)


def one_layer(tiny, family):
    config = dataclasses.replace(read_model_config(tiny / family), dtype="float32")
    return dataclasses.replace(config, layers=config.layers[-1:])


@pytest.mark.parametrize("family", ["llama", "deepseek_v3", "gemma3_text", "opt"])
def test_small_model_has_the_layers_and_next_to_no_weights(family, tiny):
    config = dataclasses.replace(read_model_config(tiny / family), dtype="float32")
    wide = dataclasses.replace(config, model_dim=4096)
    small, params = machine.small_model(make_model(wide))
    check_params(params, small)
    assert small.num_layers == config.num_layers
    assert small.vocab_size == config.vocab_size
    for ours, theirs in zip(small.layers, config.layers, strict=True):
        assert ours.attention.num_q_heads == theirs.attention.num_q_heads
        assert ours.ffn.ffn_dim == 64
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(params))


def test_small_model_is_packed_as_the_model_is(tiny):
    model = make_model(one_layer(tiny, "llama"), quantize="int4")
    _, params = machine.small_model(model)
    assert is_packed(params.layers[0].attention.wqkv)
    assert params.layers[0].attention.wqkv.matrix.group == 32
    assert not is_packed(params.final_norm.weight)


@pytest.mark.parametrize("quantize", [None, "int8"])
def test_products_read_the_weights_of_the_model(quantize, tiny, monkeypatch):
    model = make_model(one_layer(tiny, "mixtral"), quantize=quantize)
    monkeypatch.setattr(machine.limits, "median_seconds", lambda call, _: (call(), 2.0)[1])
    found = 2.0 * machine.measure_products(model, 3)
    # Of a stack of experts one stands for all: its bytes are read, not theirs.
    leaves = [leaf for leaf in model.leaves if leaf.name in ("embed", "head")]
    assert sum(leaf.num_bytes for leaf in leaves[1:]) < found < model.weight_bytes
    few = 2.0 * machine.measure_products(model, 3, most_bytes=1)
    assert few <= found


def test_loaded_weights_are_what_is_predicted_for(tiny):
    config = one_layer(tiny, "qwen3")
    params = jax.eval_shape(lambda p: quantize(p, config, "int4"), abstract_params(config))
    model = prediction.loaded_model(params, config, Exec(kv_dtype="int8"))
    real = sum(size_of(leaf) for leaf in jax.tree.leaves(params, is_leaf=is_packed))
    assert model.weight_bytes == real
    assert model.leaves == loaded_leaves(config, params)
    assert model.kv_dtype == "int8"


def test_prediction_stands_beside_what_is_measured(tiny):
    config = one_layer(tiny, "llama")
    params = random_params(config, jax.random.key(0))
    result = prediction.compare(
        params, config, batches=(2,), contexts=(8,), steps=2, repeats=1, exec=EXEC
    )
    (row,) = result["rows"]
    assert (row["batch"], row["context"]) == (2, 8)
    assert row["ratio"] == pytest.approx(row["predicted_tok_s"] / row["measured_tok_s"])
    assert [step["rows"] for step in result["chip"]["measured"]] == [2]
    text = prediction.table(result)
    assert "predicted / measured" in text
    assert len(text.splitlines()) == 5
