"""GGUF: dequantization and files against the `gguf` package, and every way a file can lie."""

import time
import tracemalloc

import gguf
import ml_dtypes
import numpy as np
import pytest
from gguf.quants import dequantize as reference_dequantize
from make_files import gguf_pair, gguf_string, gguf_tensor, make_gguf, u32, u64

from inferjax.checkpoint.gguf import MAX_ALIGNMENT, open_gguf
from inferjax.checkpoint.gguf_blocks import BLOCKS, UNREAD, dequantize, unpack_rows
from inferjax.errors import CheckpointError

NUM_BLOCKS = 8193  # one block more than a chunk of the types with 32 elements
# Where each quantized type keeps its float16 numbers; MXFP4 has the byte of an exponent instead.
HALVES = {
    2: [0],
    3: [0, 2],
    6: [0],
    7: [0, 2],
    8: [0],
    10: [80, 82],
    11: [108],
    12: [0, 2],
    13: [0, 2],
    14: [208],
    20: [0],
    23: [0],
    39: [],
}
EDGES = [0.0, -0.0, 1.0, -1.0, 65504.0, -65504.0, 6e-8, -6e-8, 6.1e-5, np.inf, -np.inf, np.nan]


def reference(number, raw, kind):
    with np.errstate(all="ignore"):
        out = reference_dequantize(
            raw.reshape(-1, kind.block_bytes), gguf.GGMLQuantizationType(number)
        )
    return out.reshape(-1).astype(np.float32)


def assert_same_bits(ours, theirs):
    assert ours.shape == theirs.shape
    nan = np.isnan(theirs)
    np.testing.assert_array_equal(np.isnan(ours), nan)
    np.testing.assert_array_equal(ours.view(np.uint32)[~nan], theirs.view(np.uint32)[~nan])


@pytest.mark.parametrize("number", BLOCKS, ids=lambda number: BLOCKS[number].name)
def test_random_blocks_equal_the_reference_bit_for_bit(number):
    kind = BLOCKS[number]
    raw = np.random.default_rng(number).integers(0, 256, NUM_BLOCKS * kind.block_bytes, np.uint8)
    ours = dequantize(kind, raw)
    assert_same_bits(ours.astype(np.float32), reference(number, raw, kind))


QUANTIZED = [number for number, kind in BLOCKS.items() if kind.unpack is not None]


@pytest.mark.parametrize("payload", ["random", "zeros", "ones"])
@pytest.mark.parametrize("number", QUANTIZED, ids=lambda number: BLOCKS[number].name)
def test_blocks_with_edge_scales_equal_the_reference(number, payload):
    kind = BLOCKS[number]
    shape = (len(EDGES) ** 2, kind.block_bytes)
    blocks = np.random.default_rng(number).integers(0, 256, shape, np.uint8)
    if payload != "random":
        blocks[...] = 255 if payload == "ones" else 0
    edges = np.array(EDGES, np.float16)
    for field, values in zip(
        HALVES[number], [np.tile(edges, len(EDGES)), edges.repeat(len(EDGES))], strict=False
    ):
        blocks[:, field : field + 2] = values[:, None].view(np.uint8)
    raw = blocks.reshape(-1)
    assert_same_bits(dequantize(kind, raw), reference(number, raw, kind))


