"""The stream equals the whole, whatever the tokens, and never shows half a character."""

import json

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizer_vocabularies import byte_level_metadata, sentencepiece_metadata
from tokenizers import decoders, models

from inferjax.errors import TokenizerError
from inferjax.tokenizer import SpecialTokens, Tokenizer, tokenizer_from_gguf

TOKENIZERS = {
    "byte_level": tokenizer_from_gguf(byte_level_metadata()),
    "sentencepiece": tokenizer_from_gguf(sentencepiece_metadata()),
    "space_prefix": tokenizer_from_gguf(sentencepiece_metadata(add_space_prefix=True)),
}
# Ids beyond every vocabulary are included: a model's table may be padded.
IDS = st.lists(st.integers(0, 420), max_size=40)
TEXTS = st.text(
    st.one_of(
        st.characters(exclude_categories=["Cs"]),
        st.sampled_from(" \n\tthelo worldé日本🎉👩\u200d👧🏽\ufffd"),
    )
)
few = settings(max_examples=50, deadline=None)
every_kind = pytest.mark.parametrize("kind", TOKENIZERS)


@every_kind
@few
@given(ids=IDS, skip=st.booleans())
def test_stream_joins_to_decode_for_any_ids(kind, ids, skip):
    tokenizer = TOKENIZERS[kind]
    stream = tokenizer.detokenizer(skip_special_tokens=skip)
    pieces = [stream.push(token_id) for token_id in ids]
    assert "".join(pieces) + stream.flush() == tokenizer.decode(ids, skip_special_tokens=skip)


@few
@given(ids=IDS, skip=st.booleans())
def test_byte_level_decode_equals_the_library_for_any_ids(ids, skip):
    tokenizer = TOKENIZERS["byte_level"]
    expected = tokenizer._core.decode(ids, skip_special_tokens=skip)
    assert tokenizer.decode(ids, skip_special_tokens=skip) == expected


@pytest.mark.parametrize("kind", ["sentencepiece", "space_prefix"])
@few
@given(ids=IDS, skip=st.booleans())
def test_sentencepiece_decode_equals_the_library_without_bytes(kind, ids, skip):
    tokenizer = TOKENIZERS[kind]
    ids = [i for i in ids if not 4 <= i < 260]
    expected = tokenizer._core.decode(ids, skip_special_tokens=skip)
    assert tokenizer.decode(ids, skip_special_tokens=skip) == expected


@every_kind
@few
@given(text=TEXTS)
def test_decode_returns_the_encoded_text(kind, text):
    tokenizer = TOKENIZERS[kind]
    ids = tokenizer.encode(text, add_special_tokens=False)
    text = text if kind == "byte_level" else text.replace("▁", " ")
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


@every_kind
@few
@given(text=TEXTS)
def test_stream_shows_only_whole_characters(kind, text):
    tokenizer = TOKENIZERS[kind]
    text = text.replace("\ufffd", "").replace("▁", " ")
    stream, shown = tokenizer.detokenizer(skip_special_tokens=False), ""
    for token_id in tokenizer.encode(text, add_special_tokens=False):
        shown += stream.push(token_id)
        assert text.startswith(shown)
    assert shown == text
    assert stream.flush() == ""


@every_kind
@few
@given(blob=st.binary(max_size=24))
def test_invalid_bytes_decode_as_python_replaces_them(kind, blob):
    tokenizer = TOKENIZERS[kind]
    first = 3 if kind == "byte_level" else 4
    expected = blob.decode("utf-8", errors="replace")
    if kind == "space_prefix":
        expected = expected.removeprefix(" ")
    assert tokenizer.decode([first + byte for byte in blob]) == expected


def test_incomplete_character_waits_for_its_last_byte():
    stream = TOKENIZERS["sentencepiece"].detokenizer()
    euro = [4 + byte for byte in "€".encode()]
    assert [stream.push(i) for i in euro] == ["", "", "€"]
    assert stream.push(euro[0]) == ""
    assert stream.flush() == "\ufffd"


def test_replacement_appears_once_bytes_cannot_become_a_character():
    stream = TOKENIZERS["byte_level"].detokenizer()
    assert stream.push(3 + 0xE2) == ""
    assert stream.push(3 + ord("a")) == "\ufffda"


def test_special_tokens_are_skipped_or_shown():
    tokenizer = TOKENIZERS["byte_level"]
    ids = tokenizer.encode("<|im_start|>hello<tool><|im_end|>")
    assert tokenizer.decode(ids) == "hello<tool>"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<|im_start|>hello<tool><|im_end|>"


def test_space_prefix_is_dropped_from_the_first_text_only():
    tokenizer = TOKENIZERS["space_prefix"]
    the = tokenizer.token_to_id("▁the")
    stream = tokenizer.detokenizer()
    assert [stream.push(i) for i in (1, the, the)] == ["", "the", " the"]
    assert tokenizer.decode([1, the], skip_special_tokens=False) == "<s> the"


def test_ids_may_be_numpy_integers():
    tokenizer = TOKENIZERS["byte_level"]
    ids = np.array(tokenizer.encode("hello 🎉"), np.int32)
    assert tokenizer.decode(ids) == "hello 🎉"


def test_pending_state_stays_below_one_character():
    stream = TOKENIZERS["byte_level"].detokenizer()
    for token_id in np.random.default_rng(0).integers(0, 300, 5_000):
        stream.push(int(token_id))
        assert len(stream._decoder.getstate()[0]) <= 3


def make_tokenizer(decoder) -> Tokenizer:
    core = tokenizers.Tokenizer(models.BPE(vocab={"▁": 0, "a": 1, "▁a": 2, "▁▁": 3}, merges=[]))
    core.decoder = decoder
    return Tokenizer(core, SpecialTokens())


@pytest.mark.parametrize("scheme", ["always", "first", "never"])
@few
@given(ids=st.lists(st.integers(0, 3), max_size=8))
def test_metaspace_decode_equals_the_library(scheme, ids):
    tokenizer = make_tokenizer(decoders.Metaspace(prepend_scheme=scheme))
    assert tokenizer.decode(ids) == tokenizer._core.decode(ids)


@pytest.mark.parametrize(
    "decoder",
    [
        None,
        decoders.WordPiece(),
        decoders.Sequence([decoders.Fuse(), decoders.ByteFallback()]),
        decoders.Sequence([decoders.Replace("x", "y"), decoders.Fuse()]),
        decoders.Sequence([decoders.Fuse(), decoders.Strip(" ", 2, 0)]),
        decoders.Metaspace(replacement="#"),
    ],
    ids=lambda decoder: "none" if decoder is None else json.loads(decoder.__getstate__())["type"],
)
def test_other_decoders_are_refused(decoder):
    with pytest.raises(TokenizerError, match="decoder"):
        make_tokenizer(decoder)
