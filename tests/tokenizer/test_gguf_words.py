"""Every pre-tokenizer by name: its cuts against llama.cpp's and the models' own patterns."""

import itertools
import json
import string

import pytest
import tokenizers
from tokenizer_vocabularies import byte_level_metadata
from tokenizers import pre_tokenizers

from inferjax.tokenizer import tokenizer_from_gguf
from inferjax.tokenizer.detokenizer import BYTE_OF_CHAR
from inferjax.tokenizer.gguf_words import WORD_RULES

DIGITS = string.digits + string.ascii_letters  # of base 62, in which lengths are recorded
# The names that each recorded rule goes by.
RECORDED = {
    name: next(first for first, other in WORD_RULES.items() if other.cuts == rule.cuts)
    for name, rule in WORD_RULES.items()
}


@pytest.fixture(scope="module")
def record(root):
    path = root / "tests" / "goldens" / "gguf_words.json"
    return json.loads(path.read_text(encoding="utf-8"))


def spelled(word):
    return bytes(BYTE_OF_CHAR[char] for char in word).decode()


def cut(name, text):
    words = WORD_RULES[name].pre_tokenizer().pre_tokenize_str(text)
    return [spelled(word) for word, _ in words]


def cut_at(text, lengths):
    ends = itertools.accumulate(DIGITS.index(length) for length in lengths)
    return [text[start:end] for start, end in itertools.pairwise([0, *ends])]


@pytest.mark.parametrize("name", WORD_RULES)
def test_words_are_those_of_the_reference(record, name):
    compared = 0
    for reference in ("llama.cpp", "own"):
        lengths = record[reference].get(RECORDED[name], [])
        for text, recorded in zip(record["texts"], lengths, strict=bool(lengths)):
            if recorded is not None:
                assert cut(name, text) == cut_at(text, recorded)
                compared += 1
    assert compared >= 44


@pytest.mark.parametrize("name", WORD_RULES)
def test_words_join_to_the_text(name):
    text = "".join(map(chr, [*range(0x300), 0x3000, 0x1F600, 0x20000, 0xE0100])) + " 12 ab\r\n " * 9
    assert "".join(cut(name, text)) == text
    assert cut(name, "") == []


@pytest.mark.parametrize("name", WORD_RULES)
def test_long_runs_take_little_time(name):
    for run in (" ", "\n", "a", "A", "1", "'", "\u0301", "!"):
        assert "".join(cut(name, run * 20_000 + "b")) == run * 20_000 + "b"


@pytest.mark.parametrize("name", WORD_RULES)
def test_texts_are_composed_first_where_the_model_does_so(name):
    tokenizer = tokenizer_from_gguf(byte_level_metadata(pre=name, add_bos_token=False))
    decomposed = "e\u0301"
    text = tokenizer.decode(tokenizer.encode(decomposed))
    assert text == ("\u00e9" if WORD_RULES[name].nfc else decomposed)


def test_names_of_qwen_and_cohere_compose_and_those_of_llama_do_not():
    assert {name for name, rule in WORD_RULES.items() if rule.nfc} == set(
        ["mpt", "olmo", "command-r", "qwen2", "qwen35", "deepseek-r1-qwen", "f2llmv2", "megrez"]
    )


def test_long_s_after_an_apostrophe_is_an_ending_in_any_case():
    assert cut("llama-bpe", "x'\u017fy") == ["x", "'\u017f", "y"]
    assert cut("gpt-2", "x'\u017fy") == ["x", "'", "\u017fy"]


def test_spaces_beyond_ascii_are_in_classes_of_characters():
    assert cut("deepseek-coder", "a\u2003  b") == ["a", "\u2003", " ", " b"]
    assert cut("deepseek-llm", "a  \u3000") == ["a", " ", " ", "\u3000"]


def test_threes_from_the_right_are_those_of_the_models_own_pattern():
    """A slow form of the pattern, which looks ahead from every digit, against the linear one."""
    texts = ["1" * n + end for n in range(1, 12) for end in ("", "a", " a", "_", ".", "\u00bd")]
    texts += ["\u00bd345", "x12345", "12345x6789", "1,234,567.89", "\u0663\u0664\u0665\u0666"]
    for text in texts:
        assert cut("tiny_aya", text) == by_definition(text)


def by_definition(text):
    slow = pre_tokenizers.Split(tokenizers.Regex(r"\d{1,3}(?=(?:\d{3})*\b)"), "isolated")
    pieces = [piece for piece, _ in slow.pre_tokenize_str(text)]
    return [word for piece in pieces for word in cut("gpt-4o", piece)]
