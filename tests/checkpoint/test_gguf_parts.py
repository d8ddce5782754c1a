"""Split GGUF models: as the `gguf` package writes them, and the ways a set can be wrong."""

import functools
import shutil

import gguf
import jax
import numpy as np
import pytest
from make_files import gguf_pair, gguf_string, gguf_tensor, make_gguf, u32
from test_load_gguf import write

from inferjax.checkpoint.gguf import open_gguf
from inferjax.checkpoint.gguf_parts import gguf_in_folder
from inferjax.checkpoint.load import load
from inferjax.errors import CheckpointError


def u16(value):
    return value.to_bytes(2, "little")


def write_split(folder, *, with_empty_first=False):
    """Write a model of five tensors in parts of two at most; return the tensors."""
    rng = np.random.default_rng(0)
    writer = gguf.GGUFWriter(
        folder / "model.gguf",
        "llama",
        split_max_tensors=2,
        small_first_shard=with_empty_first,
    )
    writer.add_string("text", "of the whole model")
    writer.add_array("tokens", ["a", "b"])
    tensors = {f"w{i}": rng.standard_normal((i + 1, 3)).astype(np.float32) for i in range(5)}
    for name, tensor in tensors.items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tensors


@pytest.mark.parametrize("with_empty_first", [False, True], ids=["full", "empty first part"])
@pytest.mark.parametrize("given", ["first", "middle", "last", "folder"])
def test_any_part_opens_the_whole_model(tmp_path, given, with_empty_first):
    tensors = write_split(tmp_path, with_empty_first=with_empty_first)
    parts = sorted(tmp_path.glob("*.gguf"))
    assert len(parts) == (4 if with_empty_first else 3)
    path = {"first": parts[0], "middle": parts[1], "last": parts[-1], "folder": tmp_path}[given]
    file = open_gguf(path)
    assert list(file.entries) == list(tensors)
    assert file.metadata["text"] == "of the whole model"
    assert file.metadata["tokens"] == ["a", "b"]
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(file.read(name), tensor)


def test_links_to_parts_open_by_the_names_of_the_links(tmp_path):
    (tmp_path / "blobs").mkdir()
    tensors = write_split(tmp_path / "blobs")
    for part in (tmp_path / "blobs").glob("*.gguf"):
        (tmp_path / part.name).symlink_to(part.rename(part.with_suffix("")))
    assert list(open_gguf(tmp_path).entries) == list(tensors)


def make_part(number, count=3, *, total=3, name=None, pairs=()):
    split = [
        gguf_pair("split.no", 2, u16(number)),
        gguf_pair("split.count", 2, u16(count)),
        gguf_pair("split.tensors.count", 5, u32(total)),
        *pairs,
    ]
    return make_gguf(split, [gguf_tensor(f"w{number}" if name is None else name)], bytes(8))


def architecture(name):
    return gguf_pair("general.architecture", 8, gguf_string(name))


def write_parts(folder, changes=None):
    """Write three good parts, then `changes` by number; None removes a part."""
    parts = {number: make_part(number) for number in range(3)} | (changes or {})
    paths = [folder / f"m-{number + 1:05}-of-00003.gguf" for number in range(3)]
    for number, path in enumerate(paths):
        if parts[number] is not None:
            path.write_bytes(parts[number])
    return paths


def test_parts_made_by_hand_are_good(tmp_path):
    paths = write_parts(tmp_path, {0: make_part(0, pairs=[architecture("llama")])})
    assert list(open_gguf(paths[1]).entries) == ["w0", "w1", "w2"]


