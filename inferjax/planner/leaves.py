"""A model's weights before they exist: how many bytes each takes, and how chips share it.

Everything follows from `param_spec`: shapes, what is packed by a scheme, and the logical axes that
a mesh divides. Leaves that are alike, in layers that are alike, are counted together.
"""

import dataclasses
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from inferjax.config import ModelConfig, MoE
from inferjax.models.params import ArraySpec, param_spec
from inferjax.models.quantized import PackedForm, form_by, form_of
from inferjax.params import Params
from inferjax.quant.leaf import is_packed
from inferjax.quant.schemes import scheme_named
from pallas_kernels.quant_matmul.packed import LANES, VALUE_DTYPES, VALUES_PER_WORD

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1, "float8_e4m3fn": 1}
# Weights that are read at the rows of the step's tokens only.
_TABLES = ("embed", "positions")
# Products whose weights are never packed.
_WIDE_PRODUCTS = ("router", "shared_gate", "project_in", "project_out", "labels")
_PERMUTATION_BYTES = 4


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Leaf:
    """`count` weights that are alike.

    `name` is the path without the layer, `form` how it is packed; None keeps an array. `dtype` is
    that of the array, and of what a packed weight is computed with: float32.
    `experts` is the mixture that it belongs to, whose first axis are its experts.
    """

    name: str
    count: int
    spec: ArraySpec
    dtype: str
    form: PackedForm | None = None
    experts: MoE | None = None

    @property
    def num_values(self) -> int:
        """The values of all `count` weights."""
        return self.count * math.prod(self.spec.shape)

    @property
    def num_bytes(self) -> int:
        """The bytes of all `count` weights, unshared."""
        return self.count * shard_bytes(self, self.spec.shape)


def uniform_leaves(
    config: ModelConfig, *, dtype: str | None = None, scheme: str | None = None
) -> tuple[Leaf, ...]:
    """Return the weights of a model: arrays of `dtype`, the large products packed by `scheme`.

    `dtype` is the checkpoint's by default.

    Raises: UnsupportedConfig for an unknown scheme.
    """
    form = None if scheme is None else form_by(scheme_named(scheme))
    found: Counter[Leaf] = Counter()
    for name, spec, experts in _walk(param_spec(config), config):
        packed = form if spec.num_in_axes else None
        kind = "float32" if packed else spec.dtype or dtype or config.dtype
        found[Leaf(name=name, count=1, spec=spec, dtype=kind, form=packed, experts=experts)] += 1
    return _counted(found)


def loaded_leaves(config: ModelConfig, params: Params) -> tuple[Leaf, ...]:
    """Return the weights as loaded ones are stored, packed or not; their values are not looked at.

    Abstract arrays will do.
    """
    found: Counter[Leaf] = Counter()
    specs = _walk(param_spec(config), config)
    for (name, spec, experts), (_, weight, _) in zip(specs, _walk(params, config), strict=True):
        form = form_of(weight) if is_packed(weight) else None
        kind = str(weight.dtype)
        found[Leaf(name=name, count=1, spec=spec, dtype=kind, form=form, experts=experts)] += 1
    return _counted(found)


def shard_bytes(leaf: Leaf, shape: tuple[int, ...]) -> int:
    """Return the bytes of a part of a weight that has this shape, packed as the whole is."""
    form, spec = leaf.form, leaf.spec
    if form is None:
        return math.prod(shape) * DTYPE_BYTES[leaf.dtype]
    if spec.num_in_axes < 0:
        stack, num_in, num_out = 1, shape[-1], math.prod(shape[:-1])
    else:
        inner = spec.num_batch_axes + spec.num_in_axes
        stack = math.prod(shape[: spec.num_batch_axes])
        num_in, num_out = math.prod(shape[spec.num_batch_axes : inner]), math.prod(shape[inner:])
    return packed_bytes(form, num_in, num_out, stack)


def packed_bytes(form: PackedForm, num_in: int, num_out: int, stack: int = 1) -> int:
    """Return the bytes of packed matrices: codes, scales, minimums, and their padding.

    Columns come in blocks of 16, rows in words of 32 bits: see `pallas_kernels.quant_matmul`.
    """
    columns = _up(num_out, LANES)
    per_word = VALUES_PER_WORD[form.format]
    size = columns * _up(num_in, per_word) // per_word * 4
    if form.format in ("int8", "int4", "float8"):
        groups = -(-num_in // form.group) if form.group else 1
        shared = columns * groups * (2 if form.scale_dtype == "float16" else 4)
        size += shared * (2 if form.minimum else 1)
    if form.permuted:
        size += num_in * _PERMUTATION_BYTES
    return stack * size


def activation_dtype(leaves: Sequence[Leaf]) -> str:
    """Return the dtype between two products: that of an embedding's rows, as they are read."""
    return next(leaf.dtype for leaf in leaves if leaf.name == "embed")


def bits_per_weight(scheme: str | None, dtype: str) -> float:
    """Return the bits that a value of a large product takes, its share of scales included."""
    if scheme is None:
        return 8.0 * DTYPE_BYTES[dtype]
    how = scheme_named(scheme)
    bits = 4.0 if how.format == "int4" else 8.0 * VALUE_DTYPES[how.format].itemsize
    # A scale per column is next to nothing.
    shared = 8.0 * DTYPE_BYTES[how.scale_dtype] * (2 if how.minimum else 1)
    return bits + (shared / how.group if how.group else 0.0)


def is_table(leaf: Leaf, config: ModelConfig) -> bool:
    """Tell whether a step reads only the rows of its tokens: the head reads a tied embedding."""
    tied = config.tied and config.head == "vocabulary"
    return leaf.name in _TABLES and not (leaf.name == "embed" and tied)


def is_product(leaf: Leaf, config: ModelConfig) -> bool:
    """Tell whether every token is multiplied with the weight."""
    wide = leaf.name.rsplit(".", 1)[-1] in _WIDE_PRODUCTS
    return (bool(leaf.spec.num_in_axes) or wide) and not is_table(leaf, config)


def is_head(leaf: Leaf, config: ModelConfig) -> bool:
    """Tell whether only a prompt's last token needs the product."""
    return leaf.name in ("head", "labels") or (leaf.name == "embed" and is_product(leaf, config))


def _walk(params: Any, config: ModelConfig) -> Iterator[tuple[str, Any, MoE | None]]:
    """Yield name, leaf and mixture of every weight, in the same order for specs and weights."""
    for field in dataclasses.fields(params):
        node = getattr(params, field.name)
        if field.name != "layers":
            yield from _inside(node, field.name, None)
            continue
        for layer, spec in zip(node, config.layers, strict=True):
            moe = spec.ffn if isinstance(spec.ffn, MoE) else None
            yield from _inside(layer, "layer", moe)


def _inside(node: Any, name: str, moe: MoE | None) -> Iterator[tuple[str, Any, MoE | None]]:
    if node is None:
        return
    if isinstance(node, ArraySpec) or is_packed(node) or not dataclasses.is_dataclass(node):
        parts = name.split(".")
        stacked = parts[-2:-1] == ["ffn"] and parts[-1] in ("w_in", "w_down", "b_in", "b_down")
        yield name, node, moe if stacked else None
        return
    for field in dataclasses.fields(node):
        yield from _inside(getattr(node, field.name), f"{name}.{field.name}", moe)


def _counted(found: Counter[Leaf]) -> tuple[Leaf, ...]:
    return tuple(dataclasses.replace(leaf, count=n) for leaf, n in found.items())


def _up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
