"""`inferjax quality`: a table, JSON, a picture, and what it refuses."""

import json

import pytest

from inferjax.cli import main as cli

pytestmark = pytest.mark.usefixtures("cache")


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("texts")
    (folder / "read.txt").write_text("All that is gold does not glitter. " * 9)
    lines = ["Not all those who wander are lost. " * 5, {"text": "The old that is strong. " * 5}]
    (folder / "seen.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n")
    return folder


def words(model, texts, *more):
    sizes = ("--window", "32", "--num-windows", "4", "--calibration-windows", "4")
    text = ("--text", str(texts / "read.txt"), "--calibration", str(texts / "seen.jsonl"))
    return ["quality", str(model), *text, *sizes, *more]


def test_quality_prints_a_table_and_writes_json_and_a_picture(model, texts, tmp_path, capsys):
    out, picture = tmp_path / "out.json", tmp_path / "out.png"
    flags = ("--schemes", "bfloat16,int4-g64", "--recipes", "rtn,gptq", "--kv", "bfloat16")
    assert cli.main(words(model, texts, *flags, "--json", str(out), "--plot", str(picture))) == 0
    printed = capsys.readouterr().out
    assert "int4-g64, gptq" in printed
    result = json.loads(out.read_text())
    assert [(row["scheme"], row["recipe"], row["kv"]) for row in result["rows"]] == [
        ("float32", "", ""),
        ("bfloat16", "rtn", ""),
        ("int4-g64", "rtn", ""),
        ("int4-g64", "gptq", ""),
        ("float32", "", "bfloat16"),
    ]
    assert (result["num_windows"], result["window"]) == (4, 32)
    assert result["num_calibration_tokens"] == 4 * 32
    assert result["text"] == ["read.txt"]
    assert {"hardware", "versions"} <= result.keys()
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--schemes", "int3"), "int4-g64"),
        (("--recipes", "magic"), "gptq"),
        (("--kv", "int2"), "kv_dtype"),
        (("--window", "1"), "--window"),
        (("--window", "512"), "whole ones count"),
        (("--num-windows", "-1"), "--num-windows"),
    ],
)
def test_quality_refuses_what_it_cannot_measure(model, texts, capsys, more, message):
    assert cli.main(words(model, texts, *more)) == 2
    assert message in capsys.readouterr().err


def test_quality_refuses_to_calibrate_on_the_text_it_measures(model, texts, capsys):
    again = ("--calibration", str(texts / "read.txt"))
    assert cli.main(words(model, texts, *again)) == 2
    assert "same text" in capsys.readouterr().err
