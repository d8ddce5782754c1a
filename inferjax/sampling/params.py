"""The request as a user writes it: values, ids and strings, checked one by one."""

import dataclasses
import difflib
import math
import numbers
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, NoReturn

import numpy as np

from inferjax.errors import InvalidSampling
from inferjax.sampling.arrays import GREEDY_BELOW, NO_LIMIT

type Check = Callable[[str, Any], Any]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """One request's sampling. Every field is checked; lists and mappings are stored as tuples.

    temperature: below 1e-5 is greedy. top_k: 0 or -1 is off. logit_bias: id -> addition to the
    logit. allowed_token_ids: None allows all. bad_token_ids: ids or sequences of ids; bad_words:
    the same as text, for whoever has a tokenizer. max_tokens: None means as many as fit. seed: None
    lets the engine choose. logprobs: how many of the most likely tokens to report, 0 for the chosen
    one alone; prompt_logprobs: the same at every place of the prompt. logprob_token_ids: tokens
    whose log-probabilities to report at every place. forced_token_ids: what the output begins with,
    whatever would have been drawn. echo: the text begins with the prompt. include_stop: the stop
    string that ends the text stays in it.

    Raises: InvalidSampling.
    """

    # The checks below give typed errors; a type checker at run time would come before them.
    __no_type_check__: ClassVar[bool] = True

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | Sequence[tuple[int, float]] = ()
    allowed_token_ids: Sequence[int] | None = None
    bad_token_ids: Sequence[int | Sequence[int]] = ()
    bad_words: str | Sequence[str] = ()
    min_tokens: int = 0
    max_tokens: int | None = None
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    seed: int | None = None
    n: int = 1
    logprobs: int | None = None
    logprob_token_ids: Sequence[int] = ()
    prompt_logprobs: int | None = None
    forced_token_ids: Sequence[int] = ()
    echo: bool = False
    include_stop: bool = False
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        """Check every field and store it in its plain form."""
        for name, check in _CHECKS.items():
            object.__setattr__(self, name, check(name, getattr(self, name)))
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            _refuse(
                "min_tokens", self.min_tokens, f"at most max_tokens, which is {self.max_tokens}"
            )
        if self.n > 1 and self.temperature < GREEDY_BELOW:
            _refuse("n", self.n, "1 when temperature is 0: greedy samples are all the same")

    @classmethod
    def from_mapping(cls, fields: Any) -> "SamplingParams":
        """Build from parsed JSON: unknown fields are refused, keys of `logit_bias` may be strings.

        Raises: InvalidSampling.
        """
        if not isinstance(fields, Mapping):
            raise InvalidSampling(
                f"sampling is {type(fields).__name__}", why="it must be an object of named fields"
            )
        known = [field.name for field in dataclasses.fields(cls)]
        unknown = sorted(str(name) for name in fields if name not in known)
        if unknown:
            near = difflib.get_close_matches(unknown[0], known, n=1)
            hint = f"did you mean {near[0]}?" if near else f"use one of: {', '.join(known)}"
            raise InvalidSampling(
                f"unknown sampling field: {', '.join(unknown)}",
                why="a field that is not understood would be ignored",
                fix=hint,
                fields=tuple(unknown),
            )
        values = dict(fields)
        bias = values.get("logit_bias")
        if isinstance(bias, Mapping):
            values["logit_bias"] = {_json_id(key): value for key, value in bias.items()}
        return cls(**values)


def _refuse(name: str, value: object, allowed: str) -> NoReturn:
    raise InvalidSampling(
        f"{name} is {value!r}",
        why=f"{name} must be {allowed}",
        fix=f"give {name} a value in that range",
        field=name,
        value=value,
    )


def _real(allowed: str, holds: Callable[[float], bool]) -> Check:
    def check(name: str, value: Any) -> float:
        number = _float(value)
        if not math.isfinite(number) or not holds(number):
            _refuse(name, value, f"a finite number {allowed}")
        return number

    return check


def _integer(low: int, high: int, *, optional: bool = False) -> Check:
    allowed = f"an integer from {low} to {high}" + (", or None" if optional else "")

    def check(name: str, value: Any) -> int | None:
        if optional and value is None:
            return None
        if value is None or not _is_integer(value) or not low <= int(value) <= high:
            _refuse(name, value, allowed)
        return int(value)

    return check


