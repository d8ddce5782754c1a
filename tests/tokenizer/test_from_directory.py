"""Tokenizers of checkpoint directories: every file's forms, and every file damaged."""

import json

import pytest
import tokenizers
from tokenizer_vocabularies import byte_level_metadata
from tokenizers import processors

from inferjax.errors import TemplateError, TokenizerError
from inferjax.tokenizer import tokenizer_from_directory, tokenizer_from_gguf

MESSAGES = [{"role": "user", "content": "the"}]


def make_directory(folder, *, config=None, generation=None, template=None, adds_bos=True, **files):
    core = tokenizer_from_gguf(byte_level_metadata())._core
    if adds_bos:
        core.post_processor = processors.TemplateProcessing(
            single="<|im_start|> $A", special_tokens=[("<|im_start|>", 1)]
        )
    core.enable_truncation(2)
    core.enable_padding(length=9)
    (folder / "tokenizer.json").write_text(core.to_str())
    config = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"} | (config or {})
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    for name, text in files.items():
        (folder / f"{name}.json").write_text(text)
    return folder


def test_directory_gives_ids_and_special_tokens(tmp_path):
    tokenizer = tokenizer_from_directory(make_directory(tmp_path))
    ids = tokenizer.encode("hello the end")
    assert ids[0] == tokenizer.bos_id == 1
    assert tokenizer.eos_ids == (2,)
    assert tokenizer.decode(ids) == "hello the end"
    assert tokenizer.token_to_id("hello") in ids
    assert tokenizer.vocab_size == max(map(tokenizer.token_to_id, ["<tool>", "hello"])) + 1
    assert tokenizer.id_to_token(10**12) is tokenizer.id_to_token(-1) is None


def test_truncation_and_padding_of_the_file_are_not_applied(tmp_path):
    tokenizer = tokenizer_from_directory(make_directory(tmp_path))
    assert len(tokenizer.encode("the the the the the the the the the the")) > 9
    assert len(tokenizer.encode("the")) == 2


def test_special_tokens_may_be_objects_or_in_their_own_file(tmp_path):
    config = {"bos_token": None, "eos_token": {"content": "<|im_end|>", "lstrip": False}}
    own = json.dumps({"unk_token": {"content": "<|endoftext|>"}, "pad_token": "<|endoftext|>"})
    folder = make_directory(tmp_path, config=config, special_tokens_map=own)
    tokenizer = tokenizer_from_directory(folder)
    assert (tokenizer.bos_id, tokenizer.eos_ids) == (None, (2,))
    assert (tokenizer.unk_id, tokenizer.pad_id) == (0, 0)


@pytest.mark.parametrize(
    ("declared", "expected"), [([2, 0], (2, 0)), (0, (2, 0)), (None, (2,)), ([], (2,))]
)
def test_every_eos_of_the_generation_config_counts(tmp_path, declared, expected):
    folder = make_directory(tmp_path, generation={"eos_token_id": declared})
    assert tokenizer_from_directory(folder).eos_ids == expected


@pytest.mark.parametrize("adds_bos", [True, False])
@pytest.mark.parametrize("wanted", [True, False, None])
def test_bos_follows_the_config_then_the_post_processor(tmp_path, adds_bos, wanted):
    config = {} if wanted is None else {"add_bos_token": wanted}
    tokenizer = tokenizer_from_directory(make_directory(tmp_path, config=config, adds_bos=adds_bos))
    expected = adds_bos if wanted is None else wanted
    assert tokenizer.encode("the").count(1) == expected
    assert tokenizer.encode("the", add_special_tokens=False).count(1) == 0


def test_eos_is_appended_to_raw_text_but_not_to_a_chat(tmp_path):
    folder = make_directory(tmp_path, config={"add_eos_token": True}, template="the")
    tokenizer = tokenizer_from_directory(folder)
    assert tokenizer.encode("the")[-1] == 2
    assert 2 not in tokenizer.apply_chat_template(MESSAGES)


@pytest.mark.parametrize("template", ["{{ bos_token }}the", "the"])
def test_chat_ids_hold_bos_once_whether_or_not_the_template_writes_it(tmp_path, template):
    tokenizer = tokenizer_from_directory(make_directory(tmp_path, template=template))
    ids = tokenizer.apply_chat_template(MESSAGES)
    assert ids.count(1) == 1
    assert ids[0] == 1
    text = tokenizer.apply_chat_template(MESSAGES, tokenize=False)
    assert tokenizer.encode(text).count(1) == 1


