"""safetensors: files and folders against the library's writer, and every way a file can lie."""

import json
import pickle
import tracemalloc

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from make_files import make_entry, make_safetensors

from inferjax.checkpoint.safetensors import INDEX_NAME, MAX_JSON_BYTES, open_safetensors
from inferjax.errors import CheckpointError

ARRAYS = {
    "a": np.arange(6, dtype=np.float32).reshape(2, 3),
    "b": np.arange(4, dtype=np.float16),
    "c": np.array([[1.5, -2.0]], ml_dtypes.bfloat16),
    "empty": np.zeros((0, 3), np.float32),
    "scalar": np.array(3.5, np.float32),
}


def assert_reads_as(file, arrays):
    assert set(file.entries) == set(arrays)
    for name, expected in arrays.items():
        got = file.read(name)
        assert (got.dtype, got.shape) == (expected.dtype, expected.shape)
        assert (file.entries[name].dtype, file.entries[name].shape) == (got.dtype, got.shape)
        np.testing.assert_array_equal(got, expected)
        assert not got.flags.writeable


def make_shards(folder):
    """Write two shards and their index; return the index for a test to bend."""
    first = {name: ARRAYS[name] for name in ("a", "b")}
    second = {name: ARRAYS[name] for name in ("c", "empty", "scalar")}
    names = ["model-1-of-2.safetensors", "model-2-of-2.safetensors"]
    for name, arrays in zip(names, (first, second), strict=True):
        safetensors.numpy.save_file(arrays, folder / name)
    weight_map = dict.fromkeys(first, names[0]) | dict.fromkeys(second, names[1])
    index = {"metadata": {"total_size": 99}, "weight_map": weight_map}
    write_index(folder, index)
    return index


def write_index(folder, index):
    (folder / INDEX_NAME).write_text(index if isinstance(index, str) else json.dumps(index))


def test_file_of_the_library_writer_reads_back(tmp_path):
    path = tmp_path / "any name.safetensors"
    safetensors.numpy.save_file(ARRAYS, path, metadata={"format": "np"})
    file = open_safetensors(path)
    assert_reads_as(file, ARRAYS)
    assert file.metadata == {"format": "np"}


def test_folder_with_one_file_reads_back(tmp_path):
    safetensors.numpy.save_file(ARRAYS, tmp_path / "model.safetensors")
    assert_reads_as(open_safetensors(tmp_path), ARRAYS)


def test_sharded_folder_reads_back(tmp_path):
    make_shards(tmp_path)
    for path in (tmp_path, tmp_path / INDEX_NAME):
        file = open_safetensors(path)
        assert_reads_as(file, ARRAYS)
        assert file.metadata == {"total_size": 99}


def test_misaligned_data_is_read_into_aligned_arrays(tmp_path):
    data = np.array([1, 2], np.float32).tobytes()
    header = json.dumps({"w": make_entry()}).encode()
    header += b" " * (-len(header) % 8 + 3)
    (tmp_path / "m.safetensors").write_bytes(make_safetensors(header, data))
    got = open_safetensors(tmp_path / "m.safetensors").read("w")
    assert got.flags.aligned
    assert got.tolist() == [1, 2]


def test_reading_maps_the_file_instead_of_copying_it(tmp_path):
    safetensors.numpy.save_file(
        {"w": np.ones((1024, 1024), np.float32)}, tmp_path / "m.safetensors"
    )
    file = open_safetensors(tmp_path / "m.safetensors")
    tracemalloc.start()
    try:
        got = file.read("w")
        assert tracemalloc.get_traced_memory()[1] < 100_000
    finally:
        tracemalloc.stop()
    file.close()
    assert got.sum() == 1024 * 1024
    with pytest.raises(CheckpointError, match="is closed"):
        file.read("w")


@pytest.mark.parametrize("dtype", [np.complex64, np.int64, np.uint8, np.bool])
def test_other_dtypes_are_listed_but_not_read_as_weights(tmp_path, dtype):
    safetensors.numpy.save_file({"ids": np.zeros(3, dtype)}, tmp_path / "m.safetensors")
    file = open_safetensors(tmp_path / "m.safetensors")
    assert file.entries["ids"].dtype == np.dtype(dtype).name
    with pytest.raises(CheckpointError, match=f"'ids' as {np.dtype(dtype).name}"):
        file.read("ids")


