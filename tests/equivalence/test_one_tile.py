"""Exact mode: a batch that fills exactly one tile gets the bits that it gets among others."""

import numpy as np
import pytest
from tiny_models import prompts_of, tiny_model

import inferjax as ij


def first_rows(family: str, num_rows: int) -> ij.Generation:
    """Generate for three prompts among `num_rows` equally long ones."""
    model = tiny_model(family)
    prompts = np.stack(prompts_of(model, (5,) * num_rows))
    exec = ij.Exec(exact=True, page_size=8, top_logprobs=4)
    return ij.generate(model.params, model.config, prompts, max_new_tokens=6, exec=exec)


@pytest.mark.parametrize("family", ["gemma3_text"])
def test_a_batch_of_one_tile_has_the_bits_of_a_larger_one(family):
    one, several = first_rows(family, 3), first_rows(family, 12)
    for name in ("tokens", "logprobs", "top_logprobs"):
        alone, among = np.asarray(getattr(one, name))[:3], np.asarray(getattr(several, name))[:3]
        assert alone.tobytes() == among.tobytes(), name
