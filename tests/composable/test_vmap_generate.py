"""`generate` under the caller's jit and vmap equals a loop of plain calls."""

import functools
from typing import Any

import composable_models as models
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tolerances import LOGPROBS_F32

import inferjax as ij

PARAMS, CONFIG = models.cut_model("llama")
TOKENS = models.random_tokens(CONFIG, 2, 4)


def draw(params: Any, tokens: Any, key: Any, temperature: Any, config: Any = CONFIG):
    sampling = ij.make_sampling(tokens.shape[0], temperature=temperature, eos_ids=(5,))
    return ij.generate(params, config, tokens, key=key, max_new_tokens=4, sampling=sampling)


plain = jax.jit(draw, static_argnums=4)


def check_mapped(args: tuple[Any, ...], axes: tuple[int | None, ...], config: Any = CONFIG) -> None:
    """Compare `vmap(generate)` with a call for each instance: tokens equal, numbers to rounding."""
    function = functools.partial(draw, config=config)
    mapped = jax.jit(jax.vmap(function, axes))(*args)
    for i in range(mapped.tokens.shape[0]):
        one = [models.take(a, i) if axis == 0 else a for a, axis in zip(args, axes, strict=True)]
        expected = plain(*one, config)
        np.testing.assert_array_equal(mapped.tokens[i], expected.tokens)
        np.testing.assert_array_equal(mapped.lengths[i], expected.lengths)
        np.testing.assert_array_equal(mapped.status[i], 0)
        for name in ("logprobs", "sampled_logprobs"):
            got, want = getattr(mapped, name)[i], getattr(expected, name)
            np.testing.assert_allclose(got, want, **LOGPROBS_F32)


def test_generate_under_the_callers_jit_equals_the_plain_call():
    inside = plain(PARAMS, TOKENS, jax.random.key(3), 0.8)
    outside = draw(PARAMS, TOKENS, jax.random.key(3), 0.8)
    jax.tree.map(np.testing.assert_array_equal, inside, outside)


def test_vmap_over_keys_and_temperatures_equals_the_loop():
    keys = jax.random.split(jax.random.key(0), 3)
    temperatures = jnp.array([0.0, 0.7, 1.5], jnp.float32)
    check_mapped((PARAMS, TOKENS, keys, temperatures), (None, None, 0, 0))


def test_vmap_over_stacked_params_and_prompts_equals_the_loop():
    stacked = models.stack_scaled(PARAMS, (1.0, 0.8, 1.2))
    prompts = jnp.stack([models.random_tokens(CONFIG, 2, 4, seed) for seed in (1, 2, 3)])
    check_mapped((stacked, prompts, jax.random.key(1), 0.9), (0, 0, None, None))


@pytest.mark.slow
@pytest.mark.parametrize("axes", [(0, None, None, None), (None, 0, None, None)])
def test_vmap_over_params_or_prompts_alone_equals_the_loop(axes: tuple[int | None, ...]):
    stacked = models.stack_scaled(PARAMS, (1.0, 0.8, 1.2))
    prompts = jnp.stack([models.random_tokens(CONFIG, 2, 4, seed) for seed in (1, 2, 3)])
    params = PARAMS if axes[0] is None else stacked
    tokens = TOKENS if axes[1] is None else prompts
    check_mapped((params, tokens, jax.random.key(1), 0.9), axes)


@pytest.mark.slow
@pytest.mark.parametrize("family", models.FAMILIES[1:])
def test_vmap_over_params_and_keys_equals_the_loop_in_every_family(family):
    params, config = models.cut_model(family, 2)
    stacked = models.stack_scaled(params, (1.0, 0.8))
    keys = jax.random.split(jax.random.key(0), 2)
    tokens = models.random_tokens(config, 2, 4)
    check_mapped((stacked, tokens, keys, 0.9), (0, None, 0, None), config)


@pytest.mark.slow
def test_vmap_in_vmap_equals_the_loop():
    stacked = models.stack_scaled(PARAMS, (1.0, 0.8))
    keys = jax.random.split(jax.random.key(0), 2)
    over_keys = jax.vmap(draw, (None, None, 0, None))
    both = jax.jit(jax.vmap(over_keys, (0, None, None, None)))(stacked, TOKENS, keys, 0.9)
    for i in range(2):
        for j in range(2):
            expected = plain(models.take(stacked, i), TOKENS, keys[j], 0.9)
            np.testing.assert_array_equal(both.tokens[i, j], expected.tokens)