def _float(value: Any) -> float:
    """Return the number, or NaN for what is none; an integer beyond the floats is infinite."""
    if not isinstance(value, numbers.Real) or isinstance(value, bool):
        return math.nan
    try:
        return float(value)
    except OverflowError:
        return math.inf


def _is_integer(value: Any) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def _flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool | np.bool_):
        _refuse(name, value, "True or False")
    return bool(value)


def _strings(name: str, value: Any) -> tuple[str, ...]:
    found = (value,) if isinstance(value, str) else _items(name, value, "strings")
    if not all(isinstance(text, str) and text for text in found):
        _refuse(name, value, "a string or a list of strings, none of them empty")
    return found


def _ids(name: str, value: Any) -> tuple[int, ...]:
    return tuple(_token_id(name, token) for token in _items(name, value, "token ids"))


def _optional_ids(name: str, value: Any) -> tuple[int, ...] | None:
    if value is None:
        return None
    ids = _ids(name, value)
    if not ids:
        _refuse(name, value, "None, or a list of at least one token id")
    return ids


def _id_sequences(name: str, value: Any) -> tuple[tuple[int, ...], ...]:
    found = []
    for item in _items(name, value, "token ids or lists of token ids"):
        found.append((item,) if _is_integer(item) else _ids(name, item))
        if not found[-1]:
            _refuse(name, value, "token ids or lists of token ids, none of them empty")
    return tuple(_ids(name, sequence) for sequence in found)


def _bias(name: str, value: Any) -> tuple[tuple[int, float], ...]:
    pairs = value.items() if isinstance(value, Mapping) else value
    pairs = _items(name, pairs, "a mapping from token id to a finite number")
    if not all(isinstance(pair, Sequence) and len(pair) == 2 for pair in pairs):
        _refuse(name, value, "a mapping from token id to a finite number")
    number = _real("for each token id", lambda _: True)
    checked = {_token_id(name, token): number(name, addition) for token, addition in pairs}
    if len(checked) != len(pairs):
        _refuse(name, value, "a mapping with each token id once")
    return tuple(sorted(checked.items()))


def _items(name: str, value: Any, allowed: str) -> tuple[Any, ...]:
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Iterable):
        _refuse(name, value, f"a list of {allowed}")
    return tuple(value)


def _json_id(key: Any) -> Any:
    # Longer strings are no ids, and Python refuses to convert the longest.
    digits = isinstance(key, str) and len(key) <= 20 and key.isascii() and key.isdecimal()
    return int(key) if digits else key


_token_id = _integer(0, NO_LIMIT)

_CHECKS: dict[str, Check] = {
    "temperature": _real("of at least 0", lambda value: value >= 0),
    "top_k": _integer(-1, NO_LIMIT),
    "top_p": _real("above 0 and at most 1", lambda value: 0 < value <= 1),
    "min_p": _real("from 0 to 1", lambda value: 0 <= value <= 1),
    "repetition_penalty": _real("above 0", lambda value: value > 0),
    "presence_penalty": _real("from -2 to 2", lambda value: -2 <= value <= 2),
    "frequency_penalty": _real("from -2 to 2", lambda value: -2 <= value <= 2),
    "logit_bias": _bias,
    "allowed_token_ids": _optional_ids,
    "bad_token_ids": _id_sequences,
    "bad_words": _strings,
    "min_tokens": _integer(0, NO_LIMIT),
    "max_tokens": _integer(0, NO_LIMIT, optional=True),
    "stop": _strings,
    "stop_token_ids": _ids,
    "ignore_eos": _flag,
    "seed": _integer(0, 2**64 - 1, optional=True),
    "n": _integer(1, 16384),
    "logprobs": _integer(0, NO_LIMIT, optional=True),
    "logprob_token_ids": _ids,
    "prompt_logprobs": _integer(0, NO_LIMIT, optional=True),
    "forced_token_ids": _ids,
    "echo": _flag,
    "include_stop": _flag,
    "skip_special_tokens": _flag,
}
