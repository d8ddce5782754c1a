"""tokenizer.json and its neighbours that are damaged or hostile, by hand."""

import base64
import json

import numpy as np
import pytest
import tokenizers
from irregular_files import IRREGULAR, replace_by
from tokenizer_vocabularies import byte_level_metadata
from tokenizers import models

from inferjax.errors import TokenizerError
from inferjax.tokenizer import tokenizer_from_directory, tokenizer_from_gguf

TEMPLATE = {
    "type": "TemplateProcessing",
    "single": [{"SpecialToken": {"id": "x", "type_id": 0}}],
    "pair": [],
    "special_tokens": {},
}


def write(folder, *, config=None, generation=None, **parts):
    core = json.loads(tokenizer_from_gguf(byte_level_metadata()).core.to_str())
    (folder / "tokenizer.json").write_text(json.dumps(core | parts))
    (folder / "tokenizer_config.json").write_text(json.dumps(config or {}))
    (folder / "generation_config.json").write_text(json.dumps(generation or {}))
    return folder


def sequence(*steps, key="normalizers"):
    return {"type": "Sequence", key: list(steps)}


def replace(pattern, content):
    return {"type": "Replace", "pattern": {"String": pattern}, "content": content}


def charsmap(text: bytes) -> str:
    return base64.b64encode((1024).to_bytes(4, "little") + bytes(1024) + text).decode()


GROWING = {
    "long replacements": replace("a", "a" * 1000),
    "doubling": sequence(*[replace("a", "aa")] * 40),
    "nested doubling": sequence(sequence(*[replace("a", "aa")] * 5), *[replace("a", "aaa")] * 6),
    "of nothing": {"type": "Replace", "pattern": {"Regex": "x*"}, "content": "a" * 999},
    "a table of long texts": {"type": "Precompiled", "precompiled_charsmap": charsmap(b"a" * 999)},
    "bytes of bytes": sequence(*[{"type": "ByteLevel"}] * 30),
}


@pytest.mark.parametrize("normalizer", GROWING.values(), ids=GROWING.keys())
def test_normalizer_that_makes_much_of_little_is_refused(tmp_path, normalizer):
    with pytest.raises(TokenizerError, match="characters of one"):
        tokenizer_from_directory(write(tmp_path, normalizer=normalizer))


def test_pre_tokenizer_that_makes_much_of_little_is_refused(tmp_path):
    step = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": False,
    }
    chain = sequence(*[step] * 30, key="pretokenizers")
    with pytest.raises(TokenizerError, match="characters of one"):
        tokenizer_from_directory(write(tmp_path, pre_tokenizer=chain))


