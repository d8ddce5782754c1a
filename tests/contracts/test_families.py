"""A family is one file, one line of the registry and one tiny checkpoint: nothing else knows it."""

import ast
import json
import sys
import types
from pathlib import Path

import jax
import numpy as np
import pytest
from tiny_models import TINY, tiny_model

import inferjax as ij
from inferjax.models import registry
from inferjax.models.family import Family

ROOT = Path(__file__).resolve().parents[2]
MODELS = ROOT / "inferjax" / "models"
MAX_LINES = 130

NEW_FAMILY = '''
"""Llama with its norms after the blocks, under names of its own."""

import functools

from inferjax.config import LayerSpec
from inferjax.models.family import Family
from inferjax.models.settings import (
    read_attention,
    read_mlp,
    read_model,
    read_norm,
    read_num_layers,
)
from inferjax.models.sources import decoder, decoder_layer


def _config(reader):
    norm = read_norm(reader)
    layer = LayerSpec(
        attention=read_attention(reader),
        ffn=read_mlp(reader),
        norm=norm,
        norm_in=False,
        norm_out=True,
    )
    return read_model(reader, "newcomer", [layer] * read_num_layers(reader), norm)


def _weights(config):
    norms = {"attention_out": "input_layernorm", "ffn_out": "post_attention_layernorm"}
    return decoder(config, functools.partial(decoder_layer, norms=norms))


FAMILY = Family(
    name="newcomer",
    model_types=("newcomer",),
    architectures=("NewcomerForCausalLM",),
    config=_config,
    weights=_weights,
)
'''


def family_files() -> dict[str, Path]:
    return {name: MODELS / f"{name}.py" for name in registry._FILES}


def strings_of(path: Path) -> set[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }


def imports_of(path: Path) -> set[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    modules = [n.module or "" for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)]
    return {
        *modules,
        *(a.name for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names),
    }


def test_the_registry_is_sorted_and_complete():
    assert list(registry._FILES) == sorted(registry._FILES)
    assert len({family.name for family in registry.FAMILIES}) == len(registry.FAMILIES) == 25


@pytest.mark.parametrize("name", registry._FILES)
def test_a_family_is_a_short_file(name):
    lines = family_files()[name].read_text(encoding="utf-8").splitlines()
    assert len(lines) <= MAX_LINES


@pytest.mark.parametrize("family", registry.FAMILIES, ids=lambda family: family.name)
def test_a_family_has_a_tiny_checkpoint(family: Family):
    folders = [path.parent.name for path in TINY.glob("*/config.json") if _is_of(path, family)]
    assert folders, f"no folder in checkpoints/tiny has a model_type of {family.model_types}"


def _is_of(config: Path, family: Family) -> bool:
    return json.loads(config.read_text())["model_type"] in family.model_types


def test_every_tiny_checkpoint_is_of_a_known_family():
    known = {name for family in registry.FAMILIES for name in family.model_types}
    found = {json.loads(path.read_text())["model_type"] for path in TINY.glob("*/config.json")}
    assert found <= known


def test_nothing_but_family_files_knows_a_family():
    files = set(family_files().values())
    names = {f"inferjax.models.{name}" for name in registry._FILES}
    types_ = {name for family in registry.FAMILIES for name in family.model_types}
    for path in (ROOT / "inferjax").rglob("*.py"):
        # Files that several families share bear the name of one of them.
        shared = path.parent == MODELS and any(path.stem.startswith(n) for n in _stems())
        # A plan's table of models holds their configs, which say which family they are of.
        table = path.name in ("registry.py", "public_models.py")
        if path in files or shared or table:
            continue
        assert not names & imports_of(path), path
        if path.parent.name != "tokenizer":  # GGUF has vocabularies of the same names
            assert not types_ & strings_of(path), path


def _stems() -> set[str]:
    return {name.split("_")[0].rstrip("0123456789") for name in registry._FILES}


@pytest.fixture
def newcomer(monkeypatch, tmp_path) -> Path:
    """Register a new family as its author would, and make its checkpoint."""
    module = types.ModuleType("inferjax.models.newcomer")
    exec(NEW_FAMILY, module.__dict__)
    monkeypatch.setitem(sys.modules, "inferjax.models.newcomer", module)
    monkeypatch.setattr(registry, "FAMILIES", (*registry.FAMILIES, module.FAMILY))
    folder = tmp_path / "newcomer"
    folder.mkdir()
    raw = json.loads((TINY / "llama" / "config.json").read_text())
    raw |= {"model_type": "newcomer", "architectures": ["NewcomerForCausalLM"]}
    for key in ("attention_bias", "mlp_bias", "pretraining_tp"):
        raw.pop(key)
    for file in (TINY / "llama").iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    (folder / "config.json").write_text(json.dumps(raw))
    return folder


def test_a_new_family_is_loaded_run_saved_and_loaded_again(newcomer, tmp_path):
    model = ij.load(newcomer)
    assert model.family == "newcomer"
    tokens = np.arange(3, 19)[None]
    logits = ij.forward(model.params, model.config, tokens)
    usual = tiny_model("llama")
    assert np.abs(logits - ij.forward(usual.params, usual.config, tokens)).max() > 0.1
    for form in ("orbax", "safetensors"):
        again = ij.load(ij.save(model, tmp_path / form, format=form))
        assert again.config == model.config
        jax.tree.map(np.testing.assert_array_equal, again.params, model.params)
