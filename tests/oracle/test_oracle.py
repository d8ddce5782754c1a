"""The oracle by hand, without an engine: right dispatches give the truth, wrong ones do not."""

import dataclasses

import numpy as np
import pytest
from expected import expected, expected_scores
from hash_model import at_spot, config_of, join, logprob
from lazy import Violation
from oracle import Oracle

from inferjax.config import cache_groups
from inferjax.engine.dispatch import Decode, Extend, Rows
from inferjax.sampling import SamplingParams

SIZE, SLOTS, ROWS, WIDTH, PAGES = 4, 3, 4, 8, 12
SEED = (7 << 32) + 99
WINDOWS = [(None, None), (None, 5, 5), (6, 6), (None, 1, 9)]
ids = [str(windows) for windows in WINDOWS]


def make_oracle(windows, **settings):
    config = config_of(windows, max_context=48)
    num_pages = [40] * len(cache_groups(config))
    return Oracle(
        config,
        num_pages=num_pages,
        page_size=SIZE,
        num_slots=SLOTS,
        max_rows=ROWS,
        capacity=48,
        **settings,
    )


@dataclasses.dataclass
class Dispatches:
    """The arrays of one request: its first page table, its row, its prefill, its decode."""

    rows: Rows
    extends: list[Extend]
    decode: Decode


def dispatches(oracle, prompt, sampling, *, chunk=48, slot=1, sample_index=0, steps=4):
    random = np.random.default_rng(len(prompt))
    tables = [random.permutation(np.arange(1, 40))[None, :PAGES] for _ in oracle.num_pages]
    tables = [table.astype(np.int32) for table in tables]
    history = np.full((1, 48), -1, np.int32)
    forced = sampling.forced_token_ids
    known = [*prompt, *forced]
    history[0, : len(known)] = known
    number = SEED if sampling.seed is None else sampling.seed
    one = lambda value: np.array([value], np.int32)  # noqa: E731
    rows = Rows(
        index=np.arange(SLOTS, dtype=np.int32),
        slots=one(slot),
        tokens=one(0),
        keys=np.array([[number >> 32, number & 0xFFFFFFFF]], np.uint32),
        sample_index=one(sample_index),
        history=history,
        lengths=one(len(prompt)),
        prompt_lens=one(len(prompt)),
        forced_lens=one(len(known) if forced else 0),
        sampling=[sampling],
    )
    extends = [
        _extend(prompt, start, min(start + chunk, len(prompt)), tables, slot)
        for start in range(0, len(prompt), chunk)
    ]
    active = np.arange(SLOTS) == slot
    wide = tuple(np.repeat(table, SLOTS, 0) * active[:, None].astype(np.int32) for table in tables)
    return Dispatches(
        rows, extends, Decode(tables=wide, active=active, steps=steps, num_rows=SLOTS)
    )


def _extend(prompt, start, stop, tables, slot):
    starts = range(start, stop, WIDTH)
    batch = Extend(
        tokens=np.zeros((ROWS, WIDTH), np.int32),
        lengths=np.zeros(ROWS, np.int32),
        starts=np.zeros(ROWS, np.int32),
        tables=tuple(np.zeros((ROWS, PAGES), np.int32) for _ in tables),
        slots=np.full(ROWS, SLOTS, np.int32),
    )
    for row, first in enumerate(starts):
        part = prompt[first : min(first + WIDTH, stop)]
        batch.tokens[row, : len(part)] = part
        batch.lengths[row], batch.starts[row] = len(part), first
        for mine, table in zip(batch.tables, tables, strict=True):
            mine[row] = table[0]
    if stop == len(prompt):
        batch.slots[len(starts) - 1] = slot
    return batch


def run(oracle, work):
    """Return (token, logprob, sampled logprob, top pairs) of every token drawn."""
    oracle.place(work.rows)
    handles = [oracle.extend(batch) for batch in work.extends]
    found, slot = [], int(work.rows.slots[0])
    first = handles[-1].read().first
    row = int(np.flatnonzero(work.extends[-1].slots < SLOTS)[0])
    found += _reported(first, row)
    done = first.done[row]
    while not done:
        drawn = oracle.decode(work.decode).read()
        found += _reported(drawn, slot)
        done = drawn.done[slot]
    return found


def _reported(drawn, row):
    n = drawn.counts[row]
    tops = zip(drawn.top_ids[row, :n].tolist(), drawn.top_logprobs[row, :n].tolist(), strict=True)
    values = (drawn.tokens, drawn.logprobs, drawn.sampled_logprobs)
    columns = [value[row, :n].tolist() for value in values]
    return list(zip(*columns, [tuple(zip(*top, strict=True)) for top in tops], strict=True))


