"""What the loader makes of sentence-transformers folders: pooling, missing heads, refusals."""

import json
import shutil
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import inferjax as ij
from inferjax.checkpoint.load import config_only
from inferjax.checkpoint.pooling import read_pooling
from inferjax.errors import CheckpointError, InferjaxError, UnsupportedConfig, UnsupportedModel

OLD = "sentence_transformers.models."
NEW = "sentence_transformers.sentence_transformer.modules."


def write(path: Path, value: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(value if isinstance(value, str) else json.dumps(value))


def modules(*kinds: str, prefix: str = OLD) -> list[dict[str, Any]]:
    """Return modules.json of these kinds: the model beside it, the others in folders."""
    return [
        {"idx": i, "name": str(i), "path": f"{i}_{kind}" if i else "", "type": prefix + kind}
        for i, kind in enumerate(kinds)
    ]


@pytest.fixture(scope="module")
def config(tiny) -> ij.ModelConfig:
    return config_only(tiny / "llama")


@pytest.fixture
def folder(tmp_path) -> Path:
    write(tmp_path / "modules.json", modules("Transformer", "Pooling", "Normalize"))
    write(tmp_path / "1_Pooling" / "config.json", {"word_embedding_dimension": 64})
    return tmp_path


def pooling(folder: Path, **keys: Any) -> dict[str, Any]:
    return {"word_embedding_dimension": 64, "include_prompt": True} | keys


@pytest.mark.parametrize(
    ("keys", "kind"),
    [
        ({"pooling_mode_lasttoken": True, "pooling_mode_mean_tokens": False}, "last"),
        ({"pooling_mode_mean_tokens": True}, "mean"),
        ({"pooling_mode_cls_token": True}, "first"),
        ({}, "mean"),
        ({"pooling_mode": "lasttoken"}, "last"),
        ({"pooling_mode": ["cls"]}, "first"),
        ({"pooling_mode": "mean", "pooling_mode_lasttoken": True}, "mean"),
        ({"pooling_mode": "lasttoken", "include_prompt": False}, "last"),
    ],
)
def test_modes_of_both_styles(folder, config, keys, kind):
    write(folder / "1_Pooling" / "config.json", pooling(folder, **keys))
    assert read_pooling(folder, config) == ij.Pooling(kind=kind, normalize=True)


def test_modules_of_the_newer_style(folder, config):
    write(folder / "modules.json", modules("Transformer", "Pooling", "Normalize", prefix=NEW))
    write(folder / "1_Pooling" / "config.json", {"embedding_dimension": 64, "pooling_mode": "mean"})
    write(folder / "2_Normalize" / "config.json", {"module_input_name": "sentence_embedding"})
    assert read_pooling(folder, config) == ij.Pooling(kind="mean", normalize=True)
    write(folder / "modules.json", modules("Transformer", "Pooling", prefix=NEW))
    assert read_pooling(folder, config) == ij.Pooling(kind="mean", normalize=False)


def test_a_folder_without_modules_has_no_pooling(tmp_path, config):
    assert read_pooling(tmp_path, config) is None


@pytest.mark.parametrize(
    ("kinds", "named"),
    [
        (("Transformer", "Pooling", "Dense", "Normalize"), "Dense"),
        (("Transformer", "WordWeights", "Pooling"), "WordWeights"),
        (("Transformer", "Normalize", "Pooling"), "Normalize"),
        (("Transformer",), "Transformer"),
        ((), "Pooling"),
    ],
)
def test_other_modules_are_refused_by_name(folder, config, kinds, named):
    write(folder / "modules.json", modules(*kinds))
    with pytest.raises(UnsupportedModel, match=named):
        read_pooling(folder, config)


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ({"pooling_mode_max_tokens": True}, "max"),
        ({"pooling_mode_weightedmean_tokens": True}, "weightedmean"),
        ({"pooling_mode": "mean_sqrt_len_tokens"}, "mean_sqrt_len_tokens"),
        ({"pooling_mode": ["mean", "max"]}, "mean and max"),
        ({"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": True}, "cls and mean"),
    ],
)
def test_other_modes_are_refused_by_name(folder, config, keys, named):
    write(folder / "1_Pooling" / "config.json", pooling(folder, **keys))
    with pytest.raises(UnsupportedModel, match=named):
        read_pooling(folder, config)


