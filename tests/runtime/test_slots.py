"""Slots of a resident state: whatever moves, sleeps or comes between, the tokens of `generate`."""

import dataclasses
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from slot_device import EXEC, ROWS, SLOTS, STEPS, WIDTH, WIDTHS, Device, bits, state_rows
from tiny_models import padded, prompts_of, tiny_model
from tolerances import LOGITS_F32, TINY_LOGPROBS_F32

import inferjax as ij
from inferjax.runtime import slots
from inferjax.sampling import SamplingParams, sampling_arrays

TOTAL = 10
LENGTHS = (1, 7, 20)
REQUESTS = (
    SamplingParams(
        temperature=0.0, max_tokens=TOTAL, ignore_eos=True, logprob_token_ids=[5], logprobs=2
    ),
    SamplingParams(max_tokens=TOTAL, top_p=0.9, ignore_eos=True, repetition_penalty=1.2),
    SamplingParams(temperature=0.8, ignore_eos=True, max_tokens=7, logprobs=1),
)


def wanted(model: Any, exec: ij.Exec) -> ij.Generation:
    """Return what `generate` makes of the requests, all at once."""
    keys = jax.random.wrap_key_data(jnp.array([[0, i] for i in range(3)], jnp.uint32))
    rows = sampling_arrays(REQUESTS, vocab_size=model.config.vocab_size, widths=WIDTHS)
    prompts = padded(prompts_of(model, LENGTHS), max(LENGTHS))
    return ij.generate(
        model.params,
        model.config,
        prompts,
        list(LENGTHS),
        key=keys,
        max_new_tokens=TOTAL,
        sampling=rows,
        exec=exec,
    )


FIELDS = ("logprobs", "sampled_logprobs", "top_logprobs", "chosen_logprobs")


class Collected:
    """What each request drew, over all dispatches."""

    def __init__(self) -> None:
        self.drawn: list[list[dict[str, Any]]] = [[], [], []]

    def take(self, output: Any, counts: np.ndarray, at: dict[int, int]) -> None:
        values = jax.tree.map(np.asarray, output.values)
        if values.tokens.ndim == 1:
            values = jax.tree.map(lambda x: x[:, None], values)
        assert not np.asarray(output.status).any()
        for row, request in at.items():
            for i in range(counts[row]):
                names = ("tokens", "top_ids", *FIELDS)
                self.drawn[request].append({n: getattr(values, n)[row, i] for n in names})

    def check(self, want: ij.Generation, exact: bool) -> None:
        for request, drawn in enumerate(self.drawn):
            count = int(want.lengths[request])
            assert len(drawn) == count
            for name in ("tokens", "top_ids", *FIELDS):
                got = np.stack([token[name] for token in drawn])
                expected = np.asarray(getattr(want, name))[request, :count]
                if exact or name in ("tokens", "top_ids"):
                    np.testing.assert_array_equal(got, expected, err_msg=name)
                else:
                    np.testing.assert_allclose(got, expected, **TINY_LOGPROBS_F32)


