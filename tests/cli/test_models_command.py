import json
import shutil
from pathlib import Path

import pytest

from inferjax.checkpoint import catalog
from inferjax.cli import main as cli


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("INFERJAX_CACHE_DIR", str(tmp_path))
    return tmp_path


def run_json(capsys, *words):
    assert cli.main(["models", "--json", *words]) == 0
    return json.loads(capsys.readouterr().out)


def test_models_lists_the_catalog_with_its_licences(cache, capsys):
    assert cli.main(["models"]) == 0
    out = capsys.readouterr().out
    for entry in catalog.load_catalog().values():
        (line,) = [line for line in out.splitlines() if line.startswith(entry.name)]
        assert entry.license in line
        assert line.endswith("no")


def test_models_says_what_the_cache_folder_holds(cache, capsys):
    entry = next(iter(catalog.load_catalog().values()))
    with (cache / entry.file).open("wb") as file:
        file.truncate(entry.num_bytes)
    cached = {row["name"]: row["cached"] for row in run_json(capsys)}
    assert cached.pop(entry.name) is True
    assert not any(cached.values())


def test_models_describes_a_checkpoint_from_its_config(cache, capsys, tiny):
    facts = run_json(capsys, str(tiny / "llama"))
    weights = (tiny / "llama").glob("*.safetensors")
    assert facts["num_bytes"] == sum(file.stat().st_size for file in weights)
    # bfloat16 weights, and headers of less than 8 kB
    assert 0 < facts["num_bytes"] - 2 * facts["num_parameters"] < 8192
    assert (facts["num_layers"], facts["context"], facts["dtype"]) == (3, 256, "bfloat16")
    # keys and values of 2 heads of 16 in 3 layers, 2 bytes each
    assert facts["cache_bytes_per_token"] == 3 * 2 * 2 * 16 * 2


def test_models_describes_a_checkpoint_for_people(cache, capsys, tiny):
    assert cli.main(["models", str(tiny / "llama")]) == 0
    assert "parameters             142,784" in capsys.readouterr().out


def test_models_does_not_fetch_unless_asked(cache, capsys):
    entry = next(iter(catalog.load_catalog().values()))
    facts = run_json(capsys, entry.name)
    assert facts["license"] == entry.license
    assert facts["cached"] is False
    assert list(cache.iterdir()) == []


@pytest.mark.parametrize("words", [["no-such-model"], ["no-such-model", "--fetch"]])
def test_models_unknown_name_says_which_are_known(cache, capsys, words):
    assert cli.main(["models", *words]) == 2
    assert "smollm2-135m-instruct" in capsys.readouterr().err


def test_models_tells_all_that_keeps_a_checkpoint_from_being_loaded(cache, capsys, tiny, tmp_path):
    folder = shutil.copytree(tiny / "llama", tmp_path / "bad")
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(raw | {"odd": 1, "hidden_act": "what"}))
    assert cli.main(["models", str(folder)]) == 1
    out = capsys.readouterr().out
    assert "parameters             142,784" in out
    problems = out.split("cannot be loaded:\n")[1].splitlines()
    assert len(problems) == 2
    assert "odd" in out
    assert cli.main(["models", "--json", str(folder)]) == 1
    assert len(json.loads(capsys.readouterr().out)["problems"]) == 2


def test_models_describes_layers_in_words(cache, capsys, tiny):
    assert cli.main(["models", str(tiny / "mixtral_window")]) == 0
    out = capsys.readouterr().out
    assert "sliding over" in out
    assert "of 4 experts" in out or "experts" in out


def test_models_says_what_blocks_become(cache, capsys, tiny):
    path = str(tiny.parent / "tiny_gguf" / "deepseek_v3.gguf")
    facts = run_json(capsys, path)
    assert facts["packed"] == {"q8_0": "int8 in groups of 32 (8.5 bits a weight, 8.5 in the file)"}
    assert facts["packed_bytes"] > 0
    assert cli.main(["models", path]) == 0
    assert "q8_0 int8 in groups of 32 (8.5 bits a weight" in capsys.readouterr().out
