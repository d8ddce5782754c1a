"""One request through the engine in every situation that must not matter: the promise of the name.

The situation: what the cache holds of the prompt, how it is cut into chunks, which slot and mates
it has, how often it is preempted, tokens per dispatch. The result must be that of `generate`, bit
for bit in exact mode, and `score` of the result must give the same bits again.
"""

import dataclasses
import functools
import itertools

import numpy as np
import pytest
from engines import SMALL, random_prompt
from tiny_models import tiny_model

import inferjax as ij
from inferjax.engine.sequence import Phase

FAMILIES = ("llama", "gemma3_text", "gpt_oss", "deepseek_v3")
PROMPT = random_prompt(29, seed=1)
NUM_TOKENS = 22
SEED = 11
SAMPLING = ij.SamplingParams(
    seed=SEED, temperature=0.8, top_k=40, presence_penalty=0.3, max_tokens=NUM_TOKENS,
    ignore_eos=True,
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Situation:
    """Everything that must not matter."""

    cached: str = "nothing"  # or "prompt", or "half" of it
    budget: int = 32
    slot: int = 0
    mates: bool = False
    preempted: int = 0
    steps: int = 8


EVERYTHING = [
    Situation(*point)
    for point in itertools.product(
        ("nothing", "half", "prompt"), (8, 16, 32), (0, 1, 3), (False, True), range(4), (1, 4, 8)
    )
    if point[2] == 0 or point[3]  # a slot above the first needs mates below it
]
SAMPLE = [
    Situation(),
    Situation(cached="prompt", budget=8, slot=3, mates=True, preempted=0, steps=1),
    Situation(cached="half", budget=16, slot=1, mates=True, preempted=1, steps=4),
    Situation(cached="nothing", budget=8, slot=0, mates=True, preempted=3, steps=8),
    Situation(cached="prompt", budget=32, slot=0, mates=False, preempted=2, steps=1),
    Situation(cached="half", budget=32, slot=3, mates=True, preempted=3, steps=4),
]


@functools.cache
def engine_for(family: str, exec: ij.Exec, decode_steps: int) -> ij.Engine:
    config = dataclasses.replace(SMALL, decode_steps=decode_steps)
    return ij.Engine(tiny_model(family), config, exec=exec)


@functools.cache
def expected(family: str, exec: ij.Exec) -> tuple[np.ndarray, np.ndarray]:
    """Return the tokens and log-probabilities that the pure function gives."""
    model = tiny_model(family)
    out = ij.generate(
        model.params,
        model.config,
        np.array([PROMPT]),
        max_new_tokens=NUM_TOKENS,
        sampling=SAMPLING,
        exec=exec,
    )
    return np.asarray(out.tokens[0]), np.asarray(out.logprobs[0])


def run(engine: ij.Engine, situation: Situation, salt: str) -> ij.Completion:
    """Bring the situation about, and return what the request got."""
    scheduler = engine._core.scheduler
    scheduler.limits = dataclasses.replace(
        scheduler.limits, token_budget=situation.budget, decode_steps=situation.steps
    )
    warm = {"nothing": [], "half": [PROMPT[:19] + random_prompt(9, seed=2)], "prompt": [PROMPT]}
    one = ij.SamplingParams(temperature=0.0, max_tokens=1)
    engine.generate(warm[situation.cached], one, cache_salt=salt)
    mates = [submit_mate(engine, salt, i) for i in range(situation.slot)]
    name = engine.submit(PROMPT, SAMPLING, cache_salt=salt)
    if situation.mates and not mates:
        mates = [submit_mate(engine, salt, 5), submit_mate(engine, salt, 6)]
    done = None
    while done is None:
        ended = [d.completion for d in engine.step() if d.request_id == name]
        done = next((completion for completion in ended if completion is not None), None)
        if done is None:
            preempt(engine, name, situation.preempted)
    for mate in mates:
        if mate in engine._core.requests:
            engine.abort(mate)
    while engine.has_work:
        engine.step()
    return done


def submit_mate(engine: ij.Engine, salt: str, index: int) -> str:
    """Submit a longer request of other kinds; every second one shares the prompt's beginning."""
    prompt = PROMPT[:16] * (index % 2) + random_prompt(7 + 5 * index, seed=50 + index)
    settings = ij.SamplingParams(seed=index, max_tokens=40, ignore_eos=True, top_p=0.9)
    return engine.submit(prompt, settings, cache_salt=salt)


def preempt(engine: ij.Engine, name: str, wanted: int) -> None:
    """Preempt the request once it has drawn its share of tokens since the last time."""
    sequence = engine._core.requests[name].samples[0].sequence
    drawn = len(sequence.tokens) - sequence.prompt_len
    running = sequence.phase in (Phase.PREFILL, Phase.DECODE)
    if running and sequence.num_preemptions < wanted and drawn > 4 * sequence.num_preemptions:
        engine._core.scheduler.preempt(sequence)


@pytest.mark.parametrize(
    ("family", "exact"),
    [
        ("llama", True),
        ("llama", False),
        ("gemma3_text", False),
        ("gpt_oss", True),
        ("deepseek_v3", False),
    ],
)
def test_no_situation_changes_the_result(family, exact):
    check(family, exact, SAMPLE, decode_steps=8)


@pytest.mark.parametrize(
    ("family", "kv_dtype"),
    [
        ("llama", "int8"),
        pytest.param("gemma3_text", "float8_e4m3fn", marks=pytest.mark.slow),
        pytest.param("deepseek_v3", "int8", marks=pytest.mark.slow),
    ],
)
def test_no_situation_changes_the_result_over_a_cache_in_eight_bits(family, kv_dtype):
    check(family, True, SAMPLE, decode_steps=8, kv_dtype=kv_dtype)


@pytest.mark.slow
@pytest.mark.parametrize("decode_steps", [1, 4, 8])
@pytest.mark.parametrize("exact", [True, False], ids=["exact", "plain"])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_full_lattice(family, exact, decode_steps):
    situations = [s for s in EVERYTHING if s.steps <= decode_steps]
    check(family, exact, situations if decode_steps == 8 else situations[::5], decode_steps)


def check(
    family: str,
    exact: bool,
    situations: list[Situation],
    decode_steps: int,
    kv_dtype: str | None = None,
) -> None:
    exec = ij.Exec(page_size=8, exact=exact, kv_dtype=kv_dtype)
    engine = engine_for(family, exec, decode_steps)
    tokens, logprobs = expected(family, exec)
    for i, situation in enumerate(situations):
        done = run(engine, situation, f"{decode_steps}-{i}-{len(situations)}")
        assert done.error is None, situation
        assert done.num_preemptions == situation.preempted, situation
        assert done.token_ids == tuple(tokens), situation
        found = np.array(done.samples[0].logprobs, np.float32)
        if exact:
            assert found.tobytes() == logprobs.tobytes(), situation
        else:
            np.testing.assert_allclose(
                found, logprobs, atol=3e-5, rtol=3e-5, err_msg=f"{situation}"
            )
    if exact:
        model, whole = tiny_model(family), np.array([[*PROMPT, *tokens]])
        scores = ij.score(model.params, model.config, whole, exec=exec)
        assert np.asarray(scores)[0, len(PROMPT) - 1 :].tobytes() == logprobs.tobytes()
