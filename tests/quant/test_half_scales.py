"""Scales and minimums in float16: what they cost in bytes and errors, and where they end."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from tiny_models import TINY, tiny_model

import inferjax as ij
from inferjax.calibrate import gptq
from inferjax.checkpoint.safetensors import open_safetensors
from inferjax.errors import UnsupportedConfig
from inferjax.models.params import ArraySpec, param_spec
from inferjax.models.quantized import form_of, pack_leaf
from inferjax.quant.fake import rounded_straight_through
from inferjax.quant.leaf import is_packed
from inferjax.quant.schemes import SCHEMES, group_rows, round_to_nearest
from inferjax.quant.watched import statistics_of
from pallas_kernels.quant_matmul import IMPLEMENTATIONS, dequantize, quant_matmul
from pallas_kernels.quant_matmul.reference import quant_matmul as reference_matmul
from tests.kernels import native_library

BITS = {"int4": 5.0, "int4-w4a8": 5.0, "int4-g64": 4.25, "int4-g128": 4.125}
WHERE = ("numpy", "xla")


def packed_by(matrix, name, where):
    run = functools.partial(round_to_nearest, scheme=SCHEMES[name])
    return run(matrix) if where == "numpy" else jax.jit(run)(jnp.asarray(matrix))


def test_every_four_bit_scheme_is_here():
    assert set(BITS) == {name for name, scheme in SCHEMES.items() if scheme.format == "int4"}


@pytest.mark.parametrize("name", BITS)
def test_bits_of_a_weight(name):
    packed = round_to_nearest(np.ones((256, 64), np.float32), SCHEMES[name])
    num_bytes = sum(array.nbytes for array in jax.tree.leaves(packed))
    assert num_bytes * 8 / (256 * 64) == BITS[name]


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("name", BITS)
@pytest.mark.parametrize("size", [1.0, 0.02, 1e-4, 300.0])
@pytest.mark.parametrize("offset", [0.0, 100.0])
def test_codes_are_those_of_the_stored_grid(rng, name, where, size, offset):
    """Also where a minimum that is rounded moves by more than a step."""
    scheme = SCHEMES[name]
    offset = offset * size if scheme.minimum else 0.0
    matrix = (rng.normal(size=(256, 32)) * size + offset).astype(np.float32)
    packed = packed_by(matrix, name, where)
    assert {array.dtype for array in jax.tree.leaves((packed.scales, packed.minimums))} == {
        np.dtype(np.float16)
    }
    scales = np.swapaxes(np.asarray(packed.scales, np.float32), 0, 1).reshape(-1, 32)
    step = np.abs(np.repeat(scales, scheme.group, axis=0))
    values = np.asarray(dequantize(packed))
    # Without a minimum the code 8 is on one side only; next to zero see `grid_of`.
    share = 0.5 if scheme.minimum else 1.0
    bound = np.maximum(share * step, 15 * 2.0**-25) + np.abs(matrix) * 2.0**-22
    assert (np.abs(values - matrix) <= bound).all()


@pytest.mark.parametrize("name", BITS)
@pytest.mark.parametrize("size", [1.0, 0.02])
def test_errors_are_those_of_scales_in_float32(name, size):
    matrix = (np.random.default_rng(5).normal(size=(1024, 512)) * size).astype(np.float32)
    wide = dataclasses.replace(SCHEMES[name], scale_dtype="float32")
    ours, theirs = (
        np.sqrt(np.mean(np.square(dequantize(round_to_nearest(matrix, s)) - matrix)))
        for s in (SCHEMES[name], wide)
    )
    assert ours <= theirs * 1.001


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("name", BITS)
@pytest.mark.parametrize("size", [1e-6, 1e-5, 1e-3, 1e4])
def test_every_implementation_reads_them_alike(rng, name, where, size):
    """Subnormal halves too."""
    scheme = SCHEMES[name]
    packed = packed_by((rng.normal(size=(128, 32)) * size).astype(np.float32), name, where)
    packed = jax.tree.map(jnp.asarray, packed)
    assert np.asarray(packed.scales).any()
    x = rng.normal(size=(3, 128)).astype(np.float32)
    known = np.asarray(reference_matmul(jnp.asarray(x), packed, activations=scheme.activations))
    for implementation in IMPLEMENTATIONS:
        if implementation == "cpu":
            native_library.require()
        ours = quant_matmul(
            jnp.asarray(x), packed, activations=scheme.activations, implementation=implementation
        )
        np.testing.assert_allclose(ours, known, rtol=0, atol=1e-5 * np.abs(known).max())


@pytest.mark.parametrize("name", BITS)
@pytest.mark.parametrize("size", [1e-7, 1e-6, 1e-4, 0.02, 1e4])
def test_numpy_and_xla_store_the_same_grids(rng, name, size):
    """But for a range whose fifteenth XLA rounds differently, just between two halves."""
    matrix = (rng.normal(size=(256, 64)) * size).astype(np.float32)
    ours, theirs = (packed_by(matrix, name, where) for where in WHERE)
    apart = np.asarray(ours.scales).view(np.int16) - np.asarray(theirs.scales).view(np.int16)
    assert np.abs(apart).max() <= 1
    assert np.mean(apart != 0) < 0.01
    if ours.minimums is not None:
        np.testing.assert_array_equal(ours.minimums, theirs.minimums)


@pytest.mark.parametrize("name", BITS)
def test_packing_packed_values_again_changes_nothing(rng, name):
    values = dequantize(round_to_nearest(rng.normal(size=(256, 64)), SCHEMES[name]))
    again = dequantize(round_to_nearest(values, SCHEMES[name]))
    if SCHEMES[name].minimum:
        np.testing.assert_allclose(again, values, rtol=0, atol=1e-6)
    else:
        np.testing.assert_array_equal(again, values)


@pytest.mark.parametrize("size", [1e-6, 1.0, 1e4])
@pytest.mark.parametrize("name", BITS)
def test_fake_quantization_has_the_same_values(rng, name, size):
    matrix = jnp.asarray(rng.normal(size=(128, 20)) * size, jnp.float32)
    packed = jax.jit(lambda m: dequantize(round_to_nearest(m, SCHEMES[name])))(matrix)
    fake = jax.jit(lambda m: rounded_straight_through(m, SCHEMES[name]))(matrix)
    np.testing.assert_array_equal(fake, packed)


@pytest.mark.parametrize("name", BITS)
def test_gptq_stores_the_grid_that_it_rounds_to(rng, name):
    scheme = SCHEMES[name]
    matrix = jnp.asarray(rng.normal(size=(128, 16)), jnp.float32)
    seen = statistics_of(jnp.asarray(rng.normal(size=(512, 128)), jnp.float32))
    packed = gptq.pack(matrix, seen, scheme)
    assert packed.scales.dtype == jnp.float16
    grouped = group_rows(dequantize(packed), scheme)
    scales = np.swapaxes(np.asarray(packed.scales, np.float32), 0, 1).reshape(-1, 16)
    shared = np.zeros_like(scales)
    if packed.minimums is not None:
        shared = np.swapaxes(np.asarray(packed.minimums, np.float32), 0, 1).reshape(-1, 16)
    codes = (np.asarray(grouped) - shared[:, None]) / scales[:, None]
    np.testing.assert_allclose(codes, np.rint(codes), rtol=0, atol=1e-3)


TOO_LARGE = {"scale": (4e6, -4e6), "minimum": (7e4, 6.9e4)}


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("name", BITS)
@pytest.mark.parametrize("which", TOO_LARGE)
def test_what_float16_does_not_hold_is_nan_and_nothing_beside_it(rng, name, where, which):
    if which == "minimum" and not SCHEMES[name].minimum:
        pytest.skip("there is no minimum")
    matrix = rng.normal(size=(128, 4)).astype(np.float32)
    known = dequantize(packed_by(matrix, name, where))
    group = SCHEMES[name].group
    matrix[:group, 1] = np.resize(TOO_LARGE[which], group)
    values = np.asarray(dequantize(packed_by(matrix, name, where)))
    broken = np.zeros(values.shape, bool)
    broken[:group, 1] = True
    assert np.isnan(values[broken]).all()
    np.testing.assert_array_equal(values[~broken], np.asarray(known)[~broken])


def too_large_params():
    model = tiny_model("llama")
    return model, jax.tree.map(lambda array: array, model.params).replace(
        embed=model.params.embed.at[3, 4].set(4e6)
    )


REFUSED = r"up to 4e\+06, too large for int4\n.*float16, which ends at 65504\n.*int8 or bfloat16"


@pytest.mark.parametrize("name", BITS)
def test_quantize_refuses_what_scales_do_not_hold(name):
    model, params = too_large_params()
    for weights in (params, jax.tree.map(np.asarray, params)):
        with pytest.raises(UnsupportedConfig, match=rf"params\.embed has values {REFUSED}"):
            ij.quantize(weights, model.config, name)
    ij.quantize(params, model.config, "int8")
    traced = jax.jit(ij.quantize, static_argnums=(1, 2))(params, model.config, name)
    assert np.isnan(np.asarray(traced.embed.matrix.scales)).sum() == 1


@pytest.mark.parametrize("recipe", ["awq", "gptq"])
def test_recipes_refuse_what_scales_do_not_hold(recipe):
    model, params = too_large_params()
    tokens = np.arange(16, dtype=np.int32)[None]
    with pytest.raises(UnsupportedConfig, match=rf"params\.embed has values {REFUSED}"):
        ij.calibrate.quantize(params, model.config, "int4", recipe=recipe, tokens=tokens)


def test_load_refuses_what_scales_do_not_hold(tmp_path):
    name = "model.layers.1.mlp.up_proj.weight"
    file = open_safetensors(TINY / "llama")
    tensors = {entry: file.read(entry).astype(np.float32) for entry in file.entries}
    tensors[name][3, 4] = 4e6
    safetensors.numpy.save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes((TINY / "llama" / "config.json").read_bytes())
    with pytest.raises(UnsupportedConfig, match=rf"up_proj.* of .* has values {REFUSED}"):
        ij.load(tmp_path, quantize="int4")
    ij.load(tmp_path, quantize="int8")
    saved = ij.save(ij.load(tmp_path), tmp_path / "saved")
    with pytest.raises(UnsupportedConfig, match=rf"layers/1/ffn/w_in has values {REFUSED}"):
        ij.load(saved, quantize="int4")


def scale_dtypes(params):
    leaves = jax.tree.leaves(params, is_leaf=is_packed)
    return {form_of(leaf).scale_dtype for leaf in leaves if is_packed(leaf)}


def test_saved_scales_in_float32_are_loaded_as_they_are(tmp_path):
    model = tiny_model("llama")
    wide = dataclasses.replace(SCHEMES["int4"], scale_dtype="float32")
    params = jax.tree.map(
        lambda spec, leaf: pack_leaf(leaf, spec, wide) if spec.num_in_axes else leaf,
        param_spec(model.config),
        model.params,
        is_leaf=lambda node: isinstance(node, ArraySpec),
    )
    path = ij.save(dataclasses.replace(model, params=params), tmp_path / "saved")
    again = ij.load(path).params
    assert scale_dtypes(again) == {"float32"}
    assert jax.tree.structure(again) == jax.tree.structure(params)
    jax.tree.map(np.testing.assert_array_equal, again, params)
    narrow = ij.load(path, quantize="int4").params
    assert scale_dtypes(narrow) == {"float16"}


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("size", [3e-8, 1e-7, 1e-30])
def test_groups_too_small_for_a_scale_are_not_all_moved_downwards(rng, where, size):
    matrix = (rng.normal(size=(256, 32)) * size).astype(np.float32)
    error = np.asarray(dequantize(packed_by(matrix, "int4", where))) - matrix
    assert np.sqrt(np.mean(error**2)) <= max(size, 15 * 2.0**-25)


@pytest.mark.parametrize("where", WHERE)
def test_a_group_of_equal_weights_is_kept(where):
    matrix = np.full((64, 32), 0.375, np.float32)
    np.testing.assert_array_equal(np.asarray(dequantize(packed_by(matrix, "int4", where))), matrix)
