"""Fake quantization: the values of packed weights, to the bit, and gradients that pass through."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_array_equal
from tiny_models import tiny_model

from inferjax.errors import ShapeError, UnsupportedConfig
from inferjax.models.params import ArraySpec, param_spec
from inferjax.models.quantized import dequantize, fake_quantize, quantize
from inferjax.quant.fake import rounded_straight_through
from inferjax.quant.schemes import SCHEMES, round_to_nearest
from pallas_kernels.quant_matmul import dequantize as values_of


@pytest.mark.parametrize("name", SCHEMES)
def test_values_are_those_of_the_packed_matrix(rng, name):
    scheme = SCHEMES[name]
    matrix = jnp.asarray(rng.normal(size=(2, 72, 19)), jnp.float32)

    def packed(matrix):
        return values_of(round_to_nearest(matrix, scheme))

    def fake(matrix):
        return rounded_straight_through(matrix, scheme)

    assert_array_equal(fake(matrix), packed(matrix))
    assert_array_equal(jax.jit(fake)(matrix), jax.jit(packed)(matrix))


@pytest.mark.parametrize("name", SCHEMES)
def test_gradients_pass_where_nothing_is_clipped(rng, name):
    matrix = jnp.asarray(rng.normal(size=(128, 16)), jnp.float32)
    # int4 without a minimum has a code for -8 and none for 8: a large negative value clips none.
    matrix = matrix.at[::64].set(-9.0)
    factor = jnp.asarray(rng.normal(size=matrix.shape), jnp.float32)
    slope = jax.grad(lambda m: jnp.sum(rounded_straight_through(m, SCHEMES[name]) * factor))
    assert_array_equal(slope(matrix), factor)


def test_clipped_values_have_no_gradient():
    column = jnp.zeros((64, 1)).at[:3, 0].set(jnp.asarray([-8.0, 7.4, 7.9]))
    seen = jax.grad(lambda m: rounded_straight_through(m, SCHEMES["int4-g64"]).sum())(column)
    assert_array_equal(seen[:4, 0], [1.0, 1.0, 0.0, 1.0])


def test_a_model_has_the_values_of_the_quantized_one():
    model = tiny_model("gpt_oss")
    fake = jax.jit(fake_quantize, static_argnums=(1, 2))(model.params, model.config, "int4")
    real = jax.jit(lambda p: dequantize(quantize(p, model.config, "int4")))(model.params)
    jax.tree.map(assert_array_equal, fake, real)
    specs = jax.tree.leaves(
        param_spec(model.config), is_leaf=lambda node: isinstance(node, ArraySpec)
    )
    before = jax.tree.leaves(model.params)
    for spec, new, old in zip(specs, jax.tree.leaves(fake), before, strict=True):
        assert np.array_equal(new, old) != bool(spec.num_in_axes)


def test_another_models_weights_and_unknown_schemes_are_refused():
    model = tiny_model("llama")
    with pytest.raises(UnsupportedConfig, match="int4-g64"):
        fake_quantize(model.params, model.config, "int3")
    with pytest.raises(ShapeError):
        fake_quantize(model.params, tiny_model("qwen3").config, "int4")


def test_packed_weights_are_refused_as_they_take_no_gradient():
    model = tiny_model("llama")
    packed = quantize(model.params, model.config, "int8")
    with pytest.raises(UnsupportedConfig, match=r"embed is packed as int8(.|\n)*quantize='none'"):
        fake_quantize(packed, model.config, "int4")
    with pytest.raises(UnsupportedConfig, match="embed is packed"):
        jax.eval_shape(lambda p: fake_quantize(p, model.config, "int4"), packed)
