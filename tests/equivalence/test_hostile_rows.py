"""One bad row never harms its neighbours: status bits, untouched pages, and typed errors."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from paged_runs import first_state, keys_of, poisoned_cache, shuffled_tables
from tiny_models import padded, prompts_of, tiny_model

import inferjax as ij
from inferjax.errors import InvalidInput, OutOfPages, RequestTooLong
from inferjax.sampling import Status

LENGTHS, PER_ROW, NUM_PAGES = (8, 7, 5), 3, 12
BAD, NEIGHBOURS = 1, [0, 2]
VOCAB = 320


@dataclasses.dataclass(frozen=True)
class Damage:
    """What is wrong with the middle row, and the status bit that must say so."""

    status: Status
    token: int | None = None
    page: int | None = None
    start: int | None = None
    length: int | None = None


DAMAGES = {
    "token too large": Damage(Status.BAD_TOKEN, token=VOCAB),
    "token huge": Damage(Status.BAD_TOKEN, token=2**31 - 1),
    "token negative": Damage(Status.BAD_TOKEN, token=-1),
    "page beyond the pool": Damage(Status.OUT_OF_PAGES, page=NUM_PAGES),
    "page huge": Damage(Status.OUT_OF_PAGES, page=2**31 - 1),
    "page negative": Damage(Status.OUT_OF_PAGES, page=-1),
    "page very negative": Damage(Status.OUT_OF_PAGES, page=-(2**31)),
    "table too short": Damage(Status.OUT_OF_PAGES, start=PER_ROW * 8 - 2),
    "start far beyond": Damage(Status.OUT_OF_PAGES, start=10_000),
    "start negative": Damage(Status.BAD_LENGTH, start=-3),
    "start that overflows": Damage(Status.TOO_LONG, start=2**31 - 4),
    "start at the end of the context": Damage(Status.TOO_LONG, start=256 - 3),
    "length beyond the tokens": Damage(Status.BAD_LENGTH, length=9),
}
MODES = {"default": False, "exact": True}


def extend(family, exact, damage=None):
    model, exec = tiny_model(family), ij.Exec(page_size=8, exact=exact)
    tokens = padded(prompts_of(model, LENGTHS), 8)
    tables = [t.copy() for t in shuffled_tables(model, 3, PER_ROW, NUM_PAGES, seed=6)]
    starts, lengths = np.zeros(3, np.int32), np.array(LENGTHS)
    if damage is not None and damage.token is not None:
        tokens[BAD, 2] = damage.token
    if damage is not None and damage.page is not None:
        for table in tables:
            table[BAD, 0] = damage.page
    if damage is not None and damage.start is not None:
        starts[BAD] = damage.start
    if damage is not None and damage.length is not None:
        lengths[BAD] = damage.length
    inputs = ij.make_inputs(tokens, lengths=lengths, starts=starts, block_tables=tables)
    cache = poisoned_cache(model, NUM_PAGES, exec)
    out, cache = ij.extend(model.params, model.config, cache, inputs, outputs="all", exec=exec)
    return out, cache, tables


def pages_of(cache, tables, rows):
    """Return the bits of all pages that do not belong to the other rows, nor to the trash."""
    kept = []
    for pool, table in zip(cache.groups, tables, strict=True):
        pages = np.setdiff1d(np.arange(1, NUM_PAGES), table[rows])
        kept.append(np.asarray(pool.values[:, pages]).view(np.int32))
    return kept


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize(
    ("family", "mode"),
    [
        ("llama", "default"),
        pytest.param("gpt_oss", "exact", marks=pytest.mark.slow),
        pytest.param("gpt_oss", "default", marks=pytest.mark.slow),
        pytest.param("deepseek_v3", "default", marks=pytest.mark.slow),
        pytest.param("gpt2", "default", marks=pytest.mark.slow),
        pytest.param("llama", "exact", marks=pytest.mark.slow),
    ],
)
def test_bad_row_is_reported_and_harms_nobody(family, mode, damage):
    good, good_cache, tables = extend(family, MODES[mode])
    bad, bad_cache, _ = extend(family, MODES[mode], DAMAGES[damage])
    np.testing.assert_array_equal(good.status, [0, 0, 0])
    assert Status(int(bad.status[BAD])) & DAMAGES[damage].status
    np.testing.assert_array_equal(np.asarray(bad.status)[NEIGHBOURS], [0, 0])
    for row in NEIGHBOURS:
        ours, known = bad.values[row, : LENGTHS[row]], good.values[row, : LENGTHS[row]]
        np.testing.assert_array_equal(ours, known)
    before = pages_of(good_cache, tables, [BAD])
    after = pages_of(bad_cache, tables, [BAD])
    for ours, known in zip(after, before, strict=True):
        np.testing.assert_array_equal(ours, known)


def test_free_pages_stay_untouched():
    """Only the rows' own pages and the trash page change; padding goes to the trash."""
    _, cache, tables = extend("llama", False)
    free = np.setdiff1d(np.arange(1, NUM_PAGES), tables[0])
    assert len(free)
    assert np.isnan(cache.groups[0].values[:, free]).all()
    written = ~np.isnan(np.asarray(cache.groups[0].values)).all(axis=(0, 2, 3, 5))  # [P, S]
    for row, length in enumerate(LENGTHS):
        assert written[tables[0][row, 0], :length].all()
        assert not written[tables[0][row, 0], length:].any()
        assert not written[tables[0][row, 1:]].any()


