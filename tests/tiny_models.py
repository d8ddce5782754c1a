"""The tiny reference checkpoints and what Hugging Face computed for them, read once a process."""

import functools
import json
from pathlib import Path

import numpy as np

from inferjax.checkpoint.load import Model, load
from inferjax.models import registry as families

TINY = Path(__file__).resolve().parent.parent / "checkpoints" / "tiny"


def _generators() -> list[str]:
    """Return the folders of models that predict tokens: a new family adds its folder, no name."""
    known = {name for family in families.FAMILIES for name in family.model_types}
    configs = {path.parent: json.loads(path.read_text()) for path in TINY.glob("*/config.json")}
    return sorted(
        folder.name
        for folder, raw in configs.items()
        if raw["model_type"] in known and "logits" in np.load(folder / "expected.npz").files
    )


def _one_each(folders: list[str]) -> list[str]:
    """Return the first folder of every model type, without its variants."""
    chosen: dict[str, str] = {}
    for folder in folders:
        raw = json.loads((TINY / folder / "config.json").read_text())
        chosen.setdefault(raw["model_type"], folder)
    return list(chosen.values())


FAMILIES = _generators()
ONE_EACH = _one_each(FAMILIES)


@functools.cache
def tiny_model(family: str) -> Model:
    """Return the float32 model of `family`."""
    return load(TINY / family)


@functools.cache
def expected(family: str) -> dict[str, np.ndarray]:
    """Return tokens [2, 40], logits [2, 40, V], greedy_prompt [2, 12] and greedy [2, 24]."""
    with np.load(TINY / family / "expected.npz") as arrays:
        return dict(arrays)


def prompts_of(model: Model, lengths: tuple[int, ...], seed: int = 0) -> list[np.ndarray]:
    """Return random prompts; prompt i does not depend on the lengths of the others."""
    vocab = model.config.vocab_size
    draws = [np.random.default_rng((seed, i)) for i in range(len(lengths))]
    return [r.integers(3, vocab, size=n) for r, n in zip(draws, lengths, strict=True)]


def padded(rows: list[np.ndarray], width: int, fill: int = 0) -> np.ndarray:
    """Return the rows as one [B, width] array, filled up on the right."""
    out = np.full((len(rows), width), fill, np.int32)
    for i, row in enumerate(rows):
        out[i, : len(row)] = row
    return out
