"""Quantization that looks at what a model computes on a text before it rounds weights."""

from inferjax.calibrate.quantize import quantize
from inferjax.calibrate.recipes import RECIPES

__all__ = ["RECIPES", "quantize"]
