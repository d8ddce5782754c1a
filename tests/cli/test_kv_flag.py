"""--kv on the commands that run a model: the cache that is made, and what it changes."""

import json

import pytest

import inferjax as ij
from inferjax.cli import main as cli
from inferjax.kv import cache as kv

pytestmark = pytest.mark.usefixtures("cache")

PROMPT = "keys and values in eight bits"
RAW = ("--raw", "--ignore-eos")


@pytest.fixture
def made(monkeypatch):
    """The dtypes of the caches that are allocated, and whether they have factors."""
    seen, allocate = [], kv._zeros

    def noted(*args):
        pages = allocate(*args)
        seen.append((pages.values.dtype.name, pages.factors is not None))
        return pages

    monkeypatch.setattr(kv, "_zeros", noted)
    return seen


def generate(capsys, model, *flags):
    words = ["generate", PROMPT, "--model", str(model), *RAW, "--max-tokens=4", "--json", "--quiet"]
    assert cli.main([*words, *flags]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(
    ("kind", "pool"),
    [("int8", ("int8", True)), ("fp8", ("uint8", True)), ("bfloat16", ("bfloat16", False))],
)
def test_a_reply_is_generated_from_such_a_cache(model, capsys, made, kind, pool):
    got = generate(capsys, model, "--kv", kind)
    assert set(made) == {pool}
    loaded = ij.load(model)
    settings = ij.SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    events = ij.stream(loaded, got["prompt_token_ids"], settings, exec=ij.Exec(kv_dtype=kind))
    assert got["logprobs"] == [p for event in events for p in event.logprobs]


def test_rounded_keys_and_values_change_what_is_reported(model, capsys, made):
    plain = generate(capsys, model)
    assert set(made) == {("float32", False)}
    rounded = generate(capsys, model, "--kv", "int8")
    assert rounded["logprobs"][0] != plain["logprobs"][0]
    # One token of a prompt is seen through 8 bits, in a model whose log-probabilities are near -6.
    assert rounded["logprobs"][0] == pytest.approx(plain["logprobs"][0], abs=0.1)


def test_a_batch_runs_on_such_a_cache(model, tmp_path, made):
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text(json.dumps({"prompt": PROMPT}) + "\n")
    files = ("--batch", str(source), "-o", str(target))
    words = ["generate", "--model", str(model), *files, *RAW, "--max-tokens=2", "--quiet"]
    assert cli.main([*words, "--kv", "int8", "--max-running=1", "--num-pages=4"]) == 0
    assert set(made) == {("int8", True)}
    assert "error" not in json.loads(target.read_text())


@pytest.mark.parametrize(
    "words", [["generate", "text"], ["chat"], ["bench", "latency"]], ids=" ".join
)
def test_another_dtype_is_refused_with_those_that_there_are(words, capsys):
    with pytest.raises(SystemExit) as caught:
        cli.main([*words, "--kv", "int3"])
    assert caught.value.code == 2
    said = capsys.readouterr().err
    assert "--kv" in said
    assert all(name in said for name in ("int3", "float32", "bfloat16", "int8", "fp8"))
