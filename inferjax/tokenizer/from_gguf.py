"""GGUF's two kinds of vocabulary, mapped onto the `tokenizers` library.

"gpt2" is byte-level BPE with its merges written out and its pre-tokenizer given by name. "llama" is
SentencePiece BPE: pieces with scores and no merges, which are rebuilt from the scores.

Source: the GGUF specification, section "Tokenizer".
"""

import enum
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers

from inferjax.errors import TokenizerError
from inferjax.tokenizer.detokenizer import METASPACE
from inferjax.tokenizer.tokenizer import SpecialTokens, Tokenizer

_PREFIX = "tokenizer.ggml."
# Splitting a piece costs the square of its length; real ones have at most a few dozen characters.
MAX_PIECE_CHARS = 256

_GPT2_WORD = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3_WORD = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_WORD = _LLAMA3_WORD.replace(r"\p{N}{1,3}", r"\p{N}")
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED_WORD = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
_TEKKEN_WORD = rf"{_CASED_WORD}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"

# How a text is cut into words before the merges, by `tokenizer.ggml.pre`. Cuts apply in order.
_WORD_PATTERNS: dict[str, tuple[str, ...]] = {
    "default": (_GPT2_WORD,),
    "gpt-2": (_GPT2_WORD,),
    "smollm": (r"\p{N}", _GPT2_WORD),
    "starcoder": (r"\p{N}", _GPT2_WORD),
    "refact": (r"\p{N}", _GPT2_WORD),
    "command-r": (r"\p{N}", _GPT2_WORD),
    "llama-bpe": (_LLAMA3_WORD,),
    "llama3": (_LLAMA3_WORD,),
    "llama-v3": (_LLAMA3_WORD,),
    "qwen2": (_QWEN2_WORD,),
    "deepseek-r1-qwen": (_QWEN2_WORD,),
    "tekken": (_TEKKEN_WORD,),
}
# A word that is itself a token is taken whole, whatever the merges would give.
_WHOLE_WORDS = frozenset({"llama-bpe", "llama3", "llama-v3", "tekken"})
_BOS_BY_DEFAULT = frozenset({"llama-bpe", "llama3", "llama-v3", "tekken"})
_NFC = frozenset({"qwen2", "deepseek-r1-qwen"})

# Files name one EOS; chat models end a turn with another token, known by its spelling.
_END_OF_TURN = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>", "<|end|>", "<|return|>")