def test_unknown_name_is_refused(tmp_path):
    safetensors.numpy.save_file(ARRAYS, tmp_path / "m.safetensors")
    with pytest.raises(CheckpointError, match="has no tensor 'absent'"):
        open_safetensors(tmp_path / "m.safetensors").read("absent")


W = {"w": make_entry()}
EIGHT = bytes(8)
W_TEXT = json.dumps(make_entry())
BAD_FILES = {
    "empty": (b"", "is empty (0 bytes)"),
    "seven-bytes": (b"\x02" + bytes(6), "7 bytes"),
    "header-claims-2**63": (make_safetensors(W, EIGHT, 2**63), f"claims {2**63}"),
    "header-past-end": (make_safetensors(W, EIGHT, 5000), "claims 5000"),
    "header-one-past-end": (make_safetensors({}, length=3), "claims 3"),
    "header-cut": (make_safetensors(W, EIGHT)[:40], "40 bytes"),
    "header-length-0": (make_safetensors(b""), "no safetensors header"),
    "header-not-object": (make_safetensors([1]), "no safetensors header"),
    "header-shorter-than-json": (make_safetensors(W, EIGHT, 30), "JSON"),
    "git-lfs-pointer": (b"version https://git-lfs.github.com/spec/v1\noid", "Git LFS pointer"),
    "renamed-pickle": (pickle.dumps({"a": 1}, protocol=2), "pickle"),
    "renamed-zip": (b"PK\x03\x04\x00\x00\x08\x08" + bytes(60), "pickle"),
    "not-utf8": (make_safetensors(b'{"\xff":1}'), "JSON"),
    "not-json": (make_safetensors(b"{]"), "JSON"),
    "nan": (make_safetensors(b'{"__metadata__": NaN}'), "NaN is not JSON"),
    "endless-number": (make_safetensors(b'{"w": ' + b"9" * 10_000 + b"}"), "JSON"),
    "depth-bomb-arrays": (make_safetensors(b'{"w":' + b"[" * 100_000 + b" " * 10**6), "JSON"),
    "depth-bomb-objects": (
        make_safetensors(b'{"w":' + b'{"w":' * 100_000 + b" " * 10**6),
        "recursion",
    ),
    "list-bomb": (
        make_safetensors(b'{"w":[' + b"[]," * 100_000 + b"[]]}"),
        "100003 lists and objects",
    ),
    "name-twice": (
        make_safetensors(f'{{"w": {W_TEXT}, "w": {W_TEXT}}}'.encode(), EIGHT),
        "'w' appears twice",
    ),
    "field-twice": (
        make_safetensors(b'{"w":{"dtype":"F32","dtype":"F32","shape":[2],"data_offsets":[0,8]}}'),
        "'dtype' appears twice",
    ),
    "metadata-not-strings": (
        make_safetensors({"__metadata__": {"a": 1}, **W}, EIGHT),
        "__metadata__",
    ),
    "metadata-a-list": (make_safetensors({"__metadata__": []}), "__metadata__"),
    "entry-not-object": (make_safetensors({"w": 3}), "'w' with other fields"),
    "entry-without-shape": (
        make_safetensors({"w": {"dtype": "F32", "data_offsets": [0, 8]}}, EIGHT),
        "'w' with other fields",
    ),
    "entry-with-more": (make_safetensors({"w": make_entry(x=1)}, EIGHT), "'w' with other fields"),
    "dtype-unknown": (make_safetensors({"w": make_entry("F33")}, EIGHT), "unknown dtype 'F33'"),
    "dtype-not-string": (make_safetensors({"w": make_entry(["F32"])}, EIGHT), "dtype a list"),
    "shape-negative": (make_safetensors({"w": make_entry(shape=(-2,))}, EIGHT), "shape '[-2]'"),
    "shape-two-negatives": (make_safetensors({"w": make_entry(shape=(-2, -1))}, EIGHT), "shape"),
    "shape-float": (make_safetensors({"w": make_entry(shape=(2.0,))}, EIGHT), "'w'"),
    "shape-bool": (make_safetensors({"w": make_entry(shape=(True, 2))}, EIGHT), "impossible shape"),
    "shape-huge": (make_safetensors({"w": make_entry(shape=(2**70,))}, EIGHT), "impossible shape"),
    "shape-empty-but-huge": (
        make_safetensors({"w": make_entry(shape=(0, 2**40, 2**40), offsets=(0, 0))}),
        "impossible shape",
    ),
    "shape-of-many-axes": (
        make_safetensors({"w": make_entry(shape=(1,) * 100_000)}, bytes(4)),
        "impossible shape",
    ),
    "shape-larger-than-bytes": (
        make_safetensors({"w": make_entry(shape=(3,))}, EIGHT),
        "shape (3,) and dtype F32: 12 bytes",
    ),
    "shape-smaller-than-bytes": (
        make_safetensors({"w": make_entry(shape=(1,))}, EIGHT),
        "shape (1,) and dtype F32: 4 bytes",
    ),
    "half-a-byte": (
        make_safetensors({"w": make_entry("F4", (3,), (0, 1))}, b"\0"),
        "dtype F4: 1.5 bytes",
    ),
    "offsets-past-end": (make_safetensors(W, bytes(7)), "'w' with the data_offsets '[0, 8]'"),
    "offsets-reversed": (
        make_safetensors({"w": make_entry(offsets=(8, 0))}, EIGHT),
        "data_offsets '[8, 0]'",
    ),
    "offsets-negative": (
        make_safetensors({"w": make_entry(offsets=(-8, 0))}, EIGHT),
        "data_offsets '[-8, 0]'",
    ),
    "offsets-three": (
        make_safetensors({"w": make_entry(offsets=(0, 8, 8))}, EIGHT),
        "data_offsets '[0, 8, 8]'",
    ),
    "offsets-strings": (
        make_safetensors({"w": make_entry(offsets=("0", "8"))}, EIGHT),
        "data_offsets a list",
    ),
    "overlap-same": (make_safetensors({"w": make_entry(), "v": make_entry()}, EIGHT), "overlaps"),
    "overlap-partial": (
        make_safetensors({"w": make_entry(), "v": make_entry(offsets=(4, 12))}, bytes(12)),
        "'v' overlaps 'w'",
    ),
    "overlap-behind-an-empty-tensor": (
        make_safetensors(
            {
                "w": make_entry(shape=(4,), offsets=(0, 16)),
                "e": make_entry(shape=(0,), offsets=(2, 2)),
                "v": make_entry(offsets=(8, 16)),
            },
            bytes(16),
        ),
        "'v' overlaps",
    ),
    "gap-at-start": (
        make_safetensors({"w": make_entry(offsets=(4, 12))}, bytes(12)),
        "belong to no tensor",
    ),
    "gap-between": (
        make_safetensors({"w": make_entry(), "v": make_entry(offsets=(12, 20))}, bytes(20)),
        "belong to no tensor",
    ),
    "bytes-after-the-last": (make_safetensors(W, bytes(9)), "belong to no tensor"),
}


