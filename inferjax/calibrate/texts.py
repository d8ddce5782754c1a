"""Texts for calibration and measurement: read from files, and cut into windows of tokens."""

import json
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from jaxtyping import Int

from inferjax.checkpoint.load import Model
from inferjax.errors import InvalidInput, TokenizerError
from inferjax.tokenizer import Tokenizer

# What the papers calibrate on is 128 windows of 512 to 2,048 tokens of common text. A quarter of
# the shorter ones has come within noise of it here, and a laptop gets through them.
NUM_WINDOWS, WINDOW = 32, 512


def read_texts(path: Path) -> list[str]:
    """Read a text file as one text, or a .jsonl file as one a line.

    A line is a JSON string, or an object whose "text" is one.

    Raises: InvalidInput for a file that cannot be read, holds something else, or holds no text.
    """
    try:
        content = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInput(
            f"{path} cannot be read", why=str(error), fix="give a text file in UTF-8"
        ) from error
    texts = _lines(content, path) if path.suffix == ".jsonl" else [content]
    if not any(text.strip() for text in texts):
        raise InvalidInput(f"{path} holds no text", fix="give a file with words in it")
    return texts


def _lines(content: str, path: Path) -> list[str]:
    # Not splitlines: a JSON string may hold U+2028 and other separators as they are.
    lines = enumerate(content.split("\n"), start=1)
    return [_text_of(line, f"{path}:{number}") for number, line in lines if line.strip()]


def _text_of(line: str, place: str) -> str:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InvalidInput(f"{place} is no JSON", why=str(error)) from error
    text = value.get("text") if isinstance(value, dict) else value
    if not isinstance(text, str):
        raise InvalidInput(
            f"{place} holds no text", fix='give a JSON string, or an object with "text"'
        )
    return text


def python_reference() -> tuple[str, str]:
    """Return two texts that have nothing in common: alternate topics of Python's own reference.

    Every installation carries it (`pydoc_data`, PSF licence).
    """
    from pydoc_data.topics import topics

    ours, theirs = (
        [part for name in sorted(topics)[half::2] for part in topics[name].split("\n\n")]
        for half in (0, 1)
    )
    # Some topics repeat what stands in others, in other lines.
    known = {" ".join(part.split()) for part in ours}
    theirs = [part for part in theirs if " ".join(part.split()) not in known]
    return "\n\n".join(ours), "\n\n".join(theirs)


def tokenizer_of(model: Model) -> Tokenizer:
    """Return a model's tokenizer.

    Raises: TokenizerError where it has none.
    """
    if model.tokenizer is None:
        raise TokenizerError(
            f"{model.path} has no tokenizer",
            why="text cannot become tokens without a vocabulary",
            fix="put the model's tokenizer.json beside its config.json",
        )
    return model.tokenizer


def cut_windows(
    tokenizer: Tokenizer, texts: Iterable[str], *, window: int = WINDOW, limit: int | None = None
) -> Int[np.ndarray, "W S"]:
    """Cut texts, one after the other, into windows of `window` tokens; a rest is left out.

    Where the vocabulary asks for a token in front of a text, each window has it in place of its
    first one. With a limit, windows are taken at equal distances from the whole.

    Raises: InvalidInput when there is not enough for one window.
    """
    ids = [i for text in texts for i in tokenizer.encode(text, add_special_tokens=False)]
    count = len(ids) // window
    if not count:
        raise InvalidInput(
            f"the text has {len(ids)} tokens",
            why=f"a window has {window}, and only whole ones count",
            fix="give a longer text or a shorter window",
        )
    rows = np.asarray(ids[: count * window], np.int32).reshape(count, window)
    prefix = tokenizer.special.prefix
    rows[:, : len(prefix)] = prefix
    if limit is not None and limit < count:
        rows = rows[np.arange(limit) * count // limit]
    return rows
