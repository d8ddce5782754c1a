"""Brings the weights of an Orbax checkpoint to their devices, in the form that is asked for.

Where they were saved from does not matter. What stays as it is stored is restored straight into its
place: of an array that a mesh cuts, a device and its host read their part only. What is packed, or
to be, passes through host memory, one weight at a time.
"""

from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import Mesh, Sharding

from inferjax.checkpoint.planning import Mode
from inferjax.checkpoint.saved_leaves import in_mode, leaves_in_mode
from inferjax.config import ModelConfig
from inferjax.models.params import ArraySpec, param_spec
from inferjax.models.placed import placements, put
from inferjax.params import Params
from inferjax.quant.leaf import is_packed
from inferjax.rules import Rules


def restore(
    path: Path, saved: Params, config: ModelConfig, mode: Mode, mesh: Mesh | None, rules: Rules
) -> Params:
    """Restore the weights, of which `saved` has the shapes, on one device or a mesh.

    Raises: ShardingError as `placements`; UnsupportedConfig for values that a scheme cannot hold;
      whatever Orbax raises for files that it cannot read.
    """
    wanted = leaves_in_mode(saved, config, mode)
    if mesh is None:
        here = jax.device_put(0).sharding
        places = jax.tree.map(lambda _: here, wanted)
    else:
        places = placements(wanted, config, mesh, rules=rules)
    specs, treedef = jax.tree.flatten_with_path(
        param_spec(config), is_leaf=lambda node: isinstance(node, ArraySpec)
    )
    stored, final, where = map(treedef.flatten_up_to, (saved, wanted, places))
    stays = [
        _described(old) == _described(new) and (mesh is None or not is_packed(old))
        for old, new in zip(stored, final, strict=True)
    ]
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:

        def read(chosen: set[int], args: list[Any]) -> list[Any]:
            tree = [
                leaf if index in chosen else jax.tree.map(lambda _: ocp.PLACEHOLDER, leaf)
                for index, leaf in enumerate(stored)
            ]
            restore_args = treedef.unflatten(args)
            how = ocp.args.PyTreeRestore(treedef.unflatten(tree), restore_args=restore_args)
            return treedef.flatten_up_to(checkpointer.restore(path, how))

        on_host = [jax.tree.map(_on_host, leaf) for leaf in stored]
        in_place = [
            jax.tree.map(_in_place, leaf, place) if stay else host
            for leaf, place, host, stay in zip(stored, where, on_host, stays, strict=True)
        ]
        chosen = {index for index, stay in enumerate(stays) if stay}
        leaves = read(chosen, in_place) if chosen else [None] * len(stored)
        for index in set(range(len(stored))) - chosen:
            name, spec = specs[index]
            leaf = in_mode(read({index}, on_host)[index], name, spec, config.dtype, mode)
            placed = jax.device_put(leaf) if mesh is None else put(leaf, where[index])
            leaves[index] = jax.block_until_ready(placed)
    return treedef.unflatten(leaves)


def _described(leaf: Any) -> tuple[Any, list[Any]]:
    """Return what must be equal for a weight to be stored as it is asked for."""
    arrays, treedef = jax.tree.flatten(leaf)
    return treedef, [(array.shape, array.dtype) for array in arrays]


def _in_place(stored: jax.ShapeDtypeStruct, where: Sharding) -> ocp.RestoreArgs:
    return ocp.ArrayRestoreArgs(
        sharding=where, global_shape=tuple(stored.shape), dtype=stored.dtype
    )


def _on_host(stored: jax.ShapeDtypeStruct) -> ocp.RestoreArgs:
    return ocp.RestoreArgs(restore_type=np.ndarray, dtype=stored.dtype)
