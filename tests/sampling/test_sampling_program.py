"""What is compiled: no sorts outside branches, real branches under vmap, one trace."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from inferjax.sampling import make_sampling, make_state, sample

SORTS = ("sort", "top_k", "approx_top_k")


def subjaxprs(equation):
    for value in equation.params.values():
        for item in value if isinstance(value, tuple | list) else (value,):
            if hasattr(item, "eqns"):
                yield item
            elif hasattr(item, "jaxpr"):
                yield item.jaxpr


def always_run(jaxpr):
    """Yield the names of the primitives that run whatever the branches choose."""
    for equation in jaxpr.eqns:
        yield equation.primitive.name
        if equation.primitive.name != "cond":
            for inner in subjaxprs(equation):
                yield from always_run(inner)


def every_primitive(jaxpr):
    for equation in jaxpr.eqns:
        yield equation.primitive.name
        for inner in subjaxprs(equation):
            yield from every_primitive(inner)


def run(logits, key, temperature, top_k, history):
    sampling = make_sampling(
        4, temperature=temperature, top_k=top_k, repetition_penalty=1.2, allowed_ids=[3, 4]
    )
    return sample(logits, sampling, make_state(key, 0, history=history, history_len=3)).tokens


ARGUMENTS = (
    jnp.zeros((4, 600)),
    jax.random.split(jax.random.key(0), 4),
    jnp.ones(4),
    jnp.zeros(4, jnp.int32),
    jnp.zeros((4, 3), jnp.int32),
)


@pytest.mark.parametrize("mapped", [False, True], ids=["plain", "vmap"])
def test_sorts_scatters_and_randomness_sit_inside_branches(mapped):
    function, arguments = run, ARGUMENTS
    if mapped:
        function = jax.vmap(run)
        arguments = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), ARGUMENTS)
    jaxpr = jax.make_jaxpr(function)(*arguments).jaxpr
    everywhere, outside = set(every_primitive(jaxpr)), set(always_run(jaxpr))
    costly = {*SORTS, "scatter", "scatter-add", "random_bits", "cumsum", "while", "scan"}
    assert {"top_k", "scatter-add", "random_bits", "cumsum"} <= everywhere
    assert not outside & costly
    assert "cond" in outside
    assert not everywhere & {"sort", "approx_top_k"}


def test_top_tokens_are_searched_for_in_a_branch():
    def report(logits, key):
        sampling = make_sampling(4, num_top=2)
        return sample(logits, sampling, make_state(key, 0), top_logprobs=3).top_ids

    jaxpr = jax.make_jaxpr(report)(*ARGUMENTS[:2]).jaxpr
    assert "top_k" in set(every_primitive(jaxpr))
    assert not {*SORTS} & set(always_run(jaxpr))


def test_compiled_program_has_no_sort_at_all():
    """XLA turns a top-k whose result is sliced further into a sort of the whole row."""
    text = jax.jit(run).lower(*ARGUMENTS).compile().as_text()
    assert text is not None
    assert "TopK" in text
    assert " sort(" not in text


def test_no_value_retraces():
    traces = 0

    @jax.jit
    def draw(logits, sampling, state):
        nonlocal traces
        traces += 1
        return sample(logits, sampling, state, candidates=8).tokens

    logits, key = jnp.zeros((2, 40)), jax.random.split(jax.random.key(0), 2)
    for number, temperature in enumerate([1, 0.5, np.float32(0), np.array([1, 2]), jnp.ones(2)]):
        sampling = make_sampling(
            2,
            temperature=temperature,
            top_k=number,
            top_p=1 - number / 10,
            ignore_eos=bool(number % 2),
            min_tokens=np.int64(number),
            eos_ids=[number],
            stop_ids=jnp.array([[1], [-1]]),
        )
        draw(logits, sampling, make_state(key, number, history_len=number))
    assert traces == 1


def test_unused_features_leave_no_trace():
    def plain(logits, key):
        return sample(logits, make_sampling(4), make_state(key, 0)).tokens

    names = list(every_primitive(jax.make_jaxpr(plain)(*ARGUMENTS[:2]).jaxpr))
    assert "scatter" not in names
