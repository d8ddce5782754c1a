"""Summaries: what a checkpoint is, and every problem it has, without a weight being read."""

import json
import shutil

import jax
import ml_dtypes
import numpy as np
import pytest
from fake_hub import serve
from make_files import make_gguf
from make_quantized import Recipe, write_pair
from safetensors.numpy import save_file

import inferjax as ij
from inferjax.checkpoint.hub import Hub
from inferjax.checkpoint.hub_files import HubId
from inferjax.checkpoint.safetensors import open_safetensors
from inferjax.checkpoint.summary import summarize, summarize_hub
from inferjax.checkpoint.tensor_file import MappedTensors
from inferjax.quant.leaf import is_packed

REPO = "someone/model"


@pytest.fixture
def folder(tiny, tmp_path):
    return shutil.copytree(tiny / "llama", tmp_path / "copy")


def loaded_packed_bytes(path):
    leaves = jax.tree.leaves(ij.load(path).params, is_leaf=is_packed)
    return sum(leaf.nbytes for leaf in leaves if is_packed(leaf))


def change_config(folder, **keys):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | keys))


def rewrite(folder, change):
    file = open_safetensors(folder)
    tensors = {name: np.array(file.read(name)) for name in file.entries}
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def test_a_good_checkpoint_is_described_by_its_numbers(tiny):
    found = summarize(tiny / "llama")
    assert (found.format, found.problems) == ("safetensors", ())
    assert found.stored == {"bfloat16": 30}
    assert not found.tokenizer
    weights = (tiny / "llama").glob("*.safetensors")
    assert found.num_bytes == sum(path.stat().st_size for path in weights)
    model = found.model
    assert (model.architecture, model.tied, model.head) == ("llama", False, "vocabulary")
    assert model.weight_bytes["float32"] == 4 * model.num_parameters
    (kind,) = model.layers
    assert (kind.num_layers, kind.attention) == (3, "full")
    assert (kind.num_heads, kind.num_kv_heads, kind.head_dim) == (4, 2, 16)


@pytest.mark.parametrize(
    ("name", "kinds", "features"),
    [
        ("gemma3_text", {"sliding", "full"}, {"normalized queries and keys"}),
        ("deepseek_v3", {"latent"}, {"shared expert"}),
        ("gpt2", {"full"}, {"learned positions"}),
        ("gpt_oss", {"sliding", "full"}, {"attention sinks", "yarn rope"}),
    ],
)
def test_kinds_of_layers_and_features_are_named(tiny, name, kinds, features):
    model = summarize(tiny / name).model
    assert {kind.attention for kind in model.layers} == kinds
    assert sum(kind.num_layers for kind in model.layers) == model.num_layers
    assert features <= set(model.features)


def test_experts_that_rest_are_not_active(tiny):
    model = summarize(tiny / "mixtral").model
    (kind,) = model.layers
    rest = kind.num_experts - kind.experts_per_token
    idle = model.num_layers * rest * 3 * model.model_dim * kind.ffn_dim
    assert model.num_parameters - model.num_active_parameters == idle > 0


def test_heads_and_pooling_are_told(tiny):
    classifier = summarize(tiny / "llama_classifier").model
    assert classifier.head == "labels"
    assert len(classifier.labels) > 1
    assert summarize(tiny / "qwen3_embedding").model.pooling == "last, normalized"


def test_no_weight_is_read(tiny, monkeypatch):
    def refuse(*_arguments):
        raise AssertionError("a tensor was read")

    for reader in ("read", "pieces", "fill"):
        monkeypatch.setattr(MappedTensors, reader, refuse)
    assert summarize(tiny / "llama3_rope").problems == ()


def test_all_problems_are_told_at_once(folder):
    change_config(
        folder,
        new_idea=1,
        hidden_act="mystery",
        rope_scaling={"rope_type": "spiral", "factor": 2.0},
    )

    def spoil(tensors):
        del tensors["model.norm.weight"]
        tensors["extra"] = np.ones(2, np.float32)
        tensors["lm_head.weight"] = tensors["lm_head.weight"][:5]
        tensors["model.layers.1.mlp.up_proj.weight"] = np.ones((112, 64), np.int8)

    rewrite(folder, spoil)
    (folder / "tokenizer.json").write_text("{}")
    found = summarize(folder)
    text = "\n".join(found.problems)
    for part in (
        "new_idea",
        "mystery",
        "spiral",
        "1 missing: 'model.norm.weight'",
        "(5, 64)",
        "1 unexpected: 'extra'",
        "'model.layers.1.mlp.up_proj.weight' is int8",
        "tokenizer.json",
    ):
        assert part in text
    assert found.model.num_layers == 3
    with pytest.raises(ij.InferjaxError):
        ij.load(folder)


