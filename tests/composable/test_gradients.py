"""Gradients of `score` and `forward` against finite differences, whole and in chunks."""

import dataclasses
from collections.abc import Callable
from typing import Any

import composable_models as models
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tolerances import CHUNKED_GRADIENTS_F32, FINITE_DIFFERENCES_F32, LOGPROBS_F32

import inferjax as ij
from inferjax.layers import context


def leaf_names(params: Any) -> list[str]:
    return [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(params)]


def slope(values: Callable[[Any], np.ndarray], params: Any, index: int, change: Any) -> float:
    """Return the change of the weighted values along `change` in one leaf, to fourth order.

    The values are subtracted one by one, in float64, before they are summed: less rounding.
    """
    leaves, treedef = jax.tree.flatten(params)

    def at(t: float) -> np.ndarray:
        moved = [*leaves]
        moved[index] = leaves[index] + jnp.float32(t) * change
        return values(jax.tree.unflatten(treedef, moved))

    # Small enough that no token changes its experts, large enough to stand out from rounding.
    step = 4e-3
    near, far = at(step) - at(-step), at(2 * step) - at(-2 * step)
    return float(np.sum(8 * near - far)) / (12 * step)


def check_gradient(function: Callable[[Any], jax.Array], params: Any) -> None:
    """Compare, leaf by leaf, along a direction that is half gradient and half random.

    A wrong gradient differs along itself; one that lacks a part differs along the random half.
    """
    weights = jax.random.normal(jax.random.key(0), jax.eval_shape(function, params).shape)

    def loss(params: Any) -> tuple[jax.Array, jax.Array]:
        values = function(params)
        return jnp.vdot(weights, values), values

    run = jax.jit(jax.grad(loss, has_aux=True))
    weights64 = np.asarray(weights, np.float64)
    gradients = jax.tree.leaves(run(params)[0])
    total = float(np.sqrt(sum(np.sum(np.square(g)) for g in gradients)))
    leaves, names = jax.tree.leaves(params), leaf_names(params)
    for i, (leaf, gradient) in enumerate(zip(leaves, gradients, strict=True)):
        gradient = np.asarray(gradient)
        assert np.isfinite(gradient).all(), names[i]
        if "score_bias" in names[i]:  # moves the choice of experts, which has no slope
            assert not gradient.any()
            continue
        assert gradient.any(), names[i]
        change = change_of(leaf, gradient, seed=i)
        got = float(np.vdot(gradient, change))
        expected = slope(lambda p: weights64 * np.asarray(run(p)[1]), params, i, change)
        scale = float(np.linalg.norm(change)) * total
        bound = FINITE_DIFFERENCES_F32["rtol"] * abs(got) + FINITE_DIFFERENCES_F32["atol"] * scale
        assert abs(got - expected) <= bound, (names[i], got, expected, bound)


def change_of(leaf: jax.Array, gradient: np.ndarray, seed: int) -> np.ndarray:
    """Return a change of a few per cent of a matrix; of a vector (it may be zero), of 0.08 each."""
    noise = np.random.default_rng(seed).standard_normal(leaf.shape).astype(np.float32)
    direction = gradient / np.linalg.norm(gradient) + noise / np.linalg.norm(noise)
    size = np.linalg.norm(leaf) if leaf.ndim > 1 else np.sqrt(leaf.size) * 2
    return direction * np.float32(0.04 * size)


@pytest.mark.parametrize("family", models.FAMILIES)
def test_gradient_of_score_equals_finite_differences(family: str):
    params, config = models.cut_model(family)
    tokens = models.random_tokens(config, 2, 7)
    check_gradient(lambda p: ij.score(p, config, tokens, [7, 5]), params)


@pytest.mark.parametrize(
    "family", [pytest.param(f, marks=pytest.mark.slow) for f in models.FAMILIES[1:]] + ["llama"]
)
def test_gradient_of_forward_equals_finite_differences(family: str):
    params, config = models.cut_model(family)
    tokens = models.random_tokens(config, 2, 5)
    check_gradient(lambda p: ij.forward(p, config, tokens), params)


@pytest.mark.parametrize(
    "family",
    [pytest.param(f, marks=pytest.mark.slow) for f in models.FAMILIES if f != "gpt_oss"]
    + ["gpt_oss"],
)
def test_gradient_of_score_over_stacked_params_equals_the_loop(family: str):
    params, config = models.cut_model(family)
    tokens = models.random_tokens(config, 2, 6)
    grad = jax.jit(jax.grad(lambda p: ij.score(p, config, tokens).mean()))
    stacked = models.stack_scaled(params, (1.0, 0.9))
    mapped = jax.jit(jax.vmap(grad))(stacked)
    for i in range(2):
        check_equal_trees(models.take(mapped, i), grad(models.take(stacked, i)))


@pytest.mark.parametrize(
    "family",
    ["llama", *(pytest.param(f, marks=pytest.mark.slow) for f in ("gemma3_text", "gpt_oss"))],
)
def test_chunks_of_positions_and_queries_change_neither_value_nor_gradient(family, monkeypatch):
    """300 tokens are two blocks of queries and five chunks of logits, or one of each."""
    params, config = models.cut_model(family)
    config = dataclasses.replace(config, max_context=1024)
    tokens = models.random_tokens(config, 1, 300)

    def scored(chunk: int) -> tuple[jax.Array, Any]:
        def loss(p: Any) -> tuple[jax.Array, jax.Array]:
            values = ij.score(p, config, tokens, [290], exec=ij.Exec(score_chunk=chunk))
            return values.mean(), values

        (_, values), gradient = jax.jit(jax.value_and_grad(loss, has_aux=True))(params)
        return values, gradient

    values, gradient = scored(64)
    monkeypatch.setattr(context, "QUERY_BLOCK", 1 << 20)
    whole_values, whole_gradient = scored(1024)
    np.testing.assert_allclose(values, whole_values, **LOGPROBS_F32)
    assert np.all(np.asarray(values)[0, 289:] == 0.0)
    assert np.all(np.asarray(values)[0, :289] < 0.0)
    check_equal_trees(gradient, whole_gradient)


def check_equal_trees(got: Any, expected: Any) -> None:
    """Compare gradients leaf by leaf, in shares of the leaf's largest value."""
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        scale = max(float(jnp.max(jnp.abs(y))), 1e-6)
        np.testing.assert_allclose(x / scale, y / scale, **CHUNKED_GRADIENTS_F32)
