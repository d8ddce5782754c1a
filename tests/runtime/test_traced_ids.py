"""Ids that nobody could check before the call show in the result, in their own row only."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_models import tiny_model

import inferjax as ij

GOOD = np.array([[5, 6, 7, 8], [9, 10, 11, 12]], np.int32)
MODEL = tiny_model("llama")
LENGTHS = np.array([4, 3], np.int32)


@jax.jit
def logits(tokens):
    return ij.forward(MODEL.params, MODEL.config, tokens, LENGTHS)


@jax.jit
def scores(tokens):
    return ij.score(MODEL.params, MODEL.config, tokens, LENGTHS)


@pytest.mark.parametrize("token", [-1, 320, 2**31 - 1])
def test_traced_id_outside_the_vocabulary_makes_its_row_nan_from_there(token):
    tokens = GOOD.copy()
    tokens[0, 2] = token
    got, known = np.asarray(logits(jnp.asarray(tokens))), np.asarray(logits(jnp.asarray(GOOD)))
    assert np.isnan(got[0, 2:]).all()
    np.testing.assert_array_equal(got[0, :2], known[0, :2])
    np.testing.assert_array_equal(got[1], known[1])
    got, known = np.asarray(scores(jnp.asarray(tokens))), np.asarray(scores(jnp.asarray(GOOD)))
    assert np.isnan(got[0, 1:]).all()
    np.testing.assert_array_equal(got[0, :1], known[0, :1])
    np.testing.assert_array_equal(got[1], known[1])


def test_traced_padding_may_be_any_id():
    tokens = GOOD.copy()
    tokens[1, 3] = -1
    np.testing.assert_array_equal(scores(jnp.asarray(tokens)), scores(jnp.asarray(GOOD)))
    assert np.isfinite(np.asarray(logits(jnp.asarray(tokens)))[1]).all()
