import json
from collections.abc import Iterable
from pathlib import Path

import pytest
from engines import text_engine

from inferjax.cli import main as cli
from inferjax.cli.batch import run_lines
from inferjax.cli.batch_file import Line, Results, read_lines
from inferjax.cli.batch_line import Reader
from inferjax.sampling import SamplingParams

SAMPLING = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)
GOOD = [{"prompt": "hello"}, {"prompt": [5, 6, 7], "id": "b"}, {"prompt": "é🎉", "max_tokens": 2}]
BAD = [
    (b"{", "InvalidInput"),
    (b"[]", "InvalidInput"),
    (b'{"prompt": ""}', "InvalidInput"),
    (b'{"prompt": 3}', "InvalidInput"),
    (b'{"prompt": {"a": 1}}', "ShapeError"),
    (b'{"prompt": [1, "a"]}', "ShapeError"),
    (b'{"prompt": [[1], [1, 2]]}', "ShapeError"),
    (b'{"prompt": [-1]}', "InvalidInput"),
    (b'{"prompt": [1e30]}', "ShapeError"),
    (b'{"prompt": [99999999999999999999]}', "ShapeError"),
    (b'{"prompt": "\\ud83d"}', "TokenizerError"),
    (b'{"prompt": "a", "max_tokens": 1000}', "RequestTooLong"),
    (b'{"prompt": "a", "top_p": 2}', "InvalidSampling"),
    (b'{"prompt": "a", "typo": 2}', "InvalidSampling"),
    (b'{"prompt": "a", "logprobs": 99}', "InvalidSampling"),
    (b'{"prompt": "a", "priority": "high"}', "InvalidInput"),
    (b'{"prompt": "a", "cache_salt": 3}', "InvalidInput"),
    (b'{"messages": [{"role": "user", "content": "a"}]}', "TemplateError"),
    (b'{"messages": [{"role": 1}, 2]}', "InvalidInput"),
]


def run(path: Path, contents: Iterable[bytes], *, ended=lambda line, num: None, window=2):
    lines = read_lines(contents)
    with Results(path, "same") as results:
        todo = (line for line in lines if line not in results)
        reader = Reader(sampling=SAMPLING, chat=False)
        run_lines(text_engine(), todo, reader, results, ended=ended, window=window)
    assert not text_engine().has_work
    return written(path)


def written(path: Path) -> dict[int, dict]:
    found = [json.loads(line) for line in path.read_bytes().splitlines()]
    assert len({result["index"] for result in found}) == len(found)
    return {result["index"]: result for result in found}


def good_lines(count: int = len(GOOD)) -> list[bytes]:
    return [json.dumps(GOOD[i % len(GOOD)] | {"id": i}).encode() + b"\n" for i in range(count)]


def test_batch_gives_what_the_engine_gives(tmp_path):
    found = run(tmp_path / "out", [json.dumps(fields).encode() + b"\n" for fields in GOOD])
    short = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)
    expected = text_engine().generate(["hello", [5, 6, 7], "é🎉"], [SAMPLING, SAMPLING, short])
    assert [found[i]["id"] for i in range(3)] == [None, "b", None]
    for i, completion in enumerate(expected):
        (sample,) = found[i]["samples"]
        assert tuple(sample["token_ids"]) == completion.token_ids
        assert sample["text"] == completion.text
        assert sample["finish_reason"] == "length"
        assert found[i]["usage"]["completion_tokens"] == len(completion.token_ids)
        assert found[i]["timings"]["e2e_s"] > 0
        assert "logprobs" not in sample


def test_batch_reports_what_a_line_asks_for(tmp_path):
    fields = {"n": 2, "temperature": 1.0, "seed": 3, "logprobs": 2, "logprob_token_ids": [9]}
    line = json.dumps({"prompt": "hello", "prompt_logprobs": 0, **fields}).encode()
    result = run(tmp_path / "out", [line])[0]
    assert len(result["samples"]) == 2
    for sample in result["samples"]:
        assert len(sample["logprobs"]) == len(sample["sampled_logprobs"]) == 5
        assert [len(top) for top in sample["top_logprobs"]] == [2] * 5
        assert [len(chosen) for chosen in sample["chosen_logprobs"]] == [1] * 5
    assert result["prompt_logprobs"][0] is None
    assert "prompt_top_logprobs" not in result


def test_batch_writes_no_numbers_that_json_does_not_have(tmp_path):
    fields = {"temperature": 1.0, "top_k": 1, "forced_token_ids": [5, 6], "logprobs": 0}
    result = run(tmp_path / "out", [json.dumps({"prompt": [7, 8], **fields}).encode()])[0]
    (sample,) = result["samples"]
    assert sample["sampled_logprobs"][:2] == [None, None]
    assert all(value <= 0 for value in sample["logprobs"])