def test_usual_normalizers_are_accepted(tmp_path):
    spaces = {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "}
    table = {"type": "Precompiled", "precompiled_charsmap": charsmap(b"abc\0" * 9)}
    chain = sequence({"type": "NFC"}, spaces, replace("``", '"'), table, {"type": "Lowercase"})
    tokenizer_from_directory(write(tmp_path, normalizer=chain))


FAILING = {
    "the prefix is no token": {"post_processor": TEMPLATE},
    "chunks of zero": {"pre_tokenizer": {"type": "FixedLength", "length": 0}},
    "unknown token is unknown": {
        "model": {"type": "WordLevel", "vocab": {"b": 0}, "unk_token": "zz"}
    },
    "table beyond its end": {
        "normalizer": {
            "type": "Precompiled",
            "precompiled_charsmap": base64.b64encode(
                b"\4\0\0\0\xff\xff\xff\xff\x08\0\0\0"
            ).decode(),
        }
    },
}


@pytest.mark.parametrize("parts", FAILING.values(), ids=FAILING.keys())
def test_failure_inside_the_library_is_our_error(tmp_path, parts):
    with pytest.raises(TokenizerError, match=r"cannot encode|cannot be read"):
        tokenizer_from_directory(write(tmp_path, **parts))


def test_expression_that_backtracks_forever_is_our_error(tmp_path):
    """Oniguruma gives up after ten million steps; the library panics."""
    split = {"type": "Split", "pattern": {"Regex": "(a+)+b"}, "behavior": "Isolated"}
    tokenizer = tokenizer_from_directory(write(tmp_path, pre_tokenizer=split | {"invert": False}))
    with pytest.raises(TokenizerError, match="cannot encode the text"):
        tokenizer.encode("a" * 1000)


def test_prefix_that_merges_are_cut_by_is_refused_however_it_is_spelled(tmp_path):
    """The library cuts a character in two and aborts as it reports it."""
    text = (write(tmp_path) / "tokenizer.json").read_text()
    cut = text.replace('"continuing_subword_prefix": null', '"continuing_subword_prefix": "1"')
    assert cut != text
    for hostile in (cut, cut.replace('"continuing', '"cont\\u0069nuing')):
        (tmp_path / "tokenizer.json").write_text(hostile)
        with pytest.raises(TokenizerError, match="continuing_subword_prefix"):
            tokenizer_from_directory(tmp_path)


def test_token_that_looks_like_an_escape_is_a_token(tmp_path):
    core = json.loads((write(tmp_path) / "tokenizer.json").read_text())
    core["model"]["vocab"]["\\u0069"] = 9_999
    core["model"]["vocab"]["continuing_subword_prefix"] = 9_998
    (tmp_path / "tokenizer.json").write_text(json.dumps(core))
    assert tokenizer_from_directory(tmp_path).token_to_id("\\u0069") == 9_999


def test_word_pieces_are_refused(tmp_path):
    """Their encoder takes the cube of a word's length."""
    core = tokenizers.Tokenizer(
        models.WordPiece(
            vocab={"a": 0, "[UNK]": 1}, unk_token="[UNK]", continuing_subword_prefix=""
        )
    )
    folder = write(tmp_path, model=json.loads(core.to_str())["model"])
    with pytest.raises(TokenizerError, match="WordPiece"):
        tokenizer_from_directory(folder)


@pytest.mark.parametrize("value", [2**31, 2**62, 10**60, -1, True, "2", [[2]], 1.0])
def test_end_that_is_no_id_is_refused(tmp_path, value):
    with pytest.raises(TokenizerError, match="eos_token_id"):
        tokenizer_from_directory(write(tmp_path, generation={"eos_token_id": [1, value]}))


def test_half_of_a_surrogate_pair_names_no_token(tmp_path):
    tokenizer = tokenizer_from_directory(write(tmp_path, config={"bos_token": "\ud800"}))
    assert tokenizer.bos_id is None
    assert tokenizer.token_to_id("\ud800") is None


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("tokenizer_config.json", '{"a":' + "[" * 100_000),
        ("tokenizer_config.json", '{"bos_token": ' + "9" * 10_000 + "}"),
        ("generation_config.json", '{"eos_token_id": NaN}'),
        ("special_tokens_map.json", '{"unk_token": {"content": ["a"]}}'),
        ("tokenizer.json", "[" * 100_000),
        ("tokenizer.json", '{"version": ' + "9" * 60 + "}"),
    ],
)
def test_strange_json_is_our_error(tmp_path, name, text):
    write(tmp_path)
    (tmp_path / name).write_text(text)
    with pytest.raises(TokenizerError):
        tokenizer_from_directory(tmp_path)


def test_config_of_many_megabytes_is_not_parsed(tmp_path):
    write(tmp_path)
    (tmp_path / "tokenizer_config.json").write_bytes(b'{"a":[' + b"[]," * 3_000_000 + b"[]]}")
    with pytest.raises(TokenizerError, match="allowed"):
        tokenizer_from_directory(tmp_path)


@pytest.mark.parametrize("kind", IRREGULAR)
def test_what_is_no_file_is_not_waited_for(tmp_path, kind):
    write(tmp_path)
    replace_by(kind, tmp_path / "tokenizer.json")
    with pytest.raises(TokenizerError, match=r"no tokenizer.json"):
        tokenizer_from_directory(tmp_path)


def test_file_that_may_not_be_looked_at_is_our_error(tmp_path, monkeypatch):
    def refuse(*_args, **_kwargs):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("pathlib.Path.stat", refuse)
    with pytest.raises(TokenizerError, match="Permission denied"):
        tokenizer_from_directory(tmp_path)


def test_long_array_in_place_of_tokens_is_refused_before_it_becomes_a_list():
    for key in ("tokens", "merges", "scores", "token_type"):
        metadata = byte_level_metadata(**{key: np.zeros(2**20 + 1, np.uint8)})
        kind = "llama" if key == "scores" else "gpt2"
        with pytest.raises(TokenizerError, match=key):
            tokenizer_from_gguf(metadata | {"tokenizer.ggml.model": kind})


def test_token_of_a_megabyte_encodes_in_linear_time(tmp_path):
    metadata = byte_level_metadata()
    metadata["tokenizer.ggml.tokens"] = [*metadata["tokenizer.ggml.tokens"], "x" * 2**20]
    metadata["tokenizer.ggml.token_type"] = [*metadata["tokenizer.ggml.token_type"], 1]
    tokenizer = tokenizer_from_gguf(metadata)
    assert len(tokenizer.encode("x" * 1000)) == 1000