class TokenType(enum.IntEnum):
    """GGUF's kinds of token."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


def tokenizer_from_gguf(metadata: Mapping[str, object]) -> Tokenizer:
    """Build the tokenizer that a GGUF file's metadata describes.

    Raises: TokenizerError for a missing or inconsistent key, and for an unknown vocabulary kind or
    pre-tokenizer.
    """
    kind = _text(metadata, "model")
    tokens = _tokens(metadata)
    types = _token_types(metadata, len(tokens))
    if kind == "gpt2":
        core = _byte_level_core(metadata, tokens, types)
    elif kind == "llama":
        core = _sentencepiece_core(metadata, tokens, types)
    else:
        raise TokenizerError(
            f"vocabulary kind {kind!r} is not supported",
            why="tokenizer.ggml.model must be 'gpt2' or 'llama'",
            fix="convert the checkpoint to safetensors with a tokenizer.json",
        )
    return Tokenizer(core, _special_tokens(metadata, tokens, types), _templates(metadata))


def _byte_level_core(
    metadata: Mapping[str, object], tokens: list[str], types: list[int]
) -> tokenizers.Tokenizer:
    name = _text(metadata, "pre", default="default")
    if name not in _WORD_PATTERNS:
        raise TokenizerError(
            f"pre-tokenizer {name!r} is not known",
            why=f"the known ones are {', '.join(sorted(_WORD_PATTERNS))}",
            fix="use a checkpoint with a tokenizer.json, or add the pattern to from_gguf.py",
        )
    vocab = _vocab(tokens)
    merges = _written_merges(metadata, vocab)
    core = tokenizers.Tokenizer(
        models.BPE(vocab=vocab, merges=merges, ignore_merges=name in _WHOLE_WORDS)
    )
    cuts: list[Any] = [
        pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated")
        for pattern in _WORD_PATTERNS[name]
    ]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.pre_tokenizer = pre_tokenizers.Sequence([*cuts, byte_level])
    if name in _NFC:
        core.normalizer = normalizers.NFC()
    core.decoder = decoders.ByteLevel()
    _add_set_apart(core, tokens, types)
    return core


def _written_merges(
    metadata: Mapping[str, object], vocab: Mapping[str, int]
) -> list[tuple[str, str]]:
    merges = []
    for rank, merge in enumerate(_sequence(metadata, "merges")):
        left, separator, right = merge.partition(" ") if isinstance(merge, str) else ("", "", "")
        if not separator or not {left, right, left + right} <= vocab.keys():
            raise TokenizerError(
                f"merge {rank} is {str(merge)[:80]!r}",
                why="a merge names two tokens whose joint spelling is a token too",
                fix="get the file again: its vocabulary is damaged",
            )
        merges.append((left, right))
    return merges


def _sentencepiece_core(
    metadata: Mapping[str, object], tokens: list[str], types: list[int]
) -> tokenizers.Tokenizer:
    scores = _numbers(metadata, "scores", len(tokens))
    pieces = [_as_piece(t, kind) for t, kind in zip(tokens, types, strict=True)]
    vocab = _vocab(pieces)
    core = tokenizers.Tokenizer(
        models.BPE(
            vocab=vocab,
            merges=_merges_by_score(vocab, pieces, scores, types),
            unk_token=_unknown_piece(metadata, pieces, types),
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    mark_spaces = normalizers.Replace(" ", METASPACE)
    unmark: list[Any] = [decoders.Replace(METASPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if _flag(metadata, "add_space_prefix", default=True):
        core.normalizer = normalizers.Sequence([normalizers.Prepend(METASPACE), mark_spaces])
        core.decoder = decoders.Sequence([*unmark, decoders.Strip(" ", 1, 0)])
    else:
        core.normalizer = mark_spaces
        core.decoder = decoders.Sequence(unmark)
    _add_set_apart(core, pieces, types)
    return core


def _as_piece(token: str, kind: int) -> str:
    """Spell a run of spaces as SentencePiece does; GGUF writes user-defined ones as plain text."""
    is_spaces = kind == TokenType.USER_DEFINED and token and not token.strip(" ")
    return METASPACE * len(token) if is_spaces else token


def _merges_by_score(
    vocab: Mapping[str, int], pieces: list[str], scores: Sequence[int | float], types: list[int]
) -> list[tuple[str, str]]:
    """Rebuild the merges: every way to make a piece of two others, the best-scored piece first.

    Runs of spaces that the file sets apart come before all scored pieces. Gemma 3's 262,144 pieces
    give 513,976 merges in about 2 s.
    """
    spaces = [
        i
        for i, kind in enumerate(types)
        if kind == TokenType.USER_DEFINED and not pieces[i].strip(METASPACE)
    ]
    scored = [i for i, kind in enumerate(types) if kind == TokenType.NORMAL]
    scored.sort(key=lambda i: -scores[i])
    if (longest := max((len(pieces[i]) for i in scored), default=0)) > MAX_PIECE_CHARS:
        raise _bad_key(
            "tokens", f"has a piece of {longest:,} characters, at most {MAX_PIECE_CHARS}"
        )
    merges = []
    for i in itertools.chain(spaces, scored):
        piece = pieces[i]
        # A piece's tail is rarely a piece, so it is looked up first.
        splits = [
            (left, right)
            for cut in range(1, len(piece))
            if (right := piece[cut:]) in vocab and (left := piece[:cut]) in vocab
        ]
        if len(splits) > 1:
            splits.sort(key=lambda pair: (vocab[pair[0]], vocab[pair[1]]))
        merges += splits
    return merges


def _unknown_piece(
    metadata: Mapping[str, object], pieces: list[str], types: list[int]
) -> str | None:
    declared = _token_id(metadata, "unknown_token_id", len(pieces))
    if declared is not None:
        return pieces[declared]
    return next((p for p, k in zip(pieces, types, strict=True) if k == TokenType.UNKNOWN), None)


def _add_set_apart(core: tokenizers.Tokenizer, tokens: list[str], types: list[int]) -> None:
    """Let control and user-defined tokens be found in raw text, before any normalisation.

    Metaspace runs stay with the merges, which see the spaces they stand for.
    """
    added = [
        tokenizers.AddedToken(token, normalized=False, special=kind != TokenType.USER_DEFINED)
        for token, kind in zip(tokens, types, strict=True)
        if kind in (TokenType.CONTROL, TokenType.UNKNOWN, TokenType.USER_DEFINED)
        and token.strip(METASPACE)
    ]
    core.add_tokens(added)


def _special_tokens(
    metadata: Mapping[str, object], tokens: list[str], types: list[int]
) -> SpecialTokens:
    is_byte_level = _text(metadata, "model") == "gpt2"
    pre = _text(metadata, "pre", default="default")
    size = len(tokens)
    bos = _token_id(metadata, "bos_token_id", size)
    eos = _eos_ids(metadata, tokens, types)
    with_bos = _flag(metadata, "add_bos_token", default=not is_byte_level or pre in _BOS_BY_DEFAULT)
    with_eos = _flag(metadata, "add_eos_token", default=False)
    return SpecialTokens(
        bos=bos,
        eos=eos,
        pad=_token_id(metadata, "padding_token_id", size),
        unk=_token_id(metadata, "unknown_token_id", size),
        prefix=(bos,) if with_bos and bos is not None else (),
        suffix=eos[:1] if with_eos else (),
    )


def _eos_ids(
    metadata: Mapping[str, object], tokens: list[str], types: list[int]
) -> tuple[int, ...]:
    keys = ("eos_token_id", "eot_token_id", "eom_token_id")
    declared = [_token_id(metadata, key, len(tokens)) for key in keys]
    turns = [
        i
        for i, (token, kind) in enumerate(zip(tokens, types, strict=True))
        if kind == TokenType.CONTROL and token in _END_OF_TURN
    ]
    return tuple(dict.fromkeys(i for i in [*declared, *turns] if i is not None))


def _templates(metadata: Mapping[str, object]) -> dict[str, str]:
    base = "tokenizer.chat_template"
    found = {
        key.removeprefix(base).removeprefix(".") or "default": text
        for key, text in metadata.items()
        if key == base or key.startswith(base + ".")
    }
    return {name: text for name, text in found.items() if isinstance(text, str)}


def _tokens(metadata: Mapping[str, object]) -> list[str]:
    tokens = list(_sequence(metadata, "tokens"))
    if not tokens or not all(isinstance(token, str) for token in tokens):
        raise _bad_key("tokens", "must be a list of strings that is not empty")
    try:
        "".join(tokens).encode()
    except UnicodeEncodeError as error:
        raise _bad_key("tokens", f"holds invalid Unicode: {error.reason}") from error
    return tokens


def _token_types(metadata: Mapping[str, object], size: int) -> list[int]:
    if _PREFIX + "token_type" not in metadata:
        return [TokenType.NORMAL] * size
    types = _numbers(metadata, "token_type", size)
    if unknown := set(types) - {int(kind) for kind in TokenType}:
        raise _bad_key("token_type", f"has kinds {sorted(unknown)[:5]}, known are 1 to 6")
    return [int(kind) for kind in types]


def _vocab(pieces: list[str]) -> dict[str, int]:
    vocab = {piece: i for i, piece in enumerate(pieces)}
    if len(vocab) != len(pieces):
        raise _bad_key("tokens", f"repeats {len(pieces) - len(vocab)} of its {len(pieces)} tokens")
    return vocab


def _text(metadata: Mapping[str, object], key: str, default: str | None = None) -> str:
    value = metadata.get(_PREFIX + key, default)
    if not isinstance(value, str):
        raise _bad_key(key, f"must be a string, found {type(value).__name__}")
    return value


def _flag(metadata: Mapping[str, object], key: str, *, default: bool) -> bool:
    return bool(metadata.get(_PREFIX + key, default))


def _numbers(metadata: Mapping[str, object], key: str, size: int) -> Sequence[int | float]:
    values = _sequence(metadata, key)
    if len(values) != size:
        raise _bad_key(key, f"has {len(values)} entries for {size} tokens")
    if not all(isinstance(value, (int, float)) and value == value for value in values):
        raise _bad_key(key, "holds something other than numbers")
    return values


def _sequence(metadata: Mapping[str, object], key: str) -> Sequence[Any]:
    value: Any = metadata.get(_PREFIX + key)
    value = value.tolist() if hasattr(value, "tolist") else value
    if not isinstance(value, (list, tuple)):
        raise _bad_key(key, f"must be a list, found {type(value).__name__}")
    return value


def _token_id(metadata: Mapping[str, object], key: str, size: int) -> int | None:
    value: Any = metadata.get(_PREFIX + key)
    if value is None:
        return None
    if not hasattr(value, "__index__") or not 0 <= int(value) < size:
        raise _bad_key(key, f"is {value!r}, outside the {size} tokens")
    return int(value)


def _bad_key(key: str, why: str) -> TokenizerError:
    return TokenizerError(
        f"{_PREFIX}{key} is missing or damaged",
        why=f"it {why}",
        fix="get the file again, or convert the checkpoint anew",
    )
