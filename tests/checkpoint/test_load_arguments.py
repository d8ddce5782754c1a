"""No argument of `load` is ignored, whatever the format."""

import json

import jax
import pytest
from tiny_models import ONE_EACH, TINY, tiny_model

import inferjax as ij
from inferjax.errors import UnsupportedConfig
from inferjax.quant.leaf import is_packed

NAME = "model.safetensors"
FORMATS = ("safetensors", "gguf", "orbax", "a lone file", "codes")


def lone_file(folder):
    return ij.save(tiny_model("llama"), folder / "whole", format="safetensors") / NAME


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """Paths of a tiny Llama model, by format."""
    folder = tmp_path_factory.mktemp("formats")
    return {
        "safetensors": TINY / "llama",
        "gguf": TINY.parent / "tiny_gguf" / "llama.gguf",
        "orbax": ij.save(tiny_model("llama"), folder / "saved"),
        "a lone file": lone_file(folder),
        "codes": TINY.parent / "tiny_quantized" / "awq",
    }


def dtypes_of(params) -> set[str]:
    leaves = jax.tree.leaves(params, is_leaf=is_packed)
    return {leaf.dtype.name for leaf in leaves if not is_packed(leaf)}


@pytest.mark.parametrize("format", FORMATS)
def test_the_context_is_the_callers(sources, format):
    declared = ij.load(sources[format]).config.max_context
    assert ij.load(sources[format], max_context=17).config.max_context == 17
    for wrong in (declared + 1, 0, -5, True):
        with pytest.raises(UnsupportedConfig, match="max_context"):
            ij.load(sources[format], max_context=wrong)


@pytest.mark.parametrize("format", FORMATS)
def test_dtype_and_scheme_are_the_callers(sources, format):
    arrays = ij.load(sources[format], dtype="bfloat16")
    assert dtypes_of(arrays.params) == {"bfloat16"}
    assert arrays.config.dtype == "bfloat16"
    mixed = ij.load(sources[format], dtype="bfloat16", quantize="int8")
    assert is_packed(mixed.params.embed)
    assert dtypes_of(mixed.params) == {"bfloat16"}
    for wrong in ({"dtype": "int8"}, {"dtype": "float64"}, {"quantize": "int3"}):
        with pytest.raises(UnsupportedConfig):
            ij.load(sources[format], **wrong)


@pytest.mark.parametrize("folder", ONE_EACH)
def test_every_family_serves_the_context_that_is_asked_for(folder, tmp_path):
    model = ij.load(TINY / folder, max_context=9)
    assert model.config.max_context == 9
    again = ij.load(ij.save(model, tmp_path / "saved"))
    assert again.config == model.config


def test_a_saved_context_is_the_default_and_no_limit(tmp_path):
    path = ij.save(ij.load(TINY / "llama", max_context=9), tmp_path / "saved")
    assert ij.load(path).config.max_context == 9
    assert ij.load(path, max_context=12).config.max_context == 12
    assert ij.load(path, max_context=5).config.max_context == 5


def test_a_dynamic_rope_of_a_saved_model_reaches_further(tmp_path):
    folder = lone_file(tmp_path).parent
    raw = json.loads((folder / "config.json").read_text())
    raw["rope_scaling"] = {"rope_type": "dynamic", "factor": 2.0}
    (folder / "config.json").write_text(json.dumps(raw))
    longer = 4 * raw["max_position_embeddings"]
    wanted = ij.load(folder, max_context=longer).config
    assert wanted.max_context == longer
    path = ij.save(ij.load(folder), tmp_path / "saved")
    assert ij.load(path, max_context=longer).config == wanted
