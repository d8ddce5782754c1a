"""SmolLM3: Llama's layers, of which some have no rope; these may attend to a sliding window."""

import dataclasses

from inferjax.config import LayerSpec, ModelConfig
from inferjax.models.family import Family
from inferjax.models.hf import MAX_LAYERS, ConfigReader
from inferjax.models.llama_gguf import SMOLLM3_GGUF
from inferjax.models.settings import (
    read_attention,
    read_layer_windows,
    read_mlp,
    read_model,
    read_norm,
    read_num_layers,
    read_switched_window,
)
from inferjax.models.sources import decoder, decoder_layer
from inferjax.params import Params


def _config(reader: ConfigReader) -> ModelConfig:
    num_layers = read_num_layers(reader)
    roped = _read_roped(reader, num_layers)
    window = read_switched_window(reader, None)
    windows = read_layer_windows(reader, num_layers, window, lambda i: not roped[i])
    biased = reader.flag("attention_bias", False)
    attention = read_attention(
        reader, kv_heads=4, theta=2_000_000.0, qkv_bias=biased, out_bias=biased
    )
    mlp, norm = read_mlp(reader, bias=reader.flag("mlp_bias", False)), read_norm(reader)

    def layer(rotates: bool, window: int | None) -> LayerSpec:
        rope = attention.rope if rotates else None
        kind = dataclasses.replace(attention, rope=rope, window=window)
        return LayerSpec(attention=kind, ffn=mlp, norm=norm)

    layers = [layer(*facts) for facts in zip(roped, windows, strict=True)]
    return read_model(reader, "smollm3", layers, norm, tied=True, bos=128_000, eos=128_001)


def _read_roped(reader: ConfigReader, num_layers: int) -> list[bool]:
    """Return which layers have a rope: in spite of the keys' names, a 1 stands for having one."""
    interval = reader.integer("no_rope_layer_interval", 4, high=MAX_LAYERS)
    marks = reader.value("no_rope_layers")
    if marks is None:
        return [bool((i + 1) % interval) for i in range(num_layers)]
    good = isinstance(marks, list) and len(marks) >= num_layers
    if not good or not all(type(mark) is int and mark in (0, 1) for mark in marks):
        reader.refuse("no_rope_layers", marks, f"it must list 0 or 1 for {num_layers} layers")
    return [mark == 1 for mark in marks[:num_layers]]


def _weights(config: ModelConfig) -> Params:
    return decoder(config, decoder_layer)


FAMILY = Family(
    name="smollm3",
    model_types=("smollm3",),
    architectures=("SmolLM3ForCausalLM",),
    config=_config,
    weights=_weights,
    # The released config has these of other families; SmolLM3 never reads them.
    ignored_keys=frozenset({"max_window_layers", "pretraining_tp"}),
    gguf=SMOLLM3_GGUF,
)
