"""Weights packed while they are read: where rows go, what they become, and how much memory."""

import tracemalloc

import jax
import numpy as np
import pytest
import safetensors.numpy
from tiny_models import TINY, tiny_model

import inferjax as ij
from inferjax.checkpoint.columns import find_columns
from inferjax.checkpoint.load import load
from inferjax.checkpoint.packing import Packing, read_packed
from inferjax.checkpoint.safetensors import open_safetensors
from inferjax.checkpoint.tensor_file import CODE_ELEMENTS
from inferjax.errors import CheckpointError, PackedWeightsWarning, UnsupportedConfig
from inferjax.models.gguf_format import Part, Stored
from inferjax.models.params import ArraySpec
from inferjax.models.quantized import abstract_leaf, form_of, pack_leaf
from inferjax.models.sources import stack_transposed
from inferjax.quant.leaf import is_packed
from inferjax.quant.schemes import SCHEMES


def columns(*shapes, build, shape, num_in_axes=1, num_batch_axes=0, undo=None):
    """Return where rows of parts go, None for none."""
    reads = [Stored((Part(f"t{i}", s, s),), undo) for i, s in enumerate(shapes)]
    spec = ArraySpec(
        shape, ("",) * len(shape), num_in_axes=num_in_axes, num_batch_axes=num_batch_axes
    )
    found = find_columns(reads, build, spec)
    return found and [None if part is None else part.tolist() for part in found]


def test_rows_of_a_linear_weight_are_columns_in_order():
    assert columns((3, 8), build=lambda w: w.T, shape=(8, 3)) == [[0, 1, 2]]
    assert columns((3, 8), build=lambda w: w, shape=(3, 8), num_in_axes=-1) == [[0, 1, 2]]


def test_rows_of_fused_and_reordered_weights_are_found():
    stacked = columns(
        (2, 8), (2, 8), build=lambda a, b: np.stack([a, b]).transpose(2, 0, 1), shape=(8, 2, 2)
    )
    assert stacked == [[0, 1], [2, 3]]
    assert columns((3, 8), build=lambda w: w[[2, 0, 1]].T, shape=(8, 3)) == [[1, 2, 0]]
    heads = columns(
        (4, 8),
        build=lambda w: w.reshape(4, 2, 4).transpose(1, 2, 0),
        shape=(2, 4, 4),
        num_in_axes=2,
    )
    assert heads == [[0, 1, 2, 3]]


def test_parts_and_rows_that_a_weight_leaves_out_are_known():
    assert columns((4, 8), build=lambda w: w[1:3].T, shape=(8, 2)) == [[-1, 0, 1, -1]]
    assert columns((2, 8), (2, 4), build=lambda a, b: a.T, shape=(8, 2)) == [[0, 1], None]


def test_columns_of_stacked_matrices_are_counted_through():
    stacked = columns(
        (2, 8),
        (2, 8),
        build=lambda *w: np.stack(w).transpose(0, 2, 1),
        shape=(2, 8, 2),
        num_batch_axes=1,
    )
    assert stacked == [[0, 1], [2, 3]]
    whole = columns((2, 3, 8), build=lambda w: w.swapaxes(1, 2), shape=(2, 8, 3), num_batch_axes=1)
    assert whole == [[0, 1, 2, 3, 4, 5]]


def test_finding_columns_takes_the_memory_of_two_weights():
    """Four bytes a value, of one array of numbers at a time and a copy in another order."""
    reads = [Stored((Part(f"t{i}", (512, 512), (512, 512)),), None) for i in range(2)]
    spec = ArraySpec((512, 2, 512), ("",) * 3, num_in_axes=1)
    tracemalloc.start()
    found = find_columns(reads, stack_transposed, spec)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert found is not None
    assert peak < 2.25 * 4 * 2 * 512 * 512


@pytest.mark.parametrize(
    "build",
    [
        lambda w: w,  # rows are inputs
        lambda w: w[:, ::-1].T,
        lambda w: w.T + 1,
        lambda w: w.T * 2,
        lambda w: w.T.astype(np.float32) - np.float32(1),
        lambda w: w[[0] * 8].T,
    ],
)
def test_what_mixes_rows_or_computes_has_no_columns(build):
    assert columns((8, 8), build=build, shape=(8, 8)) is None


