"""Small models for the tests of composition: the tiny checkpoints, and one-layer cuts of them."""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from inferjax.checkpoint.load import load
from inferjax.config import ModelConfig
from inferjax.params import Params

TINY = Path(__file__).resolve().parents[2] / "checkpoints" / "tiny"
FAMILIES = ("llama", "gemma3_text", "gpt_oss", "deepseek_v3", "gpt2")


def tiny_model(family: str) -> tuple[Params, ModelConfig]:
    model = load(TINY / family)
    return model.params, model.config


def cut_model(family: str, num_layers: int = 1) -> tuple[Params, ModelConfig]:
    """Return the last layers of a tiny checkpoint: half the time to compile, the same code.

    The last ones, because DeepSeek-V3's first layer is dense; renumbered to the pools they use.
    """
    params, config = tiny_model(family)
    layers = config.layers[-num_layers:]
    used = sorted({spec.group for spec in layers})
    specs = tuple(dataclasses.replace(spec, group=used.index(spec.group)) for spec in layers)
    return (
        dataclasses.replace(params, layers=params.layers[-num_layers:]),
        dataclasses.replace(config, layers=specs),
    )


def random_tokens(config: ModelConfig, rows: int, width: int, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return rng.integers(3, config.vocab_size, (rows, width)).astype(np.int32)


def stack_scaled(params: Params, scales: tuple[float, ...]) -> Params:
    """Return params with a leading axis: the same weights, each scaled by its own factor."""
    return jax.tree.map(lambda x: jnp.stack([x * jnp.asarray(s, x.dtype) for s in scales]), params)


def take(tree: Any, index: int) -> Any:
    return jax.tree.map(lambda x: x[index], tree)


def direction_like(params: Params, seed: int) -> Params:
    """Return random changes of a size in proportion to each weight's own."""
    leaves, treedef = jax.tree.flatten(params)
    keys = jax.random.split(jax.random.key(seed), len(leaves))
    return jax.tree.unflatten(
        treedef,
        [
            jax.random.normal(k, x.shape, x.dtype) * (jnp.std(x) + jnp.asarray(1e-2, x.dtype))
            for k, x in zip(keys, leaves, strict=True)
        ],
    )