def test_template_file_wins_over_the_config(tmp_path):
    config = {"chat_template": "from config"}
    folder = make_directory(tmp_path, config=config)
    render = lambda: tokenizer_from_directory(folder).apply_chat_template(MESSAGES, tokenize=False)  # noqa: E731
    assert render() == "from config"
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": "from json"}))
    assert render() == "from json"
    (folder / "chat_template.jinja").write_text("from file")
    assert render() == "from file"


def test_named_templates_are_chosen_by_tools(tmp_path):
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
    tokenizer = tokenizer_from_directory(make_directory(tmp_path, config={"chat_template": named}))
    assert tokenizer.apply_chat_template(MESSAGES, tokenize=False) == "plain"
    assert tokenizer.apply_chat_template(MESSAGES, tools=[{}], tokenize=False) == "tools"


def test_missing_template_says_what_to_do(tmp_path):
    tokenizer = tokenizer_from_directory(make_directory(tmp_path))
    assert not tokenizer.has_chat_template
    with pytest.raises(TemplateError, match=r"no chat template(?s:.*)Fix: use encode"):
        tokenizer.apply_chat_template(MESSAGES)


def test_missing_tokenizer_says_what_to_do(tmp_path):
    with pytest.raises(TokenizerError, match=r"no tokenizer.json(?s:.*)Fix: save the fast"):
        tokenizer_from_directory(tmp_path)


def test_lone_surrogates_are_refused(tmp_path):
    with pytest.raises(TokenizerError, match="cannot be encoded"):
        tokenizer_from_directory(make_directory(tmp_path)).encode("a\ud800")


@pytest.mark.parametrize("name", ["tokenizer_config", "special_tokens_map", "generation_config"])
@pytest.mark.parametrize("text", ["", "{", "[]", "[" * 100_000, "nul", '{"a": \ud83d}'])
def test_damaged_json_names_its_file(tmp_path, name, text):
    folder = make_directory(tmp_path)
    (folder / f"{name}.json").write_bytes(text.encode("utf-8", "surrogatepass"))
    with pytest.raises(TokenizerError, match=name):
        tokenizer_from_directory(folder)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{}",
        "[]",
        "[" * 100_000,
        '{"version": "1.0", "model": {"type": "BPE", "vocab": {}, "merges": ["a b"]}}',
        '{"version": "1.0", "model": {"type": "Nothing"}}',
        '{"version": "1.0", "added_tokens": [{"id": -1}], "model": {"type": "BPE"}}',
    ],
)
def test_damaged_tokenizer_is_refused(tmp_path, text):
    folder = make_directory(tmp_path)
    (folder / "tokenizer.json").write_text(text)
    with pytest.raises(TokenizerError, match=r"tokenizer\.json"):
        tokenizer_from_directory(folder)


def test_tokenizer_cut_anywhere_is_refused(tmp_path):
    folder = make_directory(tmp_path)
    whole = (folder / "tokenizer.json").read_text()
    for end in range(0, len(whole) - 1, 397):
        (folder / "tokenizer.json").write_text(whole[:end])
        with pytest.raises(TokenizerError):
            tokenizer_from_directory(folder)


@pytest.mark.parametrize(
    ("config", "generation", "named"),
    [
        ({"bos_token": 5}, None, "bos_token"),
        ({"eos_token": {"content": [1]}}, None, "eos_token"),
        ({"chat_template": 5}, None, "chat_template"),
        ({"chat_template": [{"name": "default"}]}, None, "chat_template"),
        ({"chat_template": [5]}, None, "chat_template"),
        ({}, {"eos_token_id": "two"}, "eos_token_id"),
        ({}, {"eos_token_id": [1, -2]}, "eos_token_id"),
        ({}, {"eos_token_id": True}, "eos_token_id"),
    ],
)
def test_values_of_the_wrong_kind_are_named(tmp_path, config, generation, named):
    folder = make_directory(tmp_path, config=config, generation=generation)
    with pytest.raises(TokenizerError, match=named):
        tokenizer_from_directory(folder)


def test_oversized_file_is_refused_before_reading(tmp_path):
    folder = make_directory(tmp_path)
    with (folder / "tokenizer.json").open("r+b") as file:
        file.truncate(2**40)
    with pytest.raises(TokenizerError, match="bytes, more than"):
        tokenizer_from_directory(folder)


def test_saved_file_is_what_the_library_reads(tmp_path):
    folder = make_directory(tmp_path, adds_bos=False)
    core = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    core.no_truncation()
    core.no_padding()
    text = "hello 日本 the<tool> 123  \n\n🎉"
    assert tokenizer_from_directory(folder).encode(text) == core.encode(text).ids
