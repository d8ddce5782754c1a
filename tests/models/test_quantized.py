"""Quantized weights in the model: the same forward pass on packed leaves."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_models import expected, tiny_model
from tolerances import PARITY_LOGITS_F32

import inferjax as ij
from inferjax.errors import ShapeError, UnsupportedConfig
from inferjax.models.params import ArraySpec, abstract_params, check_params, param_spec
from inferjax.models.quantized import dequantize, quantize
from inferjax.quant.leaf import is_packed
from inferjax.quant.schemes import SCHEMES

FOLDERS = ("llama", "gemma3_text", "deepseek_v3", "gpt2", "qwen3_moe", "opt_post_norm")


@pytest.mark.parametrize("folder", FOLDERS)
@pytest.mark.parametrize("scheme", ["float32", "bfloat16", "int8", "int4", "fp8"])
def test_logits_equal_those_of_the_widened_weights(folder, scheme):
    model, tokens = tiny_model(folder), expected(folder)["tokens"]
    packed = quantize(model.params, model.config, scheme)
    logits = ij.forward(packed, model.config, tokens)
    wide = ij.forward(dequantize(packed), model.config, tokens)
    assert np.abs(logits - wide).max() <= PARITY_LOGITS_F32 * np.std(wide)


def generate_and_score(scheme, exec):
    model = tiny_model("llama")
    packed = quantize(model.params, model.config, scheme)
    prompt = expected("llama")["greedy_prompt"]
    sampling = ij.SamplingParams(temperature=0.0, ignore_eos=True)
    out = ij.generate(packed, model.config, prompt, max_new_tokens=8, sampling=sampling, exec=exec)
    assert not np.asarray(out.status).any()
    text = np.concatenate([prompt, out.tokens], axis=1)
    return out, ij.score(packed, model.config, text, exec=exec)[:, -8:]


@pytest.mark.parametrize("scheme", [name for name in SCHEMES if name != "int4-w4a8"])
def test_generate_runs_on_packed_weights(scheme):
    out, scores = generate_and_score(scheme, ij.Exec())
    np.testing.assert_allclose(out.logprobs, scores, rtol=0, atol=2e-2)
    if scheme in ("float32", "bfloat16"):  # the checkpoint's own bits
        np.testing.assert_array_equal(out.tokens, expected("llama")["greedy"][:, :8])


@pytest.mark.parametrize("scheme", ["int4-w4a8", "int8-w8a8"])
def test_rounded_activations_are_the_same_bits_in_exact_mode(scheme):
    """Otherwise a last bit may turn an activation by a step: 1/127 of its group's largest."""
    out, scores = generate_and_score(scheme, ij.Exec(exact=True))
    np.testing.assert_array_equal(out.logprobs, scores)


def test_what_is_multiplied_is_packed_and_the_rest_is_not():
    model = tiny_model("qwen3")
    packed = quantize(model.params, model.config, "int8")
    specs = jax.tree.leaves(
        param_spec(model.config), is_leaf=lambda node: isinstance(node, ArraySpec)
    )
    for spec, leaf in zip(specs, jax.tree.leaves(packed, is_leaf=is_packed), strict=True):
        assert is_packed(leaf) == bool(spec.num_in_axes)
        assert leaf.shape == spec.shape
    products = [leaf for leaf in jax.tree.leaves(packed, is_leaf=is_packed) if is_packed(leaf)]
    wide = sum(4 * int(np.prod(leaf.shape)) for leaf in products)
    assert sum(leaf.nbytes for leaf in products) < 0.3 * wide


def test_packed_weights_are_checked_against_the_config():
    model, other = tiny_model("llama"), tiny_model("qwen3")
    packed = quantize(model.params, model.config, "int4")
    check_params(packed, model.config)
    with pytest.raises(ShapeError):
        check_params(packed, other.config)
    with pytest.raises(ShapeError):
        quantize(model.params, other.config, "int4")
    with pytest.raises(UnsupportedConfig):
        quantize(model.params, model.config, "int5")


def test_quantize_is_a_pure_function():
    model = tiny_model("llama")
    shapes = jax.eval_shape(
        lambda params: quantize(params, model.config, "int4"), abstract_params(model.config)
    )
    packed = jax.jit(quantize, static_argnums=(1, 2))(model.params, model.config, "int4")
    assert jax.tree.structure(shapes) == jax.tree.structure(packed)
    assert jax.tree.map(jnp.shape, packed) == jax.tree.map(lambda s: s.shape, shapes)


def test_gradients_pass_through_packed_weights():
    """A small adapter beside frozen packed weights is what people train."""
    model, tokens = tiny_model("llama"), jnp.asarray(expected("llama")["tokens"][:, :12])
    packed = quantize(model.params, model.config, "float32")

    def loss(params, norm):
        params = params.replace(final_norm=params.final_norm.replace(weight=norm))
        return ij.score(params, model.config, tokens).mean()

    gradient = jax.grad(loss, argnums=1)
    weight = model.params.final_norm.weight
    np.testing.assert_allclose(
        gradient(packed, weight), gradient(model.params, weight), rtol=1e-4, atol=1e-6
    )


def test_exact_mode_keeps_its_bits_on_packed_weights():
    model = tiny_model("llama")
    packed = quantize(model.params, model.config, "int8")
    exec = ij.Exec(exact=True, page_size=8)
    prompt = expected("llama")["greedy_prompt"]
    sampling = ij.SamplingParams(temperature=0.0, ignore_eos=True)

    def run(rows):
        return ij.generate(
            packed, model.config, rows, max_new_tokens=8, sampling=sampling, exec=exec
        )

    both, alone = run(prompt), run(prompt[1:])
    np.testing.assert_array_equal(both.tokens[1:], alone.tokens)
    np.testing.assert_array_equal(both.logprobs[1:], alone.logprobs)
    text = np.concatenate([prompt, both.tokens], axis=1)
    scores = ij.score(packed, model.config, text, exec=exec)
    np.testing.assert_array_equal(scores[:, -8:], both.logprobs)