@pytest.mark.parametrize("number", QUANTIZED, ids=lambda number: BLOCKS[number].name)
def test_codes_are_in_their_range_and_stand_for_the_reference_s_values(number):
    kind = BLOCKS[number]
    rng, row = np.random.default_rng(number), 3 * kind.block_len
    blocks = rng.integers(0, 256, (15, kind.block_bytes), np.uint8)
    for field in HALVES[number]:
        blocks[:, field : field + 2] = rng.normal(size=(15, 1)).astype(np.float16).view(np.uint8)
    stored = unpack_rows(kind, blocks.reshape(-1), row)
    layout = stored.layout
    assert layout == kind.layout
    assert stored.codes.shape == (5, row)
    assert stored.scales.shape == (5, row // layout.group)
    assert stored.scales.dtype == layout.scale_dtype
    low, high = (-128, 127) if layout.format == "int8" else (0, 15) if layout.minimum else (-8, 7)
    assert low <= stored.codes.min() < stored.codes.max() <= high
    assert_same_bits(stored.values().reshape(-1), reference(number, blocks.reshape(-1), kind))


def test_every_exponent_of_mxfp4_equals_the_reference():
    kind, number = BLOCKS[39], 39
    blocks = np.random.default_rng(0).integers(0, 256, (256, kind.block_bytes), np.uint8)
    blocks[:, 0] = np.arange(256)
    blocks[:, 1:] = np.arange(16) * 17  # every four-bit float, twice
    raw = blocks.reshape(-1)
    assert_same_bits(dequantize(kind, raw), reference(number, raw, kind))


def test_every_type_of_the_reference_is_read_or_named():
    for kind in gguf.GGMLQuantizationType:
        name = BLOCKS[kind].name if kind in BLOCKS else UNREAD[kind]
        number = {"f": "float", "bf": "bfloat", "i": "int"}
        stem, digits = kind.name.lower().rstrip("0123456789"), kind.name.lstrip("BFI")
        assert name in (kind.name.lower(), number.get(stem, "") + digits)
    assert not UNREAD.keys() & BLOCKS.keys()


@pytest.mark.parametrize("number", UNREAD)
def test_type_that_is_not_read_is_named(tmp_path, number):
    (tmp_path / "m.gguf").write_bytes(make_gguf(tensors=[gguf_tensor(kind=number)]))
    with pytest.raises(CheckpointError) as caught:
        open_gguf(tmp_path / "m.gguf")
    assert f"type {UNREAD[number]} ({number}), which cannot be read" in str(caught.value)


def test_every_supported_type_has_the_reference_sizes():
    for number, kind in BLOCKS.items():
        sizes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(number)]
        assert (kind.block_len, kind.block_bytes) == sizes


def write_reference_file(path, alignment=32):
    """Write a file with every kind of metadata and several tensor types by the gguf package."""
    rng = np.random.default_rng(0)
    writer = gguf.GGUFWriter(path, "llama")
    if alignment != 32:
        writer.add_custom_alignment(alignment)
    for bits in (8, 16, 32, 64):
        getattr(writer, f"add_uint{bits}")(f"u{bits}", 2**bits - 1)
        getattr(writer, f"add_int{bits}")(f"i{bits}", -(2 ** (bits - 1)))
    writer.add_float32("f32", 0.25)
    writer.add_float64("f64", 0.1)
    writer.add_bool("yes", True)
    writer.add_string("text", "höhe\n")
    writer.add_array("tokens", ["", "a", "Ġb", "語"])
    writer.add_array("scores", [0.5, -1.5])
    writer.add_array("types", [1, 2, 3])
    arrays = {
        "plain": rng.standard_normal((5, 3)).astype(np.float32),
        "half": rng.standard_normal((2, 3, 4)).astype(np.float16),
    }
    for name, array in arrays.items():
        writer.add_tensor(name, array)
    for kind in ("BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"):
        number = gguf.GGMLQuantizationType[kind]
        packed = gguf.quants.quantize(rng.standard_normal((3, 64)).astype(np.float32), number)
        arrays[kind] = reference_dequantize(packed, number)
        writer.add_tensor(kind, packed, raw_dtype=number)
    for kind in ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS", "MXFP4"):
        number = gguf.GGMLQuantizationType[kind]
        packed = rng.integers(0, 60, (2, BLOCKS[number].block_bytes), np.uint8)
        arrays[kind] = reference_dequantize(packed, number)
        writer.add_tensor(kind, packed, raw_dtype=number)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return arrays


@pytest.mark.parametrize("alignment", [32, 128])
def test_file_of_the_reference_writer_reads_back(tmp_path, alignment):
    arrays = write_reference_file(tmp_path / "m.gguf", alignment)
    file = open_gguf(tmp_path / "m.gguf")
    assert list(file.entries) == list(arrays)
    for name, expected in arrays.items():
        got = file.read(name)
        assert got.shape == file.entries[name].shape == expected.shape
        np.testing.assert_array_equal(got.astype(np.float32), expected.astype(np.float32))
        assert not got.flags.writeable
    assert file.entries["half"].dtype == "float16" == file.read("half").dtype
    assert file.read("BF16").dtype == ml_dtypes.bfloat16
    assert file.entries["Q4_K"].dtype == "q4_k"
    assert file.read("Q4_K").dtype == np.float32


