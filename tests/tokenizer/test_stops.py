import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inferjax.errors import InvalidSampling
from inferjax.tokenizer.stops import StopStrings

# Two letters make overlapping and nested stop strings common.
texts = st.text(alphabet="ab", max_size=24)
stop_lists = st.lists(st.text(alphabet="ab", min_size=1, max_size=4), max_size=3)


def whole(text: str, stops: list[str]) -> tuple[str, str | None]:
    """Return the expected text and stop by trying every end position in turn."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            longest = max(ending, key=len)
            return text[: end - len(longest)], longest
    return text, None


def streamed(pieces: list[str], stops: list[str]) -> tuple[list[str], str | None]:
    watcher = StopStrings(stops)
    shown = []
    for piece in pieces:
        emit, stopped = watcher.push(piece)
        shown.append(emit)
        if stopped:
            return shown, watcher.matched
    return [*shown, watcher.flush()], None


@given(texts, stop_lists, st.lists(st.integers(0, 24), max_size=6))
def test_stop_streamed_text_equals_whole_text_cut(text, stops, cuts):
    bounds = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    pieces = [text[i:j] for i, j in itertools.pairwise(bounds)]
    shown, matched = streamed(pieces, stops)
    assert ("".join(shown), matched) == whole(text, stops)


@given(texts, stop_lists)
def test_stop_never_shows_a_character_of_the_match(text, stops):
    """Letter by letter, what is shown is at every moment a prefix of the final text."""
    final, _ = whole(text, stops)
    shown, _ = streamed(list(text), stops)
    so_far = ""
    for piece in shown:
        so_far += piece
        assert final.startswith(so_far)


def test_stop_holds_back_no_more_than_it_must():
    watcher = StopStrings(["###"])
    assert watcher.push("answer #") == ("answer ", False)
    assert watcher.push(" 1") == ("# 1", False)
    assert watcher.push("##") == ("", False)
    assert watcher.flush() == "##"


def test_stop_without_strings_passes_text_through():
    watcher = StopStrings([])
    assert watcher.push("any text") == ("any text", False)
    assert watcher.flush() == ""


def test_stop_after_the_match_stays_stopped():
    watcher = StopStrings(["x"])
    assert watcher.push("axb") == ("a", True)
    assert watcher.push("more") == ("", True)
    assert watcher.flush() == ""


def test_stop_empty_string_is_refused():
    with pytest.raises(InvalidSampling, match="empty"):
        StopStrings(["ok", ""])
