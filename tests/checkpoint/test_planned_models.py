"""What `inferjax plan` knows of checkpoints: their configs, and weights as files hold them."""

import dataclasses
import json
import shutil

import jax
import pytest
from fake_hub import serve
from make_quantized import Recipe, write_pair
from rewrite_gguf import Kind, rewrite

from inferjax.checkpoint import catalog, opened
from inferjax.checkpoint.catalog import is_cached, load_catalog
from inferjax.checkpoint.hub import Hub
from inferjax.checkpoint.load import load
from inferjax.checkpoint.opened import read_model_config
from inferjax.checkpoint.orbax import RECORD_NAME, _digest
from inferjax.checkpoint.save import save
from inferjax.cli.plan_model import find_facts
from inferjax.errors import CheckpointError, UnsupportedModel
from inferjax.planner import public_config
from inferjax.planner.leaves import loaded_leaves
from inferjax.planner.public_models import HUB_IDS
from inferjax.quant.leaf import is_packed, size_of


def loaded_bytes(path):
    params = load(path).params
    return sum(size_of(leaf) for leaf in jax.tree.leaves(params, is_leaf=is_packed))


def stored_bytes(found):
    assert found.stored is not None
    return sum(leaf.num_bytes for leaf in found.stored("float32"))


def four_bits(_name, values):
    return Kind.Q4_0 if values.ndim == 2 and values.shape[1] % 32 == 0 else None


def test_gguf_file_is_planned_as_it_is_loaded(root, tmp_path):
    source = root / "checkpoints" / "tiny_gguf" / "llama.gguf"
    path = rewrite(source, tmp_path / "q4.gguf", four_bits)
    found = find_facts(str(path))
    assert found.config == read_model_config(path)
    assert found.stored is not None
    assert stored_bytes(found) == loaded_bytes(path)
    assert {leaf.form.format for leaf in found.stored("float32") if leaf.form} == {"int4"}


def test_quantized_folder_is_planned_as_it_is_loaded(tiny, tmp_path):
    raw = json.loads((tiny / "llama" / "config.json").read_text())
    packed, _ = write_pair(tmp_path, raw, Recipe(act_order=True))
    found = find_facts(str(packed))
    assert stored_bytes(found) == loaded_bytes(packed)


def test_folder_of_one_gguf_file_is_planned_as_it_is_loaded(root, tmp_path):
    source = root / "checkpoints" / "tiny_gguf" / "llama.gguf"
    path = rewrite(source, tmp_path / "q4.gguf", four_bits)
    found = find_facts(str(tmp_path))
    assert found.origin == str(path)
    assert stored_bytes(found) == stored_bytes(find_facts(str(path))) == loaded_bytes(tmp_path)


@pytest.mark.parametrize("quantize", [None, "int4", "int8-w8a8", "bfloat16"])
def test_saved_folder_is_planned_as_it_is_loaded(quantize, tiny, tmp_path):
    save(load(tiny / "qwen3_moe", quantize=quantize), tmp_path / "saved", format="orbax")
    found = find_facts(str(tmp_path / "saved"))
    assert found.stored is not None
    params = load(tmp_path / "saved").params
    assert found.stored("float32") == loaded_leaves(found.config, params)
    assert stored_bytes(found) == loaded_bytes(tmp_path / "saved")


def test_damaged_record_of_a_saved_folder_is_an_error(tiny, tmp_path):
    folder = save(load(tiny / "llama", quantize="int4"), tmp_path / "saved", format="orbax")
    record = json.loads((folder / RECORD_NAME).read_text())
    del record["sha256"]
    record["packed"] = {"nowhere": {}}
    (folder / RECORD_NAME).write_text(json.dumps({"sha256": _digest(record), **record}))
    with pytest.raises(CheckpointError, match="no place for"):
        stored_bytes(find_facts(str(folder)))


def test_plain_folder_is_planned_from_its_config(tiny):
    found = find_facts(str(tiny / "llama"))
    assert found.stored is None
    assert found.origin == str(tiny / "llama" / "config.json")


def test_config_of_quantized_weights_says_that_they_are_planned_as_arrays(tiny, tmp_path):
    raw = json.loads((tiny / "llama" / "config.json").read_text())
    packed, _ = write_pair(tmp_path, raw, Recipe())
    assert find_facts(str(packed)).notes == ()
    found = find_facts(str(packed / "config.json"))
    assert "planned as arrays" in found.notes[0]
    assert found.stored is None


@pytest.mark.parametrize("name", load_catalog())
def test_name_means_the_same_whatever_was_fetched(name, tmp_path, monkeypatch):
    monkeypatch.setenv("INFERJAX_CACHE_DIR", str(tmp_path))
    before = find_facts(name)
    entry = load_catalog()[name]
    with (tmp_path / entry.file).open("wb") as file:
        file.truncate(entry.num_bytes)
    assert is_cached(name, tmp_path)
    assert find_facts(name) == before
    assert before.config == public_config(name)
    assert before.origin == f"the planner's table, after {HUB_IDS[name]}"
    assert str(tmp_path / entry.file) in before.notes[0]


def test_catalog_name_beside_the_table_is_the_file_of_the_catalog(root, tmp_path, monkeypatch):
    monkeypatch.setenv("INFERJAX_CACHE_DIR", str(tmp_path))
    source = root / "checkpoints" / "tiny_gguf" / "llama.gguf"
    entry = dataclasses.replace(
        load_catalog()["gemma-3-270m"],
        name="small",
        file="small.gguf",
        num_bytes=source.stat().st_size,
    )
    monkeypatch.setattr(catalog, "load_catalog", lambda: {"small": entry})
    monkeypatch.setattr(opened, "load_catalog", lambda: {"small": entry})
    shutil.copy(source, tmp_path / "small.gguf")
    found = find_facts("small")
    assert found.origin == str(tmp_path / "small.gguf")
    assert found.stored is not None


def test_hub_id_is_planned_without_its_weights(tiny, tmp_path):
    with serve() as fake:
        fake.repos["someone/model"] = {
            "config.json": (tiny / "llama" / "config.json").read_bytes(),
            "model.safetensors": b"not read",
        }
        fake.repos["someone/gguf"] = {"model.gguf": b"not read"}
        hub = Hub(endpoint=fake.endpoint, cache_dir=tmp_path)
        found = find_facts("someone/model", hub=hub)
        assert found.config == read_model_config(tiny / "llama")
        assert found.origin == "config.json of someone/model"
        assert not any(name.endswith((".safetensors", ".gguf")) for name in fake.fetched)
        with pytest.raises(UnsupportedModel, match=r"has no config\.json"):
            find_facts("someone/gguf", hub=hub)


def test_name_of_the_table_needs_no_network():
    assert find_facts("Qwen/Qwen3-8B").config == find_facts("qwen3-8b").config
