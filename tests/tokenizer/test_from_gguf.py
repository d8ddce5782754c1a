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


def test_of_more_spaces_than_a_piece_holds_the_first_make_the_longest_piece():
    runs = [" " * n for n in range(2, 32)]
    tokenizer = tokenizer_from_gguf(sentencepiece_metadata(user=["<tool>", *runs]))
    for spaces, expected in [(31, [31]), (32, [31, 1]), (40, [31, 9]), (70, [31, 31, 8])]:
        ids = tokenizer.encode(" " * spaces, add_special_tokens=False)
        assert [len(tokenizer.id_to_token(i)) for i in ids] == expected


def test_equal_scores_put_the_longest_left_part_first():
    pieces = ["aa", "aaa", "ab", "aab", "a", "b"]
    metadata = sentencepiece_metadata(pieces)
    metadata["tokenizer.ggml.scores"] = [0.0] * len(metadata["tokenizer.ggml.tokens"])
    tokenizer = tokenizer_from_gguf(metadata)
    ids = tokenizer.encode("aaaab", add_special_tokens=False)
    assert [tokenizer.id_to_token(i) for i in ids] == ["aaa", "ab"]


def pieces_with_merges(**changes):
    """Make a "gemma4" vocabulary, whose merges are in the file."""
    metadata = sentencepiece_metadata()
    del metadata["tokenizer.ggml.scores"], metadata["tokenizer.ggml.add_space_prefix"]
    merges = ["h e", "l l", "▁ t", "▁t he", "\u2581 \u2581", "▁ w", "o r", "▁w or"]
    named = {"model": "gemma4", "merges": merges, **changes}
    tokens = [*metadata["tokenizer.ggml.tokens"], "\n\n"]
    metadata["tokenizer.ggml.tokens"] = tokens
    metadata["tokenizer.ggml.token_type"] = [*metadata["tokenizer.ggml.token_type"], 1]
    named["merges"] = [*named["merges"], "\n \n"]
    return metadata | {f"tokenizer.ggml.{key}": value for key, value in named.items()}


def test_pieces_with_written_merges_follow_them():
    tokenizer = tokenizer_from_gguf(pieces_with_merges())
    ids = tokenizer.encode("the  hello wor\n\né<tool>")
    expected = ["<s>", "t", "he", "▁▁", "he", "ll", "o", "▁wor", "\n\n", "<0xC3>", "<0xA9>"]
    assert [tokenizer.id_to_token(i) for i in ids] == [*expected, "<tool>"]
    assert tokenizer.decode(ids) == "the  hello wor\n\né<tool>"


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


def test_sentencepiece_files_need_not_say_where_bos_and_eos_are():
    metadata = sentencepiece_metadata()
    del metadata["tokenizer.ggml.bos_token_id"], metadata["tokenizer.ggml.eos_token_id"]
    tokenizer = tokenizer_from_gguf(metadata)
    assert (tokenizer.bos_id, tokenizer.eos_ids) == (1, (2, 3))
    assert tokenizer.encode("the")[0] == 1
    metadata["tokenizer.ggml.token_type"][1:3] = [1, 1]
    assert tokenizer_from_gguf(metadata).bos_id is None


def test_end_of_turn_tokens_end_a_generation_too():
    assert SENTENCEPIECE.eos_ids == (2, 3)
    assert tokenizer_from_gguf(byte_level_metadata(eot_token_id=0)).eos_ids == (2, 0)


def test_ends_known_by_their_spelling_need_no_type():
    words = ["x", "<|eot_id|>", "<end_of_turn>"]
    metadata = byte_level_metadata(words)
    tokenizer = tokenizer_from_gguf(metadata)
    ends = [tokenizer.token_to_id(word) for word in ("<|eot_id|>", "<end_of_turn>")]
    assert tokenizer.eos_ids == (2, 0, *ends)
    assert tokenizer.encode("x<|eot_id|>x")[1] == ends[0]
    assert tokenizer.decode(ends) == ""


@pytest.mark.parametrize("ends", [("<|return|>", "<|call|>"), ("<|calls|>", "<|flush|>")])
def test_replies_of_several_messages_do_not_end_with_the_first(ends):
    def eos(*words):
        tokenizer = tokenizer_from_gguf(byte_level_metadata(words))
        return [tokenizer.id_to_token(i) for i in tokenizer.eos_ids]

    assert eos("<|end|>")[2:] == ["<|end|>"]
    assert eos("<|end|>", *ends)[2:] == list(ends)


def test_tokens_of_phi_3_swallow_the_spaces_after_them():
    metadata = sentencepiece_metadata(user=["<|user|>"])
    plain = tokenizer_from_gguf(metadata).encode("<|user|>  \n\u3000the")
    phi = tokenizer_from_gguf(metadata | {"general.name": "Phi-3 mini"})
    assert [phi.id_to_token(i) for i in phi.encode("<|user|>  \n\u3000the<s> the")] == [
        *("<s>", "<|user|>", "t", "he", "<s>", "▁the")
    ]
    assert len(plain) > 4


