"""Packed weights under the caller's vmap, scan and jit, with a donated cache."""

from typing import Any

import composable_models as models
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tolerances import LOGPROBS_F32, PACKED_LOGITS_RMS

import inferjax as ij
from inferjax.models.quantized import quantize
from tests.kernels import native_library


def packed(family: str, scheme: str, num_layers: int = 1) -> tuple[Any, Any]:
    params, config = models.cut_model(family, num_layers)
    return jax.tree.map(jnp.asarray, quantize(params, config, scheme)), config


def draw(params: Any, tokens: Any, key: Any, temperature: Any, config: Any) -> ij.Generation:
    sampling = ij.make_sampling(tokens.shape[0], temperature=temperature, eos_ids=(5,))
    return ij.generate(params, config, tokens, key=key, max_new_tokens=3, sampling=sampling)


@pytest.mark.parametrize(
    ("family", "params_axis"),
    [
        ("llama", None),
        ("llama", 0),
        pytest.param("deepseek_v3", 0, marks=pytest.mark.slow),
        pytest.param("gpt_oss", None, marks=pytest.mark.slow),
    ],
)
def test_vmap_over_keys_and_packed_params_equals_the_loop(family, params_axis):
    native_library.require()
    params, config = packed(family, "int4")
    tokens = models.random_tokens(config, 2, 4)
    keys = jax.random.split(jax.random.key(0), 2)
    temperatures = jnp.array([0.0, 0.8], jnp.float32)
    both = params
    if params_axis == 0:
        other = quantize(
            jax.tree.map(lambda x: x * jnp.asarray(0.8, x.dtype), models.cut_model(family)[0]),
            config,
            "int4",
        )
        both = jax.tree.map(lambda *leaves: jnp.stack(leaves), params, other)
    plain = jax.jit(draw, static_argnums=4)
    mapped = jax.jit(jax.vmap(lambda *args: draw(*args, config), (params_axis, None, 0, 0)))(
        both, tokens, keys, temperatures
    )
    for i in range(2):
        one = params if params_axis is None else models.take(both, i)
        want = plain(one, tokens, keys[i], temperatures[i], config)
        np.testing.assert_array_equal(mapped.tokens[i], want.tokens)
        np.testing.assert_array_equal(mapped.status[i], 0)
        np.testing.assert_allclose(mapped.logprobs[i], want.logprobs, **LOGPROBS_F32)


@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_scan_over_steps_with_a_donated_cache_equals_the_forward_pass(family):
    """One token a step; the packed weights are read where they lie, in every step."""
    native_library.require()
    params, config = packed(family, "int8")
    tokens = jnp.asarray(models.random_tokens(config, 2, 5))
    exec = ij.Exec(page_size=8)

    def steps(params: Any, cache: ij.KVCache, tokens: Any) -> Any:
        def step(cache: ij.KVCache, item: Any) -> Any:
            position, column = item
            inputs = ij.make_inputs(
                column[:, None],
                starts=jnp.full(2, position),
                block_tables=[1 + np.arange(2)[:, None]],
            )
            out, cache = ij.extend(params, config, cache, inputs, exec=exec)
            return cache, out.values

        places = jnp.arange(tokens.shape[1], dtype=jnp.int32)
        return jax.lax.scan(step, cache, (places, tokens.T))

    run = jax.jit(steps, donate_argnums=1)
    cache = ij.init_cache(config, num_pages=3, exec=exec, dtype="float32")
    compiled = run.lower(params, cache, tokens).compile()
    _, logits = compiled(params, cache, tokens)
    assert cache.groups[0].values.is_deleted()
    want = np.asarray(ij.forward(params, config, tokens))
    apart = np.moveaxis(np.asarray(logits), 0, 1) - want
    assert np.sqrt(np.mean(apart**2)) <= PACKED_LOGITS_RMS * np.std(want)
    copies = [
        line
        for line in compiled.as_text().splitlines()
        if "= s8[" in line and (" copy(" in line or " fusion(" in line or " transpose(" in line)
    ]
    # A few rows of the embedding are gathered; no weight is.
    assert not [line for line in copies if "gather" not in line and "take" not in line]
