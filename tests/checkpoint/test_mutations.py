"""Mutated checkpoints: whatever a file says, reading succeeds or raises an InferjaxError, soon."""

import json
import re
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from make_files import (
    gguf_pair,
    gguf_string,
    gguf_tensor,
    make_entry,
    make_gguf,
    make_safetensors,
    u32,
    u64,
)

from inferjax.checkpoint.gguf import open_gguf
from inferjax.checkpoint.safetensors import INDEX_NAME, open_safetensors
from inferjax.errors import InferjaxError

NUMBERS = [0, 1, 2, 3, 31, 32, 255, 2**15, 2**16, 2**31, 2**32 - 1, 2**48, 2**62, 2**63, 2**64 - 1]
MAX_SECONDS = 2.0  # of processor time; a case takes about 1 ms

BASE_GGUF = make_gguf(
    [
        gguf_pair("general.architecture", 8, gguf_string("llama")),
        gguf_pair("general.alignment", 4, u32(32)),
        gguf_pair("flag", 7, b"\x01"),
        gguf_pair("tokens", 9, u32(8) + u64(3) + b"".join(map(gguf_string, ("a", "", "héé")))),
        gguf_pair("scores", 9, u32(6) + u64(4) + bytes(16)),
        gguf_pair("nested", 9, u32(9) + u64(2) + (u32(0) + u64(3) + b"abc") * 2),
    ],
    [
        gguf_tensor("plain", (4, 2), 0, 0),
        gguf_tensor("q4_1", (32, 3), 3, 32),
        gguf_tensor("q8_0", (32, 1), 8, 96),
        gguf_tensor("q6_k", (256, 1), 14, 160),
        gguf_tensor("bfloat16", (2, 2, 2, 2), 30, 384),
    ],
    np.random.default_rng(0).integers(0, 256, 416, np.uint8).tobytes(),
)
BASE_HEADER = {
    "__metadata__": {"format": "pt"},
    "w": make_entry("F32", (2, 3), (0, 24)),
    "v": make_entry("BF16", (4,), (24, 32)),
    "e": make_entry("F16", (0, 3), (32, 32)),
    "i": make_entry("I64", (1,), (32, 40)),
}
BASE_SAFETENSORS = make_safetensors(BASE_HEADER, bytes(range(40)))
BASE_INDEX = {
    "metadata": {"total_size": 40},
    "weight_map": dict.fromkeys(("w", "v", "e", "i"), "model-1-of-1.safetensors"),
}


def flip_bytes(rng: np.random.Generator, content: bytes) -> bytes:
    mutated = bytearray(content)
    for _ in range(rng.integers(1, 5)):
        mutated[rng.integers(len(mutated))] ^= int(rng.integers(1, 256))
    return bytes(mutated)


def truncate(rng: np.random.Generator, content: bytes) -> bytes:
    return content[: rng.integers(len(content))]


def edit_length(rng: np.random.Generator, content: bytes) -> bytes:
    """Overwrite 1, 4 or 8 bytes with a number that is at an edge, or near the file's size."""
    at, width = int(rng.integers(len(content))), int(rng.choice([1, 4, 8]))
    number = [*NUMBERS, len(content), len(content) - at, len(content) - at - 8][rng.integers(18)]
    patch = (number % 256**width).to_bytes(width, "little")
    return content[:at] + patch + content[at + width :]


def splice(rng: np.random.Generator, content: bytes) -> bytes:
    """Repeat or drop a stretch."""
    first, second = sorted(int(at) for at in rng.integers(len(content), size=2))
    return content[:second] + content[first if rng.random() < 0.5 else second + 4 :]


def edit_json_token(rng: np.random.Generator, content: bytes) -> bytes:
    """Replace one number or string of a JSON text, which stays well-formed."""
    tokens = list(re.finditer(rb'-?\d+|"[^"]*"', content))
    token = tokens[rng.integers(len(tokens))]
    others = [
        *(str(number).encode() for number in NUMBERS),
        *(
            b"-1",
            b"1.5",
            b"1e400",
            b"true",
            b"null",
            b'""',
            b"[]",
            b"{}",
            b'"\\ud800"',
            b"9" * 5000,
        ),
        *(other.group() for other in tokens),
    ]
    return content[: token.start()] + others[rng.integers(len(others))] + content[token.end() :]


