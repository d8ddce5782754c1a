"""Mutated GGUF files: their bytes, their metadata, their tensors, and sets of split ones."""

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mutate
import numpy as np
from make_files import gguf_tensor, make_gguf
from tokenizer_vocabularies import byte_level_metadata, sentencepiece_metadata

from inferjax.checkpoint.gguf import _open_part, open_gguf
from inferjax.checkpoint.gguf_blocks import BLOCKS

TINY_GGUF = Path(__file__).resolve().parents[2] / "checkpoints" / "tiny_gguf"


def types_gguf() -> bytes:
    """Return a file with a tensor of every type."""
    rng, tensors, data = np.random.default_rng(0), [], b""
    for number, kind in BLOCKS.items():
        rows = 2 if kind.block_len > 1 else 3
        raw = rng.integers(0, 256, rows * 2 * kind.block_bytes, np.uint8).tobytes()
        tensors.append(gguf_tensor(kind.name, (2 * kind.block_len, rows), number, len(data)))
        data += raw + bytes(-len(raw) % 32)
    pairs = [
        mutate.encode_pair("general.architecture", "llama"),
        mutate.encode_pair("general.alignment", 32),
        mutate.encode_pair("tokens", ["a", "", "héé"]),
        mutate.encode_pair("scores", np.zeros(4, np.float32)),
        mutate.encode_pair("nested", [np.arange(3, dtype=np.uint8)] * 2),
    ]
    return make_gguf(pairs, tensors, data)


def read_all(file: Any) -> None:
    for name, entry in file.entries.items():
        if file.read(name).shape != entry.shape:
            raise RuntimeError(name)
    file.close()


def write_types(folder: Path, _index: int) -> Path:
    (folder / "m.gguf").write_bytes(types_gguf())
    return folder / "m.gguf"


GGUF_FILES = sorted(TINY_GGUF.glob("*.gguf"))


def write_gguf(folder: Path, index: int) -> Path:
    shutil.copy(GGUF_FILES[index], folder / "m.gguf")
    return folder / "m.gguf"


def change_gguf(rng: np.random.Generator, folder: Path) -> None:
    """Change the bytes, or the metadata and the tensors' names and keep the file well-formed."""
    path = folder / "m.gguf"
    if rng.random() < 0.3:
        mutate.change_file(rng, path, mutate.BINARY)
        return
    metadata, tensors = read_gguf(path)
    if rng.random() < 0.8:
        metadata = mutate.mutate_metadata(rng, metadata)
    else:
        tensors = change_tensors(rng, tensors)
    path.unlink()
    path.write_bytes(write_parts(metadata, tensors))


Tensors = list[tuple[str, tuple[int, ...], int, bytes]]


def read_gguf(path: Path) -> tuple[dict[str, Any], Tensors]:
    """Return the metadata, and name, dims, type and bytes of each tensor."""
    file: Any = open_gguf(path)
    numbers = {kind.name: number for number, kind in BLOCKS.items()}
    tensors = []
    for name, entry in file.entries.items():
        stored = file._stored[name]
        raw = bytes(stored.mapped[stored.offset : stored.offset + stored.num_bytes])
        tensors.append((name, entry.shape[::-1], numbers[entry.dtype], raw))
    metadata = dict(file.metadata)
    file.close()
    return metadata, tensors


def write_parts(metadata: Mapping[str, Any], tensors: Tensors) -> bytes:
    described, data = [], b""
    for name, dims, number, raw in tensors:
        described.append(gguf_tensor(name, dims, number, len(data)))
        data += raw + bytes(-len(raw) % 32)
    pairs = [mutate.encode_pair(key, value) for key, value in metadata.items()]
    return make_gguf(pairs, described, data)


def change_tensors(rng: np.random.Generator, tensors: Tensors) -> Tensors:
    """Drop, repeat, rename, reshape or retype a tensor."""
    changed = list(tensors)
    at = int(rng.integers(len(changed)))
    name, dims, number, raw = changed[at]
    match rng.integers(6):
        case 0:
            del changed[at]
        case 1:
            changed.append(changed[at])
        case 2:
            changed[at] = (name.replace("blk.", "blk.9"), dims, number, raw)
        case 3:
            changed[at] = (name, dims[::-1], number, raw)
        case 4:
            changed[at] = (name, (*dims, 1), number, raw)
        case _:
            changed[at] = (name, dims, list(BLOCKS)[rng.integers(len(BLOCKS))], raw)
    return changed


def write_split(folder: Path, index: int) -> Path:
    metadata, tensors = read_gguf(GGUF_FILES[index])
    step = -(-len(tensors) // 3)
    for number in range(3):
        split = {"split.no": number, "split.count": 3, "split.tensors.count": len(tensors)}
        own = {**metadata, **split} if number == 0 else split
        part = write_parts(own, tensors[number * step : (number + 1) * step])
        (folder / f"m-0000{number + 1}-of-00003.gguf").write_bytes(part)
    return folder


def change_split(rng: np.random.Generator, folder: Path) -> Path | None:
    """Swap, drop, repeat, rename or damage a part, or change what it says of the others."""
    parts = sorted(folder.glob("*.gguf"))
    first, second = (parts[i] for i in rng.choice(3, 2, replace=False))
    match rng.integers(8):
        case 0:
            first.rename(folder / "x")
            second.rename(first)
            (folder / "x").rename(second)
        case 1:
            first.unlink()
        case 2:
            second.unlink()
            shutil.copy(first, second)
        case 3:
            second.unlink()
            os.symlink(first, second)
        case 4:
            first.unlink()
            os.symlink(first.name, first)
        case 5:
            first.rename(folder / f"m-0000{rng.integers(1, 9)}-of-0000{rng.integers(1, 9)}.gguf")
        case 6:
            mutate.change_file(rng, first, mutate.BINARY)
        case _:
            metadata, tensors = read_gguf_part(first)
            first.unlink()
            first.write_bytes(write_parts(mutate.mutate_metadata(rng, metadata), tensors))
    return first if rng.random() < 0.3 else None


def read_gguf_part(path: Path) -> tuple[dict[str, Any], Tensors]:
    part, numbers = _open_part(path), {kind.name: n for n, kind in BLOCKS.items()}
    return dict(part.metadata), [
        (
            stored.entry.name,
            stored.entry.shape[::-1],
            numbers[stored.entry.dtype],
            bytes(stored.mapped[stored.offset : stored.offset + stored.num_bytes]),
        )
        for stored in part.stored
    ]


VOCABULARIES = (byte_level_metadata(), sentencepiece_metadata())


def change_vocabulary(rng: np.random.Generator, folder: Path) -> None:
    """Change a vocabulary's metadata and store it as a GGUF file of no tensors."""
    index = int((folder / "vocabulary").read_text())
    metadata = mutate.mutate_metadata(rng, {**VOCABULARIES[index], "tokenizer.chat_template": "a"})
    (folder / "m.gguf").write_bytes(write_parts(_arrays(metadata), []))


def _arrays(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Turn lists of numbers into arrays, as they are stored."""

    def stored(value: Any) -> Any:
        numbers = isinstance(value, list) and value and isinstance(value[0], int | float)
        if not numbers:
            return value
        return np.asarray(value, np.float32 if isinstance(value[0], float) else np.int32)

    return {key: stored(value) for key, value in metadata.items()}


def write_vocabulary(folder: Path, index: int) -> Path:
    (folder / "vocabulary").write_text(str(index))
    (folder / "m.gguf").write_bytes(write_parts(_arrays(VOCABULARIES[index]), []))
    return folder / "m.gguf"
