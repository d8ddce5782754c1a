"""Generation inside a scan whose body trains the params: one program, and no weight copied."""

from typing import Any

import composable_models as models
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compilations import count_compilations
from jaxpr_walk import computations, shape_text
from tolerances import LOGPROBS_F32

import inferjax as ij

PARAMS, CONFIG = models.cut_model("llama")
PROMPTS = models.random_tokens(CONFIG, 2, 4)
RATE = 0.05


def train_step(params: Any, key: Any) -> tuple[Any, dict[str, jax.Array]]:
    """Draw answers, reward even tokens, and follow the policy gradient once."""
    sampling = ij.make_sampling(2, temperature=1.0, ignore_eos=True)
    drawn = ij.generate(params, CONFIG, PROMPTS, key=key, max_new_tokens=4, sampling=sampling)
    text = jnp.concatenate([jnp.asarray(PROMPTS), drawn.tokens], axis=1)
    reward = (drawn.tokens % 2 == 0).astype(jnp.float32) - 0.5

    def loss(p: Any) -> tuple[jax.Array, jax.Array]:
        scored = ij.score(p, CONFIG, text)[:, PROMPTS.shape[1] - 1 :]
        return -jnp.mean(reward * scored), scored

    gradient, scored = jax.grad(loss, has_aux=True)(params)
    params = jax.tree.map(lambda p, g: p - jnp.float32(RATE) * g, params, gradient)
    return params, {"tokens": drawn.tokens, "generated": drawn.logprobs, "scored": scored}


TRACES: list[int] = []


def train(params: Any, keys: Any) -> tuple[Any, dict[str, jax.Array]]:
    TRACES.append(1)
    return jax.lax.scan(train_step, params, keys)


trained = jax.jit(train, donate_argnums=0)


def copy_of(params: Any) -> Any:
    return jax.tree.map(jnp.copy, params)


def test_scan_of_training_steps_equals_the_loop_and_compiles_once():
    keys = jax.random.split(jax.random.key(0), 3)
    given = copy_of(PARAMS)
    params, seen = trained(given, keys)
    assert jax.tree.leaves(given)[0].is_deleted()
    np.testing.assert_allclose(seen["generated"], seen["scored"], **LOGPROBS_F32)

    step, expected = jax.jit(train_step), PARAMS
    for i in range(3):
        expected, one = step(expected, keys[i])
        np.testing.assert_array_equal(seen["tokens"][i], one["tokens"])
        np.testing.assert_allclose(seen["scored"][i], one["scored"], **LOGPROBS_F32)
    for got, want in zip(jax.tree.leaves(params), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)
    assert not np.allclose(jax.tree.leaves(params)[0], jax.tree.leaves(PARAMS)[0], atol=1e-6)

    TRACES.clear()
    others = jax.random.split(jax.random.key(1), 3)
    with count_compilations() as compiled:
        jax.block_until_ready(trained(params, others))
    assert not compiled
    assert not TRACES


def generate_step(params: Any, key: Any) -> tuple[Any, jax.Array]:
    sampling = ij.make_sampling(2, temperature=1.0, ignore_eos=True)
    drawn = ij.generate(params, CONFIG, PROMPTS, key=key, max_new_tokens=4, sampling=sampling)
    rate = jnp.float32(RATE) * drawn.logprobs.mean()
    return jax.tree.map(lambda p: p - rate * p, params), drawn.tokens


def compiled_scan(step: Any) -> Any:
    scan = jax.jit(lambda params, keys: jax.lax.scan(step, params, keys), donate_argnums=0)
    return scan.lower(PARAMS, jax.random.split(jax.random.key(0), 3)).compile()


def copied_weights(compiled: Any) -> list[str]:
    """Return the computation that each copy of an array of a weight's shape stands in."""
    weights = {shape_text(x) for x in jax.tree.leaves(PARAMS) if x.ndim > 1}
    return [
        name
        for name, lines in computations(compiled.as_text()).items()
        for line in lines
        if " copy(" in line and any(f"= {shape}" in line for shape in weights)
    ]


def test_generation_copies_no_weight_that_the_scan_carries():
    compiled = compiled_scan(generate_step)
    assert compiled.as_text().count(" while(") >= 3  # the scan, the tokens, the pages
    assert not copied_weights(compiled)
    memory = compiled.memory_analysis()
    weight_bytes = sum(x.nbytes for x in jax.tree.leaves(PARAMS))
    assert memory.alias_size_in_bytes >= weight_bytes
    # A cache of three pages and the logits; a second set of weights would not fit.
    assert memory.temp_size_in_bytes < 0.7 * weight_bytes


@pytest.mark.slow
def test_training_scan_copies_weights_in_its_update_at_most():
    """XLA:CPU keeps some old weights beside the new while it trains, without generation too.

    Those copies stand in the body of the scan over training steps, one a weight; the loops over
    tokens, pages and chunks inside it have none.
    """
    compiled = compiled_scan(train_step)
    copies = copied_weights(compiled)
    assert len(set(copies)) <= 1
    assert len(copies) <= len([x for x in jax.tree.leaves(PARAMS) if x.ndim > 1])
    weight_bytes = sum(x.nbytes for x in jax.tree.leaves(PARAMS))
    assert compiled.memory_analysis().temp_size_in_bytes < 2 * weight_bytes
