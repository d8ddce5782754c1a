"""GGUF's blocks as packed weights: the values of the file to the last bit, and its logits."""

import functools
from typing import Any

import gguf
import jax
import numpy as np
import pytest
from rewrite_gguf import Kind, rewrite
from tiny_models import TINY, expected
from tolerances import PARITY_LOGITS_F32

import inferjax as ij
from inferjax.checkpoint.load import load
from inferjax.errors import CheckpointError
from inferjax.models.params import ArraySpec, param_spec
from inferjax.models.quantized import form_of
from inferjax.quant.leaf import is_packed, widen

FILES = TINY.parent / "tiny_gguf"
SIMPLE = [Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1, Kind.Q8_0]


def by_part(**kinds):
    """Choose types by parts of names; the first that fits counts."""
    return lambda name, _values: next((kind for part, kind in kinds.items() if part in name), None)


def in_turn(name, values):
    """Give every matrix one of the simple types, chosen by its name."""
    if values.ndim < 2 or values.shape[-1] % 32 or "inp" in name:
        return None
    return SIMPLE[sum(map(ord, name)) % len(SIMPLE)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("native")


@functools.cache
def mixed(folder, name):
    """Return a tiny model of which every matrix has a type of its own."""
    return rewrite(FILES / f"{name}.gguf", folder / f"{name}.gguf", in_turn)


def leaves_of(params):
    return jax.tree.leaves_with_path(params, is_leaf=is_packed)


def assert_same_values(native, arrays):
    """Compare every leaf, packed ones with what they stand for."""
    for (path, ours), (_, theirs) in zip(leaves_of(native), leaves_of(arrays), strict=True):
        assert not is_packed(theirs)
        got = widen(ours) if is_packed(ours) else ours
        np.testing.assert_array_equal(got, theirs, err_msg=jax.tree_util.keystr(path))


# Rows of these have no whole number of blocks of 32, and are stored as floats.
RAGGED = {
    "llama": {"w_down"},
    "gemma3_text": {"w_down"},
    "phi3_longrope": {"w_down"},
    "qwen2_moe": {"w_down"},
    "gpt2": set(),
    "gpt_neox": set(),
    "gpt_oss": set(),
    "deepseek_v3": {"w_down", "wk_b"},
}


@pytest.mark.parametrize("name", RAGGED)
def test_every_leaf_has_the_file_s_values(folder, name):
    path = mixed(folder, name)
    native, arrays = load(path), load(path, quantize="none")
    assert native.config == arrays.config
    assert_same_values(native.params, arrays.params)
    specs = jax.tree.leaves(
        param_spec(native.config), is_leaf=lambda node: isinstance(node, ArraySpec)
    )
    floats = {
        path[-1].name
        for spec, (path, leaf) in zip(specs, leaves_of(native.params), strict=True)
        if spec.num_in_axes and not is_packed(leaf)
    }
    assert floats == RAGGED[name]


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "qwen2_moe"])
def test_logits_are_those_of_the_dequantized_weights(folder, name):
    path, tokens = mixed(folder, name), expected(name)["tokens"]
    native, arrays = load(path), load(path, quantize="none")
    ours = np.asarray(ij.forward(native.params, native.config, tokens))
    theirs = np.asarray(ij.forward(arrays.params, arrays.config, tokens))
    assert np.abs(ours - theirs).max() <= PARITY_LOGITS_F32 * theirs.std()


