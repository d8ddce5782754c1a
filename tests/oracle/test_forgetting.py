"""Sequences that outgrow their context, over the hash model: every page and position shows."""

import functools
import hashlib
import itertools

import numpy as np
import pytest
from accounts import Accounts
from expected import Decoder
from hash_model import MASK, SPOTS, at_spot, pick, randomized, rules_of, seed_of, turned
from rig import Rig, Wish, make_rig
from test_faults import Interrupt

from inferjax.config import ModelConfig
from inferjax.engine import Completion
from inferjax.engine.overflow import middle_of
from inferjax.sampling import SamplingParams

CONTEXT, SINKS, SIZE = 37, 6, 4
MIDDLE = middle_of(CONTEXT, SINKS, SIZE)


class Streaming(Decoder):
    """The hash model over a sequence that forgets."""

    def drop(self, tokens: list[int]) -> None:
        """Forget the middle; `tokens` are those that are left and have been pushed."""
        for layer, keys in enumerate(self.keys):
            kept = keys[: MIDDLE.start] + [turned(key) for key in keys[MIDDLE.stop :]]
            spots = [at_spot(key, spot) for key, spot in zip(kept, SPOTS, strict=False)]
            self.keys[layer] = kept
            self.sums[layer] = [total & MASK for total in itertools.accumulate(spots, initial=0)]
        self.length = len(tokens)
        spots = zip(tokens, SPOTS, strict=False)
        self.history = sum(at_spot(token, spot) for token, spot in spots) & MASK


@functools.cache
def streamed(config: ModelConfig, wish: Wish, sample_index: int) -> tuple[list[int], int]:
    """Return the tokens of a request that never stops, and how many were dropped."""
    sampling, tokens = wish.sampling, list(wish.prompt)
    assert sampling.seed is not None
    assert sampling.max_tokens is not None
    rules, decoder = rules_of(sampling, config.eos_ids), Streaming(config)
    lost, output = 0, []
    if len(tokens) >= CONTEXT:
        lost = len(tokens) - (CONTEXT - MIDDLE.size)
        del tokens[MIDDLE.start : MIDDLE.start + lost]
    prompt_len, hidden, forced = len(tokens), 0, sampling.forced_token_ids
    for token in tokens:
        hidden = decoder.push(token)
    while len(output) < sampling.max_tokens:
        if len(tokens) == CONTEXT:
            lost += MIDDLE.size
            prompt_len -= max(0, min(prompt_len, MIDDLE.stop) - MIDDLE.start)
            del tokens[MIDDLE.start : MIDDLE.stop]
            decoder.drop(tokens[:-1])
        if output:
            hidden = decoder.push(tokens[-1])
        seed = seed_of(hidden, decoder.history, prompt_len, rules.number)
        key = hashed(sampling.seed, lost) if lost else sampling.seed
        if not rules.greedy:
            seed = randomized(seed, key, sample_index, len(tokens))
        count = len(output)
        banned = rules.banned if count < rules.min_tokens else frozenset()
        token = forced[count] if count < len(forced) else pick(seed, banned, config.vocab_size)
        output.append(token)
        tokens.append(token)
    return output, lost


def hashed(seed: int, number: int) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed}:{number}".encode()).digest()[:8], "big")


def wishes(num_tokens: int = 110) -> list[Wish]:
    random = np.random.default_rng(1)
    prompts = [tuple(random.integers(3, 61, n).tolist()) for n in (5, 36, 37, 90, 20)]
    shared = {"ignore_eos": True, "max_tokens": num_tokens}
    samplings = [
        SamplingParams(seed=1, temperature=0.0, **shared),
        SamplingParams(seed=2, **shared),
        SamplingParams(seed=3, n=2, **shared),
        SamplingParams(seed=4, forced_token_ids=random.integers(3, 61, 70).tolist(), **shared),
        SamplingParams(seed=5, min_tokens=70, stop_token_ids=[9], n=3, **shared),
    ]
    return [Wish(*pair) for pair in zip(prompts, samplings, strict=True)]


def rig_of(**settings: object) -> Rig:
    defaults = {"max_len": CONTEXT, "sink_tokens": SINKS, "overflow": "lossy_sinks"}
    return make_rig(**{**defaults, **settings})


