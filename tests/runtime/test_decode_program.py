"""What the compiled decode step may not contain: a second cache, or a second copy of a weight."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from tiny_models import tiny_model

import inferjax as ij
from inferjax.runtime.steps import _decode

PER_ROW = 150
MOVED = re.compile(r"= \w+(\[[\d,]*\])\S* (?:copy|transpose|convert)\(")


@pytest.mark.parametrize("kv_dtype", [None, "int8", "float8_e4m3fn"])
def test_compiled_decode_copies_no_weight_and_no_cache(kv_dtype):
    model, exec = tiny_model("llama"), ij.Exec(page_size=8, kv_dtype=kv_dtype)
    cache = ij.init_cache(model.config, num_pages=1 + 2 * PER_ROW, exec=exec)
    table = jnp.arange(1, 1 + 2 * PER_ROW, dtype=jnp.int32).reshape(2, PER_ROW)
    state = ij.init_state(
        jnp.ones((2, 5), jnp.int32),
        jnp.full((2,), 5, jnp.int32),
        keys=jax.random.split(jax.random.key(0), 2),
        sampling=ij.make_sampling(2),
        block_tables=(table,),
        room=16,
    )
    jitted: Any = _decode
    step = jitted.lower(model.params, cache, state, config=model.config, steps=4, exec=exec)
    compiled = step.compile()
    large = [*jax.tree.leaves(cache), *(w for w in jax.tree.leaves(model.params) if w.ndim > 1)]
    shapes = {"[" + ",".join(map(str, x.shape)) + "]" for x in large}
    moved = MOVED.findall(compiled.as_text())
    assert moved  # the pattern does see copies of small things
    assert not shapes & set(moved)
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes >= sum(x.nbytes for x in jax.tree.leaves(cache))
    assert memory.temp_size_in_bytes < model.params.embed.nbytes
