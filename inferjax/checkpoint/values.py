"""Reads values of tensors into memory, and refuses those that are not finite, or too large."""

from collections.abc import Iterable
from typing import NoReturn

import ml_dtypes
import numpy as np
from jaxtyping import Shaped

from inferjax.checkpoint.tensor_file import TensorFile, quoted
from inferjax.errors import CheckpointError

AnyValues = Shaped[np.ndarray, "..."]


def read_values(file: TensorFile, name: str, begin: int, out: AnyValues, where: str) -> AnyValues:
    """Fill `out` with a tensor's elements from `begin` on, rounded to its dtype, and return it.

    `where` names the checkpoint in errors.

    Raises: CheckpointError for values that are not finite, or too large for the dtype.
    """
    for piece in file.fill(name, out.reshape(-1), begin):
        if not extremes_are_finite(piece):
            stored = file.pieces(name, begin, out.size)
            refuse_values(stored, out, f"tensor {quoted(name)} of {where}")
    return out


def extremes_are_finite(values: AnyValues) -> bool:
    """Look at the exponents' bits of half-width floats, and at the extremes of others."""
    if values.size == 0:
        return True
    if values.dtype.itemsize == 2:
        top = 0x7C00 if values.dtype == np.float16 else 0x7F80
        return int((values.view(np.uint16) & 0x7FFF).max()) < top
    with np.errstate(invalid="ignore"):
        return bool(np.isfinite(values.min()) and np.isfinite(values.max()))


def refuse_values(stored: Iterable[AnyValues], out: AnyValues, what: str) -> NoReturn:
    """Raise for values that are not finite as they are stored, or once they are rounded to `out`'s.

    The error counts them all: only now is it worth the time.
    """
    bad = too_large = 0
    for values in stored:
        with np.errstate(over="ignore", invalid="ignore"):
            rounded = values.astype(out.dtype)
        bad += _num_not_finite(values)
        too_large += _num_not_finite(rounded)
    if bad:
        raise CheckpointError(
            f"{what} has {bad} of {out.size} values that are NaN or infinite",
            why="the weights were damaged, or saved from a run that diverged",
            fix="fetch the checkpoint again, or use an earlier one",
            count=bad,
        )
    name = out.dtype.name
    raise CheckpointError(
        f"{what} has {too_large} of {out.size} values that are too large for {name}",
        why=f"{name} ends at {float(ml_dtypes.finfo(out.dtype).max):g}",
        fix="load the model as float32" if name == "bfloat16" else "load the model as bfloat16",
        count=too_large,
    )


def _num_not_finite(values: AnyValues) -> int:
    wide = values.astype(np.float64)
    return int(np.size(wide) - np.isfinite(wide).sum())
