"""Text to token ids and back: vocabularies, chat templates and the incremental detokenizer."""

from inferjax.tokenizer.chat import ChatTemplate
from inferjax.tokenizer.detokenizer import Detokenizer
from inferjax.tokenizer.from_directory import tokenizer_from_directory
from inferjax.tokenizer.from_gguf import tokenizer_from_gguf
from inferjax.tokenizer.save import save_tokenizer
from inferjax.tokenizer.tokenizer import SpecialTokens, Tokenizer

__all__ = [
    "ChatTemplate",
    "Detokenizer",
    "SpecialTokens",
    "Tokenizer",
    "save_tokenizer",
    "tokenizer_from_directory",
    "tokenizer_from_gguf",
]