def run(rig: Rig, asked: list[Wish]) -> list[Completion]:
    accounts, found = Accounts(rig), {}
    for index, wish in enumerate(asked):
        wish.submit(rig, str(index))
        accounts.entered()
    while rig.engine.has_work:
        for delta in rig.engine.step():
            if delta.completion is not None:
                found[int(delta.request_id)] = delta.completion
        accounts.check()
    accounts.check_contents()
    assert rig.engine.stats().pages_live == (0,) * len(rig.oracle.num_pages)
    return [found[index] for index in range(len(asked))]


def check(rig: Rig, asked: list[Wish], found: list[Completion]) -> None:
    for wish, completion in zip(asked, found, strict=True):
        assert completion.error is None
        dropped = 0
        for sample in completion.samples:
            tokens, lost = streamed(rig.config, wish, sample.index)
            if 9 in wish.sampling.stop_token_ids:
                tokens = stopped(tokens, 9, wish.sampling.min_tokens)
                lost = None
            assert list(sample.token_ids) == tokens
            dropped = None if lost is None or dropped is None else dropped + lost
        if dropped is not None:
            assert completion.usage.dropped_tokens == dropped
        assert completion.usage.prompt_tokens == len(wish.prompt)
        assert completion.prompt_ids == wish.prompt


def stopped(tokens: list[int], stop: int, min_tokens: int) -> list[int]:
    ends = [i for i, token in enumerate(tokens) if token == stop and i >= min_tokens]
    return tokens[: ends[0] + 1] if ends else tokens


@pytest.mark.parametrize("windows", [(None, None), (None, 9), (30, None), (9, 30, 12)])
@pytest.mark.parametrize("decode_steps", [1, 7])
def test_every_token_is_that_of_the_forgetting_model(windows, decode_steps):
    rig = rig_of(windows=windows, decode_steps=decode_steps)
    asked = wishes()
    check(rig, asked, run(rig, asked))
    totals = rig.engine.stats().totals
    assert totals.shifts > 20


@pytest.mark.parametrize("overlap", [True, False])
def test_slots_mates_and_overlap_do_not_matter(overlap):
    asked = wishes()
    for batch in (asked[:1], asked[::-1]):
        rig = rig_of(overlap=overlap, max_running=7, num_pages=120)
        check(rig, batch, run(rig, batch))


@pytest.mark.parametrize("windows", [(None, None), (None, 9)])
def test_siblings_share_pages_until_they_are_rewritten(windows):
    prompt = tuple(range(3, 36))
    wish = Wish(prompt, SamplingParams(seed=7, n=4, max_tokens=60, ignore_eos=True))
    rig = rig_of(windows=windows)
    check(rig, [wish, wish], run(rig, [wish, wish]))


def test_a_crowd_in_few_pages_is_preempted_and_ends():
    rig = rig_of(num_pages=16, max_running=6, windows=(None, 9))
    asked = wishes(num_tokens=110)
    found = run(rig, asked)
    assert rig.engine.stats().totals.preemptions > 0
    assert all(completion.error is None for completion in found)
    for wish, completion in zip(asked[:4], found, strict=False):
        assert {len(s.token_ids) for s in completion.samples} == {wish.sampling.max_tokens}


@pytest.mark.parametrize("seed", range(2))
def test_interrupts_at_any_line_lose_no_token(seed):
    random, rig = np.random.default_rng(seed), rig_of()
    accounts, counts = Accounts(rig), {}
    for wish in wishes()[:3]:
        wish.submit(rig)
        accounts.entered()
    breaks = 20
    while rig.engine.has_work:
        try:
            with Interrupt(int(random.integers(2000)) if breaks else 10**9):
                deltas = rig.engine.step()
        except KeyboardInterrupt:
            breaks -= 1
            continue
        for delta in deltas:
            name = delta.request_id, delta.index
            counts[name] = counts.get(name, 0) + len(delta.tokens.ids)
    assert set(counts.values()) == {110}
    assert rig.engine.stats().totals.recoveries > 3
    accounts.check()
