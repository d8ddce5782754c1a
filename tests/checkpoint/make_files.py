"""Builds checkpoint files byte by byte, so that a test can make any field lie."""

import json
import struct


def make_safetensors(header: object, data: bytes = b"", length: int | None = None) -> bytes:
    """Join a header (bytes, or JSON to be) and data; `length` overrides the true header length."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def make_entry(dtype="F32", shape=(2,), offsets=(0, 8), **extra):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets), **extra}


def u32(value: int) -> bytes:
    return struct.pack("<I", value)


def u64(value: int) -> bytes:
    return struct.pack("<Q", value)


def gguf_string(text: str | bytes) -> bytes:
    raw = text.encode() if isinstance(text, str) else text
    return u64(len(raw)) + raw


def gguf_pair(key: str | bytes, kind: int, payload: bytes) -> bytes:
    return gguf_string(key) + u32(kind) + payload


def gguf_tensor(name="w", dims=(2,), kind=0, offset=0, num_dims=None) -> bytes:
    shape = u32(len(dims) if num_dims is None else num_dims) + b"".join(u64(d) for d in dims)
    return gguf_string(name) + shape + u32(kind) + u64(offset)


def make_gguf(
    pairs=(),
    tensors=(),
    data=b"",
    *,
    version=3,
    num_pairs=None,
    num_tensors=None,
    alignment=32,
) -> bytes:
    """Join pairs and tensor descriptions (bytes each) and data; the counts may be overridden."""
    counts = u64(len(tensors) if num_tensors is None else num_tensors)
    counts += u64(len(pairs) if num_pairs is None else num_pairs)
    head = b"GGUF" + u32(version) + counts + b"".join(pairs) + b"".join(tensors)
    return head + bytes(-len(head) % alignment) + data
