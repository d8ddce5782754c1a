"""What `inferjax plan` knows of checkpoints: their configs, and weights as files hold them."""

import json

import jax
import pytest
from fake_hub import serve
from make_quantized import Recipe, write_pair
from rewrite_gguf import Kind, rewrite

from inferjax.checkpoint.hub import Hub
from inferjax.checkpoint.load import load
from inferjax.checkpoint.opened import read_model_config
from inferjax.checkpoint.save import save
from inferjax.cli.plan_model import find_facts
from inferjax.errors import UnsupportedModel
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
    assert stored_bytes(found) == loaded_bytes(path)
    assert {leaf.form.format for leaf in found.stored("float32") if leaf.form} == {"int4"}


def test_quantized_folder_is_planned_as_it_is_loaded(tiny, tmp_path):
    raw = json.loads((tiny / "llama" / "config.json").read_text())
    packed, _ = write_pair(tmp_path, raw, Recipe(act_order=True))
    found = find_facts(str(packed))
    assert stored_bytes(found) == loaded_bytes(packed)


def test_plain_and_saved_folders_are_planned_from_their_config(tiny, tmp_path):
    assert find_facts(str(tiny / "llama")).stored is None
    save(load(tiny / "llama"), tmp_path / "saved", format="orbax")
    assert find_facts(str(tmp_path / "saved")).config.num_layers == 3


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
        assert not any(name.endswith((".safetensors", ".gguf")) for name in fake.fetched)
        with pytest.raises(UnsupportedModel, match=r"has no config\.json"):
            find_facts("someone/gguf", hub=hub)


def test_name_of_the_table_needs_no_network():
    assert find_facts("Qwen/Qwen3-8B").config == find_facts("qwen3-8b").config