@pytest.mark.parametrize("case", BAD_FILES)
def test_bad_file_is_refused_by_name_before_memory_is_taken(tmp_path, case):
    content, message = BAD_FILES[case]
    path = tmp_path / "bad.safetensors"
    path.write_bytes(content)
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError) as caught:
            open_safetensors(path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert message in str(caught.value)
    assert str(path) in str(caught.value)
    assert len(str(caught.value)) < 1000 + len(str(path))
    assert peak < 8 * len(content) + 200_000  # JSON as Python objects outgrows its text


def test_cut_file_whose_length_spells_a_pickle_is_not_called_one(tmp_path):
    (tmp_path / "m.safetensors").write_bytes(b"\x80\x02" + bytes(6) + b'{"w":')
    with pytest.raises(CheckpointError, match="claims 640") as caught:
        open_safetensors(tmp_path / "m.safetensors")
    assert "pickle" not in str(caught.value)


def test_header_beyond_the_cap_is_refused_without_parsing(tmp_path):
    path = tmp_path / "m.safetensors"
    with path.open("wb") as file:
        file.write((MAX_JSON_BYTES + 1).to_bytes(8, "little") + b"{")
        file.truncate(MAX_JSON_BYTES + 100)
    with pytest.raises(CheckpointError, match=f"header of {MAX_JSON_BYTES + 1} bytes"):
        open_safetensors(path)


@pytest.mark.parametrize("suffix", [".bin", ".pt", ".pth", ".ckpt", ".pkl"])
def test_pickle_file_is_refused_with_the_reason_and_the_way_out(tmp_path, suffix):
    path = tmp_path / f"model{suffix}"
    path.write_bytes(pickle.dumps({}))
    for target in (path, tmp_path):
        with pytest.raises(CheckpointError) as caught:
            open_safetensors(target)
        assert "pickle" in str(caught.value)
        assert "runs whatever code" in caught.value.why
        assert "safetensors.torch.save_file" in caught.value.fix
    assert path.name in str(caught.value)


def test_pickle_beside_safetensors_is_ignored(tmp_path):
    safetensors.numpy.save_file(ARRAYS, tmp_path / "model.safetensors")
    (tmp_path / "pytorch_model.bin").write_bytes(b"never read")
    assert_reads_as(open_safetensors(tmp_path), ARRAYS)


def test_folder_without_checkpoint_says_what_it_holds(tmp_path):
    with pytest.raises(CheckpointError, match="no files"):
        open_safetensors(tmp_path)
    (tmp_path / "model-1-of-2.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"model-1-of-2(.|\n)*fetch the index"):
        open_safetensors(tmp_path)
    for name in ("absent", "absent" * 1000, "absent\0"):
        with pytest.raises(CheckpointError, match="absent"):
            open_safetensors(tmp_path / name)


def test_missing_shard_is_named(tmp_path):
    make_shards(tmp_path)
    (tmp_path / "model-2-of-2.safetensors").unlink()
    with pytest.raises(
        CheckpointError, match=r"model-2-of-2\.safetensors is missing(.|\n)*3 tensor"
    ):
        open_safetensors(tmp_path)


def test_empty_shard_is_named(tmp_path):
    make_shards(tmp_path)
    (tmp_path / "model-2-of-2.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"model-2-of-2\.safetensors is empty"):
        open_safetensors(tmp_path)


def test_tensors_absent_from_their_shards_are_all_listed(tmp_path):
    index = make_shards(tmp_path)
    index["weight_map"]["ghost"] = "model-1-of-2.safetensors"
    index["weight_map"]["c"] = "model-1-of-2.safetensors"
    write_index(tmp_path, index)
    with pytest.raises(CheckpointError) as caught:
        open_safetensors(tmp_path)
    assert "2 tensors are absent" in str(caught.value)
    assert "'c' in model-1-of-2.safetensors" in str(caught.value)
    assert "'ghost' in model-1-of-2.safetensors" in str(caught.value)


def test_tensor_in_two_shards_is_refused(tmp_path):
    make_shards(tmp_path)
    twins = {name: ARRAYS[name] for name in ("a", "c", "empty", "scalar")}
    safetensors.numpy.save_file(twins, tmp_path / "model-2-of-2.safetensors")
    with pytest.raises(CheckpointError, match="'a' is in two shards"):
        open_safetensors(tmp_path)


@pytest.mark.parametrize(
    "name",
    [
        "../outside.safetensors",
        "/etc/x.safetensors",
        "sub/x.safetensors",
        "..\\x.safetensors",
        "C:x.safetensors",
        "model.bin",
        "..",
        "",
        "x\x00.safetensors",
        "\ud800.safetensors",
        "x.safetensors\n",
        "x" * 5000 + ".safetensors",
        7,
        None,
        ["x.safetensors"],
    ],
    ids=lambda name: repr(name)[:40],
)
def test_shard_that_is_no_plain_file_name_is_refused(tmp_path, name):
    folder = tmp_path / "model"
    folder.mkdir()
    safetensors.numpy.save_file({"a": ARRAYS["a"]}, tmp_path / "outside.safetensors")
    write_index(folder, {"weight_map": {"a": name}})
    with pytest.raises(CheckpointError, match="maps tensor 'a' to"):
        open_safetensors(folder)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty"),
        ("[]", "JSON object"),
        ("{", "JSON"),
        ("[" * 100_000, "JSON"),
        ("{}", "no weight_map"),
        ('{"weight_map": {}}', "no weight_map"),
        ('{"weight_map": [1]}', "no weight_map"),
        ('{"weight_map": {"a": "x.safetensors", "a": "y.safetensors"}}', "'a' appears twice"),
        ('{"weight_map": {"a": "x.safetensors"}, "metadata": 1}', "metadata"),
    ],
)
def test_bad_index_is_refused(tmp_path, text, message):
    write_index(tmp_path, text)
    with pytest.raises(CheckpointError, match=message) as caught:
        open_safetensors(tmp_path)
    assert INDEX_NAME in str(caught.value)
