"""Every tiny checkpoint against the logits and the greedy tokens of Hugging Face transformers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from paged_runs import (
    decode_all,
    extend_chunks,
    first_state,
    poisoned_cache,
    shuffled_tables,
)
from tiny_models import FAMILIES, expected, tiny_model
from tolerances import PARITY_LOGITS_F32

import inferjax as ij
from inferjax.checkpoint.load import Model
from inferjax.kv.cache import KVCache

PAGED = ij.Exec(page_size=8)
NUM_PAGES, PAGES_PER_ROW = 14, 6


def assert_parity(logits: np.ndarray, reference: np.ndarray, scale: float) -> None:
    worst = np.abs(np.asarray(logits) - reference).max() / scale
    assert worst <= PARITY_LOGITS_F32, f"{worst:.1e} of the logits' standard deviation"


def fresh(model: Model) -> tuple[KVCache, tuple[np.ndarray, ...]]:
    tables = shuffled_tables(model, 2, PAGES_PER_ROW, NUM_PAGES, seed=1)
    return poisoned_cache(model, NUM_PAGES, PAGED), tables


@pytest.mark.parametrize("family", FAMILIES)
def test_forward_equals_reference(family):
    model, known = tiny_model(family), expected(family)
    logits = ij.forward(model.params, model.config, known["tokens"])
    assert logits.dtype == jnp.float32
    assert_parity(logits, known["logits"], known["logits"].std())


@pytest.mark.parametrize("family", FAMILIES)
def test_chunked_prefill_equals_reference(family):
    model, known = tiny_model(family), expected(family)
    cache, tables = fresh(model)
    logits, _ = extend_chunks(model, cache, tables, list(known["tokens"]), 7, PAGED)
    assert_parity(logits[:, :40], known["logits"], known["logits"].std())


@pytest.mark.parametrize("family", FAMILIES)
def test_prefill_then_single_tokens_equals_reference(family):
    model, known = tiny_model(family), expected(family)
    cache, tables = fresh(model)
    head, rest = known["tokens"][:, :14], known["tokens"][:, 14:]
    prefilled, cache = extend_chunks(model, cache, tables, list(head), 7, PAGED)
    starts = np.full(2, 14, np.int32)
    stepped, _ = extend_chunks(model, cache, tables, list(rest), 1, PAGED, starts=starts)
    logits = np.concatenate([prefilled, stepped], axis=1)
    assert_parity(logits, known["logits"], known["logits"].std())


@pytest.mark.parametrize("family", FAMILIES)
def test_decode_greedy_equals_reference(family):
    model, known = tiny_model(family), expected(family)
    cache, tables = fresh(model)
    rows = list(known["greedy_prompt"])
    _, cache = extend_chunks(model, cache, tables, [row[:-1] for row in rows], 7, PAGED)
    sampling = ij.make_sampling(2, temperature=0.0, ignore_eos=True, eos_ids=model.config.eos_ids)
    state = first_state(rows, tables, sampling, jax.random.split(jax.random.key(0), 2))
    tokens, _, _, _ = decode_all(model, cache, state, 24, 8, PAGED)
    np.testing.assert_array_equal(tokens, known["greedy"])


# Compiling `generate` takes seconds; one family of each kind of cache runs by default.
@pytest.mark.parametrize(
    "family",
    [f if f == "gemma3_text" else pytest.param(f, marks=pytest.mark.slow) for f in FAMILIES],
)
def test_generate_greedy_equals_reference(family):
    model, known = tiny_model(family), expected(family)
    sampling = ij.SamplingParams(temperature=0.0, ignore_eos=True)
    out = ij.generate(
        model.params, model.config, known["greedy_prompt"], max_new_tokens=24, sampling=sampling
    )
    np.testing.assert_array_equal(out.tokens, known["greedy"])
    np.testing.assert_array_equal(out.lengths, [24, 24])
    assert not np.asarray(out.status).any()
