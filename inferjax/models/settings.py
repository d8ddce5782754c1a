"""The parts of a Hugging Face config that most families read in the same way.

A family names what it has that others lack; the rest is what these readers do by default.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from inferjax.config import (
    MLP,
    Attention,
    LayerSpec,
    ModelConfig,
    MoE,
    Norm,
    Rope,
    Router,
    assign_groups,
)
from inferjax.models.hf import (
    ACTIVATIONS,
    MAX_CONTEXT,
    MAX_EXPERTS,
    MAX_LAYERS,
    ConfigReader,
    read_context,
    read_dtype,
    read_heads,
    read_layer_types,
    read_token_ids,
    served_context,
)
from inferjax.models.rope_config import read_rope


def read_num_layers(reader: ConfigReader, key: str = "num_hidden_layers") -> int:
    """Return L."""
    return reader.integer(key, high=MAX_LAYERS)


def read_norm(
    reader: ConfigReader, key: str = "rms_norm_eps", default: float = 1e-6, **facts: Any
) -> Norm:
    """Return the normalisation, an RMSNorm unless `facts` say otherwise."""
    return Norm(eps=reader.number(key, default, high=1.0), **facts)


def read_mlp(
    reader: ConfigReader, key: str = "hidden_act", default: str = "silu", **facts: Any
) -> MLP:
    """Return the dense feed-forward block, gated unless `facts` say otherwise."""
    return MLP(
        ffn_dim=reader.integer("intermediate_size"),
        activation=reader.choice(key, ACTIVATIONS, default),
        **facts,
    )


def read_attention(
    reader: ConfigReader,
    *,
    kv_heads: int | None = None,
    head_dim: int | None = None,
    theta: float = 10_000.0,
    default_rope: Mapping[str, Any] | None = None,
    interleaved: bool = False,
    rotated: float | None = None,
    **facts: Any,
) -> Attention:
    """Return grouped attention with one rope, scaled by the head's width.

    The arguments before `facts` are those of `read_heads` and `read_rope`.
    """
    heads, kv_heads, width = read_heads(
        reader, reader.integer("hidden_size"), kv_heads=kv_heads, head_dim=head_dim
    )
    rope = read_rope(
        reader,
        dim=width,
        declared=read_context(reader),
        theta=theta,
        default=default_rope,
        interleaved=interleaved,
        rotated=rotated,
    )
    return Attention(
        num_q_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=width,
        **{"scale": width**-0.5, "rope": rope, **facts},
    )


def read_window(reader: ConfigReader, default: int | None = None) -> int | None:
    """Return the tokens that a sliding layer sees; null stands for all of them."""
    if reader.given("sliding_window", default) is None:
        return None
    return reader.integer("sliding_window", default or 1, high=MAX_CONTEXT)


def read_switched_window(reader: ConfigReader, default: int | None = 4096) -> int | None:
    """Return the window of a model where `use_sliding_window` turns it on, None where it is off."""
    if reader.flag("use_sliding_window", False):
        return read_window(reader, default)
    reader.integer("sliding_window", None, low=0, high=MAX_CONTEXT)
    return None


def read_layer_windows(
    reader: ConfigReader, num_layers: int, window: int | None, slides: Callable[[int], bool]
) -> list[int | None]:
    """Return `window` for layers that slide, None for others; `slides` tells without `layer_types`.

    Raises: UnsupportedConfig if layers slide and there is no window.
    """
    kinds = read_layer_types(reader, num_layers, lambda i: window is not None and slides(i))
    if window is None and any(kinds):
        reader.refuse("layer_types", "sliding_attention", "the model has no sliding window")
    return [window if kind else None for kind in kinds]


def expect_one_kind(reader: ConfigReader, num_layers: int, window: int | None) -> None:
    """Refuse `layer_types` of a model that never reads them, unless they agree with its window."""
    kind = "full_attention" if window is None else "sliding_attention"
    reader.expect("layer_types", [kind] * num_layers)


def read_synonyms(reader: ConfigReader, keys: Sequence[str], *, high: int) -> int:
    """Return a number that several keys may hold, which have to agree."""
    given = [key for key in keys if reader.value(key) is not None]
    number = reader.integer((given or keys)[0], high=high)
    for key in given[1:]:
        if reader.integer(key, high=high) != number:
            reader.refuse(key, reader.value(key), f"{given[0]} says {number}")
    return number


def read_experts(
    reader: ConfigReader,
    mlp: MLP,
    *,
    count: Sequence[str],
    width: str = "moe_intermediate_size",
    router: Mapping[str, Any],
    **facts: Any,
) -> MoE:
    """Return a mixture of ungrouped experts.

    `count` names the keys that may hold the number of experts, and `width` the key of their size.
    """
    num_experts = read_synonyms(reader, count, high=MAX_EXPERTS)
    per_token = reader.integer("num_experts_per_tok", high=num_experts)
    return MoE(
        router=Router(num_experts=num_experts, experts_per_token=per_token, **router),
        ffn_dim=reader.integer(width),
        activation=mlp.activation,
        **facts,
    )


def read_model(
    reader: ConfigReader,
    family: str,
    layers: Sequence[LayerSpec],
    final_norm: Norm | None,
    *,
    tied: bool = False,
    bos: int | None = None,
    eos: int | list[int] | None = None,
    **facts: Any,
) -> ModelConfig:
    """Put a model together; `tied`, `bos` and `eos` stand in for absent keys."""
    vocab = reader.integer("vocab_size")
    return ModelConfig(
        family=family,
        vocab_size=vocab,
        model_dim=reader.integer("hidden_size"),
        max_context=_context(reader, layers),
        layers=assign_groups(tuple(layers)),
        final_norm=final_norm,
        tied=reader.flag("tie_word_embeddings", tied),
        dtype=read_dtype(reader),
        **read_token_ids(reader, vocab, bos=bos, eos=eos),
        **facts,
    )


def _context(reader: ConfigReader, layers: Sequence[LayerSpec]) -> int:
    """Return the context that the ropes are made for, which all declare alike."""
    ropes = [spec.attention.rope for spec in layers if isinstance(spec.attention.rope, Rope)]
    return ropes[0].max_context if ropes else served_context(reader, read_context(reader))
