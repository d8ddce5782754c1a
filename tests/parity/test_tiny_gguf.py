"""GGUF files that llama.cpp's converter made of the tiny references, against the references."""

import dataclasses
import functools
import json

import jax
import numpy as np
import pytest
from tiny_models import TINY, expected, tiny_model
from tolerances import GGUF_ROUNDING, PARITY_LOGITS_F32

import inferjax as ij
from inferjax.checkpoint.load import Model, load
from inferjax.config import ModelConfig
from inferjax.models.family import read_config
from inferjax.models.registry import FAMILIES, family_for

FILES = sorted(path.stem for path in (TINY.parent / "tiny_gguf").glob("*.gguf"))
GENERATORS = [name for name in FILES if "logits" in expected(name)]
EMBEDDERS = [name for name in FILES if "embeddings" in expected(name)]
# Files whose weights have fewer bits than the reference's; of the others, all bits are there.
ROUNDED = ("deepseek_v3", "gpt2", "gpt_oss", "qwen3", "qwen3_moe")
# What the format cannot say, and its readers take for granted.
UNSAID = {
    "gemma2": {"query_pre_attn_scalar": 16},
    "mixtral_window": {"sliding_window": None},
}


@functools.cache
def from_gguf(name: str, quantize: str | None = None) -> Model:
    return load(TINY.parent / "tiny_gguf" / f"{name}.gguf", quantize=quantize)


def reference_config(name: str) -> ModelConfig:
    """Return the facts of the reference, but for those that a file cannot say."""
    raw = json.loads((TINY / name / "config.json").read_text()) | UNSAID.get(name, {})
    return dataclasses.replace(read_config(family_for(raw["model_type"]), raw), dtype="float32")


def test_every_architecture_has_a_file():
    found = {from_gguf(name).config.family for name in FILES}
    readable = {family.name for family in FAMILIES if family.gguf is not None}
    # A Mistral without a window is a Llama in GGUF, and converters write no windows of Mistrals.
    assert readable - found == {"mistral"}
    assert {name for name in FILES if from_gguf(name).tokenizer is None} == set()
    assert EMBEDDERS


@pytest.mark.parametrize("name", FILES)
def test_weights_are_the_reference_s(name):
    ours, theirs = from_gguf(name, "none"), tiny_model(name)
    assert ours.config.family == theirs.config.family
    assert jax.tree.structure(ours.params) == jax.tree.structure(theirs.params)
    # One is added to some norms and taken away again: half a unit in the last place of 2.
    share = GGUF_ROUNDING if name in ROUNDED else 2e-7
    for left, right in zip(
        jax.tree.leaves(ours.params), jax.tree.leaves(theirs.params), strict=True
    ):
        assert left.shape == right.shape
        assert np.abs(left - right).max() <= share * np.abs(right).max()


@pytest.mark.parametrize("name", GENERATORS)
def test_logits_are_the_reference_s(name):
    model, known = from_gguf(name), expected(name)
    logits = np.asarray(ij.forward(model.params, model.config, known["tokens"]))
    wanted = known["logits"]
    if name in ROUNDED or name in UNSAID:
        arrays = from_gguf(name, "none").params
        wanted = np.asarray(ij.forward(arrays, reference_config(name), known["tokens"]))
    assert_close(logits, wanted)


@pytest.mark.parametrize("name", EMBEDDERS)
def test_embeddings_are_the_reference_s(name):
    model, known = from_gguf(name), expected(name)
    vectors = ij.embed(model.params, model.config, known["tokens"], known["lengths"])
    assert_close(np.asarray(vectors), known["embeddings"])


def assert_close(got, wanted):
    worst = np.abs(got - wanted).max() / wanted.std()
    assert worst <= PARITY_LOGITS_F32, f"{worst:.1e} of the standard deviation"
