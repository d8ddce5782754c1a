"""Finds the quantized linear layers of a safetensors checkpoint and checks what they are made of.

A layer `x` is four tensors where its weight would be one: `x.qweight`, `x.qzeros`, `x.scales`, and
with GPTQ `x.g_idx`, which says of each input which group it belongs to.
"""

import dataclasses
from collections.abc import Iterator, Mapping

import numpy as np
from jaxtyping import Int, Int32, Shaped, UInt8

from inferjax.checkpoint.grouped_codes import GroupedCodes, code_layout
from inferjax.checkpoint.packed_words import (
    WORD_BITS,
    unpack_awq,
    unpack_gptq_codes,
    unpack_gptq_zeros,
)
from inferjax.checkpoint.tensor_file import PIECE_ELEMENTS, TensorEntry, TensorFile, quoted
from inferjax.errors import CheckpointError
from inferjax.models.quantization_config import BITS, StoredFormat

_CODES = ".qweight"
_SCALES = ("float16", "bfloat16", "float32")
# Outputs are unpacked so many at a time or a multiple: a word of AWQ's holds eight of them.
_STEP = 32


@dataclasses.dataclass(frozen=True, slots=True)
class QuantizedLayer:
    """One layer: `entry` is its weight as Hugging Face has it, `how` its own bits and group.

    `parts` names the tensors that it is made of.
    """

    name: str
    entry: TensorEntry
    how: StoredFormat
    parts: tuple[str, ...]

    def rows(self, file: TensorFile, first: int, last: int) -> Iterator[GroupedCodes]:
        """Yield the outputs from `first` to before `last`, a few at a time.

        Raises: CheckpointError for groups or zeros that do not fit the config.
        """
        words = _read(file, f"{self.name}.qweight")
        zeros, scales = self._zeros(file), _read(file, f"{self.name}.scales").T
        groups = _groups(file, self.name, self.entry.shape[1], self.how)
        step = max(_STEP, PIECE_ELEMENTS // max(len(groups), 1) // _STEP * _STEP)
        for begin in range(first // step * step, last, step):
            run = slice(max(begin, first), min(begin + step, last))
            codes = self._codes(words, begin, min(begin + step, scales.shape[0]))
            yield GroupedCodes(
                codes=codes[run.start - begin : run.stop - begin],
                zeros=zeros[run],
                scales=scales[run],
                groups=groups,
            )

    def _zeros(self, file: TensorFile) -> UInt8[np.ndarray, "out groups"]:
        how, name = self.how, f"{self.name}.qzeros"
        words = _read(file, name)
        if how.method == "awq":
            return unpack_awq(words)
        zeros = unpack_gptq_zeros(words, how.bits, offset=how.offset, borrows=how.borrows)
        middle = 1 << (how.bits - 1)
        if how.symmetric and (zeros != middle).any():
            raise _wrong(
                name, f"has zeros other than {middle}", "sym is true, which makes all of them so"
            )
        return zeros

    def _codes(
        self, words: Int32[np.ndarray, "..."], first: int, last: int
    ) -> UInt8[np.ndarray, "rows in"]:
        if self.how.method == "awq":
            return unpack_awq(words[:, first // 8 : -(-last // 8)])[: last - first]
        return unpack_gptq_codes(words[:, first:last], self.how.bits)


def find_layers(file: TensorFile, stored: StoredFormat) -> list[QuantizedLayer]:
    """Return the layers that have `qweight`; only groups are read, where they may be out of order.

    Raises: CheckpointError naming a tensor that is missing, of another shape or dtype, or whose
      groups do not fit.
    """
    names = [name.removesuffix(_CODES) for name in file.entries if name.endswith(_CODES)]
    return [_check_layer(name, file, stored) for name in names]


def _check_layer(name: str, file: TensorFile, stored: StoredFormat) -> QuantizedLayer:
    entries = file.entries
    if f"{name}.weight" in entries:
        raise _wrong(
            f"{name}.weight", f"is beside {quoted(name + _CODES)}", "a layer has one of them"
        )
    words = _entry(entries, f"{name}.qweight", "int32")
    zeros = _entry(entries, f"{name}.qzeros", "int32")
    scales = _entry(entries, f"{name}.scales", *_SCALES)
    num_groups, num_out = scales.shape
    how = _own_format(words, zeros, scales, stored) if stored.varies else stored
    num_in = words.shape[0] if how.method == "awq" else words.shape[0] * WORD_BITS // how.bits
    if num_out * how.bits % WORD_BITS:
        raise _wrong(
            scales.name, f"has {num_out} outputs", f"at {how.bits} bits words are not full"
        )
    packed_out = num_out * how.bits // WORD_BITS
    packed_in = num_in * how.bits // WORD_BITS
    _check_shape(words, (num_in, packed_out) if how.method == "awq" else (packed_in, num_out))
    _check_shape(scales, (-(-num_in // (how.group or num_in)), num_out))
    _check_shape(zeros, (num_groups, packed_out))
    parts = ("qweight", "qzeros", "scales")
    if how.method == "gptq" and (how.act_order or f"{name}.g_idx" in entries):
        _check_shape(_entry(entries, f"{name}.g_idx", "int32", axes=1), (num_in,))
        parts = (*parts, "g_idx")
    in_order = how.act_order is False
    groups = _in_order(num_in, how) if in_order else _groups(file, name, num_in, how)
    layout = code_layout(how, groups, scales.dtype)
    shape = (num_out, num_in)
    entry = TensorEntry(f"{name}.weight", f"{how.method} int{how.bits}", shape, codes=layout)
    return QuantizedLayer(name, entry, how, tuple(f"{name}.{part}" for part in parts))


def _groups(file: TensorFile, layer: str, num_in: int, how: StoredFormat) -> Int[np.ndarray, " in"]:
    """Return the group of each of a layer's inputs.

    Raises: CheckpointError for groups that do not exist, are of other sizes, or are not in order
      where the config says they are.
    """
    in_order, name = _in_order(num_in, how), f"{layer}.g_idx"
    if how.method == "awq" or name not in file.entries:
        return in_order
    groups = _read(file, name)
    if np.array_equal(groups, in_order):
        return in_order
    if how.act_order is False:
        raise _wrong(name, "puts inputs into groups out of order", "desc_act is false")
    if not np.array_equal(np.sort(groups), in_order):
        wanted = f"there are {in_order[-1] + 1} of {how.group} inputs each, the last may have fewer"
        raise _wrong(name, "gives inputs to groups of other sizes", wanted)
    return groups.astype(np.int64)


def _in_order(num_in: int, how: StoredFormat) -> Int[np.ndarray, " in"]:
    return np.arange(num_in) // (how.group or num_in)


def _own_format(
    words: TensorEntry, zeros: TensorEntry, scales: TensorEntry, stored: StoredFormat
) -> StoredFormat:
    """Return the bits and the group that a layer's shapes imply."""
    num_groups, num_out = scales.shape
    bits = zeros.shape[1] * WORD_BITS // num_out if stored.method == "gptq" else stored.bits
    if bits not in BITS[stored.method]:
        raise _wrong(zeros.name, f"has {bits} bits for each of {num_out} outputs", _bits_of(stored))
    num_in = words.shape[0] * WORD_BITS // bits if stored.method == "gptq" else words.shape[0]
    if num_in % num_groups:
        raise _wrong(scales.name, f"has {num_groups} groups", f"they do not divide {num_in} inputs")
    group = num_in // num_groups
    return dataclasses.replace(stored, bits=bits, group=0 if group == num_in else group)


def _bits_of(stored: StoredFormat) -> str:
    return f"{stored.method} has {' or '.join(map(str, BITS[stored.method]))}"


def _entry(
    entries: Mapping[str, TensorEntry], name: str, *dtypes: str, axes: int = 2
) -> TensorEntry:
    """Return the entry of a tensor that a layer needs."""
    entry = entries.get(name)
    if entry is None:
        raise _wrong(name, "is missing", "the other tensors of its layer are there")
    if entry.dtype not in dtypes:
        raise _wrong(name, f"is {entry.dtype}", f"it must be {' or '.join(dtypes)}")
    if len(entry.shape) != axes or 0 in entry.shape:
        raise _wrong(name, f"has the shape {entry.shape}", f"it must have {axes} axes, none empty")
    return entry


def _check_shape(entry: TensorEntry, wanted: tuple[int, ...]) -> None:
    if entry.shape != wanted:
        raise _wrong(
            entry.name, f"has the shape {entry.shape}", f"config and layer call for {wanted}"
        )


def _read(file: TensorFile, name: str) -> Shaped[np.ndarray, "..."]:
    """Return a stored tensor in memory of its own."""
    entry = file.entries[name]
    out = np.empty(entry.shape, entry.dtype)
    for _ in file.fill(name, out.reshape(-1)):
        pass
    return out


def _wrong(name: str, what: str, why: str) -> CheckpointError:
    return CheckpointError(
        f"tensor {quoted(name)} {what}",
        why=why,
        fix="check that quantization_config and the weights are of one model, and whole",
        tensor=name,
    )
