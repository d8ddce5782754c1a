"""Files that a command writes in the end are refused in the beginning, if they could not be."""

import pytest

from inferjax.cli import main as cli

pytestmark = pytest.mark.usefixtures("cache")

COMMANDS = {
    "quality --json": (["quality", "no-such-model", "--json"], ""),
    "quality --plot": (["quality", "no-such-model", "--plot"], ""),
    "plan --plot": (["plan", "no-such-model", "--plot"], ""),
    "bench sweep -o": (["bench", "sweep", "--model", "no-such-model", "-o"], ".json"),
}


def refused(words, capsys):
    """Return the error, which is about the file: a model that there is not comes later."""
    assert cli.main(words) == 2
    err = capsys.readouterr().err
    assert "no-such-model" not in err
    assert "Why: " in err
    assert "Fix: " in err
    return err


@pytest.mark.parametrize("command", COMMANDS)
def test_file_in_a_folder_that_is_not_there(command, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    words, _ = COMMANDS[command]
    err = refused([*words, str(tmp_path / "none" / "out")], capsys)
    assert f"{tmp_path / 'none'} is no folder" in err


@pytest.mark.parametrize("command", COMMANDS)
def test_file_that_is_a_folder(command, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    words, suffix = COMMANDS[command]
    (tmp_path / f"out{suffix}").mkdir()
    assert "is a folder" in refused([*words, str(tmp_path / "out")], capsys)


@pytest.mark.parametrize("command", COMMANDS)
def test_file_that_may_not_be_written(command, tmp_path, monkeypatch, capsys):
    pytest.importorskip("matplotlib")
    words, _ = COMMANDS[command]
    # Tests may run as root, whom no mode stops.
    monkeypatch.setattr("inferjax.cli.setup.os.access", lambda *_: False)
    assert "cannot be written" in refused([*words, str(tmp_path / "out")], capsys)


def test_picture_of_a_sweep_is_looked_at_only_if_it_is_drawn(tmp_path, capsys):
    (tmp_path / "out.png").mkdir()
    words = ["bench", "sweep", "--model", "no-such-model", "-o", str(tmp_path / "out")]
    assert cli.main([*words, "--no-plot"]) == 2
    assert "no-such-model" in capsys.readouterr().err


def test_convert_looks_at_its_destination_first(tmp_path, capsys):
    words = ["convert", "no-such-model", str(tmp_path)]
    assert "exists already" in refused(words, capsys)
    (tmp_path / "file").touch()
    words = ["convert", "no-such-model", str(tmp_path / "file"), "--overwrite"]
    assert "is a file" in refused(words, capsys)


def test_batch_opens_its_results_first(tmp_path, capsys):
    (tmp_path / "in.jsonl").touch()
    words = ["generate", "--model", "no-such-model", "--batch", str(tmp_path / "in.jsonl"), "-o"]
    assert "cannot be written" in refused([*words, str(tmp_path / "none" / "out")], capsys)


def test_convert_looks_at_where_its_destination_will_be(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    words = ["convert", "no-such-model", str(tmp_path / "file" / "new" / "model")]
    assert cli.main(words) == 2
    err = capsys.readouterr().err
    assert f"{tmp_path / 'file'} is a file" in err
    assert "no-such-model" not in err.replace(" ".join(words), "")
