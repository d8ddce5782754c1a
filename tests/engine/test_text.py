"""Streamed text equals whole text, and no part of a stop string is ever shown."""

import codecs
import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizer_vocabularies import byte_level_metadata, sentencepiece_metadata

from inferjax.engine.text import Pushed, TextStream
from inferjax.errors import InvalidSampling
from inferjax.tokenizer import Detokenizer, tokenizer_from_gguf

TOKENIZERS = {
    "byte_level": tokenizer_from_gguf(byte_level_metadata()),
    "sentencepiece": tokenizer_from_gguf(sentencepiece_metadata()),
    "space_prefix": tokenizer_from_gguf(sentencepiece_metadata(add_space_prefix=True)),
}
STOPS = ["#", "###", "</s>", "日本", "👩\u200d🔬", "é#"]
# Few characters make stop strings that overlap, nest and repeat; each has another UTF-8 length.
CHARACTERS = "abé日👩\u200d"
few = settings(max_examples=200, deadline=None)
stop_lists = st.lists(st.text(alphabet=CHARACTERS, min_size=1, max_size=3), max_size=3)
small = st.integers(0, 4)


def cut(data: bytes, bounds: list[int]) -> list[bytes]:
    edges = [0, *sorted(min(bound, len(data)) for bound in bounds), len(data)]
    return [data[i:j] for i, j in itertools.pairwise(edges)]


# Tokens are byte strings cut anywhere, empty ones included, from valid text or from any bytes.
texts = st.text(alphabet=CHARACTERS, max_size=14).map(str.encode)
cut_texts = st.builds(cut, texts, st.lists(st.integers(0, 50), max_size=12))
raw = st.lists(st.sampled_from(["a", "b", "é", "日"]).map(str.encode) | st.binary(max_size=3))
token_lists = cut_texts | raw


def certain(data: bytes) -> str:
    """Return the text of bytes to which more may come."""
    return codecs.getincrementaldecoder("utf-8")("replace").decode(data)


def stream_of(tokens: list[bytes], **options) -> TextStream:
    return TextStream(Detokenizer(tokens.__getitem__), **options)


def run(tokens: list[bytes], sizes: list[int] | None = None, **options):
    """Return (text, streamed pieces, number of tokens that count, stop) of a stream."""
    stream, pieces, count, at = stream_of(tokens, **options), [], 0, 0
    for size in itertools.chain(sizes or [], itertools.repeat(1)):
        if at >= len(tokens) or stream.stop is not None:
            break
        ids = list(range(at, min(at + size, len(tokens))))
        pushed = stream.push(ids)
        pieces.append(pushed.text)
        count, at = count + pushed.num_tokens, at + size
    pieces.append(stream.finish())
    return stream.text, pieces, count, stream.stop


def whole(tokens: list[bytes], stops: list[str], min_tokens: int, include_stop: bool):
    """Return (text, number of tokens that count, stop) by trying every end in turn."""
    text = b"".join(tokens).decode(errors="replace")
    known = [len(certain(b"".join(tokens[: i + 1]))) for i in range(len(tokens))]
    for end in range(1, len(text) + 1):
        count = next((i + 1 for i, n in enumerate(known) if n >= end), len(tokens))
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending and count > min_tokens:
            stop = max(ending, key=len)
            return text[: end if include_stop else end - len(stop)], count, stop
    return text, len(tokens), None


@few
@given(token_lists, stop_lists, st.lists(small, max_size=8), small, st.booleans())
def test_text_streamed_equals_whole(tokens, stops, sizes, min_tokens, include_stop):
    """Any bytes, cut into any tokens, any number of them at once."""
    options = {"stops": stops, "min_tokens": min_tokens, "include_stop": include_stop}
    text, pieces, count, stop = run(tokens, sizes, **options)
    assert (text, count, stop) == whole(tokens, stops, min_tokens, include_stop)
    assert "".join(pieces) == text


@few
@given(token_lists, stop_lists, small)
def test_text_shows_all_that_cannot_become_a_stop_string_and_no_more(tokens, stops, min_tokens):
    """What is held back is the longest end of the text that a stop string goes on from."""
    stream = stream_of(tokens, stops=stops, min_tokens=min_tokens)
    for i in range(len(tokens)):
        if stream.push([i]).stop is not None:
            return
        text = certain(b"".join(tokens[: i + 1]))
        held = [n for s in stops for n in range(len(s)) if text.endswith(s[:n])]
        assert stream.text == text[: len(text) - max(held, default=0)]


