"""One result: no layout of rows, pages, chunks and dispatches changes what a prompt gets."""

import functools

import numpy as np
import pytest
from paged_runs import Layout, keys_of, run_layout
from tiny_models import padded, prompts_of, tiny_model
from tolerances import TINY_LOGPROBS_F32

import inferjax as ij

PAGED = ("llama", "gemma3_text", "gpt_oss", "deepseek_v3")
LENGTHS = (1, 9, 16)  # alone, just over and exactly at the edge of pages of 8
TOTAL = 12
# A greedy row, a filtered row, and a row that remembers what it has said.
SETTINGS = {
    "temperature": [0.0, 0.8, 1.0],
    "top_p": [1.0, 0.9, 1.0],
    "top_k": [0, 0, 40],
    "repetition_penalty": [1.0, 1.0, 1.3],
    "presence_penalty": [0.0, 0.0, 0.5],
    "frequency_penalty": [0.0, 0.0, 0.2],
}
MODES = {
    "default": ij.Exec(page_size=8),
    "exact": ij.Exec(page_size=8, exact=True),
    "exact, tile 2": ij.Exec(page_size=8, exact=True, tile=2),
}
BASE = Layout()
LAYOUTS = {
    "other slots, mates and pages": Layout(slots=(2, 0, 1), seed=7),
    "chunks of 5": Layout(chunk=5),
    "single steps": Layout(steps=1),
    "pages of 16": Layout(page_size=16),
    "pages of 64": Layout(page_size=64),
    "nine rows": Layout(num_rows=9, slots=(8, 0, 4), seed=3),
    "nine rows, the others empty": Layout(num_rows=9, slots=(1, 7, 3), mates=False),
    "one dispatch": Layout(steps=12),
    "whole prompts": Layout(chunk=16),
}
EVERYDAY = {
    ("llama", "exact", "other slots, mates and pages"),
    ("llama", "exact", "single steps"),
    ("llama", "default", "other slots, mates and pages"),
    ("gpt_oss", "exact", "other slots, mates and pages"),
}


def lattice() -> list:
    points = [(f, mode, name) for f in PAGED for mode in MODES for name in LAYOUTS]
    points += [("gpt2", mode, "nine rows") for mode in MODES]
    return [p if p in EVERYDAY else pytest.param(*p, marks=pytest.mark.slow) for p in points]


def sweep(*, everyday: bool) -> list:
    """Return every family and mode, one of them outside the slow tests if `everyday`."""
    points = [(f, mode) for f in PAGED for mode in MODES]
    quick = [("llama", "exact")] if everyday else []
    return [p if p in quick else pytest.param(*p, marks=pytest.mark.slow) for p in points]


@functools.cache
def run(family: str, mode: str, layout: Layout) -> tuple[np.ndarray, np.ndarray]:
    model = tiny_model(family)
    prompts = prompts_of(model, LENGTHS)
    return run_layout(model, prompts, layout, total=TOTAL, sampling=SETTINGS, exec=MODES[mode])


def run_alone(family: str, mode: str) -> tuple[np.ndarray, np.ndarray]:
    model, layout = tiny_model(family), Layout(num_rows=1, slots=(0,))
    rows = []
    for i, prompt in enumerate(prompts_of(model, LENGTHS)):
        mine = {name: values[i : i + 1] for name, values in SETTINGS.items()}
        rows.append(
            run_layout(
                model,
                [prompt],
                layout,
                total=TOTAL,
                sampling=mine,
                exec=MODES[mode],
                keys=(i,),
            )
        )
    return np.concatenate([t for t, _ in rows]), np.concatenate([x for _, x in rows])


def assert_same(mode: str, ours: tuple, base: tuple) -> None:
    np.testing.assert_array_equal(ours[0], base[0])
    if mode == "default":
        np.testing.assert_allclose(ours[1], base[1], **TINY_LOGPROBS_F32)
    else:
        np.testing.assert_array_equal(ours[1].view(np.int32), base[1].view(np.int32))


