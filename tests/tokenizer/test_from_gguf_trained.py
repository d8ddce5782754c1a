"""A vocabulary trained here, written as GGUF and read back, against the encoder that trained it."""

import itertools
import json
import re

import gguf
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from inferjax.checkpoint.gguf import open_gguf
from inferjax.tokenizer import tokenizer_from_gguf

LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
DEEPSEEK3 = (
    r"\p{N}{1,3}",
    r"[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)
CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
USER = ["<tool>", "<tool_call>", "   "]


def split(pattern):
    return pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated")


# Each kind's own pipeline, as its tokenizer.json states it: cuts and whether texts are composed.
PIPELINES = {
    "gpt-2": ([pre_tokenizers.ByteLevel(add_prefix_space=False)], False),
    "olmo": ([pre_tokenizers.ByteLevel(add_prefix_space=False)], True),
    "starcoder": (
        [pre_tokenizers.Digits(True), pre_tokenizers.ByteLevel(add_prefix_space=False)],
        False,
    ),
    "command-r": (
        [pre_tokenizers.Digits(True), pre_tokenizers.ByteLevel(add_prefix_space=False)],
        True,
    ),
    "llama-bpe": ([split(LLAMA3)], False),
    "qwen2": ([split(LLAMA3.replace("{1,3}", ""))], True),
    "falcon": (
        [
            pre_tokenizers.Punctuation("contiguous"),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
            split("[0-9][0-9][0-9]"),
        ],
        False,
    ),
    "deepseek-v3": ([*map(split, DEEPSEEK3)], False),
}
CORPUS = [
    "the cat don't like the dog's 1234 bones, it'll  eat\n\n  them   all!! The End.",
    "def f(x1):\n    return x1 + 25  # caf\u00e9 \u65e5\u672c\u8a9e\u306e\u6587 \u041f\u0440\u0438",
    "WE'RE in 2024\r\n\r\n\t\tHTTPServer ... <= >= == // \U0001f389 e\u0301",
] * 3
TEXTS = st.lists(
    st.one_of(
        st.sampled_from([*CORPUS[:3], *CONTROL, *USER, " ", "\n", "\r\n", "'s", "'LL", "12", "<"]),
        st.text(max_size=8),
        st.text("  \n\t\u00a0\u3000'.,!0159\u0663\u00bdabAB\u00e9\u0301\u65e5\u306e", max_size=12),
    ),
    max_size=6,
).map("".join)


def train(name):
    """Train a byte-level BPE in a kind's own pipeline."""
    cuts, composes = PIPELINES[name]
    core = tokenizers.Tokenizer(models.BPE(ignore_merges=name == "llama-bpe"))
    if composes:
        core.normalizer = normalizers.NFC()
    spelled = any(isinstance(cut, pre_tokenizers.ByteLevel) for cut in cuts)
    bytes_only = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.pre_tokenizer = pre_tokenizers.Sequence(cuts if spelled else [*cuts, bytes_only])
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        min_frequency=1,
        show_progress=False,
        special_tokens=CONTROL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    core.train_from_iterator(CORPUS, trainer)
    core.add_tokens([tokenizers.AddedToken(token, normalized=False) for token in USER])
    return core


def write(core, name, path):
    """Write a vocabulary as conversion tools do."""
    size = core.get_vocab_size()
    types = [1] * size
    for i, token in core.get_added_tokens_decoder().items():
        types[i] = 3 if token.special else 4
    merges = json.loads(core.to_str())["model"]["merges"]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(name)
    writer.add_token_list([core.id_to_token(i) for i in range(size)])
    writer.add_token_types(types)
    writer.add_token_merges([" ".join(merge) for merge in merges])
    writer.add_eos_token_id(core.token_to_id("<|im_end|>"))
    writer.add_bos_token_id(core.token_to_id("<|endoftext|>"))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture(scope="module", params=PIPELINES)
def pair(request, tmp_path_factory):
    """Return a trained encoder and the tokenizer that its GGUF file gives."""
    core = train(request.param)
    path = tmp_path_factory.mktemp("gguf") / "m.gguf"
    write(core, request.param, path)
    return core, tokenizer_from_gguf(open_gguf(path).metadata)


def test_ids_and_texts_equal_those_of_the_encoder_that_was_written(pair):
    core, tokenizer = pair

    @settings(max_examples=80, deadline=None)
    @given(TEXTS)
    def equal(text):
        ids = core.encode(text, add_special_tokens=False).ids
        assert tokenizer.encode(text, add_special_tokens=False) == ids
        composed = text if core.normalizer is None else compose(core, text)
        assert tokenizer.decode(ids, skip_special_tokens=False) == composed

    equal()


def compose(core, text):
    """Normalize what stands between the tokens set apart, which are found before."""
    return "".join(
        piece if is_token else core.normalizer.normalize_str(piece)
        for is_token, group in itertools.groupby(cut_apart(text), key=lambda p: p in CONTROL + USER)
        for piece in (group if is_token else ["".join(group)])
    )


def cut_apart(text):
    return [p for p in re.split("(" + "|".join(map(re.escape, CONTROL + USER)) + ")", text) if p]


def test_special_tokens_of_the_file_are_found(pair):
    core, tokenizer = pair
    assert tokenizer.special_ids == {core.token_to_id(token) for token in CONTROL}
    assert tokenizer.eos_ids == (2, 0)
    assert tokenizer.bos_id == 0
    assert tokenizer.vocab_size == core.get_vocab_size()
