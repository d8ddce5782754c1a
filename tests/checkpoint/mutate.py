"""Ways to damage a file: its bytes, its JSON, or the metadata of a GGUF file."""

import copy
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from make_files import gguf_pair, gguf_string, make_safetensors, u32, u64

NUMBERS = [0, 1, 2, 3, 31, 32, 255, 2**15, 2**16, 2**31, 2**32 - 1, 2**48, 2**62, 2**63, 2**64 - 1]
Mutation = Callable[[np.random.Generator, bytes], bytes]


def flip_bytes(rng: np.random.Generator, content: bytes) -> bytes:
    mutated = bytearray(content)
    for _ in range(rng.integers(1, 5)):
        mutated[_near_the_start(rng, len(mutated))] ^= int(rng.integers(1, 256))
    return bytes(mutated)


def truncate(rng: np.random.Generator, content: bytes) -> bytes:
    return content[: _near_the_start(rng, len(content))]


def edit_length(rng: np.random.Generator, content: bytes) -> bytes:
    """Overwrite 1, 4 or 8 bytes with a number that is at an edge, or near the file's size."""
    at, width = _near_the_start(rng, len(content)), int(rng.choice([1, 4, 8]))
    numbers = [*NUMBERS, len(content), len(content) - at, max(0, len(content) - at - 8)]
    patch = (numbers[rng.integers(len(numbers))] % 256**width).to_bytes(width, "little")
    return content[:at] + patch + content[at + width :]


def splice(rng: np.random.Generator, content: bytes) -> bytes:
    """Repeat or drop a stretch."""
    first, second = sorted(_near_the_start(rng, len(content)) for _ in range(2))
    return content[:second] + content[first if rng.random() < 0.5 else second + 4 :]


def _near_the_start(rng: np.random.Generator, size: int) -> int:
    """Pick a place; in three of four cases where headers are, as most of a file is weights."""
    return int(rng.integers(size if rng.random() < 0.25 else min(size, 16_384)))


BINARY: tuple[Mutation, ...] = (flip_bytes, truncate, edit_length, splice)

_RAW = "\ue000"  # stands for text that is no JSON, or that Python would write otherwise
_RAW_TEXTS = (
    *("NaN", "Infinity", "-Infinity", "1e400", "-1e400", "1e-400", "9" * 60, "9" * 5000),
    *('"\\ud800"', '"\\u0000"', "[" * 60 + "]" * 60, "[" * 3000 + "]" * 3000, '{"a":' * 9, "tru"),
)
_JUNK: tuple[Any, ...] = (
    *(None, True, False, "", "a", "1", "true", "None", "é" * 40, "x" * 3000, "../a", "/dev/zero"),
    *(-1, 1.5, -0.0, 1e-45, 5e-324, 1e308, 1e15, 10**60, -(10**60), 2**31 - 1, 2**53 + 1),
    *([], [[]], {}, {"a": 1}, [0] * 500, [None], ["a", "b"], [1, "a", None], {"type": "default"}),
    *NUMBERS,
)


def mutate_json(rng: np.random.Generator, content: bytes) -> bytes:
    """Change one to three places of a JSON text: a value, a key, or the order of things."""
    root = [json.loads(content)]
    raw: list[str] = []
    for _ in range(rng.integers(1, 4)):
        _mutate_node(rng, root, raw)
    text = json.dumps(root[0], ensure_ascii=bool(rng.integers(2)))
    for index, replacement in enumerate(raw):
        text = text.replace(f'"{_RAW}{index}"', replacement)
        text = text.replace(json.dumps(f"{_RAW}{index}"), replacement)
    if rng.random() < 0.05 and isinstance(root[0], dict) and root[0]:
        key, value = list(root[0].items())[rng.integers(len(root[0]))]
        text = f"{{{json.dumps(key)}:{json.dumps(value)},{text[1:]}"
    return text.encode("utf-8", "surrogatepass")


def _mutate_node(rng: np.random.Generator, root: list[Any], raw: list[str]) -> None:
    places = list(_places(root, 400))
    holder, key = places[rng.integers(len(places))]
    if key not in (holder if isinstance(holder, dict) else range(len(holder))):
        return
    other_holder, other_key = places[rng.integers(len(places))]
    kind = rng.integers(10)
    if kind < 5:
        holder[key] = copy.deepcopy(_JUNK[rng.integers(len(_JUNK))])
    elif kind == 5:
        raw.append(_RAW_TEXTS[rng.integers(len(_RAW_TEXTS))])
        holder[key] = f"{_RAW}{len(raw) - 1}"
    elif kind == 6 and holder is not root:
        del holder[key]
    elif kind == 7 and isinstance(holder, dict):
        holder[["", "a", key + " ", key.upper(), "é\u202e"][rng.integers(5)]] = holder.pop(key)
    elif kind == 8:
        holder[key] = json.loads(json.dumps(other_holder[other_key]))
    else:
        holder[key] = _nudged(rng, holder[key])


