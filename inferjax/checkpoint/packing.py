"""Packs a weight while it is read: a stored row after the other becomes a column of the leaf.

Neither the weight nor its codes are ever whole in memory beside the packed leaf.
"""

import dataclasses
import math
from collections.abc import Iterator

import jax
import numpy as np
from jaxtyping import Float, Shaped

from inferjax.checkpoint.columns import Columns
from inferjax.checkpoint.memory import aligned_zeros
from inferjax.checkpoint.stored_codes import CodeLayout, StoredCodes
from inferjax.checkpoint.tensor_file import CODE_ELEMENTS, TensorFile, quoted
from inferjax.checkpoint.values import read_values, refuse_values
from inferjax.errors import CheckpointError
from inferjax.models.gguf_format import Part
from inferjax.models.params import ArraySpec
from inferjax.models.quantized import (
    PackedForm,
    abstract_leaf,
    check_matrix_scales,
    form_by,
    pack_leaf,
)
from inferjax.quant.leaf import PackedLeaf
from inferjax.quant.schemes import Scheme, round_to_nearest
from pallas_kernels.quant_matmul import PackedWeight, pack_codes
from pallas_kernels.quant_matmul.packed import LANES, QUANTIZED, VALUE_DTYPES, put_columns


@dataclasses.dataclass(frozen=True, slots=True)
class Packing:
    """How a weight is packed: rounded by a scheme, or with its stored codes in a layout for all.

    `columns` says where the rows of each stored part go (see `find_columns`); None means that the
    weight is built whole before it is packed.
    """

    spec: ArraySpec
    how: Scheme | CodeLayout
    columns: tuple[Columns | None, ...] | None

    @property
    def form(self) -> PackedForm:
        """What the packed leaf looks like."""
        how = self.how
        if isinstance(how, CodeLayout):
            return PackedForm(
                format=how.format,
                group=how.group,
                minimum=how.minimum,
                scale_dtype=how.scale_dtype,
                permuted=how.order is not None,
            )
        return form_by(how)

    @property
    def values_dtype(self) -> np.dtype:
        """What values are read in before they are packed."""
        format = self.how.format
        return np.dtype(np.float32) if format in QUANTIZED else VALUE_DTYPES[format]

    @property
    def num_bytes(self) -> int:
        """The size of the packed leaf."""
        return abstract_leaf(self.spec, self.form).nbytes

    def pack(self, weight: Shaped[np.ndarray, "..."], what: str) -> PackedLeaf:
        """Return a weight that was built whole, packed; `what` names it in errors.

        Raises: UnsupportedConfig for values that the scheme's scales cannot hold.
        """
        if not isinstance(self.how, Scheme):
            raise CheckpointError("stored codes are packed row by row", fix="use read_packed")
        leaf = pack_leaf(weight, self.spec, self.how)
        check_matrix_scales(leaf.matrix, weight, what)
        return leaf


def read_packed(
    file: TensorFile,
    parts: tuple[Part, ...],
    packing: Packing,
    where: str,
) -> PackedLeaf:
    """Return a packed weight in NumPy arrays that can be handed over to XLA.

    Raises: CheckpointError for values that are not finite, UnsupportedConfig for those that the
      scheme's scales cannot hold.
    """
    empty = abstract_leaf(packing.spec, packing.form)
    leaf = jax.tree.map(lambda array: aligned_zeros(array.shape, array.dtype), empty)
    if isinstance(packing.how, CodeLayout) and packing.how.order is not None:
        order = np.frombuffer(packing.how.order, np.int32)
        np.copyto(leaf.permutation, order.reshape(leaf.permutation.shape))
    for part, columns in zip(parts, packing.columns or (), strict=True):
        if columns is None:
            continue
        at = 0
        for rows in _packed_rows(file, part, packing, where):
            put_columns(leaf.matrix, rows, columns[at : at + rows.num_out])
            at += rows.num_out
    return leaf


def _packed_rows(
    file: TensorFile, part: Part, packing: Packing, where: str
) -> Iterator[PackedWeight]:
    """Yield some rows of a stored part after the other, as columns of a packed matrix."""
    how = packing.how
    if isinstance(how, Scheme):
        for values in _value_rows(file, part, packing.values_dtype, where):
            packed = round_to_nearest(values.T, how)
            check_matrix_scales(packed, values, f"tensor {quoted(part.name)} of {where}")
            yield packed
        return
    for stored in file.codes(part.name, part.begin, math.prod(part.shape)):
        _check_codes(file, part, stored, where)
        codes = stored.widened(how)
        yield pack_codes(
            codes.codes.T,
            codes.scales.T,
            None if codes.minimums is None else codes.minimums.T,
            format=how.format,
            group=how.group,
        )


def _value_rows(
    file: TensorFile, part: Part, dtype: np.dtype, where: str
) -> Iterator[Float[np.ndarray, "rows in"]]:
    """Yield some rows after the other; an array is valid until the next is asked for."""
    length = part.shape[-1]
    num_rows = math.prod(part.shape) // length
    step = max(LANES, CODE_ELEMENTS // length // LANES * LANES)
    buffer = np.empty((min(step, num_rows), length), dtype)
    for first in range(0, num_rows, step):
        rows = buffer[: num_rows - first]
        yield read_values(file, part.name, part.begin + first * length, rows, where)


def _check_codes(file: TensorFile, part: Part, stored: StoredCodes, where: str) -> None:
    """Refuse codes of values that are not finite; most need a look at scales and minimums only."""
    shared = [array for array in (stored.scales, stored.minimums) if array is not None]
    with np.errstate(invalid="ignore"):
        largest = [max(-float(array.min()), float(array.max())) for array in shared if array.size]
    if math.fsum(largest) * 256 < float(np.finfo(np.float32).max):
        return
    if not np.isfinite(stored.values()).all():
        size = math.prod(part.shape)
        refuse_values(
            file.pieces(part.name, part.begin, size),
            np.broadcast_to(np.float32(0), size),
            f"tensor {quoted(part.name)} of {where}",
        )
