"""The functions under JAX's debugging modes, in bfloat16, and again and again without compiling."""

from typing import Any

import composable_models as models
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compilations import count_compilations
from tolerances import BFLOAT16_LOGITS, LOGPROBS_F32

import inferjax as ij
from inferjax.models.params import random_params

PARAMS, CONFIG = models.cut_model("llama")
TOKENS = models.random_tokens(CONFIG, 2, 4)


def draw(params: Any, key: Any = None, **values: Any) -> ij.Generation:
    sampling = ij.make_sampling(2, **values)
    key = jax.random.key(0) if key is None else key
    return ij.generate(params, CONFIG, TOKENS, key=key, max_new_tokens=3, sampling=sampling)


def test_after_warm_up_no_value_compiles_anything():
    draw(PARAMS, temperature=0.7, top_k=3)
    ij.score(PARAMS, CONFIG, TOKENS)
    weak, strong = jnp.asarray(0.9), jnp.float32(0.4)
    jnp.asarray(weak, jnp.float32)  # JAX's own conversion is a program, once a process
    jax.block_until_ready(jnp.asarray(TOKENS))
    keys = [jax.random.key(i) for i in range(2)]
    other = jax.block_until_ready(random_params(CONFIG, keys[0], "float32"))
    with count_compilations() as compiled:
        draw(PARAMS, keys[1], temperature=0.0, top_k=0)
        draw(PARAMS, keys[1], temperature=1.3, top_k=7)
        draw(other, keys[0], temperature=weak, top_k=np.int64(2))
        draw(other, keys[0], temperature=strong, top_k=5)
        ij.score(other, CONFIG, TOKENS[::-1].copy())
        ij.score(jax.tree.map(np.asarray, PARAMS), CONFIG, jnp.asarray(TOKENS))
    assert not compiled
    with count_compilations() as compiled:
        ij.score(PARAMS, CONFIG, TOKENS[:, :2])
    assert compiled  # a new shape: the listener does hear


@pytest.mark.parametrize(
    "mode",
    [
        "jax_debug_nans",
        pytest.param("jax_disable_jit", marks=pytest.mark.slow),
        pytest.param("jax_debug_infs", marks=pytest.mark.slow),
    ],
)
def test_debugging_modes_change_nothing(mode: str):
    """Strict promotion and ranks are on in every test; these are the others."""
    drawn, scored = draw(PARAMS, temperature=0.7, top_k=3), ij.score(PARAMS, CONFIG, TOKENS)
    previous = getattr(jax.config, mode)
    jax.config.update(mode, True)
    try:
        again, scored_again = (
            draw(PARAMS, temperature=0.7, top_k=3),
            ij.score(PARAMS, CONFIG, TOKENS),
        )
    finally:
        jax.config.update(mode, previous)
    np.testing.assert_array_equal(drawn.tokens, again.tokens)
    np.testing.assert_allclose(drawn.logprobs, again.logprobs, **LOGPROBS_F32)
    np.testing.assert_allclose(scored, scored_again, **LOGPROBS_F32)


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(f, marks=pytest.mark.slow) if f in ("gpt_oss", "deepseek_v3") else f
        for f in models.FAMILIES
    ],
)
def test_bfloat16_weights_run_in_bfloat16_and_stay_near_float32(family: str):
    params, config = models.cut_model(family)
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
    tokens = models.random_tokens(config, 2, 4)

    @jax.jit
    def run(params: Any) -> Any:
        seen = ij.activations(params, config, tokens, taps=("final",))["final"]
        logits = ij.forward(params, config, tokens)
        return seen, logits, ij.score(params, config, tokens)

    seen, logits, scored = run(half)
    _, expected, expected_score = run(params)
    assert seen.dtype == jnp.bfloat16
    assert logits.dtype == scored.dtype == jnp.float32
    error = np.sqrt(np.mean(np.square(logits - expected))) / np.std(expected)
    assert 1e-5 < error < BFLOAT16_LOGITS, error
    spread = float(jnp.std(expected))
    np.testing.assert_allclose(scored, expected_score, rtol=0, atol=8 * BFLOAT16_LOGITS * spread)


@pytest.mark.slow
@pytest.mark.parametrize("family", models.FAMILIES)
def test_bfloat16_generation_reports_the_scores_of_its_tokens(family: str):
    params, config = models.cut_model(family)
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
    tokens = models.random_tokens(config, 2, 4)
    drawn = ij.generate(half, config, tokens, max_new_tokens=3)
    assert drawn.logprobs.dtype == jnp.float32
    np.testing.assert_array_equal(drawn.status, 0)
    text = np.concatenate([tokens, np.asarray(drawn.tokens)], axis=1)
    scored = np.asarray(ij.score(half, config, text))[:, 3:]
    live = np.arange(3)[None] < np.asarray(drawn.lengths)[:, None]
    spread = float(jnp.std(ij.forward(half, config, tokens)))
    np.testing.assert_allclose(
        np.where(live, drawn.logprobs, 0),
        np.where(live, scored, 0),
        rtol=0,
        atol=8 * BFLOAT16_LOGITS * spread,
    )
