"""GGUF's vocabularies of SentencePiece pieces, mapped onto the `tokenizers` library.

Pieces are plain text in which U+2581 is a space; what no piece spells falls back to bytes. "llama"
has scores and no merges: they are rebuilt from the scores, which encodes as llama.cpp and
SentencePiece's own BPE do. "gemma4" writes its merges out.
"""

import itertools
import math
import operator
from collections.abc import Container, Mapping
from typing import Any

import tokenizers
from tokenizers import decoders, models, normalizers

from inferjax.errors import TokenizerError
from inferjax.tokenizer.detokenizer import METASPACE
from inferjax.tokenizer.gguf_fields import (
    TokenType,
    Vocabulary,
    read_flag,
    read_numbers,
    read_token_id,
)

# Splitting a piece costs the square of its length; real ones have at most a few dozen characters.
MAX_PIECE_CHARS = 256


def as_pieces(vocabulary: Vocabulary) -> Vocabulary:
    """Spell runs of spaces as SentencePiece does; GGUF writes user-defined ones as plain text."""
    pieces = [
        METASPACE * len(token) if kind == TokenType.USER_DEFINED and not token.strip(" ") else token
        for token, kind in zip(vocabulary.tokens, vocabulary.types, strict=True)
    ]
    return Vocabulary(pieces, vocabulary.types)


def pieces_core(
    fields: Mapping[str, object],
    vocabulary: Vocabulary,
    merges: list[tuple[str, str]],
    *,
    space_prefix: bool,
) -> tokenizers.Tokenizer:
    """Return the encoder of pieces.

    `space_prefix`: a space goes in front of the text and of what follows a token that was found in
    it, unless the file says otherwise.
    """
    core = tokenizers.Tokenizer(
        models.BPE(
            vocab=vocabulary.ids(),
            merges=merges,
            unk_token=_unknown_piece(fields, vocabulary),
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    mark_spaces = normalizers.Replace(" ", METASPACE)
    unmark: list[Any] = [decoders.Replace(METASPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if read_flag(fields, "add_space_prefix", default=space_prefix):
        core.normalizer = normalizers.Sequence([normalizers.Prepend(METASPACE), mark_spaces])
        core.decoder = decoders.Sequence([*unmark, decoders.Strip(" ", 1, 0)])
    else:
        core.normalizer = mark_spaces
        core.decoder = decoders.Sequence(unmark)
    return core


def merges_by_score(fields: Mapping[str, object], vocabulary: Vocabulary) -> list[tuple[str, str]]:
    """Rebuild the merges: every way to make a piece of two others, the best-scored piece first.

    Runs of spaces that the file sets apart come before all scored pieces. Among equal scores the
    longest left part comes first, as in tokenizer.json: of forty spaces the first 31 are one piece
    of Gemma's. Gemma 3's 262,144 pieces give 513,976 merges in about 2 s.
    """
    scores = read_numbers(fields, "scores", len(vocabulary.tokens))
    vocab, pieces = vocabulary.ids(), vocabulary.tokens
    ranked: list[tuple[float, str]] = []
    for piece, kind, score in zip(pieces, vocabulary.types, scores, strict=True):
        if kind == TokenType.NORMAL:
            ranked.append((-score, piece))
        elif kind == TokenType.USER_DEFINED and not piece.strip(METASPACE):
            ranked.append((-math.inf, piece))
    if (longest := max((len(piece) for _, piece in ranked), default=0)) > MAX_PIECE_CHARS:
        raise TokenizerError(
            f"tokenizer.ggml.tokens has a piece of {longest:,} characters",
            why=f"at most {MAX_PIECE_CHARS} are expected of a piece that others merge into",
            fix="get the file again: its vocabulary is damaged",
        )
    ranked.sort(key=operator.itemgetter(0))
    merges: list[tuple[str, str]] = []
    for _, group in itertools.groupby(ranked, key=operator.itemgetter(0)):
        pieces_of_score = [piece for _, piece in group]
        pairs = [pair for piece in pieces_of_score for pair in _splits(piece, vocab)]
        if len(pieces_of_score) > 1:
            pairs.sort(key=lambda pair: (-len(pair[0]), -len(pair[1])))
        merges += pairs
    return merges


def _splits(piece: str, vocab: Container[str]) -> list[tuple[str, str]]:
    """Return the ways to make a piece of two others, the longest left part first."""
    # A piece's tail is rarely a piece, so it is looked up first.
    return [
        (left, right)
        for cut in range(len(piece) - 1, 0, -1)
        if (right := piece[cut:]) in vocab and (left := piece[:cut]) in vocab
    ]


def _unknown_piece(fields: Mapping[str, object], vocabulary: Vocabulary) -> str | None:
    declared = read_token_id(fields, "unknown_token_id", len(vocabulary.tokens))
    if declared is not None:
        return vocabulary.tokens[declared]
    named = zip(vocabulary.tokens, vocabulary.types, strict=True)
    return next((token for token, kind in named if kind == TokenType.UNKNOWN), None)
