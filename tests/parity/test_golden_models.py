"""The two catalog models against tokens and log-probabilities of Hugging Face in float32."""

import functools
import json
from pathlib import Path

import numpy as np
import pytest
from tiny_models import padded
from tolerances import GOLDEN_LOGPROBS_F32, GOLDEN_TIE_MARGIN

import inferjax as ij
from inferjax.checkpoint.catalog import default_cache_dir
from inferjax.checkpoint.load import Model, load

pytestmark = pytest.mark.model

GOLDENS = Path(__file__).resolve().parent.parent / "goldens"
MODELS = ("smollm2-135m-instruct", "gemma-3-270m")
# Few shapes, few compilations: prompts of up to so many tokens share a batch.
WIDTHS = (64, 704)
# 16 positions of 12 rows keep the logits of 262,144 ids at 0.2 GB.
EXEC = ij.Exec(score_chunk=16)


@functools.cache
def loaded(name: str) -> Model:
    return load(name, cache_dir=default_cache_dir())


@functools.cache
def cases_of(name: str, width: int) -> list[dict]:
    cases = json.loads((GOLDENS / f"{name}.json").read_text(encoding="utf-8"))["cases"]
    shorter = max((w for w in WIDTHS if w < width), default=0)
    return [case for case in cases if shorter < case["n_prompt"] <= width]


@functools.cache
def generated(name: str, width: int) -> ij.Generation:
    model, cases = loaded(name), cases_of(name, width)
    return ij.generate(
        model.params,
        model.config,
        padded([case["prompt_ids"] for case in cases], width),
        [case["n_prompt"] for case in cases],
        max_new_tokens=48,
        sampling=ij.SamplingParams(temperature=0.0, ignore_eos=True),
        exec=EXEC,
    )


def num_equal(ours: np.ndarray, case: dict) -> int:
    """Return how many leading tokens must be compared: all, or up to a tie of the reference."""
    different = np.flatnonzero(ours != np.asarray(case["greedy_ids"]))
    if not len(different):
        return len(ours)
    first = int(different[0])
    margin = case["margins"][first]
    assert margin < GOLDEN_TIE_MARGIN, f"{case['name']}: token {first}, margin {margin}"
    return first


@pytest.fixture(params=MODELS)
def name(request) -> str:
    return request.param


@pytest.fixture(params=WIDTHS)
def width(request) -> int:
    return request.param


def test_golden_cases_are_all_batched(name):
    assert sum(len(cases_of(name, width)) for width in WIDTHS) == 14


def test_golden_prompt_ids_equal(name, width):
    tokenizer = loaded(name).tokenizer
    assert tokenizer is not None
    for case in cases_of(name, width):
        assert tokenizer.encode(case["prompt"]) == case["prompt_ids"], case["name"]


def test_golden_generation_equals_reference(name, width):
    out = generated(name, width)
    assert not np.asarray(out.status).any()
    for row, case in enumerate(cases_of(name, width)):
        count = num_equal(np.asarray(out.tokens[row]), case)
        np.testing.assert_allclose(
            out.logprobs[row, :count],
            case["greedy_logprobs"][:count],
            **GOLDEN_LOGPROBS_F32,
            err_msg=case["name"],
        )


def test_golden_scores_equal_reference(name, width):
    model, cases = loaded(name), cases_of(name, width)
    texts = [np.asarray(case["prompt_ids"] + case["greedy_ids"]) for case in cases]
    scores = ij.score(
        model.params,
        model.config,
        padded(texts, width + 48),
        [len(text) for text in texts],
        exec=EXEC,
    )
    for row, case in enumerate(cases):
        known = case["prompt_logprobs"][1:] + case["greedy_logprobs"]
        np.testing.assert_allclose(
            scores[row, : len(known)], known, **GOLDEN_LOGPROBS_F32, err_msg=case["name"]
        )
