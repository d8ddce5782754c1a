"""Both GGUF vocabulary kinds against slow encoders written from their definitions."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizer_vocabularies import PIECES, byte_level_metadata, sentencepiece_metadata

from inferjax.errors import TokenizerError
from inferjax.tokenizer import tokenizer_from_gguf

few = settings(max_examples=60, deadline=None)
SENTENCEPIECE = tokenizer_from_gguf(sentencepiece_metadata())


def merge_by_score(text: str) -> list[int]:
    """Encode as SentencePiece defines it: join the best-scored neighbours, leftmost first."""
    tokens = sentencepiece_metadata()["tokenizer.ggml.tokens"]
    rank = {piece: i for i, piece in enumerate(PIECES)}
    symbols = list(text.replace(" ", "▁"))
    while True:
        joined = [left + right for left, right in itertools.pairwise(symbols)]
        known = [(rank[pair], i) for i, pair in enumerate(joined) if pair in rank]
        if not known:
            break
        _, i = min(known)
        symbols[i : i + 2] = [joined[i]]
    ids = []
    for symbol in symbols:
        if symbol in rank:
            ids.append(tokens.index(symbol))
        else:
            ids += [4 + byte for byte in symbol.encode()]
    return ids


@few
@given(text=st.text("  thelowrd日本12.\né🎉", max_size=30).filter(lambda t: "  " not in t))
def test_sentencepiece_ids_equal_merging_by_score(text):
    assert SENTENCEPIECE.encode(text, add_special_tokens=False) == merge_by_score(text)


def test_spaces_set_apart_come_before_every_scored_piece():
    ids = SENTENCEPIECE.encode("   the", add_special_tokens=False)
    assert [SENTENCEPIECE.id_to_token(i) for i in ids] == ["▁▁▁", "t", "he"]


def test_space_prefix_marks_the_start_of_every_text():
    tokenizer = tokenizer_from_gguf(sentencepiece_metadata(add_space_prefix=True))
    pieces = [tokenizer.id_to_token(i) for i in tokenizer.encode("the<tool>the")]
    assert pieces == ["<s>", "▁the", "<tool>", "▁the"]


def test_byte_level_applies_merges_in_rank_order():
    tokenizer = tokenizer_from_gguf(byte_level_metadata())
    ids = tokenizer.encode(" then hello日本")
    assert [tokenizer.id_to_token(i) for i in ids] == ["Ġ", "the", "n", "Ġ", "hello", "æĹ¥æľ¬"]


def test_control_and_user_tokens_are_found_in_text():
    for metadata in (byte_level_metadata(), sentencepiece_metadata()):
        tokenizer = tokenizer_from_gguf(metadata)
        tool = tokenizer.token_to_id("<tool>")
        ids = tokenizer.encode("the<tool>the", add_special_tokens=False)
        assert ids.count(tool) == 1
        assert tool not in tokenizer.special_ids
        assert tokenizer.bos_id in tokenizer.special_ids


def test_bos_is_added_once_and_only_when_the_file_says_so():
    wanted = tokenizer_from_gguf(sentencepiece_metadata())
    assert wanted.encode("the")[0] == 1
    assert wanted.encode("<s>the").count(1) == 1
    assert wanted.encode("") == [1]
    assert wanted.encode("the", add_special_tokens=False).count(1) == 0
    assert 1 not in tokenizer_from_gguf(sentencepiece_metadata(add_bos_token=False)).encode("the")
    assert 1 not in tokenizer_from_gguf(byte_level_metadata()).encode("the")
    assert tokenizer_from_gguf(byte_level_metadata(add_bos_token=True)).encode("the")[0] == 1
    assert tokenizer_from_gguf(byte_level_metadata(pre="llama-bpe")).encode("the")[0] == 1


def test_eos_is_appended_when_the_file_says_so():
    tokenizer = tokenizer_from_gguf(sentencepiece_metadata(add_eos_token=True))
    assert tokenizer.encode("the")[-1] == 2


def test_end_of_turn_tokens_end_a_generation_too():
    assert SENTENCEPIECE.eos_ids == (2, 3)
    assert tokenizer_from_gguf(byte_level_metadata(eot_token_id=0)).eos_ids == (2, 0)


def test_pad_falls_back_to_the_first_eos():
    assert SENTENCEPIECE.pad_id == 2
    assert tokenizer_from_gguf(sentencepiece_metadata(padding_token_id=0)).pad_id == 0


def test_numbers_may_come_as_numpy_arrays():
    metadata = sentencepiece_metadata()
    for key in ("scores", "token_type"):
        metadata[f"tokenizer.ggml.{key}"] = np.asarray(metadata[f"tokenizer.ggml.{key}"])
    metadata["tokenizer.ggml.bos_token_id"] = np.uint32(1)
    assert tokenizer_from_gguf(metadata).encode("the") == SENTENCEPIECE.encode("the")


@pytest.mark.parametrize(
    ("pre", "words"),
    [
        ("gpt-2", ["ab", "Ġcd", "123", "'s", "ĠĠ", "Ġe", "!!", "Ċ"]),
        ("smollm", ["ab", "Ġcd", "1", "2", "3", "'s", "ĠĠ", "Ġe", "!!", "Ċ"]),
        ("llama-bpe", ["ab", "Ġcd", "123", "'s", "ĠĠ", "Ġe", "!!Ċ"]),
        ("qwen2", ["ab", "Ġcd", "1", "2", "3", "'s", "ĠĠ", "Ġe", "!!Ċ"]),
        ("tekken", ["ab", "Ġcd", "1", "2", "3", "'s", "ĠĠ", "Ġe", "!!Ċ"]),
    ],
)
def test_words_are_cut_as_the_pre_tokenizer_names_it(pre, words):
    core = tokenizer_from_gguf(byte_level_metadata(pre=pre))._core
    cut = [word for word, _ in core.pre_tokenizer.pre_tokenize_str("ab cd123's   e!!\n")]
    assert cut == words


def test_whole_words_win_over_merges_for_llama_3():
    metadata = byte_level_metadata(words=["zz"], pre="llama-bpe", add_bos_token=False)
    metadata["tokenizer.ggml.tokens"].append("zzzq")
    metadata["tokenizer.ggml.token_type"].append(1)
    tokenizer = tokenizer_from_gguf(metadata)
    assert tokenizer.encode("zzzq") == [tokenizer.token_to_id("zzzq")]


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"model": "bert"}, "bert"),
        ({"model": None}, "tokenizer.ggml.model"),
        ({"pre": "klingon"}, "klingon"),
        ({"tokens": []}, "tokens"),
        ({"tokens": "abc"}, "tokens"),
        ({"tokens": ["a", "a"], "token_type": [1, 1]}, "repeats 1"),
        ({"token_type": [1, 2]}, "token_type"),
        ({"merges": ["onlyone"]}, "onlyone"),
        ({"merges": ["zz yy"]}, "zz yy"),
        ({"merges": [5]}, "merge 0"),
        ({"bos_token_id": 10_000}, "bos_token_id"),
        ({"bos_token_id": -1}, "bos_token_id"),
        ({"eos_token_id": "two"}, "eos_token_id"),
    ],
)
def test_damaged_byte_level_metadata_is_named(changes, named):
    with pytest.raises(TokenizerError, match=named):
        tokenizer_from_gguf(byte_level_metadata(**changes))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("scores", [0.0]),
        ("scores", None),
        ("token_type", 9),
        ("token_type", "x"),
        ("scores", float("nan")),
        ("tokens", "▁t"),
        ("tokens", "\ud800"),
        ("tokens", "a" * 10_000_000),
    ],
)
def test_damaged_sentencepiece_metadata_is_named(key, value):
    metadata = sentencepiece_metadata()
    if value is None or isinstance(value, list):
        metadata[f"tokenizer.ggml.{key}"] = value
    else:
        metadata[f"tokenizer.ggml.{key}"][-1] = value
    with pytest.raises(TokenizerError, match=key):
        tokenizer_from_gguf(metadata)