def test_the_types_in_blocks_of_256_keep_their_values(folder):
    """Weights of a llama with rows of 256, which nothing has trained."""
    kinds = by_part(
        attn_q=Kind.Q4_K,
        attn_k=Kind.Q6_K,
        attn_v=Kind.Q5_K,
        attn_output=Kind.Q3_K,
        ffn_gate=Kind.IQ4_XS,
        ffn_up=Kind.IQ4_NL,
        ffn_down=Kind.Q2_K,
        token_embd=Kind.Q6_K,
        output=Kind.Q4_K,
    )
    path = wide_llama(folder, lambda name, values: kinds(name, values) if values.ndim > 1 else None)
    native, arrays = load(path), load(path, quantize="none")
    assert_same_values(native.params, arrays.params)
    layer: Any = native.params.layers[0]
    forms = [form_of(leaf) for leaf in (layer.attention.wqkv, layer.attention.wo, layer.ffn.w_in)]
    assert [(f.format, f.group, f.minimum) for f in forms] == [
        ("int8", 16, True),
        ("int4", 16, False),
        ("int8", 32, False),
    ]
    embed: Any = native.params.embed
    assert form_of(embed).format == "int8"
    tokens = expected("llama")["tokens"][:, :8]
    ours = np.asarray(ij.forward(native.params, native.config, tokens))
    theirs = np.asarray(ij.forward(arrays.params, arrays.config, tokens))
    assert np.abs(ours - theirs).max() <= PARITY_LOGITS_F32 * theirs.std()


def wide_llama(folder, kind_of):
    """Return the tiny llama with rows of 256 that repeat its own."""
    return rewrite(
        FILES / "llama.gguf",
        folder / "wide.gguf",
        kind_of,
        sizes={64: 256, 112: 256},
        embedding_length=256,
        feed_forward_length=256,
        head_count=16,
    )


def test_leaves_of_one_type_are_as_small_as_the_file(folder):
    for kind, form in {
        Kind.Q4_0: ("int4", 32, False, "float16"),
        Kind.Q4_1: ("int4", 32, True, "float16"),
        Kind.Q5_0: ("int8", 32, False, "float16"),
        Kind.Q5_1: ("int8", 32, True, "float16"),
        Kind.Q8_0: ("int8", 32, False, "float16"),
    }.items():
        path = rewrite(
            FILES / "llama.gguf",
            folder / f"{kind.name}.gguf",
            lambda _name, values, kind=kind: kind if values.ndim > 1 else None,
            sizes={112: 128},
            feed_forward_length=128,
        )
        packed = [leaf for _, leaf in leaves_of(load(path).params) if is_packed(leaf)]
        found = {form_of(leaf) for leaf in packed}
        assert {(f.format, f.group, f.minimum, f.scale_dtype) for f in found} == {form}


def test_a_dtype_or_none_gives_arrays_and_plain_types_stay_arrays(folder):
    path = mixed(folder, "llama")
    ways: tuple[dict[str, Any], ...] = (
        {"dtype": "float32"},
        {"quantize": "none"},
        {"dtype": "bfloat16"},
    )
    for arguments in ways:
        leaves = leaves_of(load(path, **arguments).params)
        assert {str(leaf.dtype) for _, leaf in leaves} == {arguments.get("dtype", "float32")}
        assert not any(is_packed(leaf) for _, leaf in leaves)
    both = load(path, dtype="bfloat16", quantize="native")
    assert {str(leaf.dtype) for _, leaf in leaves_of(both.params) if not is_packed(leaf)} == {
        "bfloat16"
    }
    assert any(is_packed(leaf) for _, leaf in leaves_of(both.params))
    plain = load(FILES / "llama.gguf")
    assert not any(is_packed(leaf) for _, leaf in leaves_of(plain.params))


def test_a_matrix_of_floats_among_blocks_keeps_its_leaf_an_array(folder):
    """Queries in blocks, keys and values in float16: no codes hold all three."""
    path = rewrite(FILES / "llama.gguf", folder / "part.gguf", by_part(attn_q=Kind.Q8_0))
    native, arrays = load(path), load(path, quantize="none")
    assert not any(is_packed(leaf) for _, leaf in leaves_of(native.params))
    assert_same_values(native.params, arrays.params)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_scale_that_is_not_finite_is_refused(folder, value):
    path = rewrite(
        FILES / "llama.gguf", folder / "bad.gguf", by_part(ffn_gate=Kind.Q8_0, ffn_up=Kind.Q8_0)
    )
    content = bytearray(path.read_bytes())
    entry = next(t for t in gguf.GGUFReader(path).tensors if "ffn_gate" in t.name)
    at = entry.data_offset + 34 * 5
    content[at : at + 2] = np.float16(value).tobytes()
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"ffn_gate.*32 of \d+ values that are NaN or inf"):
        load(path)
