"""What a plan needs to know of a model; all of it follows from a config."""

import dataclasses
import math

from inferjax.config import KV_DTYPES, ModelConfig
from inferjax.errors import UnsupportedConfig
from inferjax.planner.leaves import DTYPE_BYTES, Leaf, activation_dtype, uniform_leaves


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A model's config, its weights as they are stored, and the dtype of its cache.

    `activation_bytes` is the size of a number between two products.
    """

    config: ModelConfig
    leaves: tuple[Leaf, ...]
    kv_dtype: str
    activation_bytes: int = 2

    @property
    def weight_bytes(self) -> int:
        """The bytes of all weights, once."""
        return sum(leaf.num_bytes for leaf in self.leaves)

    @property
    def num_parameters(self) -> int:
        """The weights' values."""
        return sum(leaf.num_values for leaf in self.leaves)

    @property
    def num_active_parameters(self) -> int:
        """The values that one token is multiplied with, and those of its embedding's table."""
        return sum(_active(leaf) for leaf in self.leaves)


def make_model(
    config: ModelConfig,
    *,
    dtype: str | None = None,
    quantize: str | None = None,
    kv_dtype: str | None = None,
    leaves: tuple[Leaf, ...] | None = None,
) -> Model:
    """Return a model with weights of `dtype`, packed by the scheme `quantize` if there is one.

    `kv_dtype` is by default that of activations: what the embedding's rows are read as, float32
    where it is packed. "fp8" is short for "float8_e4m3fn". `leaves` stand for weights that are
    stored in some other way.

    Raises: UnsupportedConfig for a dtype or scheme that is not known.
    """
    dtype = dtype or config.dtype
    if dtype not in ("float32", "bfloat16", "float16"):
        raise UnsupportedConfig(
            f"dtype is {dtype!r}", why="weights are float32, bfloat16 or float16"
        )
    leaves = leaves or uniform_leaves(config, dtype=dtype, scheme=quantize)
    activations = activation_dtype(leaves)
    kv_dtype = {"fp8": "float8_e4m3fn", None: activations}.get(kv_dtype, kv_dtype)
    if kv_dtype not in KV_DTYPES:
        raise UnsupportedConfig(
            f"kv is {kv_dtype!r}",
            why="keys and values are not stored so",
            fix=f"use one of {', '.join(KV_DTYPES)}, or fp8",
        )
    return Model(
        config=config,
        leaves=leaves,
        kv_dtype=kv_dtype,
        activation_bytes=DTYPE_BYTES[activations],
    )


def _active(leaf: Leaf) -> int:
    if leaf.experts is None:
        return leaf.num_values
    router = leaf.experts.router
    return leaf.num_values // router.num_experts * router.experts_per_token


def largest_leaf(model: Model) -> Leaf:
    """Return the kind of weight that most values are of: what the model's products look like."""
    return max(model.leaves, key=lambda leaf: leaf.count * math.prod(leaf.spec.shape))
