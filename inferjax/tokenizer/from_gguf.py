"""GGUF's kinds of vocabulary, mapped onto the `tokenizers` library.

"gpt2" is byte-level BPE with its merges written out and its pre-tokenizer given by name. "llama" is
SentencePiece BPE: pieces with scores and no merges. "gemma4" is pieces with merges.

Source: the GGUF specification, section "Tokenizer"; llama.cpp's src/llama-vocab.cpp for what the
files leave unsaid.
"""

from collections.abc import Mapping

import tokenizers
from tokenizers import decoders, models, normalizers

from inferjax.errors import TokenizerError
from inferjax.tokenizer.detokenizer import METASPACE
from inferjax.tokenizer.gguf_fields import (
    TokenType,
    Vocabulary,
    read_flag,
    read_sequence,
    read_text,
    read_token_id,
    read_vocabulary,
)
from inferjax.tokenizer.gguf_pieces import as_pieces, merges_by_score, pieces_core
from inferjax.tokenizer.gguf_words import WORD_RULES, WordRule
from inferjax.tokenizer.tokenizer import SpecialTokens, Tokenizer

# What else `tokenizer.ggml.model` can say, and what it means.
_UNSUPPORTED = {
    "bert": "WordPiece, which encoders use",
    "t5": "SentencePiece unigram, which encoder-decoder models use",
    "rwkv": "the trie of RWKV",
    "plamo2": "the trie of PLaMo 2",
    "whitespace": "whole words",
    "hybriddna": "k-mers of DNA",
    "none": "no vocabulary at all",
    "no_vocab": "no vocabulary at all",
}

# Files name one EOS; other tokens end a turn or a text too, known by their spelling.
_ENDINGS = frozenset(
    {
        "<|im_end|>",
        "<|eot_id|>",
        "<|eom_id|>",
        "<end_of_turn>",
        "<|end|>",
        "<|return|>",
        "<|call|>",
        "<|calls|>",
        "<|flush|>",
        "<|endoftext|>",
        "<|end_of_text|>",
        "<end_of_utterance>",
        "<turn|>",
        "<|tool_response>",
        "<\uff5cend\u2581of\u2581sentence\uff5c>",
        "[EOT]",
        "[EOS]",
        "[e~[",
        "<EOT>",
        "_<EOT>",
    }
)
# In vocabularies that have these, "<|end|>" closes one of several messages of a reply.
_REPLY_ENDINGS = ({"<|return|>", "<|call|>"}, {"<|calls|>", "<|flush|>"})


# SentencePiece's own places of BOS and EOS, for old files that do not say.
_IMPLIED = {"bos_token_id": 1, "eos_token_id": 2}


def tokenizer_from_gguf(metadata: Mapping[str, object]) -> Tokenizer:
    """Build the tokenizer that a GGUF file's metadata describes.

    Raises: TokenizerError for a missing or inconsistent key, and for an unknown vocabulary kind or
    pre-tokenizer.
    """
    kind = read_text(metadata, "model")
    _refuse_kind(kind)
    vocabulary = read_vocabulary(metadata)
    if kind == "gpt2":
        rule = _word_rule(metadata)
        core, with_bos = _byte_level_core(metadata, vocabulary, rule), rule.bos
    else:
        vocabulary = as_pieces(vocabulary)
        is_scored = kind == "llama"
        make_merges = merges_by_score if is_scored else _written_merges
        merges = make_merges(metadata, vocabulary)
        core = pieces_core(metadata, vocabulary, merges, space_prefix=is_scored)
        with_bos = True
    _add_set_apart(core, vocabulary, metadata)
    special = _special_tokens(metadata, vocabulary, with_bos=with_bos)
    return Tokenizer(core, special, _templates(metadata))


def _refuse_kind(kind: str) -> None:
    if kind not in ("gpt2", "llama", "gemma4"):
        meaning = f", {_UNSUPPORTED[kind]}," if kind in _UNSUPPORTED else ""
        raise TokenizerError(
            f"vocabulary kind {kind[:80]!r}{meaning} is not supported",
            why="tokenizer.ggml.model must be 'gpt2', 'llama' or 'gemma4'",
            fix="use a checkpoint of a decoder with a byte-level or SentencePiece BPE vocabulary, "
            "or safetensors with a tokenizer.json",
        )


def _word_rule(metadata: Mapping[str, object]) -> WordRule:
    name = read_text(metadata, "pre", default="default")
    if name not in WORD_RULES:
        raise TokenizerError(
            f"pre-tokenizer {name[:80]!r} is not known",
            why=f"the known ones are {', '.join(sorted(WORD_RULES))}",
            fix="use a checkpoint with a tokenizer.json, or add the rule to gguf_words.py",
        )
    return WORD_RULES[name]


