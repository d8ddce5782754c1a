"""Experts that a checkpoint keeps in one tensor per layer, as transformers 5 may save them."""

import json
import re
import shutil
from collections import defaultdict

import jax
import numpy as np
import pytest
from safetensors.numpy import save_file

from inferjax.checkpoint.load import load
from inferjax.checkpoint.safetensors import open_safetensors
from inferjax.errors import CheckpointError

FAMILIES = ("mixtral", "qwen3_moe", "qwen2_moe", "deepseek_v3")
GATES, UPS, DOWNS = ("gate_proj", "w1"), ("up_proj", "w3"), ("down_proj", "w2")


@pytest.fixture
def fused(tiny, tmp_path):
    """Write a tiny checkpoint with fused experts, some of the tensors then changed."""

    def write(name, change=lambda tensors: tensors):
        folder = tmp_path / "fused"
        folder.mkdir()
        file = open_safetensors(tiny / name)
        tensors = fuse({key: np.array(file.read(key)) for key in file.entries})
        save_file(change(tensors), folder / "model.safetensors")
        shutil.copy(tiny / name / "config.json", folder)
        return folder

    return write


def fuse(tensors):
    experts, out = defaultdict(dict), {}
    for name, values in tensors.items():
        name = name.replace(".block_sparse_moe.", ".mlp.")
        found = re.fullmatch(r"(.*\.experts)\.(\d+)\.(\w+)\.weight", name)
        if found is None:
            out[name] = values
        else:
            experts[found[1]][int(found[2]), found[3]] = values
    for block, parts in experts.items():
        indices = range(1 + max(index for index, _ in parts))
        gate, up, down = (
            np.stack([parts[i, next(n for n in names if (i, n) in parts)] for i in indices])
            for names in (GATES, UPS, DOWNS)
        )
        out[f"{block}.gate_up_proj"] = np.concatenate([gate, up], axis=1)
        out[f"{block}.down_proj"] = down
    return out


def first(tensors, part):
    return next(name for name in tensors if name.endswith(f"experts.{part}"))


@pytest.mark.parametrize("name", FAMILIES)
def test_fused_experts_load_as_the_same_model(tiny, fused, name):
    folder = fused(name)
    stored = open_safetensors(folder).entries
    assert not any(re.search(r"experts\.\d", key) for key in stored)
    expected, got = load(tiny / name), load(folder)
    jax.tree.map(np.testing.assert_array_equal, got.params, expected.params)


def test_a_missing_fused_tensor_is_told_by_the_names_of_its_parts(fused):
    def without(tensors):
        del tensors[first(tensors, "down_proj")]
        return tensors

    with pytest.raises(CheckpointError) as error:
        load(fused("qwen3_moe", without))
    assert error.value.missing
    assert all("down_proj" in name for name in error.value.missing)
    assert error.value.unexpected == []


@pytest.mark.parametrize("part", ["gate_up_proj", "down_proj"])
@pytest.mark.parametrize("axis", [0, 1, 2])
def test_fused_experts_of_another_number_or_size_are_told_once(fused, part, axis):
    def cut(tensors):
        name = first(tensors, part)
        tensors[name] = np.ascontiguousarray(np.delete(tensors[name], 0, axis))
        return tensors

    with pytest.raises(CheckpointError, match=r"of another shape") as error:
        load(fused("mixtral", cut))
    assert len(error.value.misshapen) == 1
    assert part in error.value.misshapen[0]


def test_a_fused_tensor_beside_single_ones_is_unexpected(fused, tiny):
    single = "model.layers.0.mlp.experts.0.down_proj.weight"

    def beside(tensors):
        file = open_safetensors(tiny / "qwen3_moe")
        plain = {n: np.array(file.read(n)) for n in file.entries if re.search(r"experts\.\d", n)}
        return tensors | plain

    folder = fused("qwen3_moe", beside)
    assert single in open_safetensors(folder).entries
    assert json.loads((folder / "config.json").read_text())["model_type"] == "qwen3_moe"
    with pytest.raises(CheckpointError) as error:
        load(folder)
    assert all(name.endswith(("gate_up_proj", "down_proj")) for name in error.value.unexpected)