def test_merge_that_appears_twice_counts_where_it_is_first():
    metadata = byte_level_metadata(words=["ab", "bc"])
    metadata["tokenizer.ggml.merges"] = ["a b", "b c", "a b"]
    tokenizer = tokenizer_from_gguf(metadata)
    assert [tokenizer.id_to_token(i) for i in tokenizer.encode("abc")] == ["ab", "c"]


def test_empty_tokens_are_padding_with_names():
    metadata = byte_level_metadata(words=["ab"])
    metadata["tokenizer.ggml.tokens"] += ["", ""]
    metadata["tokenizer.ggml.token_type"] += [1, 1]
    tokenizer = tokenizer_from_gguf(metadata)
    size = tokenizer.vocab_size
    assert tokenizer.id_to_token(size - 1) == f"[EMPTY_{size - 1}]"
    assert tokenizer.decode(tokenizer.encode("abab")) == "abab"


def test_templates_are_named_and_must_be_text():
    templates = {"tokenizer.chat_template": "plain", "tokenizer.chat_template.tool_use": "tools"}
    tokenizer = tokenizer_from_gguf(byte_level_metadata() | templates)
    chat = [{"role": "user", "content": "x"}]
    assert tokenizer.apply_chat_template(chat, tokenize=False) == "plain"
    assert tokenizer.apply_chat_template(chat, tools=[{"name": "f"}], tokenize=False) == "tools"
    with pytest.raises(TokenizerError, match="chat_template is no text"):
        tokenizer_from_gguf(byte_level_metadata() | {"tokenizer.chat_template": 5})


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
    ("kind", "named"),
    [
        ("bert", "'bert', WordPiece, "),
        ("t5", "'t5', SentencePiece unigram, "),
        ("rwkv", "'rwkv', the trie of RWKV, "),
        ("none", "'none', no vocabulary at all, "),
        ("no_vocab", "no vocabulary at all"),
        ("plamo2", "trie"),
        ("klingon", "vocabulary kind 'klingon' is not supported"),
        ("k" * 10**6, "kkk' is not supported"),
    ],
)
def test_other_kinds_are_refused_by_what_they_are(kind, named):
    for metadata in (byte_level_metadata(model=kind), {"tokenizer.ggml.model": kind}):
        with pytest.raises(TokenizerError, match=named) as caught:
            tokenizer_from_gguf(metadata)
        assert len(str(caught.value)) < 500


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"model": 5}, "tokenizer.ggml.model"),
        ({"pre": 5}, "tokenizer.ggml.pre"),
        ({"add_bos_token": "false"}, "add_bos_token"),
        ({"add_eos_token": [True]}, "add_eos_token"),
        ({"bos_token_id": True}, "bos_token_id"),
        ({"eos_token_id": 1.0}, "eos_token_id"),
        ({"padding_token_id": 2**70}, "padding_token_id"),
        ({"merges": None}, "merges"),
        ({"merges": "a b"}, "merges"),
        ({"merges": [" ab"]}, "merge 0 is ' ab'"),
        ({"merges": ["a b c"]}, "merge 0 is 'a b c'"),
        ({"merges": ["a" * 10**7]}, "merge 0 is 'aaa"),
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
        ("scores", float("inf")),
        ("scores", -float("inf")),
        ("token_type", 0),
        ("token_type", float("nan")),
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


JUNK = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**63), 2**64 - 1),
    st.floats(),
    st.text(max_size=4),
    st.sampled_from(["a b", "gpt2", "llama", "gemma4", "<s>", "▁", "\n"]),
)
VALUES = st.one_of(
    JUNK,
    st.lists(JUNK, max_size=4),
    st.lists(st.lists(JUNK, max_size=2), max_size=2),
    st.integers(0, 5).map(lambda n: np.arange(n, dtype=np.float32)),
    st.integers(0, 5).map(lambda n: np.full(n, np.nan)),
    st.just([np.arange(3), np.arange(2)]),
)
KINDS = {
    "gpt2": byte_level_metadata(),
    "llama": sentencepiece_metadata(),
    "gemma4": pieces_with_merges(),
}
KEYS = sorted({key for metadata in KINDS.values() for key in metadata})
OTHERS = ["tokenizer.ggml.add_eos_token", "tokenizer.ggml.eot_token_id", "tokenizer.chat_template"]


@settings(max_examples=300, deadline=None)
@given(
    st.sampled_from(sorted(KINDS)), st.dictionaries(st.sampled_from(KEYS + OTHERS), VALUES), VALUES
)
def test_junk_in_any_field_is_a_typed_error_or_harmless(kind, junk, item):
    metadata = KINDS[kind] | junk
    if isinstance(tokens := metadata.get("tokenizer.ggml.tokens"), list) and len(tokens) > 9:
        metadata["tokenizer.ggml.tokens"] = [*tokens[:7], item, *tokens[8:]]
    try:
        tokenizer = tokenizer_from_gguf(metadata)
    except TokenizerError:
        return
    assert isinstance(tokenizer.encode("the <tool> é"), list)