def _byte_level_core(
    metadata: Mapping[str, object], vocabulary: Vocabulary, rule: WordRule
) -> tokenizers.Tokenizer:
    merges = _written_merges(metadata, vocabulary)
    core = tokenizers.Tokenizer(
        models.BPE(vocab=vocabulary.ids(), merges=merges, ignore_merges=rule.whole_words)
    )
    core.pre_tokenizer = rule.pre_tokenizer()
    if rule.nfc:
        core.normalizer = normalizers.NFC()
    core.decoder = decoders.ByteLevel()
    return core


def _written_merges(
    metadata: Mapping[str, object], vocabulary: Vocabulary
) -> list[tuple[str, str]]:
    """Return the merges in order; where one appears twice its first place counts."""
    vocab = vocabulary.ids()
    merges: dict[tuple[str, str], None] = {}
    for rank, merge in enumerate(read_sequence(metadata, "merges")):
        cut = merge.find(" ", 1) if isinstance(merge, str) else -1
        left, right = (merge[:cut], merge[cut + 1 :]) if cut > 0 else ("", "")
        if not {left, right, left + right} <= vocab.keys():
            raise TokenizerError(
                f"merge {rank} is {str(merge)[:80]!r}",
                why="a merge names two tokens whose joint spelling is a token too",
                fix="get the file again: its vocabulary is damaged",
            )
        merges[left, right] = None
    return list(merges)


def _add_set_apart(
    core: tokenizers.Tokenizer, vocabulary: Vocabulary, metadata: Mapping[str, object]
) -> None:
    """Let control and user-defined tokens be found in raw text, before any normalisation.

    Metaspace runs stay with the merges, which see the spaces they stand for.
    """
    is_phi3 = _is_phi3(metadata)
    added = [
        tokenizers.AddedToken(
            token,
            normalized=False,
            special=kind != TokenType.USER_DEFINED,
            rstrip=is_phi3 and token not in ("<unk>", "<s>", "<|endoftext|>"),
        )
        for token, kind in zip(vocabulary.tokens, vocabulary.types, strict=True)
        if (kind in _SET_APART or token in _ENDINGS) and token.strip(METASPACE)
    ]
    core.add_tokens(added)


_SET_APART = frozenset({TokenType.CONTROL, TokenType.UNKNOWN, TokenType.USER_DEFINED})


def _is_phi3(metadata: Mapping[str, object]) -> bool:
    """Whether tokens swallow the spaces after them: GGUF does not say, so the name must."""
    name = metadata.get("general.name")
    return isinstance(name, str) and any(part in name.lower() for part in ("phi-3", "phi3"))


def _special_tokens(
    metadata: Mapping[str, object], vocabulary: Vocabulary, *, with_bos: bool
) -> SpecialTokens:
    size = len(vocabulary.tokens)
    bos = _declared(metadata, vocabulary, "bos_token_id")
    eos = _eos_ids(metadata, vocabulary)
    with_bos = read_flag(metadata, "add_bos_token", default=with_bos)
    with_eos = read_flag(metadata, "add_eos_token", default=False)
    return SpecialTokens(
        bos=bos,
        eos=eos,
        pad=read_token_id(metadata, "padding_token_id", size),
        unk=read_token_id(metadata, "unknown_token_id", size),
        prefix=(bos,) if with_bos and bos is not None else (),
        suffix=eos[:1] if with_eos else (),
    )


def _declared(metadata: Mapping[str, object], vocabulary: Vocabulary, key: str) -> int | None:
    """Return the id that a field names, or the one it goes without saying."""
    declared = read_token_id(metadata, key, len(vocabulary.tokens))
    if declared is None and read_text(metadata, "model") == "llama":
        implied = _IMPLIED.get(key)
        if implied is not None and vocabulary.types[implied : implied + 1] == [TokenType.CONTROL]:
            return implied
    return declared


def _eos_ids(metadata: Mapping[str, object], vocabulary: Vocabulary) -> tuple[int, ...]:
    keys = ("eos_token_id", "eot_token_id", "eom_token_id")
    declared = [_declared(metadata, vocabulary, key) for key in keys]
    spelled = [i for i, token in enumerate(vocabulary.tokens) if token in _ENDINGS]
    found = {vocabulary.tokens[i] for i in spelled}
    if any(endings <= found for endings in _REPLY_ENDINGS):
        spelled = [i for i in spelled if vocabulary.tokens[i] != "<|end|>"]
    return tuple(dict.fromkeys(i for i in [*declared, *spelled] if i is not None))


def _templates(metadata: Mapping[str, object]) -> dict[str, str]:
    base = "tokenizer.chat_template"
    found: dict[str, str] = {}
    for key, text in metadata.items():
        if key == base or key.startswith(base + "."):
            if not isinstance(text, str):
                raise TokenizerError(
                    f"{key[:80]} is no text",
                    why=f"it is of type {type(text).__name__}",
                    fix="get the file again: its metadata is damaged",
                )
            found[key.removeprefix(base).removeprefix(".") or "default"] = text
    return found