def run(device: Device, seed: int) -> Collected:
    """Run the requests through random slots, buckets, limits and pauses, moving one half-way."""
    rng = np.random.default_rng(seed)
    places = [int(slot) for slot in rng.permutation(SLOTS - 1)[:3]]
    prompts, collected = prompts_of(device.model, LENGTHS), Collected()
    same = list(range(SLOTS))
    device.place(same, places, state_rows(device.model, prompts, [*REQUESTS], ROWS, done=False))
    for request, (slot, prompt) in enumerate(zip(places, prompts, strict=True)):
        logits = device.prefill(slot, prompt)
        row = -(-len(prompt) // WIDTH) - 1
        at = [SLOTS] * ROWS
        at[row] = slot
        output, counts, _ = device.begin(logits, at)
        assert counts.tolist() == [int(i == row) for i in range(ROWS)]
        collected.take(output, counts, {row: request})
    while not np.asarray(device.state.done).all():
        moved = rng.permutation(SLOTS)
        device.place(moved, [], state_rows(device.model, [], [], ROWS, done=False))
        device.tables = tuple(table[moved] for table in device.tables)
        places = [int(np.flatnonzero(moved == slot)[0]) for slot in places]
        size = SLOTS if max(places) >= 4 else 4
        active = rng.random(size) < 0.7
        limit = int(rng.integers(1, STEPS + 2))
        before = bits(device.state)
        output, counts, done = device.decode(active.tolist(), limit)
        at = {slot: i for i, slot in enumerate(places) if slot < size and active[slot]}
        collected.take(output, counts, at)
        check_bystanders(before, bits(device.state), active)
        assert (counts <= min(limit, STEPS)).all()
        np.testing.assert_array_equal(done, np.asarray(device.state.done)[:size])
    return collected


def check_bystanders(before: list, after: list, active: np.ndarray) -> None:
    """Slots that were not active, or beyond the bucket, keep every bit."""
    asleep = np.ones(SLOTS, bool)
    asleep[: len(active)] = ~active
    for old, new in zip(before, after, strict=True):
        np.testing.assert_array_equal(old[asleep], new[asleep])


slow = pytest.mark.slow


@pytest.mark.parametrize(
    ("family", "exact"),
    [
        ("llama", False),
        # Six slots are two tiles, three rows of `generate` one: both must give the same bits.
        pytest.param("gemma3_text", True, marks=slow),
        pytest.param("llama", True, marks=slow),
        pytest.param("gemma3_text", False, marks=slow),
    ],
)
def test_slots_draw_what_generate_draws(family, exact):
    model, exec = tiny_model(family), dataclasses.replace(EXEC, exact=exact, tile=4)
    want = wanted(model, exec)
    for seed in range(3):
        run(Device(model, exec), seed).check(want, exact)


def test_place_moves_slots_then_writes_rows_and_drops_what_is_nowhere():
    model = tiny_model("llama")
    device = Device(model, EXEC)
    prompts = prompts_of(model, (3, 4, 5))
    rows = state_rows(model, prompts, [*REQUESTS], ROWS, done=False)
    device.place(range(SLOTS), [4, 0, 2], rows)
    before = bits(device.state)
    device.state = slots.place(
        device.state,
        np.array([4, 1, 2, 3, 0, 5], np.int32),
        np.array([-1, 3, SLOTS], np.int32),
        rows,
    )
    for old, new, row in zip(before, bits(device.state), bits(rows), strict=True):
        np.testing.assert_array_equal(new[[0, 1, 2, 4, 5]], old[[4, 1, 2, 0, 5]])
        np.testing.assert_array_equal(new[3], row[1])


def test_begin_touches_the_named_slots_alone():
    model = tiny_model("llama")
    device = Device(model, EXEC)
    rows = state_rows(model, prompts_of(model, (3, 4, 5)), [*REQUESTS], ROWS, done=False)
    device.place(range(SLOTS), [4, 0, 2], rows)
    before = bits(device.state)
    logits = jnp.asarray(np.random.default_rng(0).normal(size=(ROWS, model.config.vocab_size)))
    output, counts, done = device.begin(logits.astype(jnp.float32), [SLOTS, 0, -1])
    assert counts.tolist() == [0, 1, 0]
    assert np.asarray(output.status).tolist() == [0, 0, 0]
    assert np.asarray(done).tolist() == [True, False, True]
    assert not np.asarray(output.values.logprobs)[[0, 2]].any()
    for old, new in zip(before, bits(device.state), strict=True):
        np.testing.assert_array_equal(old[1:], new[1:])
    assert int(device.state.tokens[0]) == int(output.values.tokens[1])
    assert int(device.state.sample.history_len[0]) == 5


def test_decode_stops_at_its_limit_without_a_new_program():
    model, sizes = tiny_model("llama"), []
    jitted, prompts = cast(Any, slots.decode_slots), prompts_of(model, (3,))
    for limit in (0, 1, 3, STEPS, STEPS + 5):
        device = Device(model, EXEC)
        rows = state_rows(model, prompts, [*REQUESTS[:1]], ROWS, done=False)
        device.place(range(SLOTS), [1], rows)
        device.begin(device.prefill(1, prompts[0]), [1])
        output, counts, _ = device.decode([False, True, False, False], limit)
        drawn = min(limit, STEPS)
        assert counts.tolist() == [0, drawn, 0, 0]
        assert not np.asarray(output.values.logprobs)[1, drawn:].any()
        assert np.asarray(output.values.logprobs)[1, :drawn].all()
        sizes.append(jitted._cache_size())
    assert len(set(sizes)) == 1


def test_row_that_has_ended_writes_nothing_and_draws_nothing():
    """Its pages may belong to another by now: the positions behind its end stay as they were."""
    model = tiny_model("llama")
    device = Device(model, EXEC)
    short = dataclasses.replace(REQUESTS[0], max_tokens=2)
    prompts = prompts_of(model, (3, 3))
    rows = state_rows(model, prompts, [short, REQUESTS[0]], ROWS, done=False)
    device.place(range(SLOTS), [0, 1], rows)
    for slot, prompt in enumerate(prompts):
        device.begin(device.prefill(slot, prompt), [slot])
    _, counts, done = device.decode([True, True, False, False], STEPS)
    assert counts.tolist() == [1, STEPS, 0, 0]
    assert np.asarray(done)[:2].tolist() == [True, False]
    for slot, written in ((0, 4), (1, 3 + STEPS)):
        page = np.asarray(device.cache.groups[0].values[:, device.tables[0][slot, 0]])
        assert np.isfinite(page[..., :written, :]).all()
        assert np.isnan(page[..., written:, :]).all()


def test_results_outlive_the_donated_state():
    """The state is given away with the next dispatch, before the host reads what came of it."""
    model = tiny_model("llama")
    device = Device(model, EXEC)
    rows = state_rows(model, prompts_of(model, (3,)), [*REQUESTS[:1]], ROWS, done=False)
    device.place(range(SLOTS), [0], rows)
    old = device.state
    output, counts, done = device.decode([False] * SLOTS, 1)
    state = device.state
    device.place(range(SLOTS), [], rows)
    given = [leaf for leaf in jax.tree.leaves((old, state)) if leaf.size]
    assert all(leaf.is_deleted() for leaf in given)
    assert np.asarray(done).tolist() == [False, *[True] * 5]
    assert not counts.any()
    assert not np.asarray(output.status).any()


@pytest.mark.parametrize("exact", [False, True])
def test_score_rows_equals_score(exact):
    model = tiny_model("llama")
    exec = dataclasses.replace(EXEC, exact=exact, score_chunk=5, tile=4)
    (prompt,) = prompts_of(model, (20,))
    device = Device(model, exec)
    parts = [prompt[:8], prompt[8:16], prompt[16:]]
    targets = np.full((ROWS, WIDTH), -1, np.int32)
    targets.reshape(-1)[:19] = prompt[1:]
    targets[0, 3] = -1
    output, device.cache = slots.score_rows(
        model.params,
        device.cache,
        device.inputs(2, parts),
        targets,
        config=model.config,
        max_rows=ROWS + 1,
        exec=exec,
    )
    assert np.asarray(output.status).tolist() == [0, 0, 0]
    scores = jax.tree.map(np.asarray, output.values)
    want = np.asarray(ij.score(model.params, model.config, prompt[None], exec=exec))[0].copy()
    want[3] = 0.0
    got = scores.logprobs.reshape(-1)
    logits = np.asarray(ij.forward(model.params, model.config, prompt[None], exec=exec))[0]
    if exact:
        np.testing.assert_array_equal(got[:19], want)
        np.testing.assert_array_equal(scores.last[2], logits[19])
    else:
        np.testing.assert_allclose(got[:19], want, **TINY_LOGPROBS_F32)
        np.testing.assert_allclose(scores.last[2], logits[19], **LOGITS_F32)
    assert not got[19:].any()
    assert not scores.last[3].any()
    known = np.flatnonzero(targets.reshape(-1) >= 0)
    best = np.argsort(-logits[known], axis=1, kind="stable")[:, :2]
    np.testing.assert_array_equal(scores.top_ids.reshape(-1, 2)[known], best)
    logprobs = np.take_along_axis(np.asarray(jax.nn.log_softmax(logits[known])), best, 1)
    np.testing.assert_allclose(
        scores.top_logprobs.reshape(-1, 2)[known], logprobs, **TINY_LOGPROBS_F32
    )
    assert (np.delete(scores.top_ids.reshape(-1, 2), known, axis=0) == -1).all()


def test_copy_group_pages_copies_within_one_group_and_drops_padding():
    model = tiny_model("gemma3_text")
    cache = ij.init_cache(model.config, num_pages=9, exec=EXEC)
    rng = np.random.default_rng(0)
    cache = jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape).astype(x.dtype)), cache)
    before = [np.array(pool.values) for pool in cache.groups]
    assert len(before) == 2
    given = cache
    source, target = np.array([3, 5, 7, 2], np.int32), np.array([4, 0, -1, 8], np.int32)
    cache = slots.copy_group_pages(cache, source, target, group=1)
    before[1][:, [4, 8]] = before[1][:, [3, 2]]
    for pool, want in zip(cache.groups, before, strict=True):
        np.testing.assert_array_equal(pool.values, want)
    assert given.groups[1].values.is_deleted()