def test_codes_of_a_file_are_rows_of_its_tensors(tmp_path):
    arrays = write_reference_file(tmp_path / "m.gguf")
    file = open_gguf(tmp_path / "m.gguf")
    for name, values in arrays.items():
        layout = file.entries[name].codes
        if layout is None:
            with pytest.raises(CheckpointError, match="no rows of codes"):
                next(file.codes(name))
            continue
        rows = np.concatenate([stored.values() for stored in file.codes(name)])
        np.testing.assert_array_equal(rows, values)
        width = values.shape[1]
        [last] = file.codes(name, width * (len(values) - 1), width)
        np.testing.assert_array_equal(last.values(), values[-1:])
        with pytest.raises(CheckpointError, match="no rows of codes"):
            next(file.codes(name, 1, width))
    assert {file.entries[name].codes is None for name in ("plain", "half", "BF16")} == {True}


def test_metadata_of_the_reference_writer_reads_back(tmp_path):
    write_reference_file(tmp_path / "m.gguf")
    metadata = open_gguf(tmp_path / "m.gguf").metadata
    for bits in (8, 16, 32, 64):
        assert metadata[f"u{bits}"] == 2**bits - 1
        assert metadata[f"i{bits}"] == -(2 ** (bits - 1))
    assert metadata["general.architecture"] == "llama"
    assert (metadata["f32"], metadata["f64"], metadata["text"]) == (0.25, 0.1, "höhe\n")
    assert metadata["yes"] is True
    assert type(metadata["u8"]) is int
    assert metadata["tokens"] == ["", "a", "Ġb", "語"]
    np.testing.assert_array_equal(metadata["scores"], np.array([0.5, -1.5], np.float32))
    np.testing.assert_array_equal(metadata["types"], np.array([1, 2, 3], np.int32))


def test_version_2_and_nested_arrays_are_read(tmp_path):
    inner = u32(4) + u64(2) + u32(7) + u32(9)
    pair = gguf_pair("nested", 9, u32(9) + u64(2) + inner + inner)
    (tmp_path / "m.gguf").write_bytes(make_gguf([pair], version=2))
    first, second = open_gguf(tmp_path / "m.gguf").metadata["nested"]
    assert first.tolist() == second.tolist() == [7, 9]


def test_tensors_read_before_close_stay_valid_and_later_reads_are_refused(tmp_path):
    (tmp_path / "m.gguf").write_bytes(make_gguf(tensors=[gguf_tensor()], data=bytes(8)))
    file = open_gguf(tmp_path / "m.gguf")
    kept = file.read("w")
    file.close()
    assert kept.tolist() == [0, 0]
    with pytest.raises(CheckpointError, match="is closed"):
        file.read("w")
    with pytest.raises(CheckpointError, match=r"m\.gguf has no tensor 'absent'"):
        file.read("absent")


def test_vocabulary_of_a_quarter_million_tokens_opens_quickly(tmp_path):
    tokens = b"".join(gguf_string(f"token{i}") for i in range(262_144))
    pair = gguf_pair("tokens", 9, u32(8) + u64(262_144) + tokens)
    (tmp_path / "m.gguf").write_bytes(make_gguf([pair]))
    start = time.process_time()
    assert open_gguf(tmp_path / "m.gguf").metadata["tokens"][-1] == "token262143"
    assert time.process_time() - start < 3  # 0.1 s on an idle core


