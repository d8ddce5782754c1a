"""The last layer of a tiny model, as a model of its own: a fraction of the time to compile."""

import dataclasses
import functools
from typing import Any

import numpy as np
from tiny_models import tiny_model

from inferjax.config import ModelConfig
from inferjax.models.params import param_spec
from inferjax.params import Params


@functools.cache
def one_layer(folder: str) -> tuple[Params, ModelConfig]:
    """Return the params and config; the last layer, as DeepSeek-V3's first has no experts."""
    model = tiny_model(folder)
    layer = dataclasses.replace(model.config.layers[-1], group=0)
    return (
        dataclasses.replace(model.params, layers=model.params.layers[-1:]),
        dataclasses.replace(model.config, layers=(layer,)),
    )


def products_of(config: ModelConfig) -> Any:
    """Return the specs of the layer's weights."""
    specs: Any = param_spec(config)
    return specs.layers[0]


def random_tokens(config: ModelConfig, rows: int, width: int, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return rng.integers(3, config.vocab_size, (rows, width)).astype(np.int32)