BAD_PARTS = {
    "first missing": ({0: None}, ["1 of them are missing", "m-00001-of-00003.gguf"]),
    "two missing": ({0: None, 1: None}, ["2 of them are missing", "'m-00002-of-00003.gguf'"]),
    "part twice": ({2: make_part(1)}, ["m-00003-of-00003.gguf", "it says it is part 2"]),
    "parts of another split": ({2: make_part(2, 4)}, ["m-00003-of-00003", "one of 4 parts"]),
    "part that is no part": (
        {2: make_gguf(tensors=[gguf_tensor("w2")], data=bytes(8))},
        ["m-00003-of-00003.gguf", "one of 1 parts"],
    ),
    "tensor twice": ({2: make_part(2, name="w1")}, ["in two parts: 'w1'"]),
    "tensor count": (
        {0: make_part(0, total=4), 1: make_part(1, total=4), 2: make_part(2, total=4)},
        ["hold 3 tensors, not 4"],
    ),
    "tensor counts differ": ({2: make_part(2, total=9)}, ["its 'split.tensors.count' is not that"]),
    "tensor count negative": (
        {n: make_part(n, total=2**32 - 1) for n in range(3)},
        ["split.tensors.count is '-1'"],
    ),
    "another model's part": (
        {
            0: make_part(0, pairs=[architecture("llama")]),
            1: make_part(1, pairs=[architecture("qwen2")]),
        },
        ["m-00002-of-00003.gguf does not belong", "'general.architecture' is not that of"],
    ),
    "part cut off": ({1: make_part(1)[:-4]}, ["m-00002-of-00003.gguf: tensor 'w1' does not fit"]),
    "part empty": ({2: b""}, ["m-00003-of-00003.gguf is empty"]),
    "part a web page": ({2: b"<html>not found</html>" * 9}, ["m-00003", "web page"]),
}


@pytest.mark.parametrize("case", BAD_PARTS)
def test_bad_set_of_parts_is_refused_by_name(tmp_path, case):
    changes, messages = BAD_PARTS[case]
    path = next(path for path in write_parts(tmp_path, changes) if path.exists())
    with pytest.raises(CheckpointError) as caught:
        open_gguf(path)
    assert all(message in str(caught.value) for message in messages), str(caught.value)


@pytest.mark.parametrize("name", ["m.gguf", "m-00002-of-00003.gguf", "m-1-of-3.gguf"])
def test_part_under_a_wrong_name_is_refused(tmp_path, name):
    (tmp_path / name).write_bytes(make_part(0))
    with pytest.raises(CheckpointError, match="part 1 of 3") as caught:
        open_gguf(tmp_path / name)
    assert "-00001-of-00003.gguf" in str(caught.value)


def test_split_into_one_part_needs_no_name(tmp_path):
    (tmp_path / "m.gguf").write_bytes(make_part(0, 1, total=1))
    assert list(open_gguf(tmp_path / "m.gguf").entries) == ["w0"]


def test_folder_tells_its_model(tmp_path):
    assert gguf_in_folder(tmp_path) is None
    with pytest.raises(CheckpointError, match=r"no \.gguf file"):
        open_gguf(tmp_path)
    first, *_ = write_parts(tmp_path)
    assert gguf_in_folder(tmp_path) == first
    shutil.copy(first, tmp_path / "m-00001-of-00004.gguf")
    with pytest.raises(CheckpointError, match="holds 2 GGUF models"):
        gguf_in_folder(tmp_path)


@pytest.mark.parametrize("given", ["a part", "the folder"])
def test_split_model_loads_as_the_whole_one(tiny, tmp_path, monkeypatch, given):
    write(tiny, tmp_path / "whole.gguf", "llama")
    whole = load(tmp_path / "whole.gguf")
    in_parts = functools.partial(gguf.GGUFWriter, split_max_tensors=5)
    monkeypatch.setattr(gguf, "GGUFWriter", in_parts)
    (tmp_path / "split").mkdir()
    write(tiny, tmp_path / "split" / "model.gguf", "llama")
    parts = sorted((tmp_path / "split").glob("*.gguf"))
    assert len(parts) > 2
    model = load(parts[-1] if given == "a part" else tmp_path / "split")
    jax.tree.map(np.testing.assert_array_equal, model.params, whole.params)
    assert model.config == whole.config
    assert model.tokenizer.encode("w1 w2") == whole.tokenizer.encode("w1 w2")


def test_count_of_parts_takes_no_memory_by_itself(tmp_path):
    path = tmp_path / "m-00001-of-65535.gguf"
    path.write_bytes(make_part(0, 65535))
    with pytest.raises(CheckpointError, match="65534 of them are missing") as caught:
        open_gguf(path)
    assert len(str(caught.value)) < 1000
