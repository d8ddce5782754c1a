"""Whole models: the tree of rounding to nearest, with weights that fit the text better."""

import dataclasses

import jax
import numpy as np
import pytest
from one_layer import one_layer, random_tokens

import inferjax as ij
from inferjax.calibrate import quantize
from inferjax.errors import InvalidInput, ShapeError, UnsupportedConfig
from inferjax.models import quantized
from inferjax.models.decoder import unembed

# Every kind of layer: grouped-query attention, latent attention with experts and a shared one,
# experts with biases.
FAMILIES = ("llama", "deepseek_v3", "gpt_oss")
OTHERS = ("gemma3_text", "gpt2", "opt_post_norm", "olmo2", "cohere", "qwen2_moe", "phi3")
SCHEME = "int4-g64"


def error(params, original, config, tokens):
    """Return the error of logits that is due to layers and head; tables are rounded alike."""
    params = quantized.dequantize(params)
    original = dataclasses.replace(original, embed=params.embed)
    seen = ij.forward(params, config, tokens)
    return float(np.square(seen - ij.forward(original, config, tokens)).mean())


def check(folder, recipe):
    params, config = one_layer(folder)
    tokens = random_tokens(config, 12, 64)
    plain = quantized.quantize(params, config, SCHEME)
    fitted = quantize(params, config, SCHEME, recipe=recipe, tokens=tokens)
    assert jax.tree.structure(fitted) == jax.tree.structure(plain)
    for new, old in zip(jax.tree.leaves(fitted), jax.tree.leaves(plain), strict=True):
        assert (new.shape, new.dtype) == (old.shape, old.dtype)
    other = random_tokens(config, 2, 64, seed=1)
    errors = [error(p, params, config, other) for p in (fitted, plain)]
    assert errors[0] < errors[1]


@pytest.mark.parametrize("folder", FAMILIES)
@pytest.mark.parametrize("recipe", ["awq", "gptq"])
def test_a_fitted_model_is_nearer_to_the_original(folder, recipe):
    check(folder, recipe)


@pytest.mark.slow
@pytest.mark.parametrize("folder", OTHERS)
@pytest.mark.parametrize("recipe", ["awq", "gptq"])
def test_a_fitted_model_of_another_family_is_nearer_to_the_original(folder, recipe):
    check(folder, recipe)


def test_a_tied_table_is_fitted_to_what_the_head_reads():
    params, config = one_layer("qwen3")
    params = dataclasses.replace(params, head=None)
    config = dataclasses.replace(config, tied=True)
    tokens = random_tokens(config, 12, 64)
    rows = ij.activations(params, config, tokens, taps=("final",))["final"]
    wanted = unembed(params, config, rows)
    fitted = quantize(params, config, SCHEME, recipe="gptq", tokens=tokens)
    plain = quantized.quantize(params, config, SCHEME)
    errors = [np.square(unembed(p, config, rows) - wanted).mean() for p in (fitted, plain)]
    assert errors[0] < 0.9 * errors[1]


def test_rounding_to_nearest_needs_no_text():
    params, config = one_layer("llama")
    fitted = quantize(params, config, SCHEME, recipe="rtn")
    plain = quantized.quantize(params, config, SCHEME)
    jax.tree.map(np.testing.assert_array_equal, fitted, plain)


def test_what_cannot_be_calibrated_is_refused():
    params, config = one_layer("llama")
    tokens = random_tokens(config, 1, 8)
    for scheme, recipe in (("int3", "gptq"), (SCHEME, "magic"), ("bfloat16", "gptq")):
        with pytest.raises(UnsupportedConfig):
            quantize(params, config, scheme, recipe=recipe, tokens=tokens)
    with pytest.raises(ShapeError):
        quantize(params, one_layer("gpt_oss")[1], SCHEME, tokens=tokens)
    with pytest.raises(ShapeError):
        quantize(params, config, SCHEME, tokens=[[1, 2], [3]])
    with pytest.raises(InvalidInput):
        quantize(params, config, SCHEME, tokens=tokens + config.vocab_size)


@pytest.mark.parametrize("tokens", [None, [], [[]], np.zeros((0, 8), int), np.zeros((2, 0), int)])
def test_no_tokens_are_refused(tokens):
    params, config = one_layer("llama")
    with pytest.raises(InvalidInput, match=r"recipe='awq' without a token(.|\n)*pass tokens="):
        quantize(params, config, SCHEME, recipe="awq", tokens=tokens)


@pytest.mark.parametrize("recipe", ["rtn", "gptq"])
def test_weights_that_are_packed_already_are_calibrated_as_the_values_they_have(recipe):
    params, config = one_layer("llama")
    tokens = random_tokens(config, 2, 32)
    packed = quantized.quantize(params, config, "int8")
    fitted = quantize(packed, config, SCHEME, recipe=recipe, tokens=tokens)
    wanted = quantize(ij.dequantize(packed), config, SCHEME, recipe=recipe, tokens=tokens)
    jax.tree.map(np.testing.assert_array_equal, fitted, wanted)