TWO = [gguf_tensor("a"), gguf_tensor("b", offset=32)]
HUGE = 2**63 + 5
BAD_FILES = {
    "empty": (b"", "is empty"),
    "short": (b"GGUF\x03", "version"),
    "magic": (b"GGML" + bytes(60), "begins with b'GGML'"),
    "git-lfs-pointer": (b"version https://git-lfs.github.com/spec/v1\n", "Git LFS pointer"),
    "big-endian": (b"GGUF" + u32(0x03000000) + bytes(16), "big-endian"),
    "version-1": (make_gguf(version=1), "version 1"),
    "version-0": (make_gguf(version=0), "version 0"),
    "version-99": (make_gguf(version=99), "version 99"),
    "tensor-count": (make_gguf(num_tensors=HUGE), f"number of tensors {HUGE}"),
    "tensor-count-slight": (make_gguf(tensors=TWO, num_tensors=9), "number of tensors 9"),
    "pair-count": (make_gguf(num_pairs=HUGE), f"number of metadata pairs {HUGE}"),
    "pair-count-slight": (
        make_gguf([gguf_pair("k", 4, u32(1))], num_pairs=3),
        "number of metadata pairs 3",
    ),
    "key-length": (make_gguf([u64(HUGE) + bytes(64)]), "metadata key 0"),
    "key-empty": (make_gguf([gguf_pair("", 4, u32(1))]), "metadata key 0 has 0 bytes"),
    "key-too-long": (make_gguf([gguf_pair("k" * 65536, 4, u32(1))]), "65536 bytes"),
    "key-twice": (make_gguf([gguf_pair("k", 4, u32(1))] * 2), "'k' appears twice"),
    "key-not-utf8": (make_gguf([gguf_pair(b"\xff", 4, u32(1))]), "metadata key 0 is not UTF-8"),
    "value-type": (make_gguf([gguf_pair("k", 13, u32(1))]), "'k' has the unknown value type 13"),
    "value-cut": (make_gguf([gguf_pair("long", 12, b"")], alignment=1), "metadata 'long'"),
    "string-length": (make_gguf([gguf_pair("k", 8, u64(HUGE))]), "metadata 'k'"),
    "string-not-utf8": (make_gguf([gguf_pair("k", 8, gguf_string(b"\xc3("))]), "'k' is not UTF-8"),
    "bool": (make_gguf([gguf_pair("k", 7, b"\x02")]), "neither 0 nor 1"),
    "array-length": (make_gguf([gguf_pair("k", 9, u32(4) + u64(HUGE))]), f"'k': {HUGE}"),
    "array-of-strings-length": (make_gguf([gguf_pair("k", 9, u32(8) + u64(2**40))]), f"{2**40}"),
    "array-of-strings-cut": (
        make_gguf([gguf_pair("k", 9, u32(8) + u64(3) + gguf_string("a" * 40))], alignment=1),
        "string 1 of metadata 'k'",
    ),
    "array-of-strings-element-length": (
        make_gguf([gguf_pair("k", 9, u32(8) + u64(2) + gguf_string("a") + u64(HUGE))]),
        "string 1 of metadata 'k'",
    ),
    "array-of-arrays-length": (make_gguf([gguf_pair("k", 9, u32(9) + u64(2**40))]), f"{2**40}"),
    "array-type": (make_gguf([gguf_pair("k", 9, u32(77) + u64(0))]), "unknown element type 77"),
    "array-depth": (
        make_gguf([gguf_pair("k", 9, (u32(9) + u64(1)) * 2000 + u32(4) + u64(0))]),
        "more than 4 deep",
    ),
    "alignment-zero": (
        make_gguf([gguf_pair("general.alignment", 4, u32(0))]),
        "general.alignment is '0'",
    ),
    "alignment-not-power": (
        make_gguf([gguf_pair("general.alignment", 4, u32(48))]),
        "general.alignment is '48'",
    ),
    "alignment-huge": (
        make_gguf([gguf_pair("general.alignment", 4, u32(2 * MAX_ALIGNMENT))]),
        "general.alignment",
    ),
    "alignment-a-string": (
        make_gguf([gguf_pair("general.alignment", 8, gguf_string("32"))]),
        "general.alignment is '32'",
    ),
    "split-under-another-name": (
        make_gguf([gguf_pair("split.count", 2, b"\x05\x00")]),
        "part 1 of 5 of a split model",
    ),
    "split-count-an-array": (
        make_gguf([gguf_pair("split.count", 9, u32(4) + u64(1) + u32(1))]),
        "split.count is '[1]'",
    ),
    "split-count-huge": (
        make_gguf([gguf_pair("split.count", 10, u64(2**63))]),
        f"split.count is '{2**63}'",
    ),
    "split-count-negative": (
        make_gguf([gguf_pair("split.count", 5, b"\xff" * 4)]),
        "split.count is '-1'",
    ),
    "tensor-name-length": (make_gguf(tensors=[u64(HUGE) + bytes(64)]), "name of tensor 0"),
    "tensor-name-empty": (make_gguf(tensors=[gguf_tensor("")], data=bytes(64)), "tensor 0"),
    "tensor-twice": (make_gguf(tensors=[gguf_tensor("w")] * 2), "tensor 'w' appears twice"),
    "dims-0": (make_gguf(tensors=[gguf_tensor(dims=())], data=bytes(64)), "'w' has 0 dimensions"),
    "dims-5": (make_gguf(tensors=[gguf_tensor(dims=(1,) * 5)]), "'w' has 5 dimensions"),
    "dims-many": (make_gguf(tensors=[gguf_tensor(num_dims=2**32 - 1)]), "4294967295 dimensions"),
    "dim-zero": (make_gguf(tensors=[gguf_tensor(dims=(2, 0))]), "impossible shape (0, 2)"),
    "dim-huge": (make_gguf(tensors=[gguf_tensor(dims=(HUGE,))]), "impossible shape"),
    "dim-product-wraps": (
        make_gguf(tensors=[gguf_tensor(dims=(2**32, 2**32))], data=bytes(64)),
        "impossible shape",
    ),
    "dim-beyond-file": (
        make_gguf(tensors=[gguf_tensor(dims=(2**30,))], data=bytes(64)),
        "takes 4294967296 bytes",
    ),
    "rows-of-part-blocks": (
        make_gguf(tensors=[gguf_tensor(dims=(16, 2), kind=2)], data=bytes(64)),
        "rows of 16 elements",
    ),
    "tensor-type": (make_gguf(tensors=[gguf_tensor(kind=999)]), "'w' has GGUF tensor type 999"),
    "offset-huge": (
        make_gguf(tensors=[gguf_tensor(offset=2**64 - 32)], data=bytes(64)),
        "tensor 'w' does not fit",
    ),
    "offset-past-end": (
        make_gguf(tensors=[gguf_tensor(offset=64)], data=bytes(64)),
        "tensor 'w' does not fit",
    ),
    "offset-unaligned": (
        make_gguf(tensors=[gguf_tensor(offset=8)], data=bytes(64)),
        "'w' begins at offset 8",
    ),
    "overlap-same": (
        make_gguf(tensors=[gguf_tensor("a"), gguf_tensor("b")], data=bytes(64)),
        "'b' overlaps 'a'",
    ),
    "overlap-partial": (
        make_gguf(tensors=[gguf_tensor("a", (16,)), gguf_tensor("b", offset=32)], data=bytes(96)),
        "'b' overlaps 'a'",
    ),
    "data-cut": (make_gguf(tensors=TWO, data=bytes(39)), "tensor 'b' does not fit"),
}


@pytest.mark.parametrize("case", BAD_FILES)
def test_bad_file_is_refused_by_name_before_memory_is_taken(tmp_path, case):
    content, message = BAD_FILES[case]
    path = tmp_path / "bad.gguf"
    path.write_bytes(content)
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError) as caught:
            open_gguf(path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert message in str(caught.value)
    assert str(path) in str(caught.value)
    assert peak < 2 * len(content) + 200_000


def test_good_neighbours_of_the_bad_files_open(tmp_path):
    good = make_gguf([gguf_pair("k", 7, b"\x01")], TWO, bytes(40))
    (tmp_path / "m.gguf").write_bytes(good)
    assert list(open_gguf(tmp_path / "m.gguf").entries) == ["a", "b"]


@pytest.mark.parametrize("what", ["absent", "folder"])
def test_path_that_is_no_file_is_refused(tmp_path, what):
    (tmp_path / "folder").mkdir()
    with pytest.raises(CheckpointError, match=what):
        open_gguf(tmp_path / what)
