"""`generate` prefills long prompts in chunks, whose edges must not show."""

import jax
import numpy as np
import pytest
from tiny_models import padded, prompts_of, tiny_model
from tolerances import TINY_LOGPROBS_F32

import inferjax as ij

LENGTHS = (16, 8, 1, 15)


@pytest.mark.parametrize("num_samples", [None, pytest.param(2, marks=pytest.mark.slow)])
def test_generate_does_not_depend_on_the_prefill_chunk(num_samples):
    """Rows end inside, at and before the edges of chunks of 8 and of 7, which does not divide."""
    model = tiny_model("llama")
    tokens = padded(prompts_of(model, LENGTHS), max(LENGTHS))

    def run(chunk):
        return ij.generate(
            model.params,
            model.config,
            tokens,
            LENGTHS,
            key=jax.random.key(3),
            max_new_tokens=4,
            num_samples=num_samples,
            sampling=ij.make_sampling(len(LENGTHS), temperature=1.0),
            exec=ij.Exec(page_size=8, prefill_chunk=chunk),
        )

    whole = run(16)
    for chunk in (7, 8):
        parts = run(chunk)
        np.testing.assert_array_equal(parts.tokens, whole.tokens)
        np.testing.assert_allclose(parts.logprobs, whole.logprobs, **TINY_LOGPROBS_F32)
        np.testing.assert_array_equal(parts.status, 0)
