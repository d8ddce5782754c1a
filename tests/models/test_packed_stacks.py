"""Packed experts and packed heads of latent attention: stacks of matrices in the model."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_models import expected, tiny_model
from tolerances import PACKED_LOGITS_RMS

import inferjax as ij
from inferjax.config import MoE
from inferjax.models.quantized import dequantize, quantize
from inferjax.params import Params
from inferjax.quant.leaf import PackedLeaf, widen
from inferjax.quant.linear import grouped_linear
from inferjax.quant.schemes import SCHEMES, round_to_nearest
from tests.kernels import native_library

# deepseek_v3 and qwen3_moe are in test_quantized.py, with more schemes.
FOLDERS = ("gpt_oss", "mixtral", "qwen2_moe", "deepseek_v2", "deepseek_v2_lite")


@functools.cache
def packed(folder: str, scheme: str) -> Params:
    model = tiny_model(folder)
    return quantize(model.params, model.config, scheme)


@pytest.mark.parametrize("folder", FOLDERS)
@pytest.mark.parametrize("scheme", ["int8", "int4"])
def test_logits_equal_those_of_the_widened_weights(folder, scheme):
    config, tokens = tiny_model(folder).config, expected(folder)["tokens"]
    weights = packed(folder, scheme)
    logits = ij.forward(weights, config, tokens)
    wide = ij.forward(dequantize(weights), config, tokens)
    assert np.sqrt(np.mean((logits - wide) ** 2)) <= PACKED_LOGITS_RMS * np.std(wide)


@pytest.mark.parametrize("folder", ["gpt_oss", "deepseek_v2"])
def test_every_expert_and_every_head_is_packed_by_itself(folder):
    model = tiny_model(folder)
    for layer, plain in zip(packed(folder, "int8").layers, model.params.layers, strict=True):
        pairs = []
        if hasattr(layer.attention, "wk_b"):
            pairs += [
                (getattr(layer.attention, n), getattr(plain.attention, n)) for n in ("wk_b", "wv_b")
            ]
        if hasattr(layer.ffn, "router"):
            pairs += [(getattr(layer.ffn, n), getattr(plain.ffn, n)) for n in ("w_in", "w_down")]
            assert not isinstance(layer.ffn.router, PackedLeaf)
        for leaf, array in pairs:
            assert isinstance(leaf, PackedLeaf)
            assert (leaf.num_batch_axes, leaf.num_in_axes, leaf.shape) == (1, 1, array.shape)
            assert leaf.matrix.values.shape[0] == array.shape[0]
            scale = np.abs(array).reshape(*array.shape[:2], -1).max(1)
            apart = np.abs(widen(leaf) - array).reshape(*array.shape[:2], -1).max(1)
            assert (apart <= scale * 0.51 / 127).all()


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_stack_is_packed_as_its_matrices_are(rng, scheme):
    stack = rng.normal(size=(3, 50, 21)).astype(np.float32)
    whole = round_to_nearest(stack, SCHEMES[scheme])
    for index in range(3):
        one = round_to_nearest(stack[index], SCHEMES[scheme])
        part = jax.tree.map(lambda leaf, index=index: leaf[index], whole)
        jax.tree.map(np.testing.assert_array_equal, part, one)


def test_a_row_keeps_its_bits_whoever_shares_its_experts():
    """Exact mode on packed experts: natively, and as XLA unpacks them."""
    config, prompt = tiny_model("qwen3_moe").config, expected("qwen3_moe")["greedy_prompt"]
    sampling = ij.SamplingParams(temperature=0.0, ignore_eos=True)
    how = {"max_new_tokens": 4, "sampling": sampling, "exec": ij.Exec(exact=True, page_size=8)}
    weights = packed("qwen3_moe", "int4")
    both = ij.generate(weights, config, prompt, **how)
    alone = ij.generate(weights, config, prompt[1:], **how)
    np.testing.assert_array_equal(both.tokens[1:], alone.tokens)
    np.testing.assert_array_equal(both.logprobs[1:], alone.logprobs)
    text = np.concatenate([prompt, both.tokens], axis=1)
    scores = ij.score(weights, config, text, exec=how["exec"])
    np.testing.assert_array_equal(scores[:, -4:], both.logprobs)


def test_a_step_reads_packed_experts_where_they_lie():
    """One native call for each of the two products, and no unpacked expert anywhere."""
    native_library.require()
    model = tiny_model("mixtral")
    spec = model.config.layers[0].ffn
    assert isinstance(spec, MoE)
    text = (
        jax.jit(ij.forward, static_argnums=1)
        .lower(packed("mixtral", "int8"), model.config, jnp.zeros((1, 1), jnp.int32))
        .compile()
        .as_text()
    )
    dim, experts = model.config.model_dim, spec.router.num_experts
    assert text.count("PkGroupedMatmul") >= 2
    for shape in (f"[{experts},{dim},", f"f32[{dim},{2 * spec.ffn_dim}]"):
        assert shape not in text


def test_a_permuted_stack_is_multiplied_in_its_own_order(rng):
    """As act-order GPTQ stores experts: each has its own order of the summed axis."""
    stack = rng.normal(size=(3, 64, 5)).astype(np.float32)
    orders = np.stack([rng.permutation(64) for _ in range(3)]).astype(np.int32)
    sorted_rows = np.take_along_axis(stack, orders[:, :, None], axis=1)
    leaf = PackedLeaf(
        matrix=jax.tree.map(jnp.asarray, round_to_nearest(sorted_rows, SCHEMES["int8-g128"])),
        permutation=jnp.asarray(orders),
        shape=stack.shape,
        num_in_axes=1,
        num_batch_axes=1,
    )
    assert np.abs(widen(leaf) - stack).max() < 0.02
    tiles = rng.normal(size=(2, 3, 64)).astype(np.float32)
    index = jnp.array([2, 0], jnp.int32)
    got = grouped_linear(jnp.asarray(tiles), leaf, index, jnp.full(2, 3, jnp.int32))
    want = np.einsum("nrd,ndf->nrf", tiles, np.asarray(widen(leaf))[[2, 0]])
    np.testing.assert_allclose(got, want, atol=1e-4)
