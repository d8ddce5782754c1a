"""Ids to text, one token at a time, never half a character.

A token is a run of bytes. An incremental UTF-8 decoder is all the state there is, so a stream costs
linear time and equals the decoding of the whole sequence by construction.
"""

import codecs
import dataclasses
import json
import operator
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, SupportsIndex

import tokenizers

from inferjax.errors import TokenizerError

METASPACE = "▁"


@dataclasses.dataclass(frozen=True, slots=True)
class TokenBytes:
    """How the tokens of one vocabulary spell bytes.

    `kind` is "byte_level" (each character stands for one byte) or "metaspace" (plain text in which
    U+2581 is a space). `byte_fallback` reads tokens such as `<0xE2>` as one byte. `strip` says what
    the space that the encoder put in front of the text costs on the way back: "text" drops one
    leading space of the whole text, "token" every space of the first token.
    """

    kind: Literal["byte_level", "metaspace"]
    byte_fallback: bool = False
    strip: Literal["no", "text", "token"] = "no"

    def spell(self, piece: str) -> bytes:
        """Return the bytes of a vocabulary piece."""
        if self.kind == "byte_level":
            return _byte_level(piece)
        if self.byte_fallback and (byte := _fallback_byte(piece)) is not None:
            return byte
        return piece.replace(METASPACE, " ").encode()


class Detokenizer:
    """The text of a token stream, as soon as it is certain.

    A replacement character appears only where the bytes can no longer become a character.
    """

    def __init__(self, lookup: Callable[[int], bytes], strip: str = "no") -> None:
        self._lookup = lookup
        self._strip = strip
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: SupportsIndex) -> str:
        """Take one token and return the text it completes, often the token's own, possibly none."""
        spelled = self._lookup(operator.index(token_id))
        if not spelled:
            return ""
        if self._strip != "no":
            spelled = _strip_first(spelled, self._strip)
            self._strip = "no"
        return self._decoder.decode(spelled)

    def push_many(self, token_ids: Iterable[SupportsIndex]) -> str:
        """Take several tokens and return the text they complete."""
        return "".join(map(self.push, token_ids))

    def flush(self) -> str:
        """End the text: bytes still waiting for the rest of a character become U+FFFD."""
        return self._decoder.decode(b"", final=True)


def _strip_first(spelled: bytes, strip: str) -> bytes:
    if strip == "token":
        return spelled.replace(b" ", b"")
    return spelled.removeprefix(b" ")


def token_bytes_of(core: tokenizers.Tokenizer) -> TokenBytes:
    """Return how the vocabulary of `core` spells bytes, read from its declared decoder.

    Raises: TokenizerError for a decoder that is neither byte-level nor SentencePiece-like.
    """
    declared = core.decoder
    decoder: Any = json.loads(declared.__getstate__()) if declared else {"type": "none"}
    steps = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        return TokenBytes("byte_level")
    if kinds == ["Metaspace"]:
        never = steps[0].get("prepend_scheme") == "never"
        _check_metaspace(steps[0].get("replacement"))
        return TokenBytes("metaspace", strip="no" if never else "token")
    return _from_sentencepiece_steps(steps, kinds)


def _from_sentencepiece_steps(steps: list[Mapping], kinds: list[str]) -> TokenBytes:
    """Accept any subset, in this order, of: Replace, ByteFallback, Fuse, Strip."""
    known = ["Replace", "ByteFallback", "Fuse", "Strip"]
    if kinds != [kind for kind in known if kind in kinds]:
        raise TokenizerError(
            f"decoder {' > '.join(kinds)} is not supported",
            why="only byte-level and SentencePiece-style decoders can be streamed exactly",
            fix="use a vocabulary with a ByteLevel, Metaspace or Replace/ByteFallback/Fuse decoder",
        )
    by_kind = dict(zip(kinds, steps, strict=True))
    if "Replace" in by_kind:
        replace = by_kind["Replace"]
        _check_metaspace(replace["pattern"].get("String"), replace["content"])
    if "Strip" in by_kind:
        _check_strip(by_kind["Strip"])
    strip = "text" if "Strip" in by_kind else "no"
    return TokenBytes("metaspace", byte_fallback="ByteFallback" in by_kind, strip=strip)


def _check_metaspace(pattern: object, content: object = " ") -> None:
    if (pattern, content) != (METASPACE, " "):
        raise TokenizerError(
            f"decoder replaces {pattern!r} by {content!r}",
            why=f"only {METASPACE!r} by a space is known",
            fix="use a vocabulary whose spaces are U+2581",
        )


def _check_strip(step: Mapping) -> None:
    found = (step.get("content"), step.get("start"), step.get("stop"))
    if found != (" ", 1, 0):
        raise TokenizerError(
            f"decoder strips {found[0]!r}, {found[1]} at the start and {found[2]} at the end",
            why="only one space at the start is known",
            fix="use a vocabulary whose decoder strips one leading space",
        )


def _fallback_byte(piece: str) -> bytes | None:
    if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
        try:
            return bytes.fromhex(piece[3:5])
        except ValueError:
            return None
    return None


def _byte_level(piece: str) -> bytes:
    """Undo GPT-2's byte alphabet; a piece with any other character stands for itself."""
    try:
        return bytes(BYTE_OF_CHAR[char] for char in piece)
    except KeyError:
        return piece.encode()


def _byte_alphabet() -> dict[str, int]:
    """Return GPT-2's map from visible characters to bytes.

    Visible Latin-1 bytes stand for themselves; the other 68, in order, for U+0100 onwards.
    """
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in set(visible)]
    return {chr(b): b for b in visible} | {chr(0x100 + i): b for i, b in enumerate(hidden)}


BYTE_OF_CHAR = _byte_alphabet()
