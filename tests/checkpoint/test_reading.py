"""Leaves are read in parts: what comes out, what is refused, and how much memory it takes."""

import threading

import jax
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from inferjax.checkpoint.matching import Leaf
from inferjax.checkpoint.memory import Room, aligned_empty
from inferjax.checkpoint.reading import read_leaf, read_leaves
from inferjax.checkpoint.safetensors import open_safetensors
from inferjax.checkpoint.tensor_file import PIECE_ELEMENTS
from inferjax.errors import CheckpointError
from inferjax.models.gguf_format import Part, Stored

STORED = ["float64", "float32", "float16", "bfloat16"]


def make_file(folder, **tensors):
    """Save tensors, also of float64, whose type the library spells out."""
    safetensors.numpy.save_file(tensors, folder / "m.safetensors")
    return open_safetensors(folder / "m.safetensors")


def make_leaf(shape, dtype="float32", name="w", begin=0, transform=None):
    stored = Stored((Part(name, shape, shape, begin),), transform)
    return Leaf((stored,), lambda values: values, shape, dtype)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("stored", STORED)
def test_every_stored_dtype_becomes_every_dtype_of_weights(tmp_path, stored, dtype):
    values = np.random.default_rng(0).normal(size=(5, 7)).astype(np.dtype(stored))
    file = make_file(tmp_path, w=values)
    got = read_leaf(file, make_leaf((5, 7), dtype), "here")
    assert got.dtype == dtype
    np.testing.assert_array_equal(got, values.astype(np.dtype(dtype)))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_tensor_of_several_pieces_is_read_whole(tmp_path, dtype):
    rows = PIECE_ELEMENTS // 1000 * 2 + 3
    values = np.random.default_rng(0).normal(size=(rows, 1000)).astype(np.float32)
    file = make_file(tmp_path, w=values)
    got = read_leaf(file, make_leaf((rows, 1000), dtype), "here")
    np.testing.assert_array_equal(got, values.astype(np.dtype(dtype)))
    parts = [part.copy() for part in file.pieces("w", 999, 2 * PIECE_ELEMENTS)]
    assert max(part.size for part in parts) <= PIECE_ELEMENTS
    np.testing.assert_array_equal(
        np.concatenate(parts), values.reshape(-1)[999 : 999 + 2 * PIECE_ELEMENTS]
    )


def test_a_leaf_may_take_a_part_of_a_tensor(tmp_path):
    values = np.arange(24, dtype=np.float32).reshape(4, 3, 2)
    file = make_file(tmp_path, w=values)
    got = read_leaf(file, make_leaf((3, 2), "bfloat16", begin=12), "here")
    np.testing.assert_array_equal(got, values[2])


def test_a_transform_sees_exact_values_before_they_are_rounded(tmp_path):
    file = make_file(tmp_path, w=np.float32([1 + 2**-9]))
    leaf = make_leaf((1,), "bfloat16", transform=lambda values: values - np.float32(1))
    assert read_leaf(file, leaf, "here")[0] == 2**-9


def test_scalars_and_empty_tensors_are_read(tmp_path):
    file = make_file(tmp_path, one=np.array(3, np.float32), none=np.zeros((3, 0), np.float16))
    assert read_leaf(file, make_leaf((), name="one"), "here") == 3
    assert read_leaf(file, make_leaf((3, 0), name="none"), "here").shape == (3, 0)


@pytest.mark.parametrize(
    ("stored", "value", "dtype"),
    [
        ("float32", 7e4, "float16"),
        ("bfloat16", 7e4, "float16"),
        ("float64", 1e39, "float32"),
        ("float64", -1e300, "bfloat16"),
        ("float32", 3.4e38, "bfloat16"),
    ],
)
def test_values_beyond_the_dtype_are_refused(tmp_path, stored, value, dtype):
    values = np.zeros(PIECE_ELEMENTS + 9, np.dtype(stored))
    values[[3, -1]] = value
    file = make_file(tmp_path, w=values)
    with pytest.raises(CheckpointError, match=rf"'w' of here has 2 of \d+ .* {dtype}") as error:
        read_leaf(file, make_leaf(values.shape, dtype), "here")
    assert error.value.count == 2


def test_a_transform_that_overflows_is_refused(tmp_path):
    file = make_file(tmp_path, w=np.float32([6e4]))
    leaf = make_leaf((1,), "float16", transform=lambda values: values * np.float32(2))
    with pytest.raises(CheckpointError, match="1 of 1 values that are too large for float16"):
        read_leaf(file, leaf, "here")


def test_a_file_that_became_shorter_is_an_error(tmp_path):
    file = make_file(tmp_path, w=np.ones(3000, np.float32))
    with (tmp_path / "m.safetensors").open("r+b") as handle:
        handle.truncate(5000)
    with pytest.raises(CheckpointError, match=r"ends inside tensor 'w'"):
        read_leaf(file, make_leaf((3000,)), "here")


@pytest.mark.parametrize("read", [lambda f: list(f.pieces("w")), lambda f: f.read("w")])
def test_a_closed_file_is_not_read(tmp_path, read):
    file = make_file(tmp_path, w=np.ones(3, np.float32))
    file.close()
    with pytest.raises(CheckpointError, match="closed"):
        read(file)


def test_threads_return_leaves_in_order_and_pass_errors_on(tmp_path):
    tensors = {f"w{i}": np.full((3, 50), i, np.float32) for i in range(40)}
    file = make_file(tmp_path, **tensors)
    leaves = [make_leaf((3, 50), "bfloat16", name) for name in tensors]
    done = []
    arrays = read_leaves(file, leaves, "here", done.append)
    assert [int(array[0, 0]) for array in arrays] == list(range(40))
    assert len(done) == 40
    with pytest.raises(CheckpointError, match="'none'"):
        read_leaves(file, [*leaves, make_leaf((3,), name="none")], "here", done.append)


def test_what_a_leaf_became_does_not_change_with_the_next_one(tmp_path):
    values = {name: np.full((4, 32), i, np.float32) for i, name in enumerate("ab")}
    file = make_file(tmp_path, **values)
    builds = [lambda v: v.reshape(8, 16), lambda v: v.T, lambda v: v]
    for build in builds:
        shape = build(values["a"]).shape
        leaves = [
            Leaf((Stored((Part(name, (4, 32), (4, 32)),)),), build, shape, "float32")
            for name in "ab"
        ]
        first, second = (read_leaf(file, leaf, "here") for leaf in leaves)
        assert (first == 0).all()
        assert (second == 1).all()


def test_large_arrays_begin_where_xla_takes_them_over():
    for shape in ((3, 5), (700, 1000)):
        values = aligned_empty(shape, np.dtype(ml_dtypes.bfloat16))
        values[...] = 1
        assert values.ctypes.data % 64 == 0
        array = jax.device_put(values)
        assert array.unsafe_buffer_pointer() == values.ctypes.data


def test_room_holds_back_what_does_not_fit():
    room, order = Room(10), []
    inside, leave = threading.Event(), threading.Event()

    def first():
        with room.of(8):
            inside.set()
            leave.wait(10)
            order.append("first leaves")

    def second():
        inside.wait(10)
        with room.of(3):
            order.append("second enters")

    threads = [threading.Thread(target=work) for work in (first, second)]
    for thread in threads:
        thread.start()
    inside.wait(10)
    with room.of(2):
        order.append("small enters")
    leave.set()
    for thread in threads:
        thread.join(10)
    assert order == ["small enters", "first leaves", "second enters"]
    with room.of(99):
        pass
