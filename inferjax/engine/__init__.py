"""Continuous batching: an engine that is a thin host loop around the pure functions."""

from inferjax.engine.completion import Completion, Delta, Sample, Timings, Tokens, Usage
from inferjax.engine.config import EngineConfig
from inferjax.engine.engine import Engine
from inferjax.engine.stats import Counters, SequenceView, Stats

__all__ = [
    "Completion",
    "Counters",
    "Delta",
    "Engine",
    "EngineConfig",
    "Sample",
    "SequenceView",
    "Stats",
    "Timings",
    "Tokens",
    "Usage",
]
