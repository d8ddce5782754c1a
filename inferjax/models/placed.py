"""A model's weights on a mesh: what is cut where, packed weights included."""

import dataclasses
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from inferjax.config import ModelConfig
from inferjax.errors import ShardingError
from inferjax.models.params import ArraySpec, check_params, param_spec
from inferjax.params import MoEParams, Params
from inferjax.quant.leaf import PackedLeaf, Split, is_packed
from inferjax.quant.split import lay_out, may_cut, specs_of
from inferjax.rules import DEFAULT_RULES, Rules
from inferjax.sharding import check_names, cut_axes

AnyMesh = Mesh | AbstractMesh


def place(
    params: Params, config: ModelConfig, mesh: Mesh, *, rules: Rules = DEFAULT_RULES
) -> Params:
    """Put weights on a mesh, each cut by the rules along its logical axes.

    What the rules cannot cut evenly is whole on every device: an axis that the mesh does not
    divide, or, in a packed weight, one whose parts would not end between blocks of sixteen columns
    or between groups of rows. `leaf.split` and `array.sharding` tell what became of each.

    Raises: ShapeError for weights of another model.
    """
    laid = split_packed(params, config, mesh, rules=rules)
    return jax.device_put(laid, shardings(laid, config, mesh, rules=rules))


def placements(
    abstract: Params, config: ModelConfig, mesh: Mesh, *, rules: Rules = DEFAULT_RULES
) -> Params:
    """Return where every weight goes, before any exists: see `put`. `abstract` has shapes.

    Raises: ShardingError for a mesh with an axis that cuts nothing, or that is none of devices.
    """
    _check_kinds(mesh, rules)
    sizes = dict(mesh.shape)
    check_names(sizes, rules)
    laid = jax.eval_shape(lambda p: split_packed(p, config, mesh, rules=rules), abstract)
    where = shardings(laid, config, mesh, rules=rules)
    used = {name for sharding in jax.tree.leaves(where) for name in sharding.spec}
    for name, size in sizes.items():
        if size > 1 and name not in rules.rows and name not in used:
            cut = sorted({logical for logical, axis in rules.axes if axis == name})
            raise ShardingError(
                f"mesh axis {name!r} of {size} devices divides no weight of {config.family}",
                why=f"the rules cut {', '.join(cut)} there, and {size} divides none of these: "
                "every device would hold the whole model",
                fix="use fewer devices on this axis, or let it cut rows",
                axis=name,
                size=size,
            )
    return where


def _check_kinds(mesh: Any, rules: Any) -> None:
    if not isinstance(rules, Rules):
        raise ShardingError(f"rules={rules!r:.80}", fix="use Rules(rows=..., axes=...)")
    if not isinstance(mesh, Mesh) or mesh.empty or AxisType.Manual in mesh.axis_types:
        raise ShardingError(
            f"mesh={mesh!r:.80}",
            why="weights are put on a jax.sharding.Mesh of devices, with Auto or Explicit axes",
            fix='use jax.make_mesh((2, 4), ("data", "model"))',
        )


def put(weight: Any, where: Any) -> Any:
    """Put a weight in host memory on its devices; `where` is its part of `placements`.

    Each device gets its own part only, and only those of this process are looked at.
    """
    if is_packed(weight):
        weight = lay_out(weight, where.split)
    return jax.tree.map(_shared_out, weight, where)


def _shared_out(host: Any, where: NamedSharding) -> jax.Array:
    return jax.make_array_from_callback(host.shape, where, lambda index: host[index])


def split_packed(
    params: Params, config: ModelConfig, mesh: AnyMesh, *, rules: Rules = DEFAULT_RULES
) -> Params:
    """Return packed weights laid out for a mesh; arrays as they are.

    Raises: ShapeError for weights of another model.
    """
    check_params(params, config)
    sizes = dict(mesh.shape)
    rows = tuple(name for name in rules.rows if sizes.get(name, 1) > 1)

    def split(spec: ArraySpec, leaf: Any) -> Any:
        if not is_packed(leaf):
            return leaf
        whole = lay_out(leaf, None)
        axes = cut_axes(rules, spec.axes, spec.shape, sizes, lambda a, n: may_cut(whole, a, n))
        return lay_out(whole, Split(axes=axes, rows=rows) if rows or any(axes) else None)

    laid = _with_specs(split, params, config)
    layers = tuple(
        dataclasses.replace(layer, ffn=_agreed(layer.ffn))
        if isinstance(layer.ffn, MoEParams)
        else layer
        for layer in laid.layers
    )
    return dataclasses.replace(laid, layers=layers)


def shardings(
    params: Params, config: ModelConfig, mesh: Mesh, *, rules: Rules = DEFAULT_RULES
) -> Params:
    """Return the `NamedSharding` of every array; packed weights keep to their `split`."""
    sizes = dict(mesh.shape)

    def of(spec: ArraySpec, leaf: Any) -> Any:
        if is_packed(leaf):
            return jax.tree.map(lambda p: NamedSharding(mesh, p), specs_of(leaf))
        axes = cut_axes(rules, spec.axes, spec.shape, sizes)
        return NamedSharding(mesh, PartitionSpec(*axes))

    return _with_specs(of, params, config)


def _with_specs(function: Any, params: Params, config: ModelConfig) -> Params:
    return jax.tree.map(
        function,
        param_spec(config),
        params,
        is_leaf=lambda node: isinstance(node, ArraySpec),
    )


def _agreed(ffn: MoEParams) -> MoEParams:
    """Cut both weights of the experts alike, along what both can be cut."""
    first, last = ffn.w_in, ffn.w_down
    if not isinstance(first, PackedLeaf) or not isinstance(last, PackedLeaf):
        return ffn
    if first.split is None or last.split is None:
        return dataclasses.replace(ffn, w_in=lay_out(first, None), w_down=lay_out(last, None))
    experts = first.split.axes[0] if first.split.axes[0] == last.split.axes[0] else None
    hidden = first.split.axes[3] if first.split.axes[3] == last.split.axes[1] else None
    return dataclasses.replace(
        ffn,
        w_in=lay_out(first, dataclasses.replace(first.split, axes=(experts, None, None, hidden))),
        w_down=lay_out(last, dataclasses.replace(last.split, axes=(experts, hidden, None))),
    )