def edit_header_token(rng: np.random.Generator, content: bytes) -> bytes:
    """Replace one token of a safetensors header and keep the header's length true."""
    length = int.from_bytes(content[:8], "little")
    header = edit_json_token(rng, content[8 : 8 + length])
    return make_safetensors(header, content[8 + length :])


BINARY = (flip_bytes, truncate, edit_length, splice)


def open_mutated_gguf(folder: Path, content: bytes):
    path = folder / "m.gguf"
    path.write_bytes(content)
    return open_gguf(path)


def open_mutated_safetensors(folder: Path, content: bytes):
    path = folder / "model.safetensors"
    path.write_bytes(content)
    return open_safetensors(path)


def open_with_mutated_index(folder: Path, content: bytes):
    (folder / "model-1-of-1.safetensors").write_bytes(BASE_SAFETENSORS)
    (folder / INDEX_NAME).write_bytes(content)
    return open_safetensors(folder)


TARGETS = {
    "gguf": (BASE_GGUF, BINARY, open_mutated_gguf),
    "safetensors": (BASE_SAFETENSORS, (*BINARY, edit_header_token), open_mutated_safetensors),
    "index": (
        json.dumps(BASE_INDEX).encode(),
        (*BINARY, edit_json_token),
        open_with_mutated_index,
    ),
}


def try_one(folder: Path, content: bytes, open_file: Callable) -> str:
    """Open a file and read what it lists; return "opened" or "refused"; bound memory and time."""
    start = time.process_time()
    tracemalloc.start()
    try:
        file = open_file(folder, content)
    except InferjaxError as error:
        assert len(str(error)) < 5000  # noqa: PT017
        return "refused"
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 2 * len(content) + 200_000
    for name, entry in file.entries.items():
        try:
            assert file.read(name).shape == entry.shape
        except InferjaxError:
            assert entry.dtype not in ("float32", "float16", "bfloat16")
    file.close()
    assert time.process_time() - start < MAX_SECONDS
    return "opened"


def run_cases(tmp_path: Path, target: str, num_cases: int) -> set[str]:
    content, mutations, open_file = TARGETS[target]
    outcomes = set()
    for seed in range(num_cases):
        rng = np.random.default_rng(seed)
        mutated = mutations[seed % len(mutations)](rng, content)
        # A new folder each time: rewriting a file that is still mapped would kill the process.
        folder = tmp_path / str(seed)
        folder.mkdir()
        try:
            outcomes.add(try_one(folder, mutated, open_file))
        except Exception as error:
            pytest.fail(f"{target}, seed {seed}: {type(error).__name__}: {error}")
    return outcomes


@pytest.mark.parametrize("target", TARGETS)
def test_unmutated_file_opens(tmp_path, target):
    content, _, open_file = TARGETS[target]
    assert try_one(tmp_path, content, open_file) == "opened"


@pytest.mark.parametrize("target", TARGETS)
def test_mutated_file_opens_or_is_refused_with_our_error(tmp_path, target):
    assert run_cases(tmp_path, target, 200) == {"opened", "refused"}


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
def test_ten_thousand_mutated_files_open_or_are_refused(tmp_path, target):
    assert run_cases(tmp_path, target, 10_000) == {"opened", "refused"}


@pytest.mark.parametrize("target", ["gguf", "safetensors"])
def test_file_cut_anywhere_is_refused_by_name(tmp_path, target):
    content, _, open_file = TARGETS[target]
    for num_bytes in range(0, len(content), 7):
        folder = tmp_path / str(num_bytes)
        folder.mkdir()
        with pytest.raises(InferjaxError, match=re.escape(str(folder))):
            open_file(folder, content[:num_bytes])
