"""The two catalog models' own vocabularies against what Hugging Face transformers gave."""

import json
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inferjax.checkpoint.catalog import default_cache_dir, fetch
from inferjax.checkpoint.gguf import open_gguf
from inferjax.tokenizer import Tokenizer, tokenizer_from_gguf

pytestmark = pytest.mark.model

CHATS = {
    "chat_1": [{"role": "user", "content": "What is the capital of Japan?"}],
    "chat_sys": [
        {"role": "system", "content": "You answer like a pirate."},
        {"role": "user", "content": "Tell me a joke about cats."},
    ],
}
# SmolLM2's vocabulary lacks six control characters and the bytes that start unassigned planes.
ROUGH_TEXTS = st.text(
    st.one_of(
        st.characters(exclude_categories=["Cs", "Cc", "Cn", "Co"], exclude_characters="▁"),
        st.sampled_from(" \n\t.,0123456789abcdefé日本語한글🎉👩\u200d👧🏽"),
    ),
    max_size=60,
)


@pytest.fixture(scope="module", params=["smollm2-135m-instruct", "gemma-3-270m"])
def name(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def tokenizer(name) -> Tokenizer:
    file = open_gguf(fetch(name, default_cache_dir(), progress=False))
    return tokenizer_from_gguf(file.metadata)


@pytest.fixture(scope="module")
def cases(name, root) -> list[dict]:
    golden = root / "tests" / "goldens" / f"{name}.json"
    return json.loads(golden.read_text(encoding="utf-8"))["cases"]


def test_prompt_ids_equal_the_reference(tokenizer, cases):
    for case in cases:
        assert tokenizer.encode(case["prompt"]) == case["prompt_ids"], case["name"]


def test_generated_text_equals_the_reference_whole_and_streamed(tokenizer, cases):
    for case in cases:
        stream = tokenizer.detokenizer(skip_special_tokens=False)
        streamed = stream.push_many(case["greedy_ids"]) + stream.flush()
        assert streamed == case["greedy_text"], case["name"]


def test_chat_text_equals_the_reference(name, tokenizer, cases):
    if name != "smollm2-135m-instruct":
        pytest.skip("the Gemma file is a base model's and has no template")
    prompts = {case["name"]: case for case in cases if case["name"] in CHATS}
    for chat, messages in CHATS.items():
        text = tokenizer.apply_chat_template(messages, tokenize=False)
        assert text == prompts[chat]["prompt"]
        assert tokenizer.apply_chat_template(messages) == prompts[chat]["prompt_ids"]


def test_rough_text_survives_the_stream(tokenizer):
    @settings(max_examples=300, deadline=None)
    @given(ROUGH_TEXTS)
    def survives(text):
        stream, shown = tokenizer.detokenizer(skip_special_tokens=False), ""
        for token_id in tokenizer.encode(text, add_special_tokens=False):
            shown += stream.push(token_id)
            assert text.startswith(shown)
        assert shown == text

    survives()


def test_any_ids_stream_to_what_they_decode_to(tokenizer):
    @settings(max_examples=300, deadline=None)
    @given(st.lists(st.integers(0, tokenizer.vocab_size + 9), max_size=40))
    def agrees(ids):
        stream = tokenizer.detokenizer()
        assert "".join(map(stream.push, ids)) + stream.flush() == tokenizer.decode(ids)

    agrees()


def test_streaming_takes_linear_time(tokenizer):
    ids = tokenizer.encode("a long text 🎉 of many words\n" * 4_000, add_special_tokens=False)
    start = time.perf_counter()
    tokenizer.detokenizer().push_many(ids)
    # About 3 us a token when idle; decoding the whole text at each token would take minutes.
    assert time.perf_counter() - start < 200e-6 * len(ids)
