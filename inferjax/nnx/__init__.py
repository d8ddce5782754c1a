"""Models written in Flax: a reference module, and weights from and to modules like it."""

from inferjax.nnx.module import Decoder
from inferjax.nnx.weights import from_nnx, to_nnx

__all__ = ["Decoder", "from_nnx", "to_nnx"]