def truth(oracle, prompt, sampling, **settings):
    drawn = expected(
        oracle.config, prompt, sampling, key=SEED, top=oracle.top, limit=30, **settings
    )
    return [(t.token, t.logprob, t.sampled_logprob, t.top) for t in drawn]


def prompt_of(length, seed=0):
    return np.random.default_rng((seed, length)).integers(3, 61, length).tolist()


def test_formulas_are_the_same_for_integers_and_arrays():
    values, others = [0, 1, 61, 2**40 + 5, 2**64 - 1], [9, 0, 3, 100, 60]
    array, other = np.array(values, np.uint64), np.array(others, np.uint64)
    for formula in (join, at_spot, logprob):
        plain = [formula(a, b) for a, b in zip(values, others, strict=True)]
        assert formula(array, other).tolist() == plain


@pytest.mark.parametrize("windows", WINDOWS, ids=ids)
@pytest.mark.parametrize(
    ("length", "chunk"), [(1, 48), (4, 48), (13, 48), (25, 48), (25, 3), (8, 8)]
)
@pytest.mark.parametrize("depth", [0, 3])
def test_prefill_and_decode_give_the_truth(windows, length, chunk, depth):
    oracle = make_oracle(windows, depth=depth)
    sampling = SamplingParams(max_tokens=15, ignore_eos=True)
    prompt = prompt_of(length)
    found = run(oracle, dispatches(oracle, prompt, sampling, chunk=chunk))
    assert len(found) == 15
    assert found == truth(oracle, prompt, sampling)


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 0.0},
        {"stop_token_ids": tuple(range(20))},
        {"stop_token_ids": tuple(range(30)), "min_tokens": 9},
        {"max_tokens": 1},
        {"presence_penalty": -0.5, "top_k": 3},
        {"seed": 5},
    ],
    ids=str,
)
def test_parameters_have_their_effect(fields):
    oracle, prompt = make_oracle((None, 5)), prompt_of(9)
    sampling = SamplingParams(**{"max_tokens": 14, **fields})
    right = truth(oracle, prompt, sampling)
    found = run(oracle, dispatches(oracle, prompt, sampling))
    assert (found == right) == (sampling.seed is None)
    assert found != truth(oracle, prompt, SamplingParams(max_tokens=20))


def test_samples_differ_and_forced_tokens_are_taken():
    oracle, prompt, sampling = make_oracle((None,)), prompt_of(9), SamplingParams(max_tokens=14)
    one = run(oracle, dispatches(oracle, prompt, sampling, sample_index=1))
    assert one == truth(oracle, prompt, sampling, sample_index=1)
    assert one != truth(oracle, prompt, sampling)
    sampling = SamplingParams(max_tokens=14, forced_token_ids=(11, 12, 13))
    forced = run(oracle, dispatches(oracle, prompt, sampling))
    assert [token for token, *_ in forced[:3]] == [11, 12, 13]
    assert forced == truth(oracle, prompt, sampling)


def test_scores_are_those_of_the_truth():
    oracle, prompt = make_oracle((None, 5)), prompt_of(14)
    (batch,) = dispatches(oracle, prompt, SamplingParams()).extends
    targets = np.full((ROWS, WIDTH), -1, np.int32)
    targets[0], targets[1, :5] = prompt[1:9], prompt[9:]
    batch = dataclasses.replace(batch, slots=np.full(ROWS, SLOTS, np.int32), targets=targets)
    found = oracle.extend(batch).read()
    assert found.first is None
    scores = [*found.logprobs[0].tolist(), *found.logprobs[1, :5].tolist()]
    assert scores == [score for score, _ in expected_scores(oracle.config, prompt)]


def swap_pages(work):
    for table in work.decode.tables:
        table[:, [0, 1]] = table[:, [1, 0]]


def stale_page(work):
    for table in work.decode.tables:
        table[:, 4] = 39 - table[:, 4]


def trash_page(work):
    for table in work.decode.tables:
        table[:, 4] = 0


def free_window_early(work):
    work.decode.tables[-1][:, 2] = 0


def beyond_pool(work):
    for table in work.decode.tables:
        table[:, 0] = 40


def start_late(work):
    work.extends[-1].starts[1] += 1


def other_tokens(work):
    work.extends[0].tokens[0, 0] += 1


def other_history(work):
    work.rows.history[0, 3] += 1


def other_prompt_len(work):
    work.rows.prompt_lens[0] -= 1


def other_key(work):
    work.rows.keys[0, 0] += 1


def other_sample(work):
    work.rows.sample_index[0] += 1


def wrong_slot(work):
    work.extends[-1].slots[2] = 0


