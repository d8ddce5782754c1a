"""Sliding windows at their edges, against scoring without a cache and with freed pages."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from paged_runs import (
    decode_all,
    extend_chunks,
    first_state,
    keys_of,
    poisoned_cache,
    shuffled_tables,
)
from tiny_models import padded, prompts_of, tiny_model
from tolerances import LOGITS_F32, TINY_LOGPROBS_F32

import inferjax as ij
from inferjax.config import cache_groups

WINDOWED = ("gemma3_text", "gpt_oss")
SLOW_GEMMA = [pytest.param("gemma3_text", marks=pytest.mark.slow), "gpt_oss"]
EXEC = ij.Exec(page_size=8)
WINDOW, TOTAL, PER_ROW = 8, 12, 8
LENGTHS = (WINDOW - 1, WINDOW, WINDOW + 1, 3 * WINDOW)
NUM_PAGES = 1 + len(LENGTHS) * PER_ROW


@pytest.mark.parametrize("family", WINDOWED)
def test_windows_of_the_tiny_models_are_what_these_tests_assume(family):
    windows = {group.window for group in cache_groups(tiny_model(family).config)}
    assert windows == {None, WINDOW}


@pytest.mark.parametrize("family", SLOW_GEMMA)
def test_decode_across_the_window_edge_equals_forward(family):
    model, prompts = tiny_model(family), prompts_of(tiny_model(family), LENGTHS)
    tables = shuffled_tables(model, 4, PER_ROW, NUM_PAGES, seed=2)
    cache = poisoned_cache(model, NUM_PAGES, EXEC)
    _, cache = extend_chunks(model, cache, tables, [p[:-1] for p in prompts], 8, EXEC)
    state = first_state(prompts, tables, ij.make_sampling(4, temperature=0.0), keys_of(range(4)))
    tokens, logprobs, _, _ = decode_all(model, cache, state, TOTAL, 4, EXEC)
    texts = [np.concatenate(pair) for pair in zip(prompts, tokens, strict=True)]
    logits = ij.forward(model.params, model.config, padded(texts, 36), [len(t) for t in texts])
    known = np.asarray(jax.nn.log_softmax(logits))
    for row, length in enumerate(LENGTHS):
        wanted = known[row, length - 1 : length - 1 + TOTAL]
        np.testing.assert_array_equal(tokens[row], wanted.argmax(-1))
        np.testing.assert_allclose(logprobs[row], wanted.max(-1), **TINY_LOGPROBS_F32)


@pytest.mark.parametrize("attention", ["xla", pytest.param("reference", marks=pytest.mark.slow)])
@pytest.mark.parametrize("family", SLOW_GEMMA)
def test_pages_behind_the_window_have_no_influence(family, attention):
    """A long row gives its old pages back while a short neighbour still reads its first one."""
    model, exec = tiny_model(family), ij.Exec(page_size=8, attention=attention)
    rows = prompts_of(model, (33, 3))
    tables = shuffled_tables(model, 2, PER_ROW, NUM_PAGES, seed=3)
    cache = poisoned_cache(model, NUM_PAGES, exec)
    _, cache = extend_chunks(model, cache, tables, [r[:-1] for r in rows], 8, exec)
    starts = np.array([len(r) - 1 for r in rows])
    last = [row[-1:] for row in rows]
    before, cache = extend_chunks(model, cache, tables, last, 8, exec, starts=starts)
    # Positions below 33 - 8 are out of sight: pages 0 to 2 of the long row are free again.
    freed = [
        np.where((np.arange(PER_ROW) < 3) & (np.arange(2)[:, None] == 0), 0, table)
        if group.window
        else table
        for table, group in zip(tables, cache_groups(model.config), strict=True)
    ]
    cache = jax.tree.map(lambda pool: pool.at[:, 0].set(jnp.nan), cache)
    after, _ = extend_chunks(model, cache, freed, last, 8, exec, starts=starts)
    np.testing.assert_allclose(after[:, 0], before[:, 0], **LOGITS_F32)
