"""Random schedules over tiny pools: accounts balance after every action, every output is right."""

import random

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)
from policy_runs import Run

# Prompts share prefixes of these.
STEMS = ([1, 2, 3, 4, 5, 6, 7, 8] * 5, [1, 2, 3, 4, 9, 9, 9, 9] * 5)
WINDOWS = ((None,), (None, 5), (3,), (None, 1, 8), (9, None))


class ScheduleMachine(RuleBasedStateMachine):
    @initialize(
        windows=st.sampled_from(WINDOWS),
        page_size=st.sampled_from([1, 2, 4]),
        spare=st.integers(0, 8),
        caching=st.booleans(),
        max_running=st.integers(1, 6),
        row_tokens=st.sampled_from([2, 4, 8]),
        max_rows=st.integers(1, 3),
        budget=st.integers(1, 24),
        steps=st.sampled_from([(1, None), (2, 1), (4, 2), (4, None)]),
    )
    def start(self, **kind):
        page_size = kind["page_size"]
        self.run = Run(
            num_pages=24 // page_size + kind["spare"],
            windows=kind["windows"],
            page_size=page_size,
            prefix_caching=kind["caching"],
            max_running=kind["max_running"],
            row_tokens=kind["row_tokens"],
            max_rows=kind["max_rows"],
            token_budget=kind["budget"],
            decode_steps=kind["steps"][0],
            mixed_steps=kind["steps"][1],
            buckets=(1, 2, 6),
        )

    @rule(
        stem=st.sampled_from(STEMS),
        length=st.integers(1, 20),
        new=st.integers(0, 12),
        num_samples=st.integers(1, 3),
        late=st.integers(-3, 3),
        salt=st.sampled_from([b"", b"", b"other"]),
        scored=st.booleans(),
    )
    def add(self, stem, length, new, num_samples, late, salt, scored):
        order = self.run.num_added + late
        leader = None
        for _ in range(num_samples if new else 1):
            first = leader is None and scored
            sequence = self.run.add(
                stem[:length],
                new,
                order=order,
                root=salt,
                leader=leader,
                scored=first,
                reads_cache=not first,
            )
            leader = leader or sequence

    @rule()
    def plan(self):
        self.run.plan()

    @rule(num_steps=st.integers(1, 5))
    def steps(self, num_steps):
        for _ in range(num_steps):
            self.run.plan()
            self.run.collect()

    @rule()
    def collect(self):
        self.run.collect()

    @precondition(lambda self: self.run.alive)
    @rule(choice=st.integers(0, 100))
    def abort(self, choice):
        self.run.end(self.run.alive[choice % len(self.run.alive)])

    @rule(chance=st.integers(0, 9))
    def lose_the_device(self, chance):
        if chance == 0:
            self.run.reset()

    def teardown(self):
        if hasattr(self, "run"):
            self.run.drain()


def machine_settings(num_examples, num_steps):
    return settings(
        max_examples=num_examples,
        stateful_step_count=num_steps,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )


def test_random_schedules_end_with_the_right_tokens():
    run_state_machine_as_test(ScheduleMachine, settings=machine_settings(40, 30))


@pytest.mark.slow
def test_many_random_schedules_end_with_the_right_tokens():
    run_state_machine_as_test(ScheduleMachine, settings=machine_settings(600, 60))


def soak(seed, num_sequences, **kind):
    """Keep a tiny pool overcrowded; half of the sequences are aborted somewhere."""
    rng = random.Random(seed)
    run = Run(page_size=4, max_running=8, buckets=(1, 2, 4, 8), **kind)
    while run.num_added < num_sequences:
        if len(run.alive) < 16:
            stem = rng.choice(STEMS)
            leader = run.add(stem[: rng.randint(1, 24)], rng.randint(1, 24))
            for _ in range(rng.choice([0, 0, 1, 2])):
                run.add(leader.tokens, leader.max_len - leader.prompt_len, leader=leader)
        run.plan()
        while len(run.flights) > rng.randint(0, 4):
            run.collect()
        if run.alive and rng.random() < 0.1:
            run.end(rng.choice(run.alive))
    run.drain()
    return run.seen


KINDS = [
    {"num_pages": 16, "decode_steps": 1},
    {"num_pages": (18, 12), "windows": (None, 6), "decode_steps": 4, "mixed_steps": 2},
    {"num_pages": 12, "windows": (5,), "decode_steps": 3},
    {"num_pages": 15, "prefix_caching": False, "decode_steps": 2},
]


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_overcrowded_pool_gives_the_right_tokens(kind):
    seen = soak(0, 300, **kind)
    assert seen["preempted"] > 5
    assert seen["copies"] > 5
    assert seen["moves"] > 5
    assert (seen["hits"] > 10) == kind.get("prefix_caching", True)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_soak_gives_the_right_tokens(kind, seed):
    soak(seed + 1, 2000, **kind)