def lost_chunk(work):
    work.extends[0].lengths[0] = 0


def two_writers(work):
    batch = work.extends[0]
    batch.tokens[3], batch.lengths[3], batch.starts[3] = batch.tokens[0], 2, 0
    for table in batch.tables:
        table[3] = table[0]


FAULTS = [
    swap_pages,
    stale_page,
    trash_page,
    free_window_early,
    beyond_pool,
    start_late,
    other_tokens,
    other_history,
    other_prompt_len,
    other_key,
    other_sample,
    wrong_slot,
    lost_chunk,
    two_writers,
]


@pytest.mark.parametrize("fault", FAULTS)
def test_every_fault_shows(fault):
    oracle, prompt = make_oracle((None, 9)), prompt_of(18)
    sampling = SamplingParams(max_tokens=12, ignore_eos=True)
    work = dispatches(oracle, prompt, sampling)
    fault(work)
    try:
        found = run(oracle, work)
    except Violation:
        assert fault in (trash_page, free_window_early, beyond_pool, start_late, wrong_slot) or (
            fault is two_writers
        )
        return
    assert found != truth(oracle, prompt, sampling)


@pytest.mark.parametrize("moved", [True, False])
def test_rows_move_between_dispatches(moved):
    oracle, prompt = make_oracle((None, 5)), prompt_of(10)
    sampling = SamplingParams(max_tokens=8, ignore_eos=True)
    work = dispatches(oracle, prompt, sampling, slot=2)
    oracle.place(work.rows)
    first = oracle.extend(work.extends[0]).read().first
    index = np.array([2 if moved else 0, 1, 2], np.int32)
    nobody = np.full(1, SLOTS, np.int32)
    oracle.place(dataclasses.replace(work.rows, index=index, slots=nobody, sampling=[]))
    batch = dispatches(oracle, prompt, sampling, slot=0, steps=7).decode
    drawn = oracle.decode(batch).read()
    found = [int(first.tokens[1, 0]), *drawn.tokens[0].tolist()]
    assert (found == [t for t, *_ in truth(oracle, prompt, sampling)]) == moved
    assert drawn.counts.tolist() == [7 * moved, 0, 0]


def test_copied_page_reads_like_its_source():
    oracle, prompt = make_oracle((None,)), prompt_of(10)
    sampling = SamplingParams(max_tokens=6, ignore_eos=True)
    work = dispatches(oracle, prompt, sampling, steps=6)
    table = work.decode.tables[0]
    source, target = table[1, 2], 39 if 39 not in table[1, :5] else 38
    oracle.place(work.rows)
    first = oracle.extend(work.extends[0]).read().first
    oracle.copy(0, np.array([source, 0], np.int32), np.array([target, 0], np.int32))
    table[1, 2] = target
    drawn = oracle.decode(work.decode).read()
    found = [int(first.tokens[1, 0]), *drawn.tokens[1, :5].tolist()]
    assert found == [t for t, *_ in truth(oracle, prompt, sampling)]


def test_array_written_in_flight_is_noticed():
    oracle, prompt = make_oracle((None,), depth=2), prompt_of(10)
    work = dispatches(oracle, prompt, SamplingParams(max_tokens=4))
    oracle.place(work.rows)
    handle = oracle.extend(work.extends[0])
    work.extends[0].tokens[0, 0] = 0
    with pytest.raises(Violation, match="in flight"):
        handle.read()
    assert len(oracle.queue.violations) == 1


def test_results_are_read_only_and_reset_forgets():
    oracle, prompt = make_oracle((None,)), prompt_of(10)
    sampling = SamplingParams(max_tokens=4, ignore_eos=True)
    work = dispatches(oracle, prompt, sampling)
    oracle.place(work.rows)
    first = oracle.extend(work.extends[0]).read().first
    with pytest.raises(ValueError, match="read-only"):
        first.tokens[0] = 1
    dropped = oracle.decode(work.decode)
    oracle.reset()
    with pytest.raises(Violation, match="dropped"):
        dropped.read()
    assert run(oracle, work) == truth(oracle, prompt, sampling)


def test_planned_faults_are_raised_once():
    oracle, prompt = make_oracle((None,)), prompt_of(10)
    work = dispatches(oracle, prompt, SamplingParams(max_tokens=4))
    oracle.faults[0] = RuntimeError("lost")
    oracle.read_faults[2] = RuntimeError("late")
    with pytest.raises(RuntimeError, match="lost"):
        oracle.extend(work.extends[0])
    oracle.place(work.rows)
    oracle.extend(work.extends[0]).read()
    handle = oracle.decode(work.decode)
    with pytest.raises(RuntimeError, match="late"):
        handle.read()