def test_rows_of_a_slice_are_not_whole():
    assert columns((8, 16), build=lambda w: w[:, :8].T, shape=(8, 8)) is None
    assert columns((8, 8), build=lambda w: w.T, shape=(8, 8), undo=lambda w: w.T) is None
    assert columns((0, 8), build=lambda w: w.T, shape=(8, 0)) is None


@pytest.mark.parametrize("name", ["llama", "gpt2", "qwen3_moe", "deepseek_v3", "phi3_longrope"])
@pytest.mark.parametrize("scheme", ["int4", "int8", "bfloat16"])
def test_packing_while_reading_gives_what_packing_afterwards_does(name, scheme):
    model = load(TINY / name, quantize=scheme)
    arrays = jax.tree.map(np.asarray, tiny_model(name).params)
    wanted = ij.quantize(arrays, model.config, scheme)
    assert jax.tree.structure(model.params) == jax.tree.structure(wanted)
    jax.tree.map(np.testing.assert_array_equal, model.params, wanted)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_scheme_is_read(scheme):
    model = load(TINY / "llama", quantize=scheme)
    leaves = [leaf for leaf in jax.tree.leaves(model.params, is_leaf=is_packed) if is_packed(leaf)]
    how = SCHEMES[scheme]
    assert {(leaf.matrix.format, leaf.matrix.group, leaf.activations) for leaf in leaves} == {
        (how.format, how.group, how.activations)
    }
    assert {leaf.matrix.values.platform() for leaf in leaves} == {"cpu"}


def test_packing_takes_little_memory_beside_the_leaf(tmp_path):
    rows, num_in = 12 * CODE_ELEMENTS // 256 + 5, 256
    values = np.random.default_rng(0).normal(size=(rows, num_in)).astype(np.float16)
    safetensors.numpy.save_file({"w": values}, tmp_path / "m.safetensors")
    file = open_safetensors(tmp_path / "m.safetensors")
    part = Part("w", values.shape, values.shape)
    spec = ArraySpec(values.shape, ("vocab", "model"), num_in_axes=-1)
    packing = Packing(spec, SCHEMES["int4"], find_columns([Stored((part,))], lambda w: w, spec))
    tracemalloc.start()
    leaf = read_packed(file, (part,), packing, "here")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert leaf.nbytes > 4 * 0.6 * CODE_ELEMENTS
    assert peak < 32 * CODE_ELEMENTS  # large arrays that stay are outside of the heap
    wanted = pack_leaf(values.astype(np.float32), spec, SCHEMES["int4"])
    jax.tree.map(np.testing.assert_array_equal, leaf, wanted)


def test_a_leaf_is_known_before_its_values_are():
    spec = ArraySpec((24, 5), ("a", "b"), num_in_axes=1)
    for scheme in SCHEMES.values():
        leaf = pack_leaf(np.ones(spec.shape, np.float32), spec, scheme)
        abstract = abstract_leaf(spec, form_of(leaf))
        assert jax.tree.structure(abstract) == jax.tree.structure(leaf)
        assert jax.tree.map(lambda a: (a.shape, a.dtype), abstract) == jax.tree.map(
            lambda a: (a.shape, a.dtype), leaf
        )


def test_values_that_are_not_finite_are_refused_while_packing(tmp_path):
    file, name = open_safetensors(TINY / "llama"), "model.layers.1.mlp.up_proj.weight"
    tensors = {entry: file.read(entry).copy() for entry in file.entries}
    tensors[name][3, 4] = np.inf
    safetensors.numpy.save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes((TINY / "llama" / "config.json").read_bytes())
    with pytest.raises(CheckpointError, match=r"up_proj.* has 1 of \d+ values"):
        load(tmp_path, quantize="int8")


@pytest.mark.parametrize("scheme", ["int5", "", "INT4", "int4 "])
def test_unknown_schemes_are_refused_before_anything_is_read(scheme):
    with pytest.raises(UnsupportedConfig, match=r"no such scheme\n.*int4, .*native.*none"):
        load("no-such-model", quantize=scheme)


def test_a_missing_native_library_is_said_once(monkeypatch):
    why = "the native library has not been built: build it"
    monkeypatch.setattr("pallas_kernels.native.unavailable_reason", lambda: why)
    with pytest.warns(PackedWeightsWarning, match=rf"slow here.*{why}") as caught:
        load(TINY / "llama", quantize="int8")
    assert len(caught) == 1
    load(TINY / "llama")  # no packed weights, no warning
