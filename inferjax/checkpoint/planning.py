"""Decides for every weight whether it is packed while it is read, and how."""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, cast

import numpy as np
from jax.tree_util import KeyPath, SequenceKey, keystr

from inferjax.checkpoint.columns import Columns, find_columns
from inferjax.checkpoint.packing import Packing
from inferjax.checkpoint.stored_codes import CodeLayout, narrowest
from inferjax.checkpoint.tensor_file import TensorEntry
from inferjax.config import ModelConfig
from inferjax.errors import UnsupportedConfig
from inferjax.models.gguf_format import Stored
from inferjax.models.params import ArraySpec
from inferjax.quant.schemes import SCHEMES, Scheme
from pallas_kernels.quant_matmul.packed import MAX_GROUP

# "native" packs what is stored as codes, with these codes; "none" packs nothing.
Mode = Scheme | Literal["native", "none"]


def quantize_mode(dtype: Any, quantize: Any) -> Mode:
    """Return what the arguments of `load` ask for.

    Raises: UnsupportedConfig for an unknown scheme.
    """
    if quantize is None:
        return "native" if dtype is None else "none"
    if not isinstance(quantize, str) or quantize not in (*SCHEMES, "native", "none"):
        raise UnsupportedConfig(
            f"quantize={str(quantize)[:40]!r}",
            why="there is no such scheme",
            fix=f"use one of {', '.join(SCHEMES)}, native (as the file has it) or none (arrays)",
        )
    return SCHEMES[quantize] if quantize in SCHEMES else cast(Mode, quantize)


class Planner:
    """Looks at each kind of weight once: layers that are alike have the same columns."""

    def __init__(self, entries: Mapping[str, TensorEntry], config: ModelConfig, mode: Mode) -> None:
        self._entries, self._config, self._mode = entries, config, mode
        self._found: dict[Any, tuple[Columns | None, ...] | None] = {}

    def packing(
        self,
        path: KeyPath,
        spec: ArraySpec,
        reads: tuple[Stored, ...],
        build: Callable[..., Any],
    ) -> Packing | None:
        """Return how a weight is packed; None keeps it an array."""
        if self._mode == "none" or not spec.num_in_axes:
            return None
        if isinstance(self._mode, Scheme):
            return Packing(spec, self._mode, self._columns(path, spec, reads, build))
        entries = [self._entries.get(part.name) for read in reads for part in read.parts]
        codes = [None if entry is None else entry.codes for entry in entries]
        columns = self._columns(path, spec, reads, build) if any(codes) else None
        if columns is None:
            return None
        layout = _joint_layout(codes, columns, spec)
        return None if layout is None else Packing(spec, layout, columns)

    def _columns(
        self,
        path: KeyPath,
        spec: ArraySpec,
        reads: tuple[Stored, ...],
        build: Callable[..., Any],
    ) -> tuple[Columns | None, ...] | None:
        index = next((key.idx for key in path if isinstance(key, SequenceKey)), None)
        layer = None if index is None else self._config.layers[index]
        name = keystr(tuple(key for key in path if not isinstance(key, SequenceKey)))
        shapes = tuple(tuple(part.shape for part in read.parts) for read in reads)
        kind = (layer, name, shapes, tuple(read.build is None for read in reads))
        if kind not in self._found:
            self._found[kind] = find_columns(reads, build, spec)
        return self._found[kind]


def _joint_layout(
    codes: Sequence[CodeLayout | None], columns: Sequence[Columns | None], spec: ArraySpec
) -> CodeLayout | None:
    """Return a layout for all parts of a weight; None if one part is no codes, or none is exact."""
    used = [(layout, at) for layout, at in zip(codes, columns, strict=True) if at is not None]
    layouts = [layout for layout, _ in used if layout is not None]
    plain = [dataclasses.replace(layout, order=None) for layout in layouts]
    joint = narrowest(plain) if len(layouts) == len(used) else None
    if joint is None or joint.group > MAX_GROUP or joint.group % 8:
        return None
    if not any(layout.order for layout in layouts):
        return joint
    order = _joint_order(layouts, [at for _, at in used if at is not None], spec)
    return None if order is None else dataclasses.replace(joint, order=order)


def _joint_order(
    layouts: Sequence[CodeLayout], columns: Sequence[Columns], spec: ArraySpec
) -> bytes | None:
    """Return the orders of a weight's matrices in a row; None where a matrix has two of them."""
    num_matrices = math.prod(spec.shape[: spec.num_batch_axes])
    num_columns = max(int(at.max()) for at in columns) + 1
    orders: dict[int, set[bytes | None]] = {}
    for layout, at in zip(layouts, columns, strict=True):
        for matrix in np.unique(at[at >= 0] // (num_columns // num_matrices)):
            orders.setdefault(int(matrix), set()).add(layout.order)
    if any(len(found) > 1 for found in orders.values()):
        return None
    num_in = math.prod(spec.shape) // num_columns
    counted = np.arange(num_in, dtype=np.int32).tobytes()
    return b"".join(orders[matrix].pop() or counted for matrix in range(num_matrices))
