"""The benchmark of loading, and the memory that loading takes by it."""

import json

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from inferjax.bench.load import Plan, measure, table, weight_files
from inferjax.errors import InferjaxError, InvalidInput
from inferjax.models.family import model_sources, read_config
from inferjax.models.registry import family_for

CONFIG = {
    "model_type": "llama",
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 24_000,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return a model of 77 MB in bfloat16, which loading doubles."""
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    family = family_for("llama")
    sources = jax.tree.leaves(model_sources(family, read_config(family, CONFIG)))
    tensors = {
        tensor.name: np.ones(tensor.shape, ml_dtypes.bfloat16)
        for source in sources
        for tensor in source.tensors
    }
    save_file(tensors, folder / "model.safetensors")
    return folder


def test_loading_takes_little_memory_beyond_what_stays(folder, tmp_path):
    plan = Plan(source=str(folder), cache_dir=tmp_path, rounds=1)
    result = measure(plan)
    assert result["file_bytes"] == (folder / "model.safetensors").stat().st_size
    assert [row["files"] for row in result["rows"]] == ["cold", "warm"]
    for row in result["rows"]:
        assert row["stays_bytes"] == pytest.approx(2 * result["file_bytes"], rel=1e-3)
        assert 1 <= row["peak_share"] < 1.3
        assert row["limit_share"] == pytest.approx(
            (row["read_s"] + row["write_s"]) / row["seconds"]
        )
        assert row["read_s"] > 0
    text = table(result)
    assert "77 MB of files become 155 MB" in text
    assert len(text.splitlines()) == 4


def test_all_shards_count(tiny):
    assert [path.name for path in weight_files(tiny / "llama")] == [
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
    ]


def test_what_cannot_be_loaded_is_told(folder, tmp_path):
    with pytest.raises(InvalidInput, match="rounds"):
        Plan(source="x", cache_dir=tmp_path, rounds=0)
    with pytest.raises(InferjaxError, match="no model"):
        measure(Plan(source="x", cache_dir=tmp_path))
    with pytest.raises(InvalidInput, match="int8"):
        measure(Plan(source=str(folder), dtype="int8", cache_dir=tmp_path))


@pytest.mark.parametrize(("quantize", "share"), [("int8", 0.5), ("bfloat16", 1.0)])
def test_packing_while_loading_takes_little_memory_too(folder, tmp_path, quantize, share):
    plan = Plan(source=str(folder), quantize=quantize, cache_dir=tmp_path, rounds=1)
    result = measure(plan)
    for row in result["rows"]:
        assert row["stays_bytes"] == pytest.approx(share * result["file_bytes"], rel=1e-2)
        assert 1 <= row["peak_share"] < 1.3
        assert row["stays_bytes"] < row["resident_bytes"] <= row["peak_bytes"]
    assert "MB resident beside" in table(result)
