"""Logits keep the float32 sums of the head's matmul."""

import jax
import jax.numpy as jnp
import numpy as np
from tiny_models import tiny_model

from inferjax.models.decoder import unembed


def test_logits_of_bfloat16_weights_are_not_rounded_to_bfloat16():
    model = tiny_model("llama")
    params = jax.tree.map(lambda w: w.astype(jnp.bfloat16), model.params)
    hidden = jax.random.normal(jax.random.key(0), (3, model.config.model_dim), jnp.bfloat16)
    head = params.embed if params.head is None else params.head
    wanted = np.asarray(hidden, np.float64) @ np.asarray(head, np.float64).T
    logits = unembed(params, model.config, hidden)
    assert logits.dtype == jnp.float32
    np.testing.assert_allclose(logits, wanted, rtol=0, atol=1e-5 * np.abs(wanted).max())
