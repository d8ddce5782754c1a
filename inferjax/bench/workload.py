"""What a benchmark asks for: prompts and lengths, drawn or read from a file, and when they come."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np

from inferjax.errors import InvalidInput


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One request of a benchmark; exactly `num_tokens` are generated."""

    prompt: str | tuple[int, ...]
    num_tokens: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Mix:
    """Random requests.

    Lengths are uniform in [len * (1 - range_ratio), len * (1 + range_ratio)]. Before the
    `input_len` tokens of its own, a prompt has one of `num_prefixes` prefixes of `shared_prefix`
    tokens, in turn.

    Raises: InvalidInput.
    """

    num_requests: int = 64
    input_len: int = 128
    output_len: int = 64
    range_ratio: float = 0.0
    shared_prefix: int = 0
    num_prefixes: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        """Refuse what cannot be drawn."""
        smallest = {"num_requests": 1, "input_len": 1, "output_len": 1, "num_prefixes": 1}
        smallest |= {"shared_prefix": 0, "seed": 0}
        for name, least in smallest.items():
            if getattr(self, name) < least:
                raise InvalidInput(
                    f"{name} is {getattr(self, name)}",
                    why=f"it counts from {least}",
                    fix="give a larger number",
                )
        if not 0 <= self.range_ratio < 1:
            raise InvalidInput(
                f"range_ratio is {self.range_ratio}",
                why="lengths between len * (1 - ratio) and len * (1 + ratio) must be positive",
                fix="give a number from 0 to less than 1",
            )


def draw_asks(mix: Mix, vocab_size: int) -> list[Ask]:
    """Return the requests of a mix; request i does not depend on how many follow it."""
    prefixes = [
        _ids(np.random.default_rng((mix.seed, 0, i)), mix.shared_prefix, vocab_size)
        for i in range(mix.num_prefixes)
    ]
    asks = []
    for i in range(mix.num_requests):
        draw = np.random.default_rng((mix.seed, 1, i))
        own = _ids(draw, _length(draw, mix.input_len, mix.range_ratio), vocab_size)
        num_tokens = _length(draw, mix.output_len, mix.range_ratio)
        asks.append(Ask(prompt=prefixes[i % mix.num_prefixes] + own, num_tokens=num_tokens))
    return asks


def read_asks(path: Path, *, num_tokens: int, limit: int | None = None) -> list[Ask]:
    """Return the first `limit` requests of a file, one JSON object a line.

    `{"prompt": text or ids, "max_tokens": n}`; `num_tokens` stands in for a missing "max_tokens".

    Raises: InvalidInput for a file that cannot be read, or a line that is no such object.
    """
    asks = []
    try:
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    asks.append(_ask(line, f"{path}:{number}", num_tokens))
                if len(asks) == limit:
                    break
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInput(
            f"{path} cannot be read", why=str(error), fix="give a file of JSON lines"
        ) from error
    if not asks:
        raise InvalidInput(f"{path} has no request", fix="write one JSON object a line")
    return asks


def arrival_times(count: int, rate: float | None, seed: int) -> list[float]:
    """Return the seconds at which requests arrive: a Poisson process, or all at 0 without a rate.

    Raises: InvalidInput for a rate that is no positive number.
    """
    if rate is None:
        return [0.0] * count
    if not 0 < rate < float("inf"):
        raise InvalidInput(
            f"request rate {rate}", why="it is requests per second", fix="give a positive number"
        )
    gaps = np.random.default_rng((seed, 2)).exponential(1 / rate, count)
    return np.cumsum(gaps).tolist()


def _length(draw: np.random.Generator, length: int, ratio: float) -> int:
    low, high = int(np.ceil(length * (1 - ratio))), int(length * (1 + ratio))
    return int(draw.integers(max(1, low), high, endpoint=True))


def _ids(draw: np.random.Generator, count: int, vocab_size: int) -> tuple[int, ...]:
    return tuple(draw.integers(0, vocab_size, count).tolist())


def _ask(line: str, where: str, num_tokens: int) -> Ask:
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InvalidInput(f"{where} is no JSON", why=str(error)) from error
    prompt, wanted = _fields(fields, num_tokens)
    is_ids = isinstance(prompt, list) and all(type(token) is int for token in prompt)
    if not (isinstance(prompt, str) or is_ids) or type(wanted) is not int or wanted < 1:
        raise InvalidInput(
            f"{where} is no request",
            why="a line is an object with a prompt and, if need be, max_tokens of at least 1",
            fix='write {"prompt": text or token ids, "max_tokens": n}',
        )
    return Ask(prompt=prompt if isinstance(prompt, str) else tuple(prompt), num_tokens=wanted)


def _fields(fields: Any, num_tokens: int) -> tuple[Any, Any]:
    if not isinstance(fields, dict):
        return None, None
    return fields.get("prompt"), fields.get("max_tokens", num_tokens)
