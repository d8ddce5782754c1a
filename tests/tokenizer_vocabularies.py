"""Small vocabularies of both kinds, as a GGUF file's metadata would hold them."""

from collections.abc import Sequence
from typing import Any

from inferjax.tokenizer.detokenizer import BYTE_OF_CHAR

CHAR_OF_BYTE = {byte: char for char, byte in BYTE_OF_CHAR.items()}

WORDS = ["the", " the", " then", "hello", " world", "日本", "é", "🎉", " 🎉", "123", "  ", "\n\n"]


def byte_level_metadata(words: Sequence[str] = WORDS, **changes: Any) -> dict[str, object]:
    """Make a "gpt2" vocabulary: 3 control tokens, the 256 bytes, and left-to-right merges."""
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    tokens += [CHAR_OF_BYTE[byte] for byte in range(256)]
    merges = []
    for word in words:
        spelled = "".join(CHAR_OF_BYTE[byte] for byte in word.encode())
        for end in range(2, len(spelled) + 1):
            if spelled[:end] not in tokens:
                tokens.append(spelled[:end])
                merges.append(f"{spelled[: end - 1]} {spelled[end - 1]}")
    tokens.append("<tool>")
    types = [3, 3, 3] + [1] * (len(tokens) - 4) + [4]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    } | {f"tokenizer.ggml.{key}": value for key, value in changes.items()}


PIECES = [
    *("▁t", "he", "▁the", "ll", "hell", "o▁", "▁w", "or", "▁wor", "ld", "▁world", "日本"),
    *("▁", "t", "h", "e", "l", "o", "w", "r", "d", "日", "本", "1", "2", ".", "\n"),
]


def sentencepiece_metadata(
    pieces: Sequence[str] = PIECES, user: Sequence[str] = ("<tool>", "  ", "   "), **changes: Any
) -> dict[str, object]:
    """Make a "llama" vocabulary: 4 special tokens, 256 bytes, user-defined and scored pieces."""
    tokens = ["<unk>", "<s>", "</s>", "<end_of_turn>"]
    tokens += [f"<0x{byte:02X}>" for byte in range(256)] + [*user, *pieces]
    types = [2, 3, 3, 3] + [6] * 256 + [4] * len(user) + [1] * len(pieces)
    scores = [0.0] * (len(tokens) - len(pieces)) + [-float(rank) for rank in range(len(pieces))]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.add_space_prefix": False,
    } | {f"tokenizer.ggml.{key}": value for key, value in changes.items()}
