import io
import json
from pathlib import Path

import numpy as np
import pytest
from tokenizers import pre_tokenizers

from inferjax.cli import main as cli

pytestmark = pytest.mark.usefixtures("cache")


def generate(model: Path, *words: str, max_tokens: int = 6) -> int:
    return cli.main(["generate", "--model", str(model), f"--max-tokens={max_tokens}", *words])


def report(capsys, model: Path, *words: str, max_tokens: int = 6) -> dict:
    assert generate(model, "--json", "--quiet", *words, max_tokens=max_tokens) == 0
    out, err = capsys.readouterr()
    assert err == ""
    return json.loads(out)


def test_generate_prints_the_answer_on_stdout_and_the_speed_on_stderr(model, capsys):
    expected = report(capsys, model, "hello")
    assert generate(model, "hello") == 0
    out, err = capsys.readouterr()
    assert out == expected["text"] + "\n"
    assert "tokens/s" in err
    assert "of memory" in err


def test_generate_json_shows_the_limit_of_the_machine(model, capsys):
    assert generate(model, "hello", "--json", "--ignore-eos", max_tokens=9) == 0
    speed = json.loads(capsys.readouterr().out)["speed"]
    assert 0 < speed["limit_share"] < 1
    assert speed["limit_tok_s"] * speed["weight_bytes_per_token"] == pytest.approx(
        speed["bandwidth_gbps"] * 1e9
    )


def test_generate_without_streaming_prints_the_same(model, capsys):
    assert generate(model, "hello", "--quiet") == 0
    streamed = capsys.readouterr()
    assert generate(model, "hello", "--quiet", "--no-stream") == 0
    assert capsys.readouterr() == streamed
    assert streamed.err == ""


def test_generate_json_holds_tokens_timings_and_where_it_ran(model, capsys):
    got = report(capsys, model, "hello", "--raw", "--ignore-eos")
    assert got["prompt_token_ids"] == [3 + b for b in byte_ranks("hello")]
    assert len(got["token_ids"]) == len(got["logprobs"]) == 6
    assert all(np.isfinite(got["logprobs"]))
    assert max(got["logprobs"]) <= 0
    assert got["finish_reason"] == "length"
    assert got["timings"]["num_tokens"] == 6
    assert got["timings"]["first_token_s"] > 0
    assert got["speed"] is None
    assert got["hardware"]["platform"] == "cpu"
    assert "jax" in got["versions"]


def byte_ranks(text: str) -> list[int]:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    return [letters.index(letter) for letter in text]


def test_generate_wraps_the_prompt_unless_raw(model, capsys):
    wrapped = report(capsys, model, "hello", max_tokens=1)["prompt_token_ids"]
    assert wrapped == [3 + b for b in byte_ranks("[user]hello[assistant]")]


def test_generate_greedy_answer_is_the_model_s_own(model, capsys, tiny):
    """The same tokens as one forward pass after another, without cache or loop."""
    import jax.numpy as jnp

    import inferjax as ij
    from inferjax.checkpoint.load import load

    got = report(capsys, model, "hello", "--raw", "--ignore-eos", "--dtype", "float32")
    loaded = load(model, dtype="float32")
    ids = got["prompt_token_ids"] + got["token_ids"]
    logits = ij.forward(loaded.params, loaded.config, jnp.asarray([ids], jnp.int32))
    start = len(got["prompt_token_ids"]) - 1
    assert np.argmax(logits[0, start:-1], axis=-1).tolist() == got["token_ids"]


def test_generate_seed_decides_the_answer(model, capsys):
    words = ("hello", "--raw", "--temperature=1", "--ignore-eos")
    texts = [report(capsys, model, *words, f"--seed={s}")["token_ids"] for s in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]


def test_generate_stop_string_cuts_the_answer(model, capsys):
    words = ("hello", "--raw", "--ignore-eos", "--allowed-token-ids", "70,71")
    full = report(capsys, model, *words, max_tokens=8)["text"]
    stop = full[2:4]
    got = report(capsys, model, *words, "--stop", stop, max_tokens=8)
    assert got["text"] == full[: full.index(stop)]
    assert (got["finish_reason"], got["stop"]) == ("stop", stop)


def test_generate_reads_the_prompt_from_stdin(model, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("hello"))
    ids = report(capsys, model, "-", "--raw", max_tokens=1)["prompt_token_ids"]
    assert ids == [3 + b for b in byte_ranks("hello")]


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["hello", "--temperature=nan"], "temperature"),
        (["hello", "--top-p=2"], "top_p"),
        (["hello", "--stop="], "stop"),
        (["", "--raw"], "prompt"),
        (["hello", "--allowed-token-ids=99999"], "99999"),
        (["h" * 400, "--raw"], "256"),
    ],
    ids=["nan temperature", "top-p", "empty stop", "empty prompt", "token id", "long prompt"],
)
def test_generate_bad_input_is_explained(model, capsys, words, text):
    assert generate(model, *words) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("inferjax: ")
    assert text in err
    assert "Fix: " in err


def test_generate_without_a_tokenizer_is_explained(tiny, capsys):
    assert generate(tiny / "llama", "hello") == 2
    assert "tokenizer.json" in capsys.readouterr().err


def test_generate_interrupt_keeps_what_was_said(model, capsys, monkeypatch):
    from inferjax import generation

    real = generation.stream

    def interrupted(*args, **kwargs):
        events = real(*args, **kwargs)
        yield next(events)
        raise KeyboardInterrupt

    monkeypatch.setattr(generation, "stream", interrupted)
    assert generate(model, "hello", "--quiet", "--ignore-eos") == 130
    assert capsys.readouterr().out.endswith("\n")
