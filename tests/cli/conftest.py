"""A model with text for the tests of the commands, and a cache folder of their own."""

import json
import shutil
from pathlib import Path

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


@pytest.fixture(scope="session")
def model(tmp_path_factory, tiny) -> Path:
    """The tiny llama with a vocabulary of single bytes and a chat template."""
    folder = tmp_path_factory.mktemp("model") / "bytes"
    shutil.copytree(tiny / "llama", folder)
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {letter: 3 + i for i, letter in enumerate(letters)}
    core = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    return folder


@pytest.fixture
def cache(tmp_path_factory, monkeypatch):
    """Keep what commands fetch and compile out of the user's folder."""
    monkeypatch.setenv("INFERJAX_CACHE_DIR", str(tmp_path_factory.getbasetemp() / "cli-cache"))
