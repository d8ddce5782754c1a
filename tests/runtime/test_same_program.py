"""A model gives the same program in every process: what was compiled is found on disk again."""

import os
import subprocess
import sys

import pytest
from tiny_models import TINY

PROGRAM = """
import hashlib, sys
import jax, jax.numpy as jnp
import inferjax as ij
model = ij.load(sys.argv[1])
tokens = jax.ShapeDtypeStruct((1, 4), jnp.int32)
run = jax.jit(ij.score, static_argnums=1)
text = run.lower(model.params, model.config, tokens).as_text()
print(hashlib.sha256(text.encode()).hexdigest())
"""


@pytest.mark.parametrize("family", ["gemma3_text"])
def test_a_program_does_not_depend_on_the_order_of_a_set(family):
    found = set()
    for seed in ("1", "2", "3"):
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM, str(TINY / family)],
            env=os.environ | {"PYTHONHASHSEED": seed, "JAX_PLATFORMS": "cpu"},
            capture_output=True,
            text=True,
            check=True,
        )
        found.add(done.stdout)
    assert len(found) == 1
