"""GGUF files with the metadata of another one and tensors of other types."""

from collections.abc import Callable, Mapping
from pathlib import Path

import gguf
import numpy as np
from gguf.quants import dequantize, quantize

Kind = gguf.GGMLQuantizationType
# Where the types that the package cannot write keep numbers in half precision, and how large these
# are beside each other: so that offsets make up for the mean of codes.
_HALVES = {
    Kind.Q2_K: {80: 1.0, 82: 1.5},
    Kind.Q3_K: {108: 1.0},
    Kind.Q4_K: {0: 1.0, 2: 7.5},
    Kind.Q5_K: {0: 1.0, 2: 15.5},
    Kind.Q6_K: {208: 1.0},
    Kind.IQ4_NL: {0: 1.0},
    Kind.IQ4_XS: {0: 1.0},
}


def rewrite(
    source: Path,
    target: Path,
    kind_of: Callable[[str, np.ndarray], Kind | None],
    *,
    sizes: Mapping[int, int] | None = None,
    **changed: int,
) -> Path:
    """Copy a file; a tensor for which `kind_of` names a type is stored in it, others as they are.

    `sizes` replaces lengths of axes, repeating values as small as longer rows want; `changed` are
    new numbers of the architecture's metadata.
    """
    reader = gguf.GGUFReader(source)
    architecture = reader.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(target, architecture)
    for field in reader.fields.values():
        if field.name.startswith("GGUF.") or field.name == "general.architecture":
            continue
        value = changed.get(field.name.rpartition(".")[2], field.contents())
        inner = field.types[-1] if len(field.types) > 1 else None
        writer.add_key_value(field.name, value, field.types[0], inner)
    for index, tensor in enumerate(reader.tensors):
        values = dequantize(tensor.data, tensor.tensor_type)
        wanted: Mapping[int, int] = sizes or {}
        shape = tuple(wanted.get(int(length), int(length)) for length in values.shape)
        if shape != values.shape:
            longer = (values.shape[-1] / shape[-1]) ** 0.5 if values.ndim > 1 else 1.0
            values = np.resize(values, shape).astype(np.float32) * np.float32(longer)
        kind = kind_of(tensor.name, values)
        if kind is None and shape != tuple(tensor.shape[::-1]):
            writer.add_tensor(tensor.name, values)
        elif kind is None:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
        else:
            writer.add_tensor(tensor.name, stored(values, kind, index), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


def stored(values: np.ndarray, kind: Kind, seed: int) -> np.ndarray:
    """Return values in a type, or for the types that nothing here rounds to, random ones like them.

    Random values are scaled to be as large as those that were given.
    """
    if kind not in _HALVES:
        return quantize(values.astype(np.float32), kind)
    rng = np.random.default_rng(seed)
    length, size = gguf.GGML_QUANT_SIZES[kind]
    blocks = rng.integers(0, 256, (values.size // length, size)).astype(np.uint8)
    for factor in (1.0, None):
        scale = factor or float(values.std() / dequantize(blocks, kind).std())
        for at, share in _HALVES[kind].items():
            halves = scale * share * rng.uniform(0.9, 1.1, (len(blocks), 1))
            blocks[:, at : at + 2] = halves.astype(np.float16).view(np.uint8)
    return blocks.reshape(*values.shape[:-1], -1)
