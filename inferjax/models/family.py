"""What a model family is: how its configs and its tensors are read."""

import dataclasses
import re
from collections.abc import Callable, Mapping
from typing import Any

from inferjax.config import ModelConfig
from inferjax.models.gguf_format import GgufFormat
from inferjax.models.gguf_format import Transform as Transform
from inferjax.models.hf import ConfigReader, read_common, read_labels
from inferjax.models.ignored_keys import IGNORED_KEYS
from inferjax.models.quantization_config import read_quantization
from inferjax.models.sources import plain
from inferjax.params import Params


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """A model family: its names, and its readers.

    `weights` returns `Params` whose leaves are `Source`, with the vocabulary's head. `base_prefix`
    starts the names of all tensors but the head's; a checkpoint saved from the bare model lacks it.
    `in_first` marks linear weights that are stored [in, out]. `skips` tells which tensors of a
    checkpoint are rightly left unread. From a causal architecture
    ("LlamaForCausalLM") follow the names of its classifier and of its bare model.
    """

    name: str
    model_types: tuple[str, ...]
    architectures: tuple[str, ...]
    config: Callable[[ConfigReader], ModelConfig]
    weights: Callable[[ModelConfig], Params]
    ignored_keys: frozenset[str] = frozenset()
    base_prefix: str = "model."
    in_first: bool = False
    skips: Callable[[str, ModelConfig], bool] = lambda _name, _config: False
    gguf: GgufFormat | None = None


# Frequencies that old transformers versions saved; they are computed from the config.
_COMPUTED = re.compile(r".*\.rotary_emb\.(inv_freq|cos_cached|sin_cached)")


def read_config(
    family: Family, raw: Mapping[str, Any], max_context: int | None = None
) -> ModelConfig:
    """Turn a Hugging Face config into facts; `max_context` overrides the declared context.

    Raises: UnsupportedConfig naming every key or value that is not understood; UnsupportedModel for
      another task than prediction, classification or embedding, or weights that are quantized in a
      way that is not read.
    """
    reader = ConfigReader(raw, ignored=IGNORED_KEYS | family.ignored_keys, max_context=max_context)
    head = read_common(reader, family.architectures)
    read_quantization(raw)
    config = family.config(reader)
    labels = read_labels(reader) if head == "labels" else ()
    reader.finish()
    if head == "none" and config.tied:
        head = "vocabulary"
    return dataclasses.replace(config, head=head, labels=labels)


def model_sources(family: Family, config: ModelConfig) -> Params:
    """Return where every weight comes from, with the head that the checkpoint has."""
    sources = family.weights(config)
    if config.head == "vocabulary":
        return sources
    width = config.embed_dim or config.model_dim
    labels = plain("score.weight", len(config.labels), width) if config.labels else None
    return dataclasses.replace(sources, head=None, labels=labels)


def skips_tensor(family: Family, name: str, config: ModelConfig) -> bool:
    """Tell whether a tensor that the family does not use is known to be superfluous."""
    return _COMPUTED.fullmatch(name) is not None or family.skips(name, config)
