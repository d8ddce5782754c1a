"""Rows without a place for their tokens say so: beyond the context, the tokens or the pages."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_models import tiny_model

import inferjax as ij
from inferjax.config import cache_groups
from inferjax.errors import InvalidInput, OutOfPages, RequestTooLong
from inferjax.kv.cache import init_cache
from inferjax.runtime.inputs import input_status
from inferjax.sampling import Status

SIZE, PAGES, KEY = 8, 40, jax.random.key(0)
EXEC = ij.Exec(page_size=SIZE)


def status_of(family, *, starts=0, lengths=4, table=None):
    """Return the bits of one row with room for 4 new tokens and a page for every position."""
    config = tiny_model(family).config
    cache = init_cache(config, num_pages=PAGES, exec=EXEC)
    row = np.arange(1, PAGES)[None] if table is None else np.asarray([table])
    inputs = ij.make_inputs(
        np.ones((1, 4), np.int32),
        lengths=lengths,
        starts=starts,
        block_tables=[row] * len(cache.groups),
    )
    return Status(int(input_status(inputs, cache, config)[0]))


@pytest.mark.parametrize(
    ("starts", "lengths", "status"),
    [
        (0, 4, Status.OK),
        (124, 4, Status.OK),
        (125, 4, Status.TOO_LONG),
        (125, 3, Status.OK),
        (0, 5, Status.BAD_LENGTH),
        (-1, 4, Status.BAD_LENGTH),
        (-1, 0, Status.OK),
        (0, -1, Status.BAD_LENGTH),
        (10_000, 0, Status.OK),
    ],
)
def test_row_status_names_lengths_that_cannot_be_run(starts, lengths, status):
    assert status_of("gpt2", starts=starts, lengths=lengths) == status


def test_row_status_survives_positions_that_overflow():
    assert Status.TOO_LONG in status_of("gpt2", starts=2**31 - 1)


@pytest.mark.parametrize("page", [0, -1, PAGES])
def test_row_status_names_a_page_that_cannot_hold_new_tokens(page):
    table = np.arange(1, 9)
    table[3] = page
    assert status_of("llama", starts=24, table=table) == Status.OUT_OF_PAGES
    assert status_of("llama", starts=32, table=table) == Status.OUT_OF_PAGES
    assert status_of("llama", starts=20, table=table) == Status.OK


def test_row_status_allows_anything_behind_every_window():
    config = tiny_model("gpt_oss").config
    cache = init_cache(config, num_pages=PAGES, exec=EXEC)
    whole = np.arange(1, PAGES)[None]
    freed = np.where(np.arange(PAGES - 1)[None] < 3, 0, whole)
    windows = [group.window for group in cache_groups(config)]
    assert set(windows) == {None, 8}
    for start, status in ((31, Status.OK), (30, Status.OUT_OF_PAGES)):
        inputs = ij.make_inputs(
            np.ones((1, 1), np.int32),
            starts=start,
            block_tables=[freed if window else whole for window in windows],
        )
        assert Status(int(input_status(inputs, cache, config)[0])) == status


def test_decode_stops_a_row_at_the_end_of_the_context():
    model = tiny_model("gpt2")
    limit = model.config.max_context
    cache = init_cache(model.config, num_pages=PAGES, exec=EXEC)
    state = ij.init_state(
        jnp.ones((1, limit - 1), jnp.int32),
        jnp.array([limit - 1], jnp.int32),
        keys=jax.random.key(0)[None],
        sampling=ij.make_sampling(1, temperature=0.0),
        block_tables=(jnp.arange(1, PAGES, dtype=jnp.int32)[None],),
        room=8,
    )
    _, state = ij.start(model.config, jnp.zeros((1, model.config.vocab_size)), state)
    out, state, _ = ij.decode(model.params, model.config, cache, state, steps=3, exec=EXEC)
    # The first step caches the context's last position; the token it draws has none.
    np.testing.assert_array_equal(out.values.status[0], [0, int(Status.TOO_LONG), 0])
    assert bool(state.done[0])


def test_generate_reports_a_traced_length_beyond_the_tokens():
    model = tiny_model("llama")
    run = jax.jit(
        lambda lengths: (
            ij.generate(
                model.params,
                model.config,
                np.ones((1, 4), np.int32),
                lengths,
                max_new_tokens=2,
                key=KEY,
            ).status
        )
    )
    assert Status(int(run(jnp.array([5]))[0])) == Status.BAD_LENGTH


@pytest.mark.parametrize(
    ("status", "error"),
    [
        (Status.TOO_LONG, RequestTooLong),
        (Status.BAD_LENGTH, InvalidInput),
        (Status.OUT_OF_PAGES, OutOfPages),
    ],
)
def test_row_status_becomes_a_typed_error(status, error):
    with pytest.raises(error, match="row 1"):
        ij.raise_for_status(np.array([0, int(status)]))
