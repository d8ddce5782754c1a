"""Whole models with packed weights on meshes: logits, tokens and what is exchanged."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from meshes import collectives, mesh_of
from tiny_models import tiny_model
from tolerances import LOGPROBS_F32, PACKED_LOGITS_RMS

import inferjax as ij
from inferjax.config import Attention, LayerSpec, ModelConfig, MoE
from inferjax.models.params import abstract_params, random_params
from inferjax.models.placed import place, shardings, split_packed
from inferjax.models.quantized import quantize
from inferjax.params import Params
from tests.kernels import native_library

VOCAB = 512


def widened(spec: LayerSpec) -> LayerSpec:
    """Give a tiny layer enough heads and hidden columns for eight devices."""
    attention: Any = spec.attention
    if isinstance(attention, Attention):
        attention = dataclasses.replace(attention, num_q_heads=16, num_kv_heads=8)
    else:
        attention = dataclasses.replace(attention, num_q_heads=8, value_dim=32)
    ffn: Any = dataclasses.replace(spec.ffn, ffn_dim=256)
    if isinstance(ffn, MoE) and ffn.shared is not None:
        ffn = dataclasses.replace(ffn, shared=dataclasses.replace(ffn.shared, ffn_dim=256))
    return dataclasses.replace(spec, attention=attention, ffn=ffn, group=0)


@functools.cache
def model(folder: str, scheme: str) -> tuple[Params, ModelConfig]:
    """Return a random packed model of one layer, the last of a tiny one."""
    config = tiny_model(folder).config
    layers = (widened(config.layers[-1]),)
    config = dataclasses.replace(config, layers=layers, vocab_size=VOCAB)
    params = random_params(config, jax.random.key(0), "float32")
    return jax.jit(quantize, static_argnums=(1, 2))(params, config, scheme), config


TOKENS = np.random.default_rng(0).integers(3, VOCAB, (4, 6)).astype(np.int32)


@functools.cache
def logits_of(folder: str, scheme: str) -> np.ndarray:
    params, config = model(folder, scheme)
    return np.asarray(ij.forward(params, config, TOKENS))


def slow(*case: Any) -> Any:
    return pytest.param(*case, marks=pytest.mark.slow)


# A sum for the embedding, one behind attention, one behind the feed-forward, one for a shared
# expert. Mixtral's four experts are cut inside on eight devices, and apart from each other on four.
@pytest.mark.parametrize(
    ("folder", "scheme", "shape", "num_sums"),
    [
        ("llama", "int4", (2, 4), 3),
        ("mixtral", "int4", (1, 8), 3),
        ("deepseek_v3", "int8", (2, 4), 4),
        slow("qwen3", "int8", (1, 8), 3),
        slow("mixtral", "int8", (2, 4), 3),
        slow("llama", "int8", (1, 8), 3),
        slow("gpt_oss", "int8", (2, 4), 3),
        slow("gpt_oss", "int4", (1, 8), 3),
        slow("qwen2_moe", "int4", (2, 4), 4),
    ],
)
def test_logits_equal_one_device_and_weights_stay_where_they_are(folder, scheme, shape, num_sums):
    params, config = model(folder, scheme)
    placed = place(params, config, mesh_of(*shape))
    run = jax.jit(lambda params, tokens: ij.forward(params, config, tokens))
    compiled = run.lower(placed, TOKENS).compile()
    exchanged = collectives(compiled.as_text())
    assert {kind for kind, _ in exchanged} == {"all-reduce"}
    assert sum(exchanged.values()) == num_sums
    got, want = np.asarray(compiled(placed, TOKENS)), logits_of(folder, scheme)
    assert np.sqrt(np.mean((got - want) ** 2)) <= PACKED_LOGITS_RMS * np.std(want)


def generated(params: Params, config: ModelConfig, tokens: Any) -> ij.Generation:
    sampling = ij.SamplingParams(temperature=0.0, ignore_eos=True)
    return ij.generate(params, config, tokens, max_new_tokens=3, sampling=sampling)


@pytest.mark.parametrize(
    ("folder", "kind"),
    [
        ("llama", AxisType.Auto),
        slow("llama", AxisType.Explicit),
        slow("mixtral", AxisType.Auto),
        slow("deepseek_v3", AxisType.Auto),
    ],
)
def test_generate_equals_one_device_and_gathers_no_weights_and_no_pages(folder, kind):
    native_library.require()
    params, config = model(folder, "int8")
    placed = place(params, config, mesh_of(2, 4, kind))
    run = jax.jit(generated, static_argnums=1)
    compiled = run.lower(placed, config, TOKENS).compile()
    text = compiled.as_text()
    # Prefill and decode, each layer: the kernel of attention on each device's own heads.
    assert text.count("PkPagedAttention") >= 2
    sizes = [
        int(np.prod([int(n) for n in shape.split("[")[1].rstrip("]").split(",") if n]))
        for what, shape in collectives(text)
        if what != "all-reduce"
    ]
    assert not any(shape.startswith(("s8", "u8")) for _, shape in collectives(text))
    # New keys and values of all rows, and one row of logits for each: nothing as large as a weight.
    assert max(sizes) <= 4 * max(VOCAB, 6 * 8 * 2 * 16)
    got, want = compiled(placed, TOKENS), generated(params, config, TOKENS)
    np.testing.assert_array_equal(got.tokens, want.tokens)
    np.testing.assert_array_equal(got.status, 0)
    np.testing.assert_allclose(got.logprobs, want.logprobs, **LOGPROBS_F32)


def test_a_step_on_a_mesh_updates_its_donated_cache_in_place():
    params, config = model("llama", "int8")
    placed = place(params, config, mesh_of(1, 8))
    exec = ij.Exec(page_size=8)

    def step(params: Params, cache: ij.KVCache, tokens: Any) -> Any:
        inputs = ij.make_inputs(tokens, block_tables=[1 + np.arange(4)[:, None]])
        out, cache = ij.extend(params, config, cache, inputs, exec=exec)
        return out.values, cache

    run = jax.jit(step, donate_argnums=1)
    new = functools.partial(ij.init_cache, config, num_pages=5, exec=exec, dtype="float32")
    got, cache = run(placed, new(), TOKENS)
    want, whole = run(params, new(), TOKENS)
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-4)
    np.testing.assert_allclose(
        cache.groups[0].values[:, 1:], whole.groups[0].values[:, 1:], rtol=0, atol=1e-5
    )
    again = run(placed, cache, TOKENS)[0]
    assert cache.groups[0].values.is_deleted()
    np.testing.assert_allclose(again, want, rtol=0, atol=1e-4)


def split_shapes(config: ModelConfig, scheme: str) -> Params:
    """Return the weights on eight devices as shapes."""
    return jax.eval_shape(
        lambda params: split_packed(quantize(params, config, scheme), config, mesh_of(1, 8)),
        abstract_params(config),
    )


def test_what_does_not_divide_is_whole_on_every_device():
    """Two key/value heads on eight devices, and 40 words each."""
    laid = split_shapes(tiny_model("llama").config, "int8")
    assert laid.layers[0].attention.wqkv.split is None
    assert laid.embed.split is None


def test_both_weights_of_an_expert_are_cut_alike():
    """128 hidden columns: sixteen of w_in on each device, but half a group of w_down's rows."""
    config = model("mixtral", "int4")[1]
    narrow = dataclasses.replace(config.layers[0].ffn, ffn_dim=128)
    layers = (dataclasses.replace(config.layers[0], ffn=narrow),)
    config = dataclasses.replace(config, layers=layers)
    laid = split_shapes(config, "int4")
    put = shardings(laid, config, mesh_of(1, 8)).layers[0]
    assert put.ffn.w_in.matrix.values.is_fully_replicated
    assert put.ffn.w_down.matrix.values.is_fully_replicated
    assert put.attention.wqkv.matrix.values.spec[0] == "model"
    laid = split_shapes(config, "int8").layers[0].ffn
    assert (laid.w_in.split.axes[3], laid.w_down.split.axes[1]) == ("model", "model")


def test_placing_twice_changes_the_cut():
    params, config = model("llama", "int8")
    first = place(params, config, mesh_of(1, 8))
    second = place(first, config, mesh_of(2, 4))
    got = np.asarray(ij.forward(second, config, jnp.asarray(TOKENS)))
    want = logits_of("llama", "int8")
    assert np.sqrt(np.mean((got - want) ** 2)) <= PACKED_LOGITS_RMS * np.std(want)
    assert first.layers[0].ffn.w_in.matrix.values.shape[0] == 2