@pytest.mark.parametrize(("family", "mode", "layout"), lattice())
def test_result_independent_of_layout(family, mode, layout):
    # The page size is a setting of `Exec`: the sum over pages follows it, also in exact mode.
    exact = mode if LAYOUTS[layout].page_size == BASE.page_size else "default"
    assert_same(exact, run(family, mode, LAYOUTS[layout]), run(family, mode, BASE))


def test_penalties_see_prompt_and_output():
    """A repetition penalty of 100 rules out every id seen so far, across dispatches."""
    model = tiny_model("llama")
    prompts = [np.array([p[0], *p]) for p in prompts_of(model, LENGTHS)]
    settings = SETTINGS | {"temperature": [0.0] * 3, "repetition_penalty": [1.0] * 3}
    settings |= {"presence_penalty": [0.0] * 3, "frequency_penalty": [0.0] * 3}
    free, _ = run_layout(model, prompts, BASE, total=36, sampling=settings, exec=MODES["exact"])
    settings["repetition_penalty"] = [1.0, 100.0, 100.0]
    tied, _ = run_layout(model, prompts, BASE, total=36, sampling=settings, exec=MODES["exact"])
    for row in (1, 2):
        text = [*set(prompts[row].tolist()), *tied[row].tolist()]
        assert len(set(text)) == len(text)
    assert len(set(free[1].tolist())) < 36  # or else the penalty had nothing to do
    np.testing.assert_array_equal(tied[0], free[0])


@pytest.mark.parametrize(("family", "mode"), sweep(everyday=False))
def test_result_of_a_row_alone_equals_the_batch(family, mode):
    assert_same(mode, run_alone(family, mode), run(family, mode, BASE))


@pytest.mark.parametrize("width", [16, pytest.param(29, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("family", "mode"), sweep(everyday=True))
def test_generate_equals_extend_and_decode(family, mode, width):
    """Also: the width to which prompts are padded does not matter."""
    model = tiny_model(family)
    out = ij.generate(
        model.params,
        model.config,
        padded(prompts_of(model, LENGTHS), width, fill=5),
        list(LENGTHS),
        key=keys_of((0, 1, 2)),
        max_new_tokens=TOTAL,
        sampling=ij.make_sampling(3, ignore_eos=True, **SETTINGS),
        exec=MODES[mode],
    )
    assert_same(mode, (np.asarray(out.tokens), np.asarray(out.logprobs)), run(family, mode, BASE))


@pytest.mark.parametrize(("family", "mode"), sweep(everyday=True))
def test_score_equals_generated_logprobs(family, mode):
    tokens, logprobs = run(family, mode, BASE)
    scores = scored(family, mode, tokens, rows=3)
    assert_same(mode, (tokens, scores), (tokens, logprobs))


@pytest.mark.slow
@pytest.mark.parametrize("rows", [1, 9])
@pytest.mark.parametrize("mode", ["exact", "exact, tile 2"])
@pytest.mark.parametrize("family", PAGED)
def test_score_in_other_batches_equals_generated_logprobs(family, mode, rows):
    tokens, logprobs = run(family, mode, BASE)
    assert_same(mode, (tokens, scored(family, mode, tokens, rows)), (tokens, logprobs))


def scored(family: str, mode: str, tokens: np.ndarray, rows: int) -> np.ndarray:
    """Score prompt + tokens in batches of `rows`, the last text repeated to fill a batch."""
    model = tiny_model(family)
    prompts = prompts_of(model, LENGTHS)
    texts = [np.concatenate(pair) for pair in zip(prompts, tokens, strict=True)]
    out = []
    for first in range(0, 3, rows):
        batch = texts[first : first + rows]
        batch = batch + batch[-1:] * (rows - len(batch))
        lengths = [len(text) for text in batch]
        scores = ij.score(model.params, model.config, padded(batch, 32), lengths, exec=MODES[mode])
        out.append(np.asarray(scores)[: min(rows, 3)])
    scores = np.concatenate(out)
    return np.stack([s[n - 1 : n - 1 + TOTAL] for s, n in zip(scores, LENGTHS, strict=True)])
