import json

import numpy as np
import pytest
from tokenizer_vocabularies import byte_level_metadata

from inferjax.calibrate.texts import cut_windows, python_reference, read_texts
from inferjax.errors import InvalidInput
from inferjax.tokenizer import tokenizer_from_gguf


def test_texts_are_read_from_files(tmp_path):
    (tmp_path / "a.txt").write_text('one\n"two"\n')
    assert read_texts(tmp_path / "a.txt") == ['one\n"two"\n']
    lines = [json.dumps("one"), "", json.dumps({"text": "two", "id": 3})]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    assert read_texts(tmp_path / "a.jsonl") == ["one", "two"]


@pytest.mark.parametrize("mark", ["\u2028", "\u2029", "\x85"])
def test_separators_inside_a_text_end_no_line(tmp_path, mark):
    texts = [f"one{mark}two", "three"]
    lines = [json.dumps(text, ensure_ascii=False) for text in texts]
    (tmp_path / "a.jsonl").write_text("\r\n".join(lines), encoding="utf-8", newline="")
    assert read_texts(tmp_path / "a.jsonl") == texts


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.txt", ""),
        ("a.txt", " \n\n"),
        ("a.jsonl", ""),
        ("a.jsonl", "\n \n"),
        ("a.jsonl", '""\n" "'),
    ],
)
def test_files_without_a_text_are_refused(tmp_path, name, content):
    (tmp_path / name).write_text(content)
    with pytest.raises(InvalidInput, match="holds no text"):
        read_texts(tmp_path / name)


@pytest.mark.parametrize("line", ["{", "3", '{"txt": "a"}', '{"text": 3}', "[" * 100_000])
def test_lines_without_a_text_are_refused(tmp_path, line):
    (tmp_path / "a.jsonl").write_text(f'"fine"\n{line}\n')
    with pytest.raises(InvalidInput, match=r"a\.jsonl:2"):
        read_texts(tmp_path / "a.jsonl")


def test_files_that_are_no_text_are_refused(tmp_path):
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\x00")
    for path in (tmp_path / "bytes", tmp_path / "missing", tmp_path):
        with pytest.raises(InvalidInput, match="cannot be read"):
            read_texts(path)


def test_windows_follow_one_another_and_may_be_thinned():
    tokenizer = tokenizer_from_gguf(byte_level_metadata(add_bos_token=True))
    texts = ["abcdefgh" * 4, "12345678" * 4]
    ids = [i for text in texts for i in tokenizer.encode(text, add_special_tokens=False)]
    prefix = tokenizer.special.prefix
    assert prefix == (tokenizer.special.bos,)
    rows = cut_windows(tokenizer, texts, window=10)
    assert rows.shape == (len(ids) // 10, 10)
    wanted = np.reshape(ids[: rows.size], rows.shape)
    np.testing.assert_array_equal(rows[:, len(prefix) :], wanted[:, len(prefix) :])
    assert (rows[:, : len(prefix)] == prefix).all()
    np.testing.assert_array_equal(
        cut_windows(tokenizer, texts, window=10, limit=2), rows[[0, len(rows) // 2]]
    )
    with pytest.raises(InvalidInput, match="whole ones count"):
        cut_windows(tokenizer, texts, window=1000)


def test_the_default_texts_have_nothing_in_common():
    ours, theirs = python_reference()
    assert min(len(ours), len(theirs)) > 100_000
    paragraphs = [
        {" ".join(p.split()) for p in t.split("\n\n") if len(p) > 20} for t in (ours, theirs)
    ]
    assert not paragraphs[0] & paragraphs[1]
