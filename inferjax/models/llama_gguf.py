"""Llama in GGUF files: metadata, tensor names, and the rope permutation of queries and keys."""

from collections.abc import Collection, Mapping
from functools import partial
from typing import Any, cast

import numpy as np
from einops import rearrange
from jaxtyping import Shaped

from inferjax.config import Attention, ModelConfig
from inferjax.models.family import GgufFormat, ReadTensor, Transform
from inferjax.models.gguf_config import (
    LAYER_PARTS,
    common_config,
    gguf_name,
    metadata_reader,
    rope_scaling,
)

_PARTS = {**LAYER_PARTS, "post_attention_layernorm": "ffn_norm"}
_ROPE_FACTORS = "rope_freqs.weight"


def _config(
    metadata: Mapping[str, object], names: Collection[str], read: ReadTensor
) -> dict[str, Any]:
    reader = metadata_reader(metadata, "llama")
    config = common_config(reader, metadata, names)
    config["rope_theta"] = reader.number("rope.freq_base", 10_000.0)
    scaling = rope_scaling(reader)
    if _ROPE_FACTORS in names:
        if scaling is not None:
            reader.refuse(
                "rope.scaling.type", scaling["rope_type"], f"{_ROPE_FACTORS} is there too"
            )
        scaling = _explicit_factors(read(_ROPE_FACTORS))
    reader.finish()
    return {
        "model_type": "llama",
        "rope_scaling": scaling,
        "attention_bias": "blk.0.attn_q.bias" in names,
        "mlp_bias": "blk.0.ffn_up.bias" in names,
        **config,
    }


def _explicit_factors(factors: Shaped[np.ndarray, "..."]) -> dict[str, Any]:
    """State the per-pair divisors that stand for llama3 scaling as a "longrope"."""
    values = [float(v) for v in factors.reshape(-1)]
    return {
        "rope_type": "longrope",
        "long_factor": values,
        "short_factor": values,
        "attention_factor": 1.0,
    }


def _tensor(name: str, config: ModelConfig) -> tuple[str, Transform | None] | None:
    stored = gguf_name(name, _PARTS)
    if stored is None:
        return None
    attention = cast(Attention, config.layers[0].attention)
    heads = {"q_proj": attention.num_q_heads, "k_proj": attention.num_kv_heads}
    part = name.split(".")[-2]
    return stored, partial(unpermute, heads=heads[part]) if part in heads else None


def unpermute(
    values: Shaped[np.ndarray, "rows *rest"], heads: int
) -> Shaped[np.ndarray, "rows *rest"]:
    """Undo GGUF's order of a head's rows, which has a pair's two side by side."""
    return rearrange(values, "(n pair two) ... -> (n two pair) ...", n=heads, two=2)


LLAMA_GGUF = GgufFormat(
    architecture="llama",
    config=_config,
    tensor=_tensor,
    ignored_tensors=frozenset({_ROPE_FACTORS}),
)
