"""Weights from and to a flax.nnx module, without a file in between and inside `jit`.

A module fits a family when its parameters bear Hugging Face's names: the tensor
`model.layers.0.self_attn.q_proj.weight` is the parameter `model.layers[0].self_attn.q_proj.kernel`.
The last part may be what Flax calls it (`kernel` of a Linear, `embedding` of an Embed, `scale` of a
norm) or `weight`; a `kernel` is [in, out], everything else lies as in the checkpoint. The `model.`
in front may be missing. How the module computes is its own affair.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array

from inferjax.config import ModelConfig
from inferjax.errors import ShapeError
from inferjax.models.registry import family_named
from inferjax.models.tensors import params_from_tensors, tensors_from_params
from inferjax.params import Params

# Flax's names of what a checkpoint calls "weight".
_WEIGHTS = ("kernel", "embedding", "scale", "weight")


def from_nnx(module: Any, config: ModelConfig) -> Params:
    """Return the weights that a module holds, for `generate`, `score` and all other functions.

    `module` is an `nnx.Module` or its state. Called inside a training step's `jit`, it costs a
    rearrangement of the weights on the device; gradients flow back to the module.

    Raises: ShapeError naming a parameter that is missing or of another shape.
    """
    state = module if isinstance(module, nnx.State) else nnx.state(module, nnx.Param)
    read = _reader(config)
    tensors = {}
    for path, variable in nnx.to_flat_state(state):
        tensors[_tensor_name(path)] = read(path, variable[...])
    return params_from_tensors(config, _with_prefix(tensors, config))


def to_nnx(params: Params, config: ModelConfig, module: nnx.Module) -> None:
    """Give a module the weights of `params`, in the dtype of its own parameters.

    Parameters that the config does not know keep their values.

    Raises: ShapeError naming a weight that the module has no parameter for, or of another shape;
      UnsupportedConfig for packed weights.
    """
    tensors = tensors_from_params(config, params)
    prefix = family_named(config.family).base_prefix
    state = nnx.state(module, nnx.Param)
    read = _reader(config)
    found = set()
    for path, variable in nnx.to_flat_state(state):
        name = _tensor_name(path)
        name = name if name in tensors else prefix + name
        if name not in tensors:
            continue
        values = read(path, tensors[name])
        if values.shape != variable.shape:
            raise ShapeError(
                f"the module's {_dotted(path)} is {variable.shape}",
                why=f"the weights call for {values.shape}",
                fix="make the module with the config of these weights",
            )
        variable[...] = values.astype(variable.dtype)
        found.add(name)
    missing = sorted(tensors.keys() - found)
    if missing:
        raise ShapeError(
            f"the module has no parameter for {missing[0]!r} ({len(missing)} are missing)",
            why="its parameters must bear Hugging Face's names",
            fix=f"name it {missing[0].removesuffix('.weight')!r} with one of {', '.join(_WEIGHTS)}",
        )
    nnx.update(module, state)


def _reader(config: ModelConfig) -> Callable[[tuple[Any, ...], Array], Array]:
    """Return what turns a parameter into a tensor, and a tensor into a parameter."""
    in_first = family_named(config.family).in_first

    def read(path: tuple[Any, ...], values: Array) -> Array:
        return jnp.asarray(values).T if path[-1] == "kernel" and not in_first else values

    return read


def _tensor_name(path: Iterable[Any]) -> str:
    *parts, leaf = path
    return ".".join(map(str, [*parts, "weight" if leaf in _WEIGHTS else leaf]))


def _with_prefix(tensors: Mapping[str, Array], config: ModelConfig) -> Mapping[str, Array]:
    """Return the tensors under their full names, as the bare model's lack what is in front."""
    prefix = family_named(config.family).base_prefix
    if any(name.startswith(prefix) for name in tensors):
        return tensors
    heads = ("lm_head.", "embed_out.", "score.")
    return {n if n.startswith(heads) else prefix + n: values for n, values in tensors.items()}


def _dotted(path: Iterable[Any]) -> str:
    return ".".join(map(str, path))
