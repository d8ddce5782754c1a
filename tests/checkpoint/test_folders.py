"""Folders as repositories really look: copies in other formats, adapters, links, foreign dtypes."""

import json
import shutil

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from inferjax.checkpoint.load import load
from inferjax.checkpoint.safetensors import INDEX_NAME, open_safetensors
from inferjax.errors import CheckpointError, InferjaxError

Q = "model.layers.0.self_attn.q_proj.weight"


@pytest.fixture
def folder(tiny, tmp_path):
    """Return a writable copy of a tiny checkpoint in two shards."""
    return shutil.copytree(tiny / "llama", tmp_path / "copy")


def same(left, right):
    jax.tree.map(np.testing.assert_array_equal, left.params, right.params)


def test_copies_in_other_formats_do_not_confuse(folder, tiny):
    save_file({"tok_embeddings.weight": np.ones(3)}, folder / "consolidated.safetensors")
    (folder / "params.json").write_text("{}")
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x02")
    (folder / "original").mkdir()
    (folder / "original" / "consolidated.00.pth").write_bytes(b"\x80\x02")
    (folder / "model-00003-of-00003.safetensors").write_bytes(b"of another version")
    same(load(folder), load(tiny / "llama"))


def test_one_file_comes_before_an_index(folder, tiny):
    file = open_safetensors(folder)
    save_file(
        {name: np.array(file.read(name)) for name in file.entries}, folder / "model.safetensors"
    )
    (folder / INDEX_NAME).write_text('{"weight_map": {"x": "gone.safetensors"}}')
    same(load(folder), load(tiny / "llama"))


def test_consolidated_weights_alone_are_not_taken_for_the_model(folder):
    for path in folder.glob("model*"):
        path.unlink()
    save_file({"tok_embeddings.weight": np.ones(3)}, folder / "consolidated.safetensors")
    with pytest.raises(CheckpointError, match=r"consolidated\.safetensors"):
        load(folder)


def test_links_are_followed_as_the_hubs_cache_has_them(folder, tiny, tmp_path):
    blobs = tmp_path / "blobs"
    blobs.mkdir()
    for i, path in enumerate(sorted(folder.iterdir())):
        path.rename(blobs / str(i))
        path.symlink_to(f"../blobs/{i}")
    same(load(folder), load(tiny / "llama"))


def test_an_adapter_is_told_from_a_model(folder):
    for path in folder.iterdir():
        path.unlink()
    (folder / "adapter_config.json").write_text('{"base_model_name_or_path": "a/b"}')
    save_file({"lora_A.weight": np.ones((2, 2))}, folder / "adapter_model.safetensors")
    with pytest.raises(CheckpointError, match="is an adapter") as error:
        load(folder)
    assert "merge" in error.value.fix


@pytest.mark.parametrize(
    ("dtype", "name"),
    [(np.int8, "int8"), (np.int64, "int64"), (ml_dtypes.float8_e4m3fn, "float8_e4m3fn")],
)
def test_weights_of_a_foreign_dtype_are_all_listed_before_any_is_read(folder, dtype, name):
    file = open_safetensors(folder)
    tensors = {key: np.array(file.read(key)) for key in file.entries}
    bad = [key for key in tensors if key.endswith("q_proj.weight")]
    tensors |= {key: tensors[key].astype(dtype) for key in bad}
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match="3 of a dtype that is not read") as error:
        load(folder)
    assert all(f"'{key}' is {name}" in str(error.value) for key in bad)
    assert error.value.missing == []


def test_a_layer_of_no_size_is_misshapen(folder):
    file = open_safetensors(folder)
    tensors = {name: np.array(file.read(name)) for name in file.entries}
    tensors[Q] = tensors[Q][:0]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"\(0, 64\), expected \(64, 64\)"):
        load(folder)


@pytest.mark.parametrize(
    "shard", ["../model.safetensors", "/etc/x.safetensors", "a/b.safetensors", "x.bin", 3]
)
def test_an_index_cannot_lead_out_of_its_folder(folder, shard):
    index = json.loads((folder / INDEX_NAME).read_text())
    index["weight_map"][Q] = shard
    (folder / INDEX_NAME).write_text(json.dumps(index))
    with pytest.raises(InferjaxError, match="shard is named by a plain"):
        load(folder)