def decode(rows, tables, cache, model, exec):
    state = first_state(rows, tables, ij.make_sampling(3, temperature=0.0), keys_of(range(3)))
    return ij.decode(model.params, model.config, cache, state, steps=12, exec=exec)


def prefilled(model, exec, tables, rows):
    inputs = ij.make_inputs(padded(rows, 8), lengths=LENGTHS, block_tables=tables)
    cache = poisoned_cache(model, NUM_PAGES, exec)
    return ij.extend(model.params, model.config, cache, inputs, outputs="all", exec=exec)[1]


def test_row_that_outgrows_its_table_stops_and_harms_nobody():
    """Row 1 has pages for 16 tokens; it holds 7 and is asked for 12 more."""
    model, exec = tiny_model("llama"), ij.Exec(page_size=8)
    rows = prompts_of(model, LENGTHS)
    (table,) = shuffled_tables(model, 3, PER_ROW, NUM_PAGES, seed=6)
    short = table.copy()
    short[BAD, 2] = NUM_PAGES + 5
    cache = prefilled(model, exec, [table], rows)
    good, _, good_cache = decode(rows, [table], jax.tree.map(jnp.copy, cache), model, exec)
    bad, state, bad_cache = decode(rows, [short], cache, model, exec)
    np.testing.assert_array_equal(good.status, [0, 0, 0])
    np.testing.assert_array_equal(bad.status, [0, int(Status.OUT_OF_PAGES), 0])
    assert state.done[BAD]
    for name in ("tokens", "logprobs"):
        ours, known = getattr(bad.values, name), getattr(good.values, name)
        np.testing.assert_array_equal(np.asarray(ours)[NEIGHBOURS], np.asarray(known)[NEIGHBOURS])
    # Ten tokens see 16 positions; what follows is padding.
    np.testing.assert_array_equal(bad.values.tokens[BAD, :10], good.values.tokens[BAD, :10])
    assert not np.asarray(bad.values.logprobs)[BAD, 11:].any()
    for ours, known in zip(
        pages_of(bad_cache, [table], [BAD]), pages_of(good_cache, [table], [BAD]), strict=True
    ):
        np.testing.assert_array_equal(ours, known)


