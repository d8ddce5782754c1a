"""--quantize on the commands that load a model."""

import warnings

import jax
import numpy as np
import pytest
from tiny_models import TINY, tiny_model

import inferjax as ij
from inferjax.cli import main as cli
from inferjax.cli.main import parser_for
from inferjax.cli.options import QUANTIZE
from inferjax.cli.setup import warnings_in_a_line
from inferjax.errors import PackedWeightsWarning
from inferjax.quant.leaf import is_packed
from inferjax.quant.schemes import SCHEMES

COMMANDS = (
    ["generate", "text"],
    ["chat"],
    ["convert", "from", "to"],
    ["bench", "latency"],
    ["bench", "throughput"],
    ["bench", "load"],
)
BLOCKS = TINY.parent / "tiny_gguf" / "deepseek_v3.gguf"


@pytest.fixture(autouse=True)
def folder(cache):
    return cache


def packed_formats(params):
    leaves = jax.tree.leaves(params, is_leaf=is_packed)
    return {leaf.matrix.format for leaf in leaves if is_packed(leaf)}


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_every_command_that_loads_a_model_has_the_flag(words):
    args = parser_for(words).parse_args([*words, "--quantize", "int8"])
    assert args.quantize == "int8"
    assert parser_for(words).parse_args(words).quantize is None


def test_the_help_names_what_load_takes():
    assert set(QUANTIZE) == {*SCHEMES, "native", "none"}


def test_a_reply_is_generated_with_packed_weights(model, capsys):
    words = ["generate", "--model", str(model), "--quantize", "int8", "--quiet"]
    assert cli.main([*words, "--max-tokens", "2", "hello"]) == 0
    assert capsys.readouterr().err == ""


def test_an_unknown_scheme_is_an_error(model, capsys):
    assert cli.main(["generate", "--model", str(model), "--quantize", "int3", "hello"]) == 2
    assert "int4-g128" in capsys.readouterr().err


def test_convert_packs(tmp_path, capsys):
    target = tmp_path / "out"
    words = ["convert", str(TINY / "llama"), str(target), "--format", "orbax"]
    assert cli.main([*words, "--quantize", "int4"]) == 0
    assert "orbax, bfloat16, int4" in capsys.readouterr().out
    saved = ij.load(target).params
    wanted = ij.quantize(
        jax.tree.map(np.asarray, tiny_model("llama").params), tiny_model("llama").config, "int4"
    )
    jax.tree.map(np.testing.assert_array_equal, saved, wanted)


def test_convert_keeps_the_codes_of_a_file(tmp_path, capsys):
    target = tmp_path / "out"
    assert cli.main(["convert", str(BLOCKS), str(target), "--format", "orbax"]) == 0
    assert "orbax, float32, int8" in capsys.readouterr().out
    ours, theirs = ij.load(target).params, ij.load(BLOCKS).params
    assert packed_formats(ours) == {"int8"}
    jax.tree.map(np.testing.assert_array_equal, ours, theirs)


def test_convert_writes_arrays_for_hugging_face(tmp_path, capsys):
    words = ["convert", str(BLOCKS), str(tmp_path / "out")]
    assert cli.main([*words, "--quantize", "int4"]) == 2
    assert "--format orbax" in capsys.readouterr().err
    assert cli.main([*words, "--dtype", "float32"]) == 0
    ours = ij.load(tmp_path / "out").params
    theirs = ij.load(BLOCKS, quantize="none").params
    jax.tree.map(np.testing.assert_array_equal, ours, theirs)


def test_a_warning_is_one_line_on_stderr(capsys):
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        with warnings_in_a_line():
            warnings.warn("weights are slow here", PackedWeightsWarning, stacklevel=1)
    assert capsys.readouterr().err == "inferjax: weights are slow here\n"
