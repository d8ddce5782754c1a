"""Weights to tensors and back: nothing is lost, and the way out is the transpose of the way in."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_models import FAMILIES, TINY, tiny_model

from inferjax.checkpoint.safetensors import open_safetensors
from inferjax.errors import ShapeError
from inferjax.models.family import skips_tensor
from inferjax.models.registry import family_for
from inferjax.models.tensors import params_from_tensors, tensors_from_params


def stored(folder: str) -> dict[str, np.ndarray]:
    """Return a file's weights, without the masks that old versions saved beside them."""
    file, config = open_safetensors(TINY / folder), tiny_model(folder).config
    names = [n for n in file.entries if not skips_tensor(family_for(config.family), n, config)]
    return {name: np.asarray(file.read(name), np.float32) for name in names}


@pytest.mark.parametrize("folder", FAMILIES)
def test_weights_give_back_the_tensors_of_the_file(folder):
    model = tiny_model(folder)
    tensors = tensors_from_params(model.config, model.params)
    file = stored(folder)
    for name, values in tensors.items():
        known = file.get(name, file.get(name.partition(".")[2]))
        assert known is not None, name
        seen = np.asarray(values)
        if "embed_positions" in name:  # two rows that are never read
            known = np.concatenate([np.zeros_like(known[:2]), known[2:]])
        np.testing.assert_array_equal(seen, known, err_msg=name)


@pytest.mark.parametrize("folder", FAMILIES)
def test_tensors_give_back_the_weights(folder):
    model = tiny_model(folder)
    tensors = tensors_from_params(model.config, model.params)
    again = params_from_tensors(model.config, tensors)
    jax.tree.map(np.testing.assert_array_equal, again, model.params)


def test_both_ways_are_traced_and_differentiated():
    model = tiny_model("llama")
    tensors = tensors_from_params(model.config, model.params)

    def total(tensors):
        params = params_from_tensors(model.config, tensors)
        return sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(params))

    gradient = jax.jit(jax.grad(total))(tensors)
    for name, values in tensors.items():
        np.testing.assert_allclose(gradient[name], 2 * values, rtol=1e-6)


def test_a_missing_or_misshapen_tensor_is_named():
    model = tiny_model("llama")
    tensors = tensors_from_params(model.config, model.params)
    name = "model.layers.0.self_attn.k_proj.weight"
    with pytest.raises(ShapeError, match=r"k_proj.weight' is missing"):
        params_from_tensors(model.config, {k: v for k, v in tensors.items() if k != name})
    with pytest.raises(ShapeError, match=r"k_proj.weight' is \(64, 32\)"):
        params_from_tensors(model.config, tensors | {name: tensors[name].T})
