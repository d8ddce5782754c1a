"""What dtype stands between two products, and in the cache: that of the model as it runs."""

import dataclasses

import jax
import numpy as np
import pytest

import inferjax as ij
from inferjax.checkpoint.opened import read_model_config
from inferjax.models.params import abstract_params
from inferjax.models.quantized import quantize
from inferjax.planner import make_model
from inferjax.planner.leaves import DTYPE_BYTES, loaded_leaves, uniform_leaves
from inferjax.runtime.passes import make_cache


def abstract(tiny, family, scheme, parts):
    """Return a config and weights of bfloat16, of which `parts` are packed."""
    config = dataclasses.replace(read_model_config(tiny / family), dtype="bfloat16")
    params = abstract_params(config)
    if scheme is None:
        return config, params
    packed = jax.eval_shape(lambda p: quantize(p, config, scheme), params)
    return config, packed if parts == "all" else dataclasses.replace(packed, embed=params.embed)


def run_dtypes(config, params):
    """Return the dtypes of the residual and of keys and values, as a program has them."""
    tokens = np.zeros((1, 4), np.int32)

    def run(params):
        taps = ("embed", "layers.0", "final")
        seen = ij.activations(params, config, tokens, taps=taps)
        return seen, make_cache(params, config, num_pages=2, exec=ij.Exec())

    seen, cache = jax.eval_shape(run, params)
    (kind,) = {str(x.dtype) for x in seen.values()}
    return kind, str(cache.groups[0].values.dtype)


@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "gemma3_text"])
@pytest.mark.parametrize(
    ("scheme", "parts", "wanted"),
    [
        (None, "all", "bfloat16"),
        ("int4", "all", "float32"),
        ("bfloat16", "all", "float32"),
        # AWQ and GPTQ leave the embedding an array, whose dtype the residual has.
        ("int4", "layers", "bfloat16"),
    ],
)
def test_plan_has_the_dtypes_of_the_program(family, scheme, parts, wanted, tiny):
    config, params = abstract(tiny, family, scheme, parts)
    model = make_model(config, leaves=loaded_leaves(config, params))
    assert run_dtypes(config, params) == (wanted, wanted)
    assert (model.activation_bytes, model.kv_dtype) == (DTYPE_BYTES[wanted], wanted)
    if parts == "all":
        assert make_model(config, quantize=scheme) == model
        assert set(uniform_leaves(config, scheme=scheme)) == set(model.leaves)


def test_cache_may_be_narrower_than_activations(tiny):
    config = read_model_config(tiny / "llama")
    model = make_model(config, dtype="bfloat16", quantize="int4", kv_dtype="bfloat16")
    assert (model.activation_bytes, model.kv_dtype) == (4, "bfloat16")
