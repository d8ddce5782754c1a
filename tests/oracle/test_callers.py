"""Several callers of one engine who do not know of each other: none waits for ever, none loses."""

import contextlib
import itertools

import numpy as np
import pytest
from rig import make_rig
from test_faults import Interrupt

from inferjax.errors import EngineFull, InvalidInput
from inferjax.sampling import SamplingParams

SHORT = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
LONG_FOR_48 = SamplingParams(temperature=0.0, max_tokens=25, ignore_eos=True)
LONG = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)


def test_generate_waits_while_others_fill_the_engine():
    engine = make_rig(max_waiting=1).engine
    name = engine.submit([1, 2, 3], SHORT)
    assert [c.finish_reason for c in engine.generate([[1, 2]], SHORT)] == ["length"]
    assert {delta.request_id for delta in engine.step()} == {name}


def test_generate_keeps_only_what_can_run_soon_in_the_engine():
    engine, seen = make_rig().engine, []
    prompts = [[1, 2, 3 + i] for i in range(40)]
    done = engine.generate(
        prompts, SHORT, on_completion=lambda *_: seen.append(len(engine.sequences()))
    )
    assert [list(c.prompt_ids) for c in done] == prompts
    assert max(seen) <= 8


def test_a_stream_ends_when_its_request_is_aborted():
    engine = make_rig().engine
    stream = engine.stream([1, 2, 3], LONG)
    first = next(stream)
    completion = engine.abort(first.request_id)
    (last,) = stream
    assert last.completion == completion
    assert (last.finish_reason, completion.token_ids) == ("abort", first.tokens.ids)
    assert not engine.generate([[1]], SHORT)[0].error


def test_generate_returns_what_a_callback_aborts():
    engine = make_rig().engine

    def stop_the_rest(index, completion):
        for sequence in engine.sequences():
            engine.abort(sequence.request_id)

    done = engine.generate([[1, 2], [3, 4]], [SHORT, LONG], on_completion=stop_the_rest)
    assert [c.finish_reason for c in done] == ["length", "abort"]
    assert 0 < len(done[1].token_ids) < 60


@pytest.mark.parametrize("close", [lambda s: s.close(), lambda s: None])
def test_a_stream_that_nobody_reads_is_aborted(close):
    engine = make_rig().engine
    close(engine.stream([1, 2, 3], LONG))
    assert engine.stats().waiting == 0
    assert engine.stats().totals.aborted == 1


def test_nothing_arrives_for_a_request_that_was_aborted_between_two_steps():
    engine = make_rig().engine
    name = engine.submit([1, 2, 3], LONG)
    engine.generate([[4, 5]], SHORT)
    engine.abort(name)
    assert list(itertools.chain(engine.step(), engine.step())) == []


def test_nothing_arrives_for_a_list_that_was_interrupted():
    engine = make_rig().engine

    def interrupt(index, completion):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        engine.generate([[1, 2], [3, 4], [5, 6]], SHORT, on_completion=interrupt)
    while engine.has_work:
        assert engine.step() == []


def test_callers_within_each_other_all_get_their_own():
    engine, inner = make_rig().engine, []
    name, alone = engine.submit([9, 9, 9], SHORT), make_rig().engine.generate([[1, 2, 3]], SHORT)[0]

    def more(index, completion):
        inner.extend(engine.generate([[5, 6], [7, 8, 9]], SHORT))

    outer = [t for d in engine.stream([1, 2, 3], SHORT) for t in d.tokens.ids]
    done = engine.generate([[1, 2], [3, 4]], SHORT, on_completion=more)
    assert tuple(outer) == alone.token_ids
    assert [len(c.token_ids) for c in (*done, *inner)] == [6] * 6
    left = [delta for delta in engine.step() if delta.request_id == name]
    assert sum(len(delta.tokens.ids) for delta in left) == 6
    assert left[-1].completion is not None


def test_own_names_make_way_for_those_of_users():
    engine = make_rig(max_waiting=3).engine
    engine.submit([1], SHORT, request_id="request-1")
    assert engine.submit([1], SHORT) == "request-2"
    assert engine.submit([1], SHORT) == "request-3"
    with pytest.raises(EngineFull):
        engine.submit([1], SHORT)


def test_weights_can_change_after_a_failure():
    rig = make_rig()
    rig.oracle.read_faults[0] = RuntimeError("gone")
    with pytest.raises(RuntimeError):
        rig.engine.generate([[1, 2, 3]], SHORT)
    rig.engine.update_params(rig.oracle.params)
    assert rig.engine.generate([[1, 2, 3]], SHORT)[0].error is None


@pytest.mark.parametrize("seed", range(0, 200, 20))
def test_all_can_be_aborted_wherever_a_step_broke_off(seed):
    for each in range(seed, seed + 20):
        random = np.random.default_rng(each)
        sizes = {"num_pages": 16, "max_len": 48, "row_tokens": 4, "token_budget": 8}
        engine = make_rig((None, 6), decode_steps=3, **sizes).engine
        names = [engine.submit(random.integers(3, 60, 3 + 4 * i), LONG_FOR_48) for i in range(5)]
        for _ in range(random.integers(25)):
            engine.step()
        with contextlib.suppress(KeyboardInterrupt), Interrupt(int(random.integers(700))):
            engine.step()
        for name in names:
            with contextlib.suppress(InvalidInput):
                engine.abort(name)
        assert engine.generate([[1, 2, 3]], SHORT)[0].finish_reason == "length"
        assert engine.stats().pages_live == (0, 0)