def test_batch_bad_lines_fail_alone(tmp_path):
    contents = [b"\n"]
    for (bad, _), good in zip(BAD, good_lines(len(BAD)), strict=True):
        contents += [bad + b"\n", good]
    found = run(tmp_path / "out", contents)
    assert len(found) == 2 * len(BAD)
    for i, (_, kind) in enumerate(BAD):
        assert found[1 + 2 * i]["error"]["type"] == kind
        assert found[1 + 2 * i]["error"]["message"]
        assert len(found[2 + 2 * i]["samples"][0]["token_ids"]) > 0


def test_batch_reads_only_as_many_lines_as_it_submits(tmp_path):
    read: list[int] = []
    ended: list[int] = []

    def lines():
        for i, line in enumerate(good_lines(12)):
            read.append(i)
            yield line

    def end(line: Line, num_tokens: int) -> None:
        ended.append(num_tokens)
        # The line that ended is replaced at the next look.
        assert len(read) - len(ended) < 3

    run(tmp_path / "out", lines(), ended=end, window=3)
    assert sum(ended) == 4 * (5 + 5 + 2)


@pytest.mark.parametrize("torn", [False, True])
def test_batch_goes_on_where_it_was_interrupted(tmp_path, torn):
    path, contents = tmp_path / "out", [*good_lines(8), b"{\n"]
    whole = run(tmp_path / "whole", contents)
    count = 0

    def interrupt(line: Line, num_tokens: int) -> None:
        nonlocal count
        count += 1
        if count == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(path, contents, ended=interrupt)
    assert not text_engine().has_work
    assert len(written(path)) == 3
    if torn:
        path.write_bytes(path.read_bytes()[:-9])
    ended: list[int] = []
    again = run(path, contents, ended=lambda line, num: ended.append(line.index))
    assert len(ended) == 9 - (2 if torn else 3)
    assert again.keys() == whole.keys()
    for index, result in again.items():
        assert result.get("samples") == whole[index].get("samples")
    before = path.read_bytes()
    run(path, contents)
    assert path.read_bytes() == before


def test_batch_does_a_changed_line_again(tmp_path):
    path = tmp_path / "out"
    run(path, good_lines(2))
    changed = [good_lines(2)[0], b'{"prompt": "other"}\n']
    with Results(path, "same") as results:
        todo = [line for line in read_lines(changed) if line not in results]
    assert [line.index for line in todo] == [1]


FLAGS = (
    *("--max-len=64", "--max-running=1", "--num-pages=20", "--token-budget=32"),
    *("--decode-steps=4", "--max-logprobs=0", "--max-tokens=4", "--ignore-eos"),
)


@pytest.mark.usefixtures("cache")
def test_batch_command_writes_results_and_says_so(model, tmp_path, capsys):
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_bytes(b"".join(good_lines(3)) + b"{\n")
    words = ["generate", "--batch", str(source), "-o", str(target), "--model", str(model), *FLAGS]
    assert cli.main(words) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert "4 lines, 10 tokens" in err
    assert "1 lines of the file failed" in err
    found = written(target)
    assert found[3]["error"]["type"] == "InvalidInput"
    # The template wraps text, not ids.
    assert found[0]["usage"]["prompt_tokens"] == len("[user]hello[assistant]")
    assert found[1]["usage"]["prompt_tokens"] == 3
    source.write_bytes(b"".join(good_lines(3)))
    assert cli.main([*words, "--overwrite", "--quiet"]) == 0
    assert capsys.readouterr() == ("", "")
    assert cli.main(words) == 0
    assert "3 had a result already" in capsys.readouterr().err
    assert cli.main([*words, "--temperature=1"]) == 2
    assert "--overwrite" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ([], "nothing to answer"),
        (["hello", "--max-running=2"], "--max-running"),
        (["hello", "-o", "out"], "--output"),
        (["--batch", "in"], "without --output"),
        (["hello", "--batch", "in", "-o", "out"], "PROMPT"),
        (["--batch", "in", "-o", "out", "--json"], "--json"),
        (["--batch", "in", "-o", "out"], "cannot be read"),
        (["--batch", "in", "-o", "out", "--max-running=0"], "max_running"),
    ],
    ids=lambda value: "" if isinstance(value, str) else " ".join(value),
)
def test_batch_command_explains_flags_that_do_not_fit(words, text, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["generate", *words]) == 2
    err = capsys.readouterr().err
    assert text in err
    assert "Fix: " in err
    assert not list(tmp_path.iterdir())


def test_batch_command_does_not_write_into_its_input(tmp_path, capsys):
    path = tmp_path / "in.jsonl"
    path.write_bytes(b"{}\n")
    words = ["generate", "--batch", str(path), "-o", str(path), "--overwrite"]
    assert cli.main(words) == 2
    assert "both input and output" in capsys.readouterr().err
    assert path.read_bytes() == b"{}\n"
