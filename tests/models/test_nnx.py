"""Flax modules: the reference module equals the engine's forward, and weights travel both ways."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from tiny_models import ONE_EACH, expected, tiny_model
from tolerances import LOGITS_F32, PARITY_LOGITS_F32

import inferjax as ij
from inferjax.errors import ShapeError, UnsupportedModel
from inferjax.models.tensors import tensors_from_params
from inferjax.nnx import Decoder, from_nnx, to_nnx

LLAMA_LIKE = ("llama", "llama3_rope", "mistral_window", "qwen2", "qwen2_windows", "qwen3")


class Named(nnx.Module):
    """A module with parameters of given dotted names, under Flax's names of the last part."""

    def __init__(self, tensors, in_first=False):
        for name, values in tensors.items():
            *path, leaf = name.split(".")
            node = self
            for part in path:
                if not hasattr(node, part):
                    setattr(node, part, Named({}))
                node = getattr(node, part)
            # Linear layers, as a trainer has them: everything of two axes but the embeddings.
            linear = leaf == "weight" and values.ndim == 2 and "embed" not in name
            leaf = "kernel" if linear else leaf
            setattr(node, leaf, nnx.Param(values.T if linear and not in_first else values))


@functools.cache
def decoder(folder: str) -> Decoder:
    model = tiny_model(folder)
    module = Decoder(model.config, rngs=nnx.Rngs(0))
    to_nnx(model.params, model.config, module)
    return module


@pytest.mark.parametrize("folder", LLAMA_LIKE)
def test_the_reference_module_equals_hugging_face(folder):
    known = expected(folder)
    logits = decoder(folder)(jnp.asarray(known["tokens"]))
    worst = np.abs(np.asarray(logits) - known["logits"]).max() / known["logits"].std()
    assert worst <= PARITY_LOGITS_F32


@pytest.mark.parametrize("folder", LLAMA_LIKE)
def test_weights_come_back_from_the_module(folder):
    model = tiny_model(folder)
    jax.tree.map(
        np.testing.assert_array_equal, from_nnx(decoder(folder), model.config), model.params
    )


@pytest.mark.parametrize("folder", ONE_EACH)
def test_weights_of_every_family_come_from_named_parameters(folder):
    model = tiny_model(folder)
    module = Named(tensors_from_params(model.config, model.params), folder == "gpt2")
    params = from_nnx(module, model.config)
    jax.tree.map(np.testing.assert_array_equal, params, model.params)
    changed = jax.tree.map(lambda leaf: leaf + 1, model.params)
    to_nnx(changed, model.config, module)
    jax.tree.map(np.testing.assert_array_equal, from_nnx(module, model.config), changed)


def test_random_weights_give_equal_logits_and_greedy_tokens():
    config = tiny_model("qwen3").config
    module = Decoder(config, rngs=nnx.Rngs(1))
    params = from_nnx(module, config)
    tokens = jnp.asarray(expected("qwen3")["tokens"][:, :12])
    np.testing.assert_allclose(ij.forward(params, config, tokens), module(tokens), **LOGITS_F32)


def test_a_training_step_generates_from_its_own_weights():
    """The step trains, generates with the new weights and compiles once."""
    config = tiny_model("llama").config
    module = Decoder(config, rngs=nnx.Rngs(2))
    optimizer = nnx.Optimizer(module, optax.adam(3e-3), wrt=nnx.Param)
    text = jnp.asarray(expected("llama")["tokens"][:, :24])
    traces = []

    @nnx.jit
    def step(module, optimizer):
        traces.append(None)

        def loss(module):
            return -ij.score(from_nnx(module, config), config, text).mean()

        value, gradient = nnx.value_and_grad(loss)(module)
        with jax.numpy_dtype_promotion("standard"):  # optax mixes its counters with floats
            optimizer.update(module, gradient)
        out = ij.generate(
            from_nnx(module, config),
            config,
            text[:, :8],
            max_new_tokens=16,
            sampling=ij.SamplingParams(temperature=0.0, ignore_eos=True),
        )
        return value, out.tokens

    losses, first = [], None
    for _ in range(60):
        value, tokens = step(module, optimizer)
        losses.append(float(value))
        first = tokens if first is None else first
    assert len(traces) == 1
    assert losses[-1] < losses[0] / 4
    hits = np.mean(np.asarray(tokens) == np.asarray(text[:, 8:]))
    assert hits > 0.9 > np.mean(np.asarray(first) == np.asarray(text[:, 8:]))


def test_a_module_of_another_size_is_refused():
    model, other = tiny_model("llama"), tiny_model("qwen3")
    module = Decoder(other.config, rngs=nnx.Rngs(0))
    with pytest.raises(ShapeError):
        to_nnx(model.params, model.config, module)
    with pytest.raises(ShapeError):
        from_nnx(module, model.config)


def test_a_missing_parameter_is_named():
    model = tiny_model("llama")
    tensors = tensors_from_params(model.config, model.params)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    module = Named(tensors)
    with pytest.raises(ShapeError, match=r"layers\.1\.mlp\.up_proj"):
        from_nnx(module, model.config)
    with pytest.raises(ShapeError, match=r"layers\.1\.mlp\.up_proj"):
        to_nnx(model.params, model.config, module)


@pytest.mark.parametrize("folder", ["gemma3_text", "gpt2", "deepseek_v3", "gpt_oss"])
def test_the_reference_module_refuses_what_it_does_not_compute(folder):
    with pytest.raises(UnsupportedModel, match="computes no"):
        Decoder(tiny_model(folder).config, rngs=nnx.Rngs(0))
