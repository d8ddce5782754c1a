"""Beam search over pages equals the rules written down plainly over whole re-computed sequences."""

import functools
import itertools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_models import expected, padded, prompts_of, tiny_model
from tolerances import TINY_LOGPROBS_F32

import inferjax as ij
from inferjax.errors import InferjaxError, InvalidInput, RequestTooLong, ShapeError
from inferjax.runtime.beam_rules import Beams, Rules, empty_search, select
from inferjax.sampling import Status

LENGTHS = (9, 4, 7)
STEPS = 10
VOCAB = 24
ENDS = (3, 7, 11, 15)
PENALTIES = (0.0, 1.0, 2.0, -1.0)


def plain_search(
    logits_of: Callable[[list[list[int]]], np.ndarray], rules: Rules, penalty: float
) -> list[tuple[float, list[int]]]:
    """Return (score, tokens) of one prompt's finished beams, the best first."""
    width = rules.num_beams
    num_candidates = width * max(2, 1 + len(rules.eos_ids))
    live: list[tuple[float, list[int]]] = [(0.0, [])]
    ended: list[tuple[float, list[int]]] = []
    for step in range(1, rules.max_new_tokens + 1):
        logprobs = jax.nn.log_softmax(logits_of([tokens for _, tokens in live]))
        sums = np.array([total for total, _ in live])[:, None] + np.asarray(logprobs, np.float64)
        order = np.argsort(-sums, axis=None, kind="stable")[:num_candidates]
        places = [np.unravel_index(i, sums.shape) for i in order]
        found = [(sums[beam, token], [*live[beam][1], int(token)]) for beam, token in places]
        ends = [t[-1] in rules.eos_ids or step == rules.max_new_tokens for _, t in found]
        new = [(s / step**penalty, t) for (s, t), end in zip(found, ends, strict=True) if end]
        num_new = sum(ends[:width])
        ended = sorted([*ended, *new[:num_new]], key=lambda beam: -beam[0])[:width]
        live = [beam for beam, end in zip(found, ends, strict=True) if not end][:width]
        if step == rules.max_new_tokens or len(ended) < width:
            continue
        far = rules.early_stopping == "never" and penalty > 0
        reachable = live[0][0] / (rules.max_new_tokens if far else step) ** penalty
        if rules.early_stopping is True or reachable <= ended[-1][0]:
            break
    return ended


def check_beams(found: Beams, wanted: list[list[tuple[float, list[int]]]], pad: int = 0) -> None:
    for row, beams in enumerate(wanted):
        for place, (score, tokens) in enumerate(beams[: found.tokens.shape[1]]):
            length = int(found.lengths[row, place])
            assert np.asarray(found.tokens)[row, place, :length].tolist() == tokens
            assert (np.asarray(found.tokens)[row, place, length:] == pad).all()
            assert (np.asarray(found.logprobs)[row, place, length:] == 0).all()
            np.testing.assert_allclose(found.scores[row, place], score, rtol=1e-5, atol=1e-4)


def table_logits(prefix: list[int], prompt: int) -> np.ndarray:
    """Return logits that are a random function of what came before; ends are likely."""
    logits = np.random.default_rng((prompt, *prefix)).normal(0, 2, VOCAB).astype(np.float32)
    logits[list(ENDS)] += 3
    return logits


def rules_of(num_beams: int, early: object, num_ends: int) -> Rules:
    return Rules(
        num_beams=num_beams,
        max_new_tokens=8,
        early_stopping=early,
        eos_ids=ENDS[:num_ends],
    )


def rule_cases() -> list:
    quick = {(1, False, 1), (3, False, 4), (3, True, 1), (3, "never", 4), (4, False, 0)}
    points = itertools.product((1, 3, 4), (False, True, "never"), (0, 1, 4))
    return [p if p in quick else pytest.param(*p, marks=pytest.mark.slow) for p in points]


@pytest.mark.parametrize(("num_beams", "early", "num_ends"), rule_cases())
def test_beam_rules_equal_the_plain_search(num_beams, early, num_ends):
    """Three prompts side by side, some of which are decided before the others."""
    rules = rules_of(num_beams, early, num_ends)
    step_once = jax.jit(functools.partial(select, rules=rules, exec=ij.Exec()))
    for penalty in PENALTIES:
        search = empty_search(jnp.zeros(3, jnp.int32), rules, 0)
        for step in range(rules.max_new_tokens):
            live = np.asarray(search.tokens)[:, :, :step].tolist()
            logits = np.stack([table_logits(t, row) for row in range(3) for t in live[row]])
            search = step_once(jnp.int32(step), logits, search, jnp.float32(penalty))
        wanted = [
            plain_search(
                lambda live, r=r: np.stack([table_logits(t, r) for t in live]), rules, penalty
            )
            for r in range(3)
        ]
        check_beams(search.ended, wanted)


