"""`inferjax quality`: a table, JSON, a picture, and what it refuses."""

import json
import shutil

import pytest

from inferjax.bench import quality
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


def test_every_window_begins_as_the_tokenizer_begins_a_text(
    model, texts, tmp_path, monkeypatch, capsys
):
    folder = tmp_path / "with_bos"
    shutil.copytree(model, folder)
    raw = json.loads((folder / "tokenizer.json").read_text())
    raw["model"]["vocab"]["<s>"] = 1
    (folder / "tokenizer.json").write_text(json.dumps(raw))
    config = {"bos_token": "<s>", "add_bos_token": True}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    seen, measure = {}, quality.measure

    def noted(params, config, windows, calibration, *rest, **more):
        seen.update(windows=windows, calibration=calibration)
        return measure(params, config, windows, calibration, *rest, **more)

    monkeypatch.setattr(quality, "measure", noted)
    assert cli.main(words(folder, texts, "--schemes", "bfloat16")) == 0
    assert "124 tokens in 4 windows of 32" in capsys.readouterr().out
    for rows in seen.values():
        assert rows.shape == (4, 32)
        assert (rows[:, 0] == 1).all()
        assert (rows[:, 1:] != 1).all()


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


@pytest.mark.parametrize("flag", ["--text", "--calibration"])
def test_quality_refuses_a_file_without_text(model, texts, tmp_path, capsys, flag):
    (tmp_path / "empty.jsonl").write_text("\n\n")
    assert cli.main(words(model, texts, flag, str(tmp_path / "empty.jsonl"))) == 2
    assert "empty.jsonl holds no text" in capsys.readouterr().err


def test_quality_refuses_to_calibrate_on_the_text_it_measures(model, texts, capsys):
    again = ("--calibration", str(texts / "read.txt"))
    assert cli.main(words(model, texts, *again)) == 2
    assert "same text" in capsys.readouterr().err
