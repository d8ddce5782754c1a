"""What the configs of Qwen 2, Qwen 3 and their mixtures of experts have in common."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from inferjax.config import MLP, Attention, LayerSpec, ModelConfig, MoE
from inferjax.models.hf import MAX_LAYERS, ConfigReader
from inferjax.models.settings import (
    read_experts,
    read_layer_windows,
    read_mlp,
    read_model,
    read_norm,
    read_num_layers,
    read_switched_window,
)

# Training: what the router's loss weighs, and whether its logits are returned.
ROUTER_KEYS = frozenset({"output_router_logits", "router_aux_loss_coef"})


def read_decoder(
    reader: ConfigReader,
    family: str,
    attention: Attention,
    windows: Sequence[int | None],
    ffns: Sequence[MLP | MoE],
) -> ModelConfig:
    """Put a model together from what its layers share and what they differ in."""
    norm = read_norm(reader)
    layers = [
        LayerSpec(attention=dataclasses.replace(attention, window=window), ffn=ffn, norm=norm)
        for window, ffn in zip(windows, ffns, strict=True)
    ]
    return read_model(reader, family, layers, norm)


def read_late_windows(reader: ConfigReader) -> list[int | None]:
    """Return each layer's window; by default the first `max_window_layers` have none."""
    first = reader.integer("max_window_layers", 28, low=0, high=MAX_LAYERS)
    window = read_switched_window(reader)
    return read_layer_windows(reader, read_num_layers(reader), window, lambda i: i >= first)


def read_sparse_ffns(reader: ConfigReader, make: Callable[[MLP], MoE]) -> list[MLP | MoE]:
    """Return each layer's block: experts in every `decoder_sparse_step`-th one, bar exceptions."""
    step = reader.integer("decoder_sparse_step", 1, high=MAX_LAYERS)
    dense_only = reader.value("mlp_only_layers")
    dense_only = [] if dense_only is None else dense_only
    if not isinstance(dense_only, list) or not all(type(i) is int for i in dense_only):
        reader.refuse("mlp_only_layers", dense_only, "it must be a list of layers")
    dense = read_mlp(reader)
    moe = make(dense)
    sparse = [(i + 1) % step == 0 and i not in dense_only for i in range(read_num_layers(reader))]
    return [moe if experts else dense for experts in sparse]


def read_qwen_experts(reader: ConfigReader, dense: MLP, **facts: Any) -> MoE:
    """Return experts weighed by a softmax over all, normalised over the chosen if asked for."""
    normalize = reader.flag("norm_topk_prob", False)
    return read_experts(
        reader,
        dense,
        count=("num_experts", "num_local_experts"),
        router={"kind": "softmax", "normalize": normalize},
        **facts,
    )
