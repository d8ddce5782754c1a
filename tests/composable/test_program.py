"""What the traced program of `generate` and `score` may not contain."""

import dataclasses
import functools
from typing import Any

import composable_models as models
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxpr_walk import equations, sizes

import inferjax as ij
from inferjax.models.params import abstract_params

PARAMS, CONFIG = models.cut_model("llama")
TOKENS = models.random_tokens(CONFIG, 2, 4)
NEW = 200
EXEC = ij.Exec(page_size=16, score_chunk=8)


def draw(params: Any, key: Any, temperature: Any) -> ij.Generation:
    sampling = ij.make_sampling(2, temperature=temperature)
    return ij.generate(
        params, CONFIG, TOKENS, key=key, max_new_tokens=NEW, sampling=sampling, exec=EXEC
    )


def pool_size() -> int:
    pages = 1 + TOKENS.shape[0] * -(-(TOKENS.shape[1] + NEW) // EXEC.page_size)
    cache = jax.eval_shape(lambda: ij.init_cache(CONFIG, num_pages=pages, exec=EXEC))
    return min(pool.values.size for pool in cache.groups)


@functools.cache
def program(mapped: str) -> Any:
    keys = jax.random.split(jax.random.key(0), 2)
    temperatures = jnp.array([0.0, 1.0], jnp.float32)
    match mapped:
        case "nothing":
            return jax.make_jaxpr(draw)(PARAMS, keys[0], temperatures[0]).jaxpr
        case "keys":
            mapped_draw = jax.vmap(draw, (None, 0, None))
            return jax.make_jaxpr(mapped_draw)(PARAMS, keys, temperatures[0]).jaxpr
        case "all":
            stacked = models.stack_scaled(PARAMS, (1.0, 0.9))
            return jax.make_jaxpr(jax.vmap(draw))(stacked, keys, temperatures).jaxpr
    raise ValueError(mapped)


@pytest.mark.parametrize("mapped", ["nothing", "keys", "all"])
def test_generate_never_selects_between_whole_caches(mapped: str):
    limit = pool_size()
    assert limit > 2 * TOKENS.shape[0] * CONFIG.vocab_size  # or logits would count as a cache
    writes = 0
    for eqn in equations(program(mapped)):
        writes += eqn.primitive.name == "scatter" and max(sizes(eqn.outvars)) >= limit
        if eqn.primitive.name == "select_n":
            assert max(sizes(eqn.invars)) < limit, eqn
    assert writes > 0  # the cache is there, and as large as thought


@pytest.mark.parametrize("mapped", ["nothing", "keys", "all"])
def test_greedy_path_never_sorts_the_vocabulary(mapped: str):
    sorts = {"sort", "top_k", "approx_top_k"}
    everywhere = [
        eqn
        for eqn in equations(program(mapped))
        if eqn.primitive.name in sorts and max(sizes(eqn.invars)) >= CONFIG.vocab_size
    ]
    always = [
        eqn
        for eqn in equations(program(mapped), enter_cond=False)
        if eqn.primitive.name in sorts and max(sizes(eqn.invars)) >= CONFIG.vocab_size
    ]
    assert everywhere  # the filters' top_k: the walk does see sorts
    assert not always


@pytest.mark.parametrize("mapped", ["nothing", "keys", "all"])
def test_token_loop_carries_the_cache_but_no_weight(mapped: str):
    weights = {x.shape for x in jax.tree.leaves(PARAMS) if x.size >= CONFIG.model_dim**2}
    weights |= {(2, *shape) for shape in weights}
    limit, token_loops = pool_size(), 0
    for eqn in equations(program(mapped)):
        carry = carried(eqn)
        token_loops += max(sizes(carry), default=0) >= limit
        assert not weights & {v.aval.shape for v in carry}
    assert token_loops > 0


def carried(eqn: Any) -> list[Any]:
    """Return what a loop's body hands to its next turn (and a scan's outputs)."""
    bodies = {"while": "body_jaxpr", "scan": "jaxpr"}
    if eqn.primitive.name not in bodies:
        return []
    body = eqn.params[bodies[eqn.primitive.name]]
    return getattr(body, "jaxpr", body).outvars


@pytest.mark.parametrize("mapped", ["nothing", "keys", "all"])
def test_loop_predicates_are_scalars(mapped: str):
    loops = [e for e in equations(program(mapped)) if e.primitive.name in ("while", "cond")]
    assert loops
    for eqn in loops:
        if eqn.primitive.name == "while":
            assert eqn.params["cond_jaxpr"].jaxpr.outvars[0].aval.shape == ()
            # A batched predicate is reduced by `vmap` itself, and every carry selected by it.
            names = {e.primitive.name for e in eqn.params["cond_jaxpr"].jaxpr.eqns}
            assert names <= {"lt", "and", "custom_vmap_call", "not", "le", "reduce_or"}, names
        else:
            assert eqn.invars[0].aval.shape == ()


@pytest.mark.parametrize("mapped", [False, True])
def test_score_and_its_gradient_never_hold_all_logits(mapped: bool):
    config = dataclasses.replace(CONFIG, vocab_size=4099)  # a number no other axis has
    tokens = models.random_tokens(config, 2, 200)
    copies = 2 if mapped else 1

    def loss(params: Any) -> jax.Array:
        return ij.score(params, config, tokens, exec=EXEC).sum()

    params, function = abstract_params(config), jax.grad(loss)
    if mapped:
        function = jax.vmap(function)
        params = jax.tree.map(lambda x: jax.ShapeDtypeStruct((2, *x.shape), x.dtype), params)
    jaxpr = jax.make_jaxpr(function)(params).jaxpr
    outputs = [v.aval for eqn in equations(jaxpr) for v in eqn.outvars if hasattr(v.aval, "shape")]
    largest = max(aval.size for aval in outputs if config.vocab_size in aval.shape)
    chunk = copies * tokens.shape[0] * EXEC.score_chunk * config.vocab_size
    weight = copies * config.model_dim * config.vocab_size
    assert largest == max(chunk, weight)
    assert largest < copies * tokens.size * config.vocab_size // 4
    assert any(aval.size == chunk and config.vocab_size in aval.shape for aval in outputs)


@pytest.mark.slow
def test_executed_steps_end_with_the_last_row(monkeypatch):
    """Count decode steps from inside: an end at once runs none, no end runs all."""
    from inferjax.runtime import steps

    ran: list[int] = []
    real = steps.decode_step

    def counted(params: Any, config: Any, cache: Any, state: Any, exec: Any, *rest: Any) -> Any:
        jax.debug.callback(lambda _: ran.append(1), state.done[0])
        return real(params, config, cache, state, exec, *rest)

    monkeypatch.setattr(steps, "decode_step", counted)
    new = 23  # no other test's program

    def run(force: Any) -> ij.Generation:
        sampling = ij.make_sampling(
            2, temperature=0.0, eos_ids=(5,), bias_ids=(5,), bias=force[None]
        )
        return ij.generate(
            PARAMS, CONFIG, TOKENS, key=jax.random.key(0), max_new_tokens=new, sampling=sampling
        )

    mapped = jax.jit(jax.vmap(run))
    stop, go = jnp.float32(1e6), jnp.float32(-1e6)
    for forces, steps_run in [((stop, stop), 0), ((stop, go), new - 1)]:
        ran.clear()
        out = jax.block_until_ready(mapped(jnp.stack(forces)))
        jax.effects_barrier()
        assert len(ran) == 2 * steps_run  # vmap calls back once for each instance
        np.testing.assert_array_equal(out.lengths[0], 1)
        np.testing.assert_array_equal(out.tokens[0, :, 1:], 0)
        np.testing.assert_array_equal(out.logprobs[0, :, 1:], 0.0)
    np.testing.assert_array_equal(out.lengths[1], new)