def all_cuts(data: bytes) -> list[list[bytes]]:
    inner = range(1, len(data))
    return [cut(data, list(c)) for n in range(len(data)) for c in itertools.combinations(inner, n)]


@pytest.mark.parametrize("stop", STOPS)
def test_text_never_leaks_a_part_of_a_stop_string_however_it_is_cut(stop):
    for parts in all_cuts(stop.encode()):
        tokens = [b"a ", *parts, b"more"]
        text, pieces, count, found = run(tokens, stops=[stop])
        assert (text, count, found) == ("a ", len(tokens) - 1, stop)
        assert pieces[:1] == ["a "]
        assert not any(pieces[1:])


@pytest.mark.parametrize("stop", STOPS)
def test_text_ending_within_a_stop_string_is_flushed(stop):
    for parts in all_cuts(stop.encode()):
        text, pieces, _, found = run([b"a ", *parts[:-1]], stops=[stop])
        assert found is None
        assert text == "".join(pieces) == (b"a " + b"".join(parts[:-1])).decode(errors="replace")


@pytest.mark.parametrize("kind", TOKENIZERS)
@few
@given(data=st.data())
def test_text_of_real_vocabularies_ends_at_a_stop_string_from_within(kind, data):
    tokenizer = TOKENIZERS[kind]
    ids = data.draw(st.lists(st.integers(0, 420), max_size=40))
    full = tokenizer.decode(ids)
    at = data.draw(st.integers(0, max(0, len(full) - 1)))
    stop = full[at : at + data.draw(st.integers(1, 4))] or "never"
    stream = TextStream(tokenizer.detokenizer(), stops=[stop])
    pieces = [stream.push(ids).text, stream.finish()]
    assert "".join(pieces) == stream.text == full.partition(stop)[0]
    assert stream.stop == (stop if full else None)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("👩", "👩"),
        ("👩\u200d🔬", "👩\u200d🔬"),
        ("日本語", "日本語"),
        ("e\u0301", "e\u0301"),
    ],
)
def test_text_appears_with_the_last_byte_of_a_character(text, shown):
    tokens = [bytes([byte]) for byte in text.encode()]
    stream = stream_of(tokens, stops=["###"])
    for i in range(len(tokens)):
        stream.push([i])
        assert stream.text == b"".join(tokens[: i + 1]).decode(errors="ignore")
    assert stream.text == shown
    assert stream.finish() == ""


def test_text_goes_on_when_a_held_end_is_no_stop_string():
    stream = stream_of([b"x #", b"#", b" y"], stops=["###"])
    assert [stream.push([i]).text for i in range(3)] == ["x ", "", "## y"]


def test_text_ends_at_the_stop_string_that_is_complete_first():
    assert run([b"abcd"], stops=["abcd", "bc"])[::3] == ("a", "bc")
    assert run([b"abcd"], stops=["c", "bc"])[::3] == ("a", "bc")


def test_text_includes_the_stop_string_but_nothing_behind_it():
    stream = stream_of([b"x", b"EN", b"D more"], stops=["END"], include_stop=True)
    assert stream.push([0, 1, 2]) == Pushed("xEND", 3, "END")


def test_text_drops_what_comes_after_the_end():
    stream = stream_of([b"a#", b"b"], stops=["#"])
    assert stream.push([0, 1]) == Pushed("a", 1, "#")
    assert stream.push([1]) == Pushed("", 0, "#")
    assert stream.finish() == ""
    assert stream.text == "a"


def test_text_is_finished_once():
    stream = stream_of([b"a#"], stops=["##"])
    stream.push([0])
    assert [stream.finish(), stream.finish()] == ["#", ""]
    assert stream.push([0]) == Pushed("", 0, None)


def test_text_min_tokens_pass_over_a_stop_string_for_good():
    assert run([b"a#", b"b", b"c"], stops=["#"], min_tokens=1)[::3] == ("a#bc", None)
    assert run([b"a#", b"b", b"#"], stops=["#"], min_tokens=1)[::3] == ("a#b", "#")


def test_text_min_tokens_let_a_stop_string_begin_within_them():
    assert run([b"a#", b"#b"], stops=["##"], min_tokens=1)[::3] == ("a", "##")


def test_text_without_a_detokenizer_is_empty_and_counts_tokens():
    stream = TextStream(None)
    assert stream.push([5, 6, 7]) == Pushed("", 3, None)
    assert stream.finish() == stream.text == ""


def test_text_empty_stop_string_is_refused():
    with pytest.raises(InvalidSampling, match="empty"):
        TextStream(None, stops=[""])
