"""The tiny reference checkpoints and what Hugging Face computed for them, read once a process."""

import functools
from pathlib import Path

import numpy as np

from inferjax.checkpoint.load import Model, load

TINY = Path(__file__).resolve().parent.parent / "checkpoints" / "tiny"

FAMILIES = (
    "llama",
    "llama3_rope",
    "llama_yarn",
    "gemma3_text",
    "gpt_oss",
    "deepseek_v3",
    "gpt2",
)


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
