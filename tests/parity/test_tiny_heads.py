"""Classifiers, rerankers and embedding models against what Hugging Face transformers computed."""

import json

import numpy as np
import pytest
from tiny_models import TINY, expected, tiny_model
from tolerances import PARITY_LOGITS_F32

import inferjax as ij
from inferjax.models.registry import FAMILIES

KNOWN = {name for family in FAMILIES for name in family.model_types}


def folders(result: str) -> list[str]:
    """Return the known models whose reference holds `result`."""
    configs = {path.parent: json.loads(path.read_text()) for path in TINY.glob("*/config.json")}
    return sorted(
        folder.name
        for folder, raw in configs.items()
        if raw["model_type"] in KNOWN and result in np.load(folder / "expected.npz").files
    )


def assert_close(got: np.ndarray, reference: np.ndarray) -> None:
    assert got.dtype == np.float32
    worst = np.abs(np.asarray(got) - reference).max() / reference.std()
    assert worst <= PARITY_LOGITS_F32, f"{worst:.1e} of the standard deviation"


@pytest.mark.parametrize("exec", [ij.Exec(), ij.Exec(exact=True, page_size=8)], ids=str)
@pytest.mark.parametrize("folder", folders("scores"))
def test_classify_equals_reference(folder, exec):
    model, known = tiny_model(folder), expected(folder)
    scores = ij.classify(model.params, model.config, known["tokens"], known["lengths"], exec=exec)
    assert scores.shape == (3, len(model.config.labels))
    assert_close(scores, known["scores"])


@pytest.mark.parametrize("exec", [ij.Exec(), ij.Exec(exact=True, page_size=8)], ids=str)
@pytest.mark.parametrize("folder", folders("embeddings"))
def test_embed_equals_reference(folder, exec):
    model, known = tiny_model(folder), expected(folder)
    vectors = ij.embed(model.params, model.config, known["tokens"], known["lengths"], exec=exec)
    assert_close(vectors, known["embeddings"])


def test_there_are_references_of_each_kind():
    assert len(folders("scores")) >= 3
    assert len(folders("embeddings")) >= 2