def test_a_quantized_checkpoint_is_described_in_words(tmp_path, tiny):
    raw = json.loads((tiny / "llama" / "config.json").read_text())
    recipe = Recipe(group=16, act_order=True, keep=("v_proj",))
    found = summarize(write_pair(tmp_path, raw, recipe)[0])
    assert found.problems == ()
    assert found.quantization == "gptq, 4 bits, groups of 16, act-order"
    assert found.stored == {"gptq int4": 18, "float16": 12}
    # A weight of which v_proj is an array is one too: what stays packed is the loaded weights'.
    assert found.packed_bytes == loaded_packed_bytes(tmp_path / "packed")
    assert summarize(tiny / "llama").packed_bytes is None


@pytest.mark.parametrize("name", ["deepseek_v3", "llama", "gpt_oss"])
def test_packed_bytes_are_those_of_the_loaded_weights(name, tiny):
    path = tiny.parent / "tiny_gguf" / f"{name}.gguf"
    assert (summarize(path).packed_bytes or 0) == loaded_packed_bytes(path)


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ({"quant_method": "hqq", "bits": 4}, "quantized (hqq)"),
        ({"quant_method": "awq", "bits": 4, "group_size": 16}, "qzeros' is missing"),
    ],
)
def test_quantized_weights_that_are_not_read_are_one_problem(folder, config, text):
    change_config(folder, quantization_config=config)

    def quantize(tensors):
        for name in [name for name in tensors if "proj" in name]:
            del tensors[name]
            tensors[name.replace("weight", "qweight")] = np.ones((8, 8), np.int32)

    rewrite(folder, quantize)
    (problem,) = summarize(folder).problems
    assert text in problem
    assert summarize(folder).model.architecture == "llama"


@pytest.mark.parametrize(
    ("spoil", "texts"),
    [
        (lambda f: change_config(f, model_type="mamba9"), ["mamba9"]),
        (lambda f: change_config(f, architectures=["LlamaForTokenTask"]), ["LlamaForTokenTask"]),
        (lambda f: change_config(f, vocab_size=None), ["vocab_size"]),
        (lambda f: change_config(f, num_hidden_layers=9000), ["9000 layers"]),
        (lambda f: (f / "config.json").unlink(), ["no config.json"]),
        (lambda f: (f / "model-00001-of-00002.safetensors").unlink(), ["shard model-00001"]),
        (
            lambda f: [path.unlink() for path in f.iterdir()],
            ["neither model.safetensors", "no config.json"],
        ),
    ],
)
def test_what_is_known_is_told_beside_the_problem(folder, spoil, texts):
    spoil(folder)
    problems = summarize(folder).problems
    assert len(problems) == len(texts)
    assert all(text in problem for text, problem in zip(texts, problems, strict=True))


def test_a_saved_model_and_a_bad_gguf_are_summarized(tiny, tmp_path):
    ij.save(ij.load(tiny / "llama", dtype=ml_dtypes.bfloat16), tmp_path / "saved", format="orbax")
    found = summarize(tmp_path / "saved")
    assert (found.format, found.problems, found.model.dtype) == ("orbax", (), "bfloat16")
    assert found.num_bytes > 0
    (tmp_path / "saved" / "inferjax.json").write_text("{}")
    assert len(summarize(tmp_path / "saved").problems) == 1
    (tmp_path / "m.gguf").write_bytes(make_gguf())
    (problem,) = summarize(tmp_path / "m.gguf").problems
    assert "architecture" in problem


def test_a_hub_model_is_summarized_without_its_weights(folder, tmp_path):
    with serve() as fake:
        fake.repos[REPO] = {path.name: path.read_bytes() for path in folder.iterdir()}
        hub = Hub(endpoint=fake.endpoint, cache_dir=tmp_path / "hub")
        found = summarize_hub(HubId(REPO), hub=hub)
        assert (found.problems, found.model.num_layers) == ((), 3)
        assert found.num_bytes == summarize(folder).num_bytes
        assert not any(name.endswith(".safetensors") for name in fake.fetched)
        fake.repos[REPO] = {"config.json": b"{}", "pytorch_model.bin": b"x"}
        hub = Hub(endpoint=fake.endpoint, cache_dir=tmp_path / "hub2")
        pickles, unknown = summarize_hub(HubId(REPO), hub=hub).problems
        assert "pickles" in pickles
        assert "model_type" in unknown
