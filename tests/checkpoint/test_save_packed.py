"""Packed weights in Orbax folders: every bit, and what a record may not say of them."""

import dataclasses
import json

import jax
import numpy as np
import pytest
from rewrite_gguf import Kind, rewrite
from tiny_models import TINY, tiny_model

import inferjax as ij
from inferjax.checkpoint.orbax import RECORD_NAME, _digest
from inferjax.errors import CheckpointError, ShapeError, UnsupportedConfig
from inferjax.models.params import check_params
from inferjax.models.quantized import form_of
from inferjax.models.tensors import tensors_from_params
from inferjax.quant.leaf import is_packed


def assert_same_bits(ours, theirs):
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    for left, right in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        assert left.dtype == right.dtype
        assert np.asarray(left).tobytes() == np.asarray(right).tobytes()


def packed_model(name, scheme):
    model = tiny_model(name)
    return dataclasses.replace(model, params=ij.quantize(model.params, model.config, scheme))


@pytest.mark.parametrize(
    ("name", "scheme"),
    [
        ("llama", "int4"),
        ("qwen3_moe", "int8"),
        ("gpt2", "fp8"),
        ("gemma3_text", "bfloat16"),
        ("llama", "int8-w8a8"),
    ],
)
def test_packed_weights_come_back_bit_for_bit(tmp_path, name, scheme):
    model = packed_model(name, scheme)
    again = ij.load(ij.save(model, tmp_path / "saved"))
    assert_same_bits(again.params, model.params)
    assert again.config == model.config


@pytest.fixture(scope="module")
def blocks(tmp_path_factory):
    """A saved model of GGUF blocks, some of them beside floats."""
    folder = tmp_path_factory.mktemp("blocks")
    kinds = {"attn_q": Kind.Q4_0, "attn_k": Kind.Q5_1, "attn_v": Kind.Q8_0, "ffn_up": Kind.Q4_0}
    path = rewrite(
        TINY.parent / "tiny_gguf" / "llama.gguf",
        folder / "m.gguf",
        lambda name, _values: next((kind for part, kind in kinds.items() if part in name), None),
    )
    model = ij.load(path)
    return model, ij.save(model, folder / "saved")


def test_blocks_of_a_file_come_back_bit_for_bit(blocks):
    model, path = blocks
    assert form_of(model.params.layers[0].attention.wqkv).scale_dtype == "float16"
    assert_same_bits(ij.load(path).params, model.params)


def test_saved_packed_weights_are_unpacked_or_packed_anew(blocks):
    model, path = blocks
    arrays = ij.load(path, quantize="none").params
    wide = ij.dequantize(model.params)
    jax.tree.map(np.testing.assert_array_equal, arrays, wide)
    half = ij.load(path, dtype="bfloat16").params
    assert {leaf.dtype.name for leaf in jax.tree.leaves(half)} == {"bfloat16"}
    again = ij.load(path, quantize="int8").params
    wanted = ij.quantize(jax.tree.map(np.asarray, wide), model.config, "int8")
    assert_same_bits(again, wanted)


def test_what_is_packed_as_asked_already_is_not_rounded_again(tmp_path):
    model = packed_model("llama", "int4")
    path = ij.save(model, tmp_path / "saved")
    assert_same_bits(ij.load(path, quantize="int4").params, model.params)


def test_saved_arrays_are_packed_while_they_are_read(tmp_path):
    model = tiny_model("qwen3_moe")
    packed = ij.load(ij.save(model, tmp_path / "saved"), quantize="int4").params
    wanted = ij.quantize(jax.tree.map(np.asarray, model.params), model.config, "int4")
    assert_same_bits(packed, wanted)


def test_safetensors_take_arrays_only(tmp_path):
    model = packed_model("llama", "int8")
    with pytest.raises(UnsupportedConfig, match=r"embed is packed as int8\n.*\n.*dequantize"):
        ij.save(model, tmp_path / "saved", format="safetensors")
    assert not list(tmp_path.iterdir())
    with pytest.raises(UnsupportedConfig, match="packed"):
        tensors_from_params(model.config, model.params)
    arrays = dataclasses.replace(model, params=ij.dequantize(model.params))
    again = ij.load(ij.save(arrays, tmp_path / "saved", format="safetensors"))
    jax.tree.map(np.testing.assert_array_equal, again.params, arrays.params)


GOOD = {"format": "int4", "group": 32, "minimum": True, "scale_dtype": "float16"}
GOOD |= {"activations": "float32", "permuted": False}
FORGED = {
    "no object": [],
    "a leaf that is no object": {"embed": "int4"},
    "fields missing": {"embed": {"format": "int4"}},
    "fields too many": {"embed": GOOD | {"zero": 1}},
    "another kind": {"embed": GOOD | {"group": 32.0}},
    "a flag for a number": {"embed": GOOD | {"group": True}},
    "an unknown format": {"embed": GOOD | {"format": "int3"}},
    "a group that nothing takes": {"embed": GOOD | {"group": 24_000}},
    "an odd group": {"embed": GOOD | {"group": 12}},
    "another group": {"embed": GOOD | {"group": 64}},
    "no minimum": {"embed": GOOD | {"minimum": False}},
    "another dtype of scales": {"embed": GOOD | {"scale_dtype": "int8"}},
    "wider scales": {"embed": GOOD | {"scale_dtype": "float32"}},
    "activations of another format": {"embed": GOOD | {"activations": "bfloat16"}},
    "a permutation": {"embed": GOOD | {"permuted": True}},
    "a leaf that does not exist": {"head/none": GOOD},
    "a leaf that is no product": {"final_norm/weight": GOOD},
    "nothing": {},
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    return ij.save(packed_model("llama", "int4"), tmp_path_factory.mktemp("forged") / "saved")


@pytest.mark.parametrize("name", FORGED)
def test_a_record_that_lies_about_packed_leaves_is_refused(saved, name):
    record_path = saved / RECORD_NAME
    text = record_path.read_text()
    record = json.loads(text)
    forged = FORGED[name]
    if isinstance(forged, dict) and forged:
        forged = record["packed"] | forged
    content = {key: value for key, value in record.items() if key != "sha256"} | {"packed": forged}
    record_path.write_text(json.dumps({"sha256": _digest(content), **content}))
    try:
        with pytest.raises(CheckpointError):
            ij.load(saved)
    finally:
        record_path.write_text(text)
    assert is_packed(ij.load(saved).params.embed)


def test_an_engine_takes_new_packed_weights_of_the_same_form():
    model = packed_model("llama", "int8")
    check_params(model.params, model.config)
    config = ij.EngineConfig(max_running=2, num_pages=32, max_len=64)
    with ij.Engine(model, config) as engine:
        new = ij.quantize(
            jax.tree.map(lambda leaf: leaf * 1.5, tiny_model("llama").params), model.config, "int8"
        )
        engine.update_params(new)
        other = ij.quantize(tiny_model("llama").params, model.config, "int4")
        for wrong in (other, tiny_model("llama").params):
            with pytest.raises(ShapeError):
                engine.update_params(wrong)
