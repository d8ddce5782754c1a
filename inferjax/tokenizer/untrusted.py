"""What stands between the `tokenizers` library and files that nobody vouches for.

The library panics on some of the files that it has read, and it runs what they ask for: a chain of
replacements can make a thousand gigabytes of one line.
"""

import base64
import json
import math
import re
from typing import Any

import tokenizers

from inferjax.errors import TokenizerError

# How many characters the normalizer and the pre-tokenizer may make of one. SentencePiece's own
# table has a character that stands for eighteen.
MAX_GROWTH = 256.0
_GROWTH = {"ByteLevel": 4.0, "NFKC": 18.0, "NFKD": 18.0, "NFC": 3.0, "NFD": 4.0}


_PREFIXED = re.compile(r'"continuing_subword_prefix"\s*:\s*"[^"]')
# An underscore or a small letter, spelled as no writer of JSON spells it.
_SPELLED_OUT = re.compile(r"(\\+)u00(?:5[fF]|[67])")


def check_text(text: str) -> None:
    """Refuse what ends the process inside the library: a prefix that its merges are cut by.

    It cuts bytes, whole characters or not, and aborts when it reports what came out. No decoder has
    such a prefix. The text is searched, as parsing it takes seconds and hundreds of megabytes.

    Raises: TokenizerError.
    """
    hidden = any(len(found[1]) % 2 for found in _SPELLED_OUT.finditer(text))
    if hidden or _PREFIXED.search(text):
        raise TokenizerError(
            "tokenizer.json has a continuing_subword_prefix, or letters spelled as escapes",
            why="vocabularies of decoders have no such prefix, and writers of JSON no such escapes",
            fix="get tokenizer.json again from its source",
        )


def check_core(core: tokenizers.Tokenizer) -> None:
    """Refuse a vocabulary whose steps could make a text of any size, or take any time.

    Raises: TokenizerError.
    """
    steps = [*_steps(core.normalizer), *_steps(core.pre_tokenizer)]
    growth = math.prod(map(_growth, steps))
    if growth > MAX_GROWTH:
        raise TokenizerError(
            f"the vocabulary's steps can make {growth:.3g} characters of one",
            why=f"at most {MAX_GROWTH:g} are expected of {len(steps)} steps before the merges",
            fix="get tokenizer.json again from its source",
        )
    if type(core.model).__name__ == "WordPiece":
        raise TokenizerError(
            "the vocabulary is WordPiece, which encoders use",
            why="decoders have BPE, or SentencePiece's pieces",
            fix="use a checkpoint of a decoder",
        )


def encode_ids(core: tokenizers.Tokenizer, text: str, *, add_special_tokens: bool) -> list[int]:
    """Return the ids of a text.

    Raises: TokenizerError for what is not valid text, and where the library gives up.
    """
    try:
        return core.encode(text, add_special_tokens=add_special_tokens).ids
    except (KeyboardInterrupt, SystemExit, MemoryError):
        raise
    except (TypeError, UnicodeEncodeError) as error:
        raise TokenizerError(
            "the text cannot be encoded",
            why=str(error),
            fix="give a str of valid Unicode (no lone surrogates)",
        ) from error
    # A panic in the library's Rust code derives from BaseException.
    except BaseException as error:
        raise TokenizerError(
            "the vocabulary cannot encode the text",
            why=str(error)[:500],
            fix="get the tokenizer's files again from their source",
        ) from error


def is_text(text: str) -> bool:
    """Tell whether the library takes a string: JSON can hold half a surrogate pair."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _steps(part: Any) -> list[dict[str, Any]]:
    """Return the steps of a normalizer or pre-tokenizer, those of sequences one by one."""
    pending: list[Any] = [json.loads(part.__getstate__())] if part is not None else []
    steps = []
    while pending:
        step = pending.pop()
        inner = step.get("normalizers") or step.get("pretokenizers")
        if isinstance(inner, list):
            pending += inner
        else:
            steps.append(step)
    return steps


def _growth(step: dict[str, Any]) -> float:
    """Return how many characters a step makes of one at most."""
    kind = step.get("type")
    if kind == "Replace":
        pattern, content = step["pattern"].get("String"), len(step["content"])
        # An expression can match the nothing between characters.
        return max(1.0, content / len(pattern)) if pattern else 1.0 + content
    if kind == "Precompiled":
        table = base64.b64decode(step["precompiled_charsmap"])
        texts = table[4 + int.from_bytes(table[:4], "little") :].split(b"\0")
        return max(1.0, *map(len, texts))
    return _GROWTH.get(str(kind), 1.0)
