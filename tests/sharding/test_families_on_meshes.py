"""Checkpoints loaded onto meshes of eight devices give the logits and tokens that were recorded."""

import functools

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from meshes import mesh_of
from tiny_models import TINY, expected
from tolerances import PARITY_LOGITS_F32

import inferjax as ij

FAMILIES = ("llama", "qwen3", "gemma3_text", "mixtral", "qwen3_moe", "gpt_oss", "deepseek_v3")
SHAPES = ((1, 8), (2, 4), (8, 1))
# One key/value head on eight devices; latents, and experts beside a shared one.
DEFAULT = {("gemma3_text", (1, 8)), ("deepseek_v3", (2, 4))}
CASES = [
    pytest.param(
        name,
        shape,
        marks=() if (name, shape) in DEFAULT else pytest.mark.slow,
        id=f"{name}-{shape}",
    )
    for name in FAMILIES
    for shape in SHAPES
]
NEW = 6


@functools.partial(jax.jit, static_argnames="config")
def run(params, tokens, prompt, *, config):
    greedy = ij.SamplingParams(temperature=0.0, ignore_eos=True)
    answer = ij.generate(params, config, prompt, max_new_tokens=NEW, sampling=greedy)
    return ij.forward(params, config, tokens), answer.tokens


@pytest.mark.parametrize(("name", "shape"), CASES)
def test_a_mesh_changes_nothing(name, shape):
    known, mesh = expected(name), mesh_of(*shape)
    model = ij.load(TINY / name, mesh=mesh)
    rows = NamedSharding(mesh, PartitionSpec("data"))
    tokens, prompt = (
        jax.device_put(np.repeat(known[key], 4, axis=0).astype(np.int32), rows)
        for key in ("tokens", "greedy_prompt")
    )
    logits, answers = run(model.params, tokens, prompt, config=model.config)
    want = np.repeat(known["logits"], 4, axis=0)
    assert np.abs(logits - want).max() < PARITY_LOGITS_F32 * want.std()
    np.testing.assert_array_equal(answers, np.repeat(known["greedy"][:, :NEW], 4, axis=0))
