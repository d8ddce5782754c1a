import io
import json
from pathlib import Path

import pytest

from inferjax.cli.batch_file import Line, Results, read_lines
from inferjax.errors import InvalidInput

FIRST, SECOND = Line(0, b'{"prompt": "a"}\n'), Line(1, b'{"prompt": "b"}\n')


def written(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_bytes().splitlines()]


@pytest.fixture
def path(tmp_path) -> Path:
    """A file with the results of two lines, the second one failed."""
    path = tmp_path / "out.jsonl"
    with Results(path, "same") as results:
        results.write(FIRST, {"text": "é\n"})
        results.write(SECOND, {"error": {}})
    return path


def test_lines_are_numbered_and_empty_ones_left_out():
    lines = list(read_lines(io.BytesIO(b"a\n\n  \nb")))
    assert lines == [Line(0, b"a\n"), Line(3, b"b")]


def test_separators_inside_a_text_end_no_line(tmp_path):
    text = "a\u2028b\x85c"
    line = Line(0, json.dumps({"prompt": text}, ensure_ascii=False).encode() + b"\n")
    assert list(read_lines(io.BytesIO(line.content))) == [line]
    for _ in range(2):  # the second run reads what the first has written
        with Results(tmp_path / "out.jsonl", "same") as results:
            results.write(line, {"text": text})
    assert [result["text"] for result in written(tmp_path / "out.jsonl")] == [text, text]


def test_digest_of_a_line_does_not_depend_on_its_end():
    assert Line(0, b"a\r\n").digest == Line(5, b"a").digest != Line(0, b"b").digest


def test_results_are_lines_of_json(path):
    assert path.read_bytes().count(b"\n") == 2
    assert [(r["index"], r["digest"]) for r in written(path)] == [
        (0, FIRST.digest),
        (1, SECOND.digest),
    ]
    assert "é" in path.read_text(encoding="utf-8")


def test_result_is_in_the_file_as_soon_as_it_is_written(tmp_path):
    with Results(tmp_path / "out", "same") as results:
        results.write(FIRST, {"text": "a"})
        assert written(tmp_path / "out")[0]["text"] == "a"


def test_results_survive_half_a_surrogate_pair(tmp_path):
    with Results(tmp_path / "out", "same") as results:
        results.write(FIRST, {"id": "\ud83d"})
    assert written(tmp_path / "out")[0]["id"] == "\ud83d"


def test_results_know_what_is_there(path):
    with Results(path, "same") as results:
        assert FIRST in results
        assert SECOND in results
        assert results.num_failed == 1
        assert Line(0, b"changed\n") not in results
        assert Line(2, FIRST.content) not in results


def test_result_written_again_replaces_a_failure(path):
    with Results(path, "same") as results:
        results.write(SECOND, {"text": "b"})
        assert results.num_failed == 0
    with Results(path, "same") as results:
        assert results.num_failed == 0


@pytest.mark.parametrize("cut", [1, 2, 20])
def test_torn_last_line_is_cut_off(path, cut):
    whole = path.read_bytes()
    path.write_bytes(whole[:-cut])
    with Results(path, "same") as results:
        assert FIRST in results
        assert SECOND not in results
        results.write(SECOND, {"error": {}})
    assert path.read_bytes() == whole


def test_torn_only_line_is_cut_off(path):
    path.write_bytes(path.read_bytes()[:5])
    with Results(path, "same") as results:
        assert FIRST not in results
    assert path.read_bytes() == b""


def test_overwrite_starts_anew(path):
    with Results(path, "other", overwrite=True) as results:
        assert FIRST not in results
    assert path.read_bytes() == b""


@pytest.mark.parametrize("content", [b"my notes", b"my notes\n", b"{}\n", b'{"index": 0}\n{}\n'])
def test_file_of_something_else_is_not_touched(tmp_path, content):
    path = tmp_path / "out"
    path.write_bytes(content)
    with pytest.raises(InvalidInput, match="no result of a batch"):
        Results(path, "same")
    assert path.read_bytes() == content


def test_damage_before_the_last_line_is_named(path):
    path.write_bytes(path.read_bytes().replace(b'{"index": 0', b'{"index": 0', 1)[3:])
    with pytest.raises(InvalidInput, match="line 1"):
        Results(path, "same")


def test_results_of_other_settings_are_not_mixed(path):
    with pytest.raises(InvalidInput, match="other settings"):
        Results(path, "different")
    assert len(written(path)) == 2


def test_place_that_cannot_be_written_is_explained(tmp_path):
    with pytest.raises(InvalidInput, match="cannot be written"):
        Results(tmp_path / "none" / "out", "same")
