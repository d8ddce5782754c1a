import json

import pytest

from inferjax.cli.batch_line import Reader, failure, parse
from inferjax.errors import InferjaxError, InvalidInput, InvalidSampling
from inferjax.sampling import SamplingParams

DEFAULTS = SamplingParams(temperature=0.5, max_tokens=7, stop=["x"], logit_bias={3: 1.0})
PLAIN = Reader(sampling=DEFAULTS, chat=False)
CHAT = Reader(sampling=DEFAULTS, chat=True)


@pytest.mark.parametrize(
    "content", [b"{", b"[1]", b'"text"', b"3", b"\xff\xfe", b"[" * 100_000, b"1" * 5000]
)
def test_line_that_is_no_object_is_refused(content):
    with pytest.raises(InvalidInput, match="the line is"):
        parse(content)


def test_line_takes_what_it_leaves_out_from_the_flags():
    assert PLAIN.ask({"prompt": "a"}).sampling == DEFAULTS


def test_line_overrides_the_flags():
    fields = {"max_tokens": None, "stop": [], "logit_bias": {"4": -1}, "seed": 3}
    expected = SamplingParams(temperature=0.5, logit_bias={4: -1.0}, seed=3)
    assert PLAIN.ask({"prompt": "a", **fields}).sampling == expected


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"tempreature": 1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"n": 10**9}, "n is"),
    ],
    ids=str,
)
def test_line_with_a_bad_field_is_refused(fields, text):
    with pytest.raises(InvalidSampling, match=text):
        PLAIN.ask({"prompt": "a", **fields})


@pytest.mark.parametrize("prompt", ["a", [1, 2], [{"role": "user", "content": "a"}], None, 3])
def test_prompt_is_left_to_the_engine(prompt):
    assert PLAIN.ask({"prompt": prompt}).prompt == prompt


def test_text_is_wrapped_for_a_chat_model_and_ids_are_not():
    assert CHAT.ask({"prompt": "a"}).prompt == [{"role": "user", "content": "a"}]
    assert CHAT.ask({"prompt": [1, 2]}).prompt == [1, 2]


def test_messages_are_another_name_for_a_conversation():
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    assert PLAIN.ask({"messages": messages}).prompt == messages


@pytest.mark.parametrize(
    "fields",
    [{}, {"id": 1}, {"prompt": "a", "messages": []}, {"messages": "a"}, {"messages": [1]}],
    ids=str,
)
def test_line_without_one_prompt_is_refused(fields):
    with pytest.raises(InvalidInput):
        PLAIN.ask(fields)


def test_priority_and_salt_are_passed_on():
    ask = PLAIN.ask({"prompt": "a", "priority": -2, "cache_salt": "s"})
    assert (ask.priority, ask.cache_salt) == (-2, "s")


def test_failure_names_the_kind_and_the_fix():
    found = failure(InvalidInput("it is empty", why="no tokens", fix="say something"))
    assert json.loads(json.dumps(found))["error"]["type"] == "InvalidInput"
    assert "say something" in found["error"]["message"]
    assert issubclass(InvalidInput, InferjaxError)
