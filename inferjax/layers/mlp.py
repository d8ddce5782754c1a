"""The dense feed-forward block."""

import functools
from collections.abc import Callable

import jax
from jaxtyping import Array, Float

from inferjax.config import MLP, Activation
from inferjax.params import MLPParams
from inferjax.quant.linear import linear

ACTIVATIONS: dict[Activation, Callable[[Array], Array]] = {
    "silu": jax.nn.silu,
    "gelu": functools.partial(jax.nn.gelu, approximate=False),
    "gelu_tanh": functools.partial(jax.nn.gelu, approximate=True),
    "relu": jax.nn.relu,
}


def mlp(x: Float[Array, "B T D"], w: MLPParams, spec: MLP) -> Float[Array, "B T D"]:
    """Apply down(act(gate) * up), or down(act(up)) when the block is not gated."""
    hidden = linear(x, w.w_in, "BTD,DCF->BTCF", w.b_in)
    active = ACTIVATIONS[spec.activation](hidden[:, :, 0])
    if spec.gated:
        active = active * hidden[:, :, 1]
    return linear(active, w.w_down, "BTF,FD->BTD", w.b_down)
