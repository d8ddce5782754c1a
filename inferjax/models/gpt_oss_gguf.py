"""gpt-oss in GGUF files: experts' gates and ups apart, and linear weights the other way round."""

from collections.abc import Callable, Collection, Mapping
from typing import Any

from einops import rearrange

from inferjax.config import LayerSpec
from inferjax.models.gguf_config import read_layer_types
from inferjax.models.gguf_format import (
    EXPERTS,
    LAYER_PARTS,
    Facts,
    GgufFormat,
    Part,
    Setting,
    Stored,
)

_Shape = tuple[int, ...]
_Find = Callable[[str, _Shape, LayerSpec, Collection[str]], Stored]


def _derived(facts: Facts, config: Mapping[str, Any]) -> dict[str, Any]:
    reader, scaling = facts.reader, config["rope_scaling"]
    reader.expect("rope.freq_base_swa", config["rope_theta"])
    return {
        "intermediate_size": reader.integer("expert_feed_forward_length"),
        "layer_types": read_layer_types(reader, config["num_hidden_layers"], 2),
        # As the released configs say; the format has no key for it, and llama.cpp does truncate.
        "rope_scaling": {**scaling, "truncate": False} if scaling else {"rope_type": "default"},
    }


def _gate_up(leaf: str, pattern: str) -> _Find:
    """Interleave gates and ups along the last axis."""

    def find(block: str, shape: _Shape, _spec: LayerSpec, _names: Collection[str]) -> Stored:
        count, *rest, twice = shape
        one = (count, twice // 2, *rest)
        names = [f"{block}ffn_{kind}_exps.{leaf}" for kind in ("gate", "up")]
        return Stored(
            tuple(Part(name, one, one) for name in names),
            lambda gate, up: rearrange([gate, up], pattern),
        )

    return find


def _down(block: str, shape: _Shape, _spec: LayerSpec, _names: Collection[str]) -> Stored:
    count, ffn, dim = shape
    stored = (count, dim, ffn)
    part = Part(f"{block}ffn_down_exps.weight", stored, stored)
    return Stored((part,), lambda values: values.swapaxes(1, 2))


def _as_it_is(name: str) -> _Find:
    def find(block: str, shape: _Shape, _spec: LayerSpec, _names: Collection[str]) -> Stored:
        return Stored((Part(block + name, shape, shape),))

    return find


GPT_OSS_GGUF = GgufFormat(
    architecture="gpt-oss",
    settings=(
        Setting("expert_count", "num_local_experts", "count"),
        EXPERTS[1],
        Setting("attention.sliding_window", "sliding_window", "count"),
    ),
    expected={},
    present={"attention_bias": "attn_q.bias"},
    derive=_derived,
    parts={
        **LAYER_PARTS,
        "post_attention_layernorm": "post_attention_norm",
        "mlp.router": "ffn_gate_inp",
    },
    special={
        "self_attn.sinks": _as_it_is("attn_sinks.weight"),
        "mlp.experts.gate_up_proj": _gate_up("weight", "p e f d -> e d (f p)"),
        "mlp.experts.gate_up_proj_bias": _gate_up("bias", "p e f -> e (f p)"),
        "mlp.experts.down_proj": _down,
        "mlp.experts.down_proj_bias": _as_it_is("ffn_down_exps.bias"),
    },
)
