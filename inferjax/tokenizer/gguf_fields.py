"""The vocabulary's fields of a GGUF file, checked one by one as they are read."""

import dataclasses
import enum
import math
import operator
from collections.abc import Mapping, Sequence
from typing import Any

from inferjax.errors import TokenizerError

PREFIX = "tokenizer.ggml."
MAX_TOKENS = 2**20


class TokenType(enum.IntEnum):
    """GGUF's kinds of token."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclasses.dataclass(frozen=True, slots=True)
class Vocabulary:
    """The tokens by id, each with its `TokenType`."""

    tokens: Sequence[str]
    types: Sequence[int]

    def ids(self) -> dict[str, int]:
        """Return the id of each token.

        Raises: TokenizerError if a token appears twice: which id a text gets would be unclear.
        """
        ids = {token: i for i, token in enumerate(self.tokens)}
        if missing := len(self.tokens) - len(ids):
            raise bad_field("tokens", f"repeats {missing} of its {len(self.tokens)} tokens")
        return ids


def read_vocabulary(fields: Mapping[str, object]) -> Vocabulary:
    """Return the tokens and their types; all are normal where the file has no types."""
    tokens = list(read_sequence(fields, "tokens"))
    if not tokens or not all(isinstance(token, str) for token in tokens):
        raise bad_field("tokens", "must be a list of strings that is not empty")
    try:
        "".join(tokens).encode()
    except UnicodeEncodeError as error:
        raise bad_field("tokens", f"holds invalid Unicode: {error.reason}") from error
    # Padding of a table can come as empty tokens: they get names, as in llama.cpp.
    tokens = [token or f"[EMPTY_{i}]" for i, token in enumerate(tokens)]
    return Vocabulary(tokens, _read_types(fields, len(tokens)))


def _read_types(fields: Mapping[str, object], size: int) -> list[int]:
    if PREFIX + "token_type" not in fields:
        return [TokenType.NORMAL] * size
    types = read_numbers(fields, "token_type", size)
    if unknown := set(types) - {int(kind) for kind in TokenType}:
        raise bad_field("token_type", f"has kinds {sorted(unknown)[:5]}, known are 1 to 6")
    return [int(kind) for kind in types]


def read_text(fields: Mapping[str, object], key: str, default: str | None = None) -> str:
    """Return a field that is a string."""
    value = fields.get(PREFIX + key, default)
    if not isinstance(value, str):
        raise bad_field(key, f"must be a string, found {type(value).__name__}")
    return value


def read_flag(fields: Mapping[str, object], key: str, *, default: bool) -> bool:
    """Return a field that is true or false."""
    value = fields.get(PREFIX + key, default)
    if not isinstance(value, int) or value not in (0, 1):
        raise bad_field(key, f"must be true or false, found {str(value)[:80]!r}")
    return bool(value)


def read_numbers(fields: Mapping[str, object], key: str, size: int) -> Sequence[int | float]:
    """Return a field of one finite number for each token."""
    values = read_sequence(fields, key)
    if len(values) != size:
        raise bad_field(key, f"has {len(values)} entries for {size} tokens")
    if not all(isinstance(value, (int, float)) and math.isfinite(value) for value in values):
        raise bad_field(key, "holds something other than finite numbers")
    return values


def read_sequence(fields: Mapping[str, object], key: str) -> Sequence[Any]:
    """Return a field that is a list."""
    value: Any = fields.get(PREFIX + key)
    # As Python's numbers an array takes up to 36 times its bytes.
    if hasattr(value, "tolist") and value.size > MAX_TOKENS:
        raise bad_field(key, f"has {value.size} entries, at most {MAX_TOKENS} are read")
    value = value.tolist() if hasattr(value, "tolist") else value
    if not isinstance(value, (list, tuple)):
        raise bad_field(key, f"must be a list, found {type(value).__name__}")
    return value


def read_token_id(fields: Mapping[str, object], key: str, size: int) -> int | None:
    """Return a field that is a token's id, None if the file has no such field."""
    value: Any = fields.get(PREFIX + key)
    if value is None:
        return None
    token_id = _whole_number(value)
    if token_id is None or not 0 <= token_id < size:
        raise bad_field(key, f"is {str(value)[:80]!r}, outside the {size} tokens")
    return token_id


def _whole_number(value: Any) -> int | None:
    try:
        return None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        return None


def bad_field(key: str, why: str) -> TokenizerError:
    """Return the error for a field that is missing or damaged."""
    return TokenizerError(
        f"{PREFIX}{key} is missing or damaged",
        why=f"it {why}",
        fix="get the file again, or convert the checkpoint anew",
    )