def forward_logits(model, prompt: np.ndarray, num_rows: int) -> Callable:
    """Return a function that runs prompt and beams anew, always in one shape."""

    def logits_of(live: list[list[int]]) -> np.ndarray:
        rows = [np.concatenate([prompt, np.array(tokens, int)]) for tokens in live]
        rows += [prompt] * (num_rows - len(rows))
        tokens = padded(rows, max(LENGTHS) + STEPS)
        logits = np.asarray(ij.forward(model.params, model.config, tokens))
        return np.stack([logits[i, len(rows[i]) - 1] for i in range(len(live))])

    return logits_of


@functools.cache
def plain_beams(family: str, rules: Rules, penalty: float) -> list[list[tuple[float, list[int]]]]:
    model = tiny_model(family)
    return [
        plain_search(forward_logits(model, prompt, rules.num_beams), rules, penalty)
        for prompt in prompts_of(model, LENGTHS)
    ]


def run(family: str = "llama", **options) -> Beams:
    model = tiny_model(family)
    prompts = padded(prompts_of(model, LENGTHS), max(LENGTHS), fill=1)
    defaults = {"lengths": LENGTHS, "max_new_tokens": STEPS, "exec": ij.Exec(page_size=4)}
    return ij.beam_search(model.params, model.config, prompts, **(defaults | options))


def occurring_ends(family: str, num_beams: int) -> tuple[int, ...]:
    """Return two ids that beams without end ids draw in the middle."""
    rules = Rules(num_beams=num_beams, max_new_tokens=STEPS, early_stopping=False, eos_ids=())
    beams = plain_beams(family, rules, 1.0)
    return tuple({beams[0][0][1][2], beams[1][0][1][4]})


def cases() -> list:
    quick = {
        ("llama", 3, 4, False, True),
        ("gemma3_text", 2, 8, True, True),
    }
    points = itertools.product(
        ("llama", "gemma3_text", "gpt2", "gpt_oss", "deepseek_v3"),
        (2, 3, 4),
        (4, 8),
        (False, True, "never"),
        (False, True),
    )
    return [p if p in quick else pytest.param(*p, marks=pytest.mark.slow) for p in points]


@pytest.mark.parametrize(("family", "num_beams", "page_size", "early", "ending"), cases())
def test_beam_search_equals_the_plain_search(family, num_beams, page_size, early, ending):
    """Ragged prompts, beams that leave one another's pages, ends in the middle."""
    ends = occurring_ends(family, num_beams) if ending else ()
    rules = Rules(num_beams=num_beams, max_new_tokens=STEPS, early_stopping=early, eos_ids=ends)
    for penalty in (1.0, 0.0, 2.0):
        found = run(
            family,
            num_beams=num_beams,
            num_return=num_beams,
            length_penalty=penalty,
            early_stopping=early,
            eos_ids=rules.eos_ids,
            exec=ij.Exec(page_size=page_size),
        )
        assert not np.asarray(found.status).any()
        pad = tiny_model(family).config.pad_id or 0
        check_beams(found, plain_beams(family, rules, penalty), pad)
        if ending and penalty == 0:
            assert (np.asarray(found.lengths) < STEPS).any()


@pytest.mark.parametrize("family", ["llama", pytest.param("gpt2", marks=pytest.mark.slow)])
def test_beam_search_with_one_beam_is_greedy(family):
    model, known = tiny_model(family), expected(family)
    found = ij.beam_search(
        model.params,
        model.config,
        known["greedy_prompt"],
        num_beams=1,
        max_new_tokens=known["greedy"].shape[1],
        eos_ids=(),
        exec=ij.Exec(page_size=8),
    )
    np.testing.assert_array_equal(found.tokens[:, 0], known["greedy"])


@pytest.mark.parametrize("exact", [pytest.param(False, marks=pytest.mark.slow), True])
def test_beam_search_logprobs_are_those_of_score(exact):
    """The reported numbers belong to the reported tokens; in exact mode they are the same bits."""
    exec = ij.Exec(page_size=4, exact=exact)
    model = tiny_model("llama")
    found = run(num_beams=3, num_return=2, eos_ids=(), exec=exec)
    prompts = prompts_of(model, LENGTHS)
    for row, place in itertools.product(range(3), range(2)):
        whole = np.concatenate([prompts[row], np.asarray(found.tokens)[row, place]])[None]
        scored = ij.score(
            model.params, model.config, padded([*whole], 19), [len(whole[0])], exec=exec
        )
        wanted = np.asarray(scored)[0, LENGTHS[row] - 1 :][:STEPS]
        if exact:
            np.testing.assert_array_equal(found.logprobs[row, place], wanted)
        np.testing.assert_allclose(found.logprobs[row, place], wanted, **TINY_LOGPROBS_F32)
    sums = np.asarray(found.logprobs).sum(axis=2)
    np.testing.assert_allclose(found.scores, sums / np.asarray(found.lengths), rtol=1e-5)


