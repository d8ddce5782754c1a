"""Reads the configs of the tiny checkpoints with some keys changed or left out."""

import json
from collections.abc import Collection

from tiny_models import TINY

from inferjax.config import Attention, ModelConfig, Rope
from inferjax.models.family import read_config
from inferjax.models.registry import family_for


def read_changed(name: str, drop: Collection[str] = (), **change: object) -> ModelConfig:
    """Return what a tiny checkpoint's config says after the change."""
    raw = json.loads((TINY / name / "config.json").read_text())
    raw = {key: value for key, value in raw.items() if key not in drop} | change
    return read_config(family_for(raw["model_type"]), raw)


def attention_of(config: ModelConfig, layer: int = 0) -> Attention:
    """Return the grouped attention of one layer."""
    attention = config.layers[layer].attention
    assert isinstance(attention, Attention)
    return attention


def rope_of(config: ModelConfig, layer: int = 0) -> Rope:
    """Return the rope of one layer, which must have one."""
    rope = attention_of(config, layer).rope
    assert rope is not None
    return rope
