"""Which head a checkpoint has, by the names that Hugging Face gives to its architectures."""

import json

import pytest

from inferjax.errors import UnsupportedModel
from inferjax.models.family import read_config
from inferjax.models.registry import family_for

NAMES = [
    ("llama", "LlamaForSequenceClassification", "labels"),
    ("llama", "LlamaModel", "none"),
    ("gpt2", "GPT2ForSequenceClassification", "labels"),
    ("gemma3_text", "Gemma3ForCausalLM", "vocabulary"),
    ("gemma3_text", "Gemma3TextForSequenceClassification", "labels"),
    ("opt", "OPTForSequenceClassification", "labels"),
    ("stablelm", "StableLmModel", "none"),
    # The bare model of tied embeddings has all that the causal one has.
    ("gemma3_text", "Gemma3TextModel", "vocabulary"),
    ("cohere", "CohereModel", "vocabulary"),
]


@pytest.mark.parametrize(("name", "architecture", "head"), NAMES)
def test_architecture_tells_the_head(tiny, name, architecture, head):
    raw = json.loads((tiny / name / "config.json").read_text())
    config = read_config(family_for(name), raw | {"architectures": [architecture]})
    assert config.head == head
    assert len(config.labels) == (2 if head == "labels" else 0)


@pytest.mark.parametrize("architecture", ["LlamaForTokenClassification", "Gemma3Model", "Model"])
def test_other_tasks_are_refused(tiny, architecture):
    raw = json.loads((tiny / "llama" / "config.json").read_text())
    with pytest.raises(UnsupportedModel, match=architecture):
        read_config(family_for("llama"), raw | {"architectures": [architecture]})
