"""The product with packed weights inside jit, scan, vmap and grad, and on a mesh."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from pallas_kernels.quant_matmul import PackedWeight, dequantize, quant_matmul
from pallas_kernels.quant_matmul.cases import CASES, Case, make_weight, quantize
from tests.kernels import native_library
from tests.tolerances import MATMUL_F32

INT8 = Case(name="int8", num_in=64, num_out=48, format="int8", group=32)
FLOAT = Case(name="float32", num_in=64, num_out=48, format="float32")

native_library.require()


def make_packed(case: Case, seed: int = 0) -> PackedWeight:
    return jax.tree.map(jnp.asarray, quantize(make_weight(case, seed), case))


def make_x(*shape: int, seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape).astype(np.float32))


multiply = functools.partial(quant_matmul, implementation="cpu")


def test_auto_runs_the_native_kernel_on_a_cpu():
    x, packed = make_x(3, 64), make_packed(INT8)
    compiled = jax.jit(quant_matmul).lower(x, packed).compile().as_text()
    assert "PkQuantMatmul" in compiled
    assert "conditional" not in compiled
    np.testing.assert_array_equal(
        np.asarray(quant_matmul(x, packed)), np.asarray(multiply(x, packed))
    )


def test_leading_axes_are_rows():
    x, packed = make_x(2, 3, 5, 64), make_packed(INT8)
    got = multiply(x, packed)
    assert got.shape == (2, 3, 5, 48)
    np.testing.assert_array_equal(
        np.asarray(got).reshape(30, 48), np.asarray(multiply(x.reshape(30, 64), packed))
    )
    assert multiply(x[0, 0, 0], packed).shape == (48,)


def test_vmap_over_x_is_one_call_with_more_rows():
    x, packed = make_x(4, 3, 64), make_packed(INT8)
    mapped = jax.vmap(multiply, (0, None))
    jaxpr = str(jax.make_jaxpr(mapped)(x, packed))
    assert jaxpr.count("ffi_call") == 1
    assert "while" not in jaxpr
    assert "scan" not in jaxpr
    np.testing.assert_array_equal(np.asarray(mapped(x, packed)), np.asarray(multiply(x, packed)))
    twice = jax.vmap(mapped, (0, None))(x[None], packed)
    np.testing.assert_array_equal(np.asarray(twice[0]), np.asarray(multiply(x, packed)))


@pytest.mark.parametrize("x_axis", [0, None])
def test_vmap_over_weights_multiplies_one_by_one(x_axis):
    weights = [make_packed(INT8, seed) for seed in range(3)]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *weights)
    x = make_x(3, 5, 64) if x_axis == 0 else make_x(5, 64)
    got = jax.vmap(multiply, (x_axis, 0))(x, stacked)
    for index, weight in enumerate(weights):
        want = multiply(x[index] if x_axis == 0 else x, weight)
        np.testing.assert_array_equal(np.asarray(got[index]), np.asarray(want))


@pytest.mark.parametrize("activations", ["float32", "int8"])
def test_gradient_in_x_is_the_dequantized_weight(activations):
    x, packed = make_x(3, 64), make_packed(INT8)
    cotangent = make_x(3, 48, seed=1)

    def loss(x):
        return jnp.sum(multiply(x, packed, activations=activations) * cotangent)

    want = np.asarray(cotangent, np.float64) @ np.asarray(dequantize(packed), np.float64).T
    np.testing.assert_allclose(np.asarray(jax.grad(loss)(x)), want, **MATMUL_F32)
    np.testing.assert_allclose(np.asarray(jax.jit(jax.grad(loss))(x)), want, **MATMUL_F32)


def test_gradient_in_float_weights_and_scales():
    x, packed = make_x(3, 64), make_packed(FLOAT)

    def loss(weight, implementation):
        return jnp.sum(jnp.sin(quant_matmul(x, weight, implementation=implementation)))

    got = jax.grad(loss)(packed, "cpu").values
    want = jax.grad(loss)(packed, "xla").values
    np.testing.assert_allclose(np.asarray(got), np.asarray(want), **MATMUL_F32)
    packed = make_packed(INT8)

    def loss_of_scales(scales, implementation):
        return loss(dataclasses.replace(packed, scales=scales), implementation)

    got = jax.grad(loss_of_scales)(packed.scales, "cpu")
    want = jax.grad(loss_of_scales)(packed.scales, "xla")
    assert np.abs(np.asarray(want)).max() > 1
    np.testing.assert_allclose(np.asarray(got), np.asarray(want), rtol=1e-3, atol=1e-3)


def test_derivatives_compose_with_vmap_and_jvp():
    x, packed = make_x(4, 3, 64), make_packed(INT8)
    per_example = jax.vmap(jax.grad(lambda x: jnp.sum(multiply(x, packed) ** 2)))(x)
    whole = jax.grad(lambda x: jnp.sum(multiply(x, packed) ** 2))(x)
    np.testing.assert_allclose(np.asarray(per_example), np.asarray(whole), rtol=1e-4, atol=1e-3)
    out, tangent = jax.jvp(lambda x: multiply(x, packed), (x,), (x,))
    np.testing.assert_allclose(np.asarray(tangent), np.asarray(out), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("case", [INT8, FLOAT], ids=lambda c: c.name)
def test_scan_reads_the_weights_where_they_lie(case):
    packed, x = make_packed(case), make_x(2, 64)

    @jax.jit
    def steps(x, packed):
        def step(carry, _):
            out = quant_matmul(carry, packed)
            return jnp.tanh(jnp.concatenate([out, out[:, :16]], axis=1)), None

        return jax.lax.scan(step, x, None, length=5)[0]

    text = steps.lower(x, packed).compile().as_text()
    assert "PkQuantMatmul" in text
    shape = re.escape(",".join(str(n) for n in packed.values.shape))
    copies = re.findall(rf"= \w+\[{shape}\]\S* (?:copy|transpose|fusion|convert)\(.*", text)
    assert copies == []
    want = x
    for _ in range(5):
        out = multiply(want, packed)
        want = jnp.tanh(jnp.concatenate([out, out[:, :16]], axis=1))
    np.testing.assert_allclose(np.asarray(steps(x, packed)), np.asarray(want), **MATMUL_F32)


def test_shard_map_multiplies_a_shard_of_the_columns_on_each_device():
    case = dataclasses.replace(INT8, num_out=128)
    packed, x = make_packed(case), make_x(3, 64)
    mesh = jax.make_mesh((4,), ("model",), axis_types=(AxisType.Auto,))

    def local(x, weight):
        part = dataclasses.replace(weight, num_out=weight.num_out // 4)
        return multiply(x, part)

    sharded = jax.jit(
        jax.shard_map(local, mesh=mesh, in_specs=(P(), P("model")), out_specs=P(None, "model"))
    )
    np.testing.assert_array_equal(np.asarray(sharded(x, packed)), np.asarray(multiply(x, packed)))


def test_zero_sized_products_have_their_shape():
    packed = make_packed(CASES[-2])
    assert multiply(make_x(3, 8), packed).shape == (3, 0)
    empty = make_packed(CASES[-1])
    np.testing.assert_array_equal(np.asarray(multiply(make_x(3, 0), empty)), np.zeros((3, 5)))
