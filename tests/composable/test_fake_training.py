"""Training with rounding in sight ends with better rounded weights than rounding afterwards."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from composable_models import cut_model
from flax import nnx

import inferjax as ij
from inferjax.models.quantized import fake_quantize, quantize
from inferjax.nnx import Decoder, from_nnx

SCHEME, STEPS = "int4-g128", 40
PARAMS, CONFIG = cut_model("llama")
# Sequences that a rule makes: each token follows from the one before.
FIRST = np.random.default_rng(0).integers(3, 67, size=(8, 1))
TOKENS = jnp.asarray((FIRST * 5 ** np.arange(16)[None] + np.arange(16)) % 61 + 3, jnp.int32)


def loss(params):
    return -ij.score(params, CONFIG, TOKENS).mean()


def train(params, seen_as, num_steps=STEPS):
    """Train with Adam on the loss of `seen_as(params)`."""
    optimizer = optax.adam(1e-2)

    @jax.jit
    def step(params, state):
        gradient = jax.grad(lambda p: loss(seen_as(p)))(params)
        with jax.numpy_dtype_promotion("standard"):  # optax mixes dtypes
            change, state = optimizer.update(gradient, state)
        return optax.apply_updates(params, change), state

    state = optimizer.init(params)
    for _ in range(num_steps):
        params, state = step(params, state)
    return params


def rounded_loss(params):
    return float(loss(quantize(params, CONFIG, SCHEME)))


def test_training_on_rounded_weights_beats_rounding_trained_ones():
    plain = train(PARAMS, lambda p: p)
    aware = train(PARAMS, lambda p: fake_quantize(p, CONFIG, SCHEME))
    start, afterwards, inside = map(rounded_loss, (PARAMS, plain, aware))
    assert float(loss(plain)) < start
    assert inside < afterwards < start
    np.testing.assert_allclose(
        loss(fake_quantize(aware, CONFIG, SCHEME)), inside, rtol=0, atol=1e-3
    )


def test_a_flax_module_is_trained_on_its_rounded_weights():
    module = Decoder(CONFIG, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(module, optax.adam(1e-2), wrt=nnx.Param)

    @nnx.jit
    def step(module, optimizer):
        value, gradient = nnx.value_and_grad(
            lambda m: loss(fake_quantize(from_nnx(m, CONFIG), CONFIG, SCHEME))
        )(module)
        with jax.numpy_dtype_promotion("standard"):
            optimizer.update(module, gradient)
        return value

    losses = [float(step(module, optimizer)) for _ in range(10)]
    assert losses[-1] < losses[0]
    np.testing.assert_allclose(
        rounded_loss(from_nnx(module, CONFIG)), float(step(module, optimizer)), rtol=0, atol=1e-3
    )