def _nudged(rng: np.random.Generator, value: Any) -> Any:
    """Return a value near the one that was there, which is likelier to be let through."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return [value + 1, value - 1, value * 2, value // 2, float(value), -value][rng.integers(6)]
    if isinstance(value, str):
        return [value + value, value[:-1], value.upper(), [value]][rng.integers(4)]
    return [value] if rng.random() < 0.5 else {"a": value}


def _places(root: list[Any], limit: int) -> Sequence[tuple[Any, Any]]:
    found: list[tuple[Any, Any]] = []
    pending: list[Any] = [root]
    while pending and len(found) < limit:
        node = pending.pop(0)
        items = node.items() if isinstance(node, dict) else enumerate(node)
        for key, value in items:
            found.append((node, key))
            if isinstance(value, dict | list):
                pending.append(value)
    return found


def edit_json_token(rng: np.random.Generator, content: bytes) -> bytes:
    """Replace one number or string of a JSON text by its like, or by text that is no JSON."""
    tokens = list(re.finditer(rb'-?\d+|"[^"]*"', content))
    if not tokens:
        return content
    token = tokens[rng.integers(len(tokens))]
    others = [
        *(str(number).encode() for number in NUMBERS),
        *(text.encode() for text in _RAW_TEXTS),
        *(other.group() for other in tokens[:100]),
    ]
    return content[: token.start()] + others[rng.integers(len(others))] + content[token.end() :]


def mutate_header(rng: np.random.Generator, content: bytes) -> bytes:
    """Change the header of a safetensors file and keep its length true."""
    length = int.from_bytes(content[:8], "little")
    change = (mutate_json, edit_json_token)[rng.integers(2)]
    return make_safetensors(change(rng, content[8 : 8 + length]), content[8 + length :])


JSON: tuple[Mutation, ...] = (mutate_json, mutate_json, mutate_json, edit_json_token, *BINARY)

_KINDS = {0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "?"}
_KINDS |= {10: "<u8", 11: "<i8", 12: "<f8"}


def encode_pair(key: str, value: Any) -> bytes:
    """Write a metadata pair as a value of the kind that Python's type suggests."""
    if isinstance(value, str):
        return gguf_pair(key, 8, gguf_string(value))
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        return gguf_pair(key, 9, u32(8) + u64(len(value)) + b"".join(map(gguf_string, value)))
    if isinstance(value, list):
        inner = b"".join(_encode_array(np.asarray(item)) for item in value)
        return gguf_pair(key, 9, u32(9) + u64(len(value)) + inner)
    array = np.asarray(value)
    if array.ndim:
        return gguf_pair(key, 9, _encode_array(array))
    if isinstance(value, bool):
        return gguf_pair(key, 7, bytes([value]))
    if isinstance(value, float):
        with np.errstate(over="ignore"):
            return gguf_pair(key, 6, np.float64(value).astype("<f4").tobytes())
    kind = 4 if 0 <= value < 2**32 else 11
    return gguf_pair(key, kind, (value % 2**64).to_bytes(8, "little")[: 4 if kind == 4 else 8])


def _encode_array(array: np.ndarray) -> bytes:
    kind = next(k for k, name in _KINDS.items() if np.dtype(name) == array.dtype)
    return u32(kind) + u64(array.size) + array.tobytes()


_GGUF_JUNK: tuple[Any, ...] = (
    *("", "a", "llama", "x" * 70_000, True, False, 0, 1, 2, 3, -1, 65_537, 2**31, 2**32 - 1),
    *(-(2**63), 2**62, 0.0, -1.0, 1e-45, 3e38, float("nan"), float("inf"), float("-inf"), 1.5),
    *([], [""], ["a", "b"], np.zeros(0, np.int32), np.arange(3, dtype=np.int32)),
    *(np.ones(3, bool), np.array([np.nan, 1.0]), np.zeros(70_000, np.uint8), np.ones(1, np.int8)),
    *([np.arange(2, dtype=np.int32), np.arange(3, dtype=np.int32)], [np.zeros(0, np.uint8)]),
)


def mutate_metadata(rng: np.random.Generator, metadata: dict[str, Any]) -> dict[str, Any]:
    """Change one to three pairs of a GGUF file's metadata."""
    changed = dict(metadata)
    for _ in range(rng.integers(1, 4)):
        keys = list(changed)
        key, other = (keys[rng.integers(len(keys))] for _ in range(2))
        kind = rng.integers(8)
        if kind < 4:
            changed[key] = _GGUF_JUNK[rng.integers(len(_GGUF_JUNK))]
        elif kind == 4:
            del changed[key]
        elif kind == 5:
            changed[[key + "x", key.upper(), "é"][rng.integers(3)]] = changed.pop(key)
        elif kind == 6:
            changed[key] = changed[other]
        else:
            changed[key] = _nudged_metadata(rng, changed[key])
        if not changed:
            return changed
    return changed


def _nudged_metadata(rng: np.random.Generator, value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value[: rng.integers(value.size + 1)]
    if isinstance(value, list):
        cut = list(value)
        if cut:
            cut[rng.integers(len(cut))] = "" if isinstance(cut[0], str) else cut[0]
        return cut[: rng.integers(len(cut) + 1)] if rng.random() < 0.5 else cut
    if isinstance(value, str):
        return value[: rng.integers(len(value) + 1)]
    nudged = [value + 1, value - 1, value * 2, value // 2][rng.integers(4)]
    return nudged if not isinstance(value, bool) else not value


def change_file(rng: np.random.Generator, file: Path, mutations: Sequence[Mutation]) -> None:
    """Replace a file, by a new one: writing to one that is still mapped would kill the process."""
    content = file.read_bytes()
    mutated = mutations[rng.integers(len(mutations))](rng, content) if content else b"x"
    file.unlink()
    file.write_bytes(mutated)