@pytest.mark.parametrize(
    "keys",
    [
        {"word_embedding_dimension": 32},
        {"embedding_dimension": 65},
        {"pooling_mode": "mean", "include_prompt": False},
        {"pooling_mode_mean_tokens": "yes"},
        {"pooling_mode_median_tokens": True},
    ],
)
def test_what_contradicts_the_model_is_refused(folder, config, keys):
    write(folder / "1_Pooling" / "config.json", pooling(folder, **keys))
    with pytest.raises(UnsupportedConfig, match=r"1_Pooling.config\.json"):
        read_pooling(folder, config)


def test_normalising_something_else_is_refused(folder, config):
    write(folder / "2_Normalize" / "config.json", {"module_input_name": "token_embeddings"})
    with pytest.raises(UnsupportedConfig, match="module_input_name"):
        read_pooling(folder, config)


@pytest.mark.parametrize("path", ["..", ".", "/etc", "a/b", "../x", "\0", None, 3, "missing"])
def test_a_module_is_a_folder_beside_the_file(folder, config, path):
    entries = modules("Transformer", "Pooling")
    entries[1]["path"] = path
    write(folder / "modules.json", entries)
    with pytest.raises(CheckpointError):
        read_pooling(folder, config)


def test_a_model_in_a_folder_of_its_own_is_refused(folder, config):
    entries = modules("Transformer", "Pooling")
    entries[0]["path"] = "0_Transformer"
    write(folder / "modules.json", entries)
    with pytest.raises(CheckpointError, match="0_Transformer"):
        read_pooling(folder, config)


@pytest.mark.parametrize(
    "text", ["", "{}", "[1]", "[[]]", "[", "null", '[{"type": 1}]', "[" * 9999]
)
@pytest.mark.parametrize("file", ["modules.json", "1_Pooling/config.json"])
def test_damaged_files_are_typed_errors(folder, config, file, text):
    write(folder / file, text)
    if (file, text) != ("1_Pooling/config.json", "{}"):  # which means the mean
        with pytest.raises(InferjaxError):
            read_pooling(folder, config)


def test_an_embedding_model_may_lack_the_head_of_its_architecture(tiny):
    raw = json.loads((tiny / "qwen3_embedding" / "config.json").read_text())
    assert raw["architectures"] == ["Qwen3ForCausalLM"]
    assert not raw["tie_word_embeddings"]
    config = config_only(tiny / "qwen3_embedding")
    assert (config.head, config.pooling) == ("none", ij.Pooling(kind="last", normalize=True))
    model = ij.load(tiny / "qwen3_embedding")
    assert model.params.head is None
    assert (model.config.head, model.config.pooling) == (config.head, config.pooling)


def test_an_embedding_model_keeps_the_head_it_has(tiny, tmp_path):
    for name in ("config.json", "model.safetensors"):
        shutil.copy(tiny / "stablelm" / name, tmp_path / name)
    shutil.copy(tiny / "llama_embedding" / "modules.json", tmp_path / "modules.json")
    shutil.copytree(tiny / "llama_embedding" / "1_Pooling", tmp_path / "1_Pooling")
    config = config_only(tmp_path)
    assert (config.head, config.pooling) == ("vocabulary", ij.Pooling(kind="mean"))
    assert ij.load(tmp_path / "model.safetensors").config.pooling == config.pooling


@pytest.mark.parametrize("format", ["orbax", "safetensors"])
@pytest.mark.parametrize(
    "name", ["qwen3_embedding", "llama_embedding", "llama_classifier", "qwen3_reranker"]
)
def test_head_and_pooling_are_saved(tiny, tmp_path, name, format):
    model = ij.load(tiny / name)
    again = ij.load(ij.save(model, tmp_path / "saved", format=format))
    assert again.config == model.config
    jax.tree.map(np.testing.assert_array_equal, again.params, model.params)


def test_without_modules_a_missing_head_is_an_error(tiny, tmp_path):
    for name in ("config.json", "model.safetensors"):
        shutil.copy(tiny / "qwen3_embedding" / name, tmp_path / name)
    with pytest.raises(CheckpointError, match="lm_head"):
        ij.load(tmp_path)