@functools.cache
def mapped_search() -> Callable[..., Beams]:
    """Return a search for each prompt by itself, in the caller's jit and vmap."""
    model, ends = tiny_model("llama"), occurring_ends("llama", 3)

    def search(tokens, length, penalty):
        return ij.beam_search(
            model.params,
            model.config,
            tokens[None],
            length[None],
            num_beams=3,
            max_new_tokens=STEPS,
            length_penalty=penalty,
            eos_ids=ends,
            exec=ij.Exec(page_size=4),
        )

    return jax.jit(jax.vmap(search, (0, 0, None)))


def test_beam_search_works_inside_jit_and_vmap():
    rules = Rules(
        num_beams=3,
        max_new_tokens=STEPS,
        early_stopping=False,
        eos_ids=occurring_ends("llama", 3),
    )
    prompts = padded(prompts_of(tiny_model("llama"), LENGTHS), max(LENGTHS), fill=1)
    for penalty in (0.0, 2.0):
        found = mapped_search()(prompts, jnp.array(LENGTHS, jnp.int32), jnp.float32(penalty))
        found = jax.tree.map(lambda x: x[:, 0], found)
        assert not np.asarray(found.status).any()
        check_beams(found, plain_beams("llama", rules, penalty), tiny_model("llama").config.pad_id)


def test_beam_search_reports_a_bad_prompt_beside_good_ones():
    prompts = padded(prompts_of(tiny_model("llama"), LENGTHS), max(LENGTHS), fill=1)
    lengths, penalty = jnp.array(LENGTHS, jnp.int32), jnp.float32(1)
    good = mapped_search()(prompts, lengths, penalty)
    prompts[1, 2] = 10**6
    bad = mapped_search()(prompts, lengths, penalty)
    assert np.asarray(bad.status)[:, 0].tolist() == [0, int(Status.BAD_TOKEN), 0]
    assert np.asarray(bad.lengths)[1].tolist() == [[0]]
    assert np.isneginf(np.asarray(bad.scores)[1]).all()
    np.testing.assert_array_equal(bad.tokens[::2], good.tokens[::2])


def test_beam_rules_close_a_prompt_with_broken_logits():
    rules = rules_of(2, False, 1)
    logits = np.stack([table_logits([], row) for row in (0, 0, 1, 1)])
    logits[3, 5] = np.nan
    step_once = jax.jit(functools.partial(select, rules=rules, exec=ij.Exec()))
    search = empty_search(jnp.zeros(2, jnp.int32), rules, 0)
    search = step_once(jnp.int32(0), logits, search, jnp.float32(1))
    assert np.asarray(search.open).tolist() == [True, False]
    assert np.asarray(search.ended.status).tolist() == [0, int(Status.NAN_LOGITS)]
    assert np.asarray(search.ended.lengths)[1].tolist() == [0, 0]


@pytest.mark.parametrize(
    ("options", "kind", "named"),
    [
        ({"num_beams": 0}, InvalidInput, "num_beams=0"),
        ({"num_beams": True}, InvalidInput, "num_beams=True"),
        ({"num_return": 0}, InvalidInput, "num_return=0"),
        ({"num_return": 3}, InvalidInput, "num_return=3 with num_beams=2"),
        ({"num_beams": 10**6}, InvalidInput, "candidates"),
        ({"max_new_tokens": 0}, InvalidInput, "max_new_tokens=0"),
        ({"max_new_tokens": 10**6}, RequestTooLong, "tokens are asked for"),
        ({"lengths": (0, 4, 7)}, InvalidInput, "lengths are in"),
        ({"lengths": (4, 7)}, ShapeError, "lengths have shape"),
        ({"length_penalty": float("nan")}, InvalidInput, "length_penalty=nan"),
        ({"length_penalty": "1"}, InvalidInput, "length_penalty='1'"),
        ({"length_penalty": jnp.ones(2)}, InvalidInput, "length_penalty="),
        ({"eos_ids": (10**6,)}, InvalidInput, "eos_ids="),
    ],
    ids=lambda x: str(x)[:40],
)
def test_beam_search_refuses_bad_arguments(options, kind, named):
    with pytest.raises(kind, match=named):
        run(**({"num_beams": 2} | options))


def test_beam_search_refuses_an_empty_prompt():
    model = tiny_model("llama")
    with pytest.raises(InferjaxError, match="empty prompt"):
        ij.beam_search(
            model.params, model.config, np.zeros((1, 0), int), num_beams=2, max_new_tokens=2
        )
