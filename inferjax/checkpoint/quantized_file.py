"""A safetensors file whose quantized layers are read as the weights that they stand for."""

import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from jaxtyping import Shaped

from inferjax.checkpoint.quantized_layers import QuantizedLayer, find_layers
from inferjax.checkpoint.stored_codes import StoredCodes
from inferjax.checkpoint.tensor_file import TensorFile, quoted
from inferjax.errors import CheckpointError, UnsupportedModel
from inferjax.models.family import Family
from inferjax.models.quantization_config import StoredFormat, read_quantization


def unquantized(file: TensorFile, raw: Mapping[str, Any], family: Family) -> TensorFile:
    """Return a file in which no tensor is a part of a weight, whatever a config says of it.

    Raises: UnsupportedModel, UnsupportedConfig, CheckpointError.
    """
    stored = read_quantization(raw)
    if stored is None:
        return file
    if family.in_first:
        raise UnsupportedModel(
            f"{family.name} is quantized as {stored.label}",
            why="its weights are stored [in, out], and packed codes are read as [out, in]",
            fix="use a float32, float16 or bfloat16 checkpoint, or a GGUF file",
        )
    return QuantizedTensors(file, stored)


def is_idle_bias(file: TensorFile, name: str) -> bool:
    """Tell whether a tensor is the zeros that older GPTQ tools store for layers without a bias."""
    layer = name.removesuffix(".bias")
    if layer == name or not isinstance(file, QuantizedTensors) or not file.is_layer(layer):
        return False
    return not any(piece.any() for piece in file.pieces(name))


class QuantizedTensors:
    """The `TensorFile` over another: tensors that form a quantized layer are one weight in it.

    Values of such a weight are float32; all other tensors are the file's own.
    """

    def __init__(self, file: TensorFile, stored: StoredFormat) -> None:
        layers = find_layers(file, stored)
        stand_in = {layer.parts[0]: layer.entry for layer in layers}
        hidden = {name for layer in layers for name in layer.parts[1:]}
        shown = [stand_in.get(n, entry) for n, entry in file.entries.items() if n not in hidden]
        self._file = file
        self._layers = {layer.entry.name: layer for layer in layers}
        self.entries = {entry.name: entry for entry in shown}
        self.metadata, self.paths = file.metadata, file.paths

    def is_layer(self, name: str) -> bool:
        """Tell whether a layer's weight is made of several tensors."""
        return f"{name}.weight" in self._layers

    def read(self, name: str) -> Shaped[np.ndarray, "..."]:
        """Return one tensor, read-only (see `TensorFile.read`)."""
        if name not in self._layers:
            return self._file.read(name)
        out = np.empty(self.entries[name].shape, np.float32)
        for _ in self.fill(name, out.reshape(-1)):
            pass
        out.flags.writeable = False
        return out

    def pieces(
        self, name: str, begin: int = 0, count: int | None = None
    ) -> Iterator[Shaped[np.ndarray, " elements"]]:
        """Yield elements of the flattened tensor (see `TensorFile.pieces`)."""
        if name not in self._layers:
            yield from self._file.pieces(name, begin, count)
            return
        layer = self._layers[name]
        end = _end(layer, begin, count)
        row = layer.entry.shape[1]
        at = begin // row * row
        for run in layer.rows(self._file, begin // row, -(-end // row)):
            values = run.values().reshape(-1)
            yield values[max(0, begin - at) : end - at]
            at += values.size

    def fill(
        self, name: str, out: Shaped[np.ndarray, " elements"], begin: int = 0
    ) -> Iterator[Shaped[np.ndarray, " elements"]]:
        """Write elements into `out`, part by part (see `TensorFile.fill`)."""
        if name not in self._layers:
            yield from self._file.fill(name, out, begin)
            return
        at = 0
        for piece in self.pieces(name, begin, out.size):
            part = out[at : at + piece.size]
            with np.errstate(over="ignore", invalid="ignore"):
                np.copyto(part, piece, casting="unsafe")
            at += piece.size
            yield part

    def codes(self, name: str, begin: int = 0, count: int | None = None) -> Iterator[StoredCodes]:
        """Yield whole rows as codes (see `TensorFile.codes`)."""
        layer = self._layers.get(name)
        if layer is None:
            yield from self._file.codes(name, begin, count)
            return
        layout, row = layer.entry.codes, layer.entry.shape[1]
        end = _end(layer, begin, count)
        if layout is None or begin % row or end % row:
            raise CheckpointError(
                f"elements {begin} to {end} of {quoted(name)} are no rows of codes"
            )
        for run in layer.rows(self._file, begin // row, end // row):
            yield run.stored(layout)

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _end(layer: QuantizedLayer, begin: int, count: int | None) -> int:
    return math.prod(layer.entry.shape) if count is None else begin + count
