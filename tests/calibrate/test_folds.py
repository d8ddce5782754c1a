"""Folding scales into what stands before a product leaves a layer's result as it was."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose
from one_layer import one_layer

from inferjax.calibrate.folds import folds_of
from inferjax.calibrate.products import at, layer_output

# family: the weights that read scaled channels
FAMILIES = {
    "llama": {"wqkv", "wo", "w_in", "w_down"},  # grouped-query attention, gated
    "gemma3_text": {"wqkv", "wo", "w_in", "w_down"},  # norms whose weights are stored minus one
    "gpt2": {"wqkv", "wo", "w_in"},  # LayerNorms and biases; gelu passes nothing on in proportion
    "opt": {"wqkv", "wo", "w_in", "w_down"},  # relu does
    "cohere": {"wqkv", "wo", "w_in", "w_down"},  # one norm for attention and feed-forward
    "olmo2": {"wo", "w_down"},  # no norm before a block
    "deepseek_v3": {"wq_a", "wkv_a", "wq", "wo", "w_in", "w_down", "router"},
    "qwen2_moe": {"wqkv", "wo", "w_in", "w_down", "router", "shared_gate"},
    "gpt_oss": {"wqkv", "wo", "w_in", "router"},  # experts that clamp
}


@pytest.mark.parametrize("folder", FAMILIES)
def test_folding_leaves_the_result(rng, folder):
    params, config = one_layer(folder)
    spec, layer = config.layers[0], params.layers[0]
    x = jnp.asarray(rng.normal(size=(1, 9, config.model_dim)), jnp.float32)
    before = layer_output(layer, x, spec)
    folds, readers, scaled = folds_of(spec, layer), set(), layer
    for fold in folds:
        scales = np.exp(rng.normal(size=fold.shape) * 0.5).astype(np.float32)
        if fold.shared_axis is not None:
            scales = scales.mean(fold.shared_axis, keepdims=True) + 0 * scales
        for path, _ in fold.readers:
            readers.add(path[-1])
        scaled = fold.apply(scaled, jnp.asarray(scales))
    assert readers == FAMILIES[folder]
    for fold in folds:
        for path, _ in fold.readers:
            assert not np.allclose(at(scaled, path), at(layer, path), rtol=1e-2)
    after = layer_output(scaled, x, spec)
    assert_allclose(after, before, rtol=0, atol=1e-4 * float(jnp.std(before)))
    assert jax.tree.structure(scaled) == jax.tree.structure(layer)