def test_insert_and_release_midway_leave_the_others_alone():
    model, exec = tiny_model("llama"), ij.Exec(page_size=8)
    rows = prompts_of(model, LENGTHS)
    (table,) = shuffled_tables(model, 3, PER_ROW, NUM_PAGES, seed=6)
    cache = prefilled(model, exec, [table], rows)
    state = first_state(rows, [table], ij.make_sampling(3, temperature=0.0), keys_of(range(3)))

    def steps(state, cache):
        out, state, cache = ij.decode(model.params, model.config, cache, state, steps=4, exec=exec)
        assert not np.asarray(out.status).any()
        return out.values, state, cache

    whole = [steps(*pair) for pair in [(copied(state), copied(cache))]]
    whole.append(steps(copied(whole[0][1]), copied(whole[0][2])))
    first, state, cache = steps(state, cache)
    state = ij.release(state, jnp.array([BAD]))
    np.testing.assert_array_equal(state.block_tables[0][BAD], 0)
    guest = prompts_of(model, (8,), seed=9)[0]
    spare = np.setdiff1d(np.arange(1, NUM_PAGES), table)
    guest_table = np.resize(np.concatenate([table[BAD][:2], spare]), (1, PER_ROW)).astype(np.int32)
    inputs = ij.make_inputs(
        padded([[], guest, []], 8),
        lengths=[0, 8, 0],
        block_tables=[np.repeat(guest_table, 3, axis=0)],
    )
    _, cache = ij.extend(model.params, model.config, cache, inputs, outputs="all", exec=exec)
    row = first_state([guest], [guest_table], ij.make_sampling(1, temperature=0.0), keys_of([5]))
    state = ij.insert(state, jnp.array([BAD]), row)
    second, state, cache = steps(state, cache)
    for drawn, known in ((first, whole[0][0]), (second, whole[1][0])):
        for name in ("tokens", "logprobs"):
            ours, other = getattr(drawn, name), getattr(known, name)
            np.testing.assert_array_equal(
                np.asarray(ours)[NEIGHBOURS], np.asarray(other)[NEIGHBOURS]
            )
    text = np.concatenate([guest, second.tokens[BAD]])[None]
    logits = ij.forward(model.params, model.config, text)
    np.testing.assert_array_equal(np.asarray(logits[0, 7:11]).argmax(-1), second.tokens[BAD])


def copied(tree):
    return jax.tree.map(jnp.copy, tree)


@pytest.mark.parametrize(
    ("tokens", "lengths", "kind", "words"),
    [
        (np.zeros((1, 0), np.int32), None, InvalidInput, ["[1, 0]", "empty prompt"]),
        (np.zeros((0, 4), np.int32), None, InvalidInput, ["[0, 4]"]),
        (np.full((2, 4), 5), [4, 0], InvalidInput, ["[0, 4]", "between 1 and 4"]),
        (np.full((2, 4), 5), [4, 5], InvalidInput, ["[4, 5]", "between 1 and 4"]),
        (np.array([[5, 320]]), None, InvalidInput, ["320", "row 0, position 1"]),
        (np.array([[5, -7]]), None, InvalidInput, ["-7", "320 ids"]),
        (np.full((1, 250), 5), None, RequestTooLong, ["258", "256"]),
    ],
)
def test_generate_refuses_bad_prompts_with_the_numbers(tokens, lengths, kind, words):
    model = tiny_model("llama")
    with pytest.raises(kind) as caught:
        ij.generate(model.params, model.config, tokens, lengths, max_new_tokens=8)
    for word in words:
        assert word in str(caught.value)


def test_status_bits_become_errors_of_the_row():
    with pytest.raises(OutOfPages, match="row 2"):
        ij.raise_for_status(np.array([0, 0, int(Status.OUT_OF_PAGES)]))
    with pytest.raises(InvalidInput, match="row 0: token id"):
        ij.raise_for_status(np.array([int(Status.BAD_TOKEN)]))
    ij.raise_for_status(np.zeros(3, np.int32))
