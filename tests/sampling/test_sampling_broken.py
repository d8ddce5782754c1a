"""Logits that are not finite are found wherever they stand, in vocabularies of real models too.

XLA's maximum over thousands of numbers drops a NaN among them on a CPU.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from inferjax.sampling import Status, make_sampling, make_state, sample
from inferjax.sampling.blocks import broken_rows

SIZES = (1, 300, 5_000, 49_152)


@pytest.mark.parametrize("size", SIZES)
def test_one_bad_logit_anywhere_breaks_its_row_only(size):
    places = sorted({0, size // 3, size // 2, size - 1})
    find = jax.jit(broken_rows)
    for value in (np.nan, -np.nan, np.inf):
        rows = np.random.default_rng(0).standard_normal((len(places) + 1, size), np.float32)
        rows[np.arange(len(places)), places] = value
        assert np.asarray(find(rows)).tolist() == [True] * len(places) + [False]


def test_rows_of_nothing_but_minus_infinity_are_broken():
    rows = np.full((2, 5_000), -np.inf, np.float32)
    rows[1, 4_000] = -3.0
    assert np.asarray(broken_rows(jnp.asarray(rows))).tolist() == [True, False]


def test_sample_reports_a_nan_in_a_large_vocabulary():
    logits = np.random.default_rng(1).standard_normal((3, 49_152), np.float32)
    logits[1, 31_007] = np.nan
    sampling = make_sampling(3, temperature=0.0)
    state = make_state(jax.random.split(jax.random.key(0), 3), 1)
    result = sample(jnp.asarray(logits), sampling, state)
    assert result.status.tolist() == [0, int(Status.NAN_LOGITS), 0]
