"""Packed weights beside arrays in bfloat16: what is added to what must have one dtype."""

import functools

import jax
import jax.numpy as jnp
import pytest
from tiny_models import TINY

import inferjax as ij

FAMILIES = sorted(path.parent.name for path in TINY.glob("*/config.json"))


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_runs(family):
    """Traced only: a sum of two dtypes is an error there, as promotion is strict in tests."""
    model = ij.load(TINY / family, dtype="bfloat16", quantize="int8")
    tokens = jax.ShapeDtypeStruct((1, 3), jnp.int32)
    run = functools.partial(ij.activations, config=model.config, taps=("final",))
    hidden = jax.eval_shape(lambda params, tokens: run(params, tokens=tokens), model.params, tokens)
    assert hidden["final"].dtype == model.params.embed.dtype
