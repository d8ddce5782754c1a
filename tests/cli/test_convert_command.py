import json

import jax
import numpy as np
import pytest
from tiny_models import TINY, tiny_model

import inferjax as ij
from inferjax.cli import main as cli
from inferjax.cli.convert import parse_size
from inferjax.errors import InvalidInput


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("INFERJAX_CACHE_DIR", str(tmp_path / "cache"))


@pytest.mark.parametrize("form", ["orbax", "safetensors"])
def test_convert_keeps_the_stored_dtype_and_values(tmp_path, capsys, form):
    target = tmp_path / "out"
    words = ["convert", str(TINY / "llama"), str(target), "--format", form, "--json"]
    assert cli.main(words) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["dtype"], report["format"], report["path"]) == ("bfloat16", form, str(target))
    assert report["num_bytes"] == sum(f.stat().st_size for f in target.rglob("*") if f.is_file())
    again = ij.load(target)
    jax.tree.map(np.testing.assert_array_equal, again.params, tiny_model("llama").params)
    assert ij.load(target, dtype="bfloat16").params.embed.dtype == "bfloat16"


def test_convert_writes_several_files_and_another_dtype(tmp_path, capsys):
    target = tmp_path / "out"
    words = ["convert", str(TINY / "qwen3"), str(target), "--shard-bytes", "200kb"]
    assert cli.main([*words, "--dtype", "float32"]) == 0
    assert "float32" in capsys.readouterr().out
    files = sorted(target.glob("*.safetensors"))
    assert len(files) > 2
    largest = max(leaf.nbytes for leaf in jax.tree.leaves(tiny_model("qwen3").params))
    assert max(file.stat().st_size for file in files) < max(200_000, largest) + 10_000
    jax.tree.map(np.testing.assert_array_equal, ij.load(target).params, tiny_model("qwen3").params)


def test_convert_refuses_to_overwrite_unless_told(tmp_path, capsys):
    words = ["convert", str(TINY / "llama"), str(tmp_path / "out")]
    assert cli.main(words) == 0
    assert cli.main(words) == 2
    assert "--overwrite" in capsys.readouterr().err
    assert cli.main([*words, "--overwrite"]) == 0


def test_sizes():
    assert [parse_size(text) for text in ("5GB", "500mb", "7kB", "12")] == [
        5 * 10**9,
        5 * 10**8,
        7000,
        12,
    ]
    for text in ("", "5TB", "-1", "1.5", "0", "GB", "1 GB", "nan"):
        with pytest.raises(InvalidInput):
            parse_size(text)


def test_convert_calibrates_on_a_text(model, tmp_path, capsys):
    text, target = tmp_path / "text.txt", tmp_path / "out"
    text.write_text("All that is gold does not glitter. " * 40)
    words = ["convert", str(model), str(target), "--format", "orbax", "--quantize", "int4-g64"]
    assert cli.main([*words, "--recipe", "gptq", "--calibration", str(text), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["packed"] == ["int4"]
    fitted, plain = ij.load(target), ij.load(model, quantize="int4-g64")
    assert jax.tree.structure(fitted.params) == jax.tree.structure(plain.params)
    fitted, plain = (m.params.layers[0].ffn.w_in.matrix.values for m in (fitted, plain))
    assert fitted.dtype == plain.dtype
    assert not np.array_equal(fitted, plain)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", "", "a.txt holds no text"),
        ("a.txt", "\n \n", "a.txt holds no text"),
        ("a.jsonl", "", "a.jsonl holds no text"),
        ("a.jsonl", "\n\n", "a.jsonl holds no text"),
        ("a.jsonl", '""\n', "a.jsonl holds no text"),
        ("a.jsonl", '"short"\n"ones"\n', "the text has 9 tokens"),
    ],
)
def test_convert_refuses_a_calibration_without_text(
    model, tmp_path, capsys, monkeypatch, name, content, message
):
    def quantize(*_: object, **__: object) -> None:
        raise AssertionError("the text is checked first")

    monkeypatch.setattr("inferjax.calibrate.quantize", quantize)
    (tmp_path / name).write_text(content)
    words = ["convert", str(model), str(tmp_path / "out"), "--format", "orbax"]
    flags = ("--quantize", "int4", "--recipe", "gptq", "--calibration", str(tmp_path / name))
    assert cli.main([*words, *flags]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "more",
    [
        ("--recipe", "gptq"),
        ("--recipe", "awq", "--quantize", "int4"),
        ("--recipe", "awq", "--calibration", "a.txt"),
        ("--recipe", "gptq", "--quantize", "native", "--calibration", "a.txt"),
        ("--quantize", "int4", "--calibration", "a.txt"),
        ("--quantize", "int4", "--recipe", "awq", "--calibration", "missing.txt"),
    ],
)
def test_convert_refuses_half_a_recipe(model, tmp_path, capsys, more):
    assert cli.main(["convert", str(model), str(tmp_path / "out"), "--format", "orbax", *more]) == 2
    assert "inferjax: " in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
