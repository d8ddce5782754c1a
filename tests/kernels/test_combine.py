"""Every implementation of joining parts of attention, against float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.combine import IMPLEMENTATIONS, combine
from tests.tolerances import ATTENTION_F32

EMPTY = -np.inf


def make_parts() -> tuple[np.ndarray, np.ndarray]:
    """Three parts of five rows; a part without keys holds NaN, and one row has no keys at all."""
    rng = np.random.default_rng(0)
    outs, lses = rng.standard_normal((3, 5, 2, 4)), rng.standard_normal((3, 5, 2)) * 9
    lses[1, 2] = lses[:, 3] = EMPTY
    outs[np.isneginf(lses)] = np.nan
    return outs.astype(np.float32), lses.astype(np.float32)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("with_sinks", [False, True])
def test_combine_equals_float64(implementation: str, with_sinks: bool):
    outs, lses = make_parts()
    sinks = np.array([2.0, -30.0], np.float32) if with_sinks else None
    given = None if sinks is None else jnp.asarray(sinks)
    out, lse = jax.jit(lambda *x: combine(*x, sinks=given, implementation=implementation))(
        outs, lses
    )
    weights = np.exp(lses.astype(np.float64))
    total = weights.sum(0) + (0.0 if sinks is None else np.exp(sinks.astype(np.float64)))
    values = np.where(np.isneginf(lses)[..., None], 0.0, outs.astype(np.float64))
    known = (weights[..., None] * values).sum(0) / np.where(total == 0, 1.0, total)[..., None]
    with np.errstate(divide="ignore"):
        known_lse = np.log(total)
    np.testing.assert_allclose(np.asarray(out), known, **ATTENTION_F32)
    np.testing.assert_allclose(np.asarray(lse), known_lse, **ATTENTION_F32)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_combine_is_associative_and_keeps_the_dtype_of_parts(implementation: str):
    outs, lses = (jnp.asarray(x) for x in make_parts())
    whole, total = combine(outs, lses, implementation=implementation)
    first, first_lse = combine(outs[:2], lses[:2], implementation=implementation)
    nested = combine(
        jnp.stack([first, outs[2]]),
        jnp.stack([first_lse, lses[2]]),
        implementation=implementation,
    )
    np.testing.assert_allclose(np.asarray(nested[0]), np.asarray(whole), **ATTENTION_F32)
    np.testing.assert_allclose(np.asarray(nested[1]), np.asarray(total), **ATTENTION_F32)
    narrow, lse = combine(outs.astype(jnp.bfloat16), lses, implementation=implementation)
    assert (narrow.dtype, lse.dtype) == (jnp.bfloat16, jnp.float32)


def test_unknown_implementation_is_refused():
    outs, lses = make_parts()
    with pytest.raises(KeyError, match="warp"):
        combine(jnp.asarray(outs), jnp.asarray(lses), implementation="warp")
