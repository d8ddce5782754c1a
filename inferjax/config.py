"""Settings of two scopes that never inherit from each other.

`ModelConfig` holds facts of a checkpoint; `Exec` holds how to run. Both are frozen and hashable, so
they can be static arguments of `jax.jit`; dtypes are canonical strings, because `jnp.bfloat16` and
`jnp.dtype("bfloat16")` compare equal yet hash differently and would compile twice.
"""

import dataclasses
from typing import Any, ClassVar, Literal

from inferjax.errors import KernelUnavailable, UnsupportedConfig

Activation = Literal["silu", "gelu", "gelu_tanh", "relu"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Rope:
    """Rotary position embedding of one kind of layer.

    `dim` counts the rotated leading dimensions of a head. `scaling` names the rule that bends the
    frequencies; the rule's numbers are the optional fields below. Rules that Hugging Face
    recomputes per call ("dynamic", "longrope") are fixed once from `max_context`. `interleaved` is
    a fact of the checkpoint only: it pairs neighbouring dimensions, which the loader moves half a
    head apart.
    """

    theta: float
    dim: int
    scaling: Literal["none", "linear", "dynamic", "llama3", "yarn", "longrope"] = "none"
    factor: float = 1.0
    original_context: int = 0
    max_context: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    attention_factor: float | None = None
    truncate: bool = True
    long_factor: tuple[float, ...] = ()
    short_factor: tuple[float, ...] = ()
    interleaved: bool = False


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Norm:
    """A normalisation: RMSNorm or LayerNorm, with a learned weight unless `weight` is false.

    `unit_offset` means that the weight is stored minus one.
    """

    kind: Literal["rms", "layer"] = "rms"
    eps: float = 1e-6
    unit_offset: bool = False
    weight: bool = True
    bias: bool = False


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """Grouped-query attention: N query heads share K key/value heads of `head_dim`.

    `qk_norm` normalises queries and keys before the rope: each head with the same weights ("head")
    or with its own ("each_head"), or all heads as one vector ("all_heads").
    """

    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    rope: Rope | None = None
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    qkv_bias: bool = False
    out_bias: bool = False
    qk_norm: Norm | None = None
    qk_norm_span: Literal["head", "each_head", "all_heads"] = "head"

    @property
    def q_per_kv(self) -> int:
        """G, the query heads that share one key/value head."""
        return self.num_q_heads // self.num_kv_heads


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LatentAttention:
    """Multi-head latent attention: one compressed latent and one rotary key per token.

    Source: DeepSeek-V2, arXiv 2405.04434, section 2.1.
    """

    num_q_heads: int
    q_rank: int | None
    kv_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    scale: float
    rope: Rope
    norm: Norm
    bias: bool = False


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MLP:
    """A dense feed-forward block, gated (gate, up, down) or plain (up, down)."""

    ffn_dim: int
    activation: Activation = "silu"
    gated: bool = True
    bias: bool = False


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Router:
    """How a token picks its experts.

    "softmax_topk" normalises over the chosen logits only, "softmax" over all experts, "sigmoid"
    scores each expert alone. Groups are limited before the choice, by their best expert or by the
    sum of their best two; `score_bias` moves the choice but not the weight (DeepSeek-V3, arXiv
    2412.19437, section 2.1.2).
    """

    kind: Literal["softmax_topk", "softmax", "sigmoid"]
    num_experts: int
    experts_per_token: int
    num_groups: int = 1
    groups_per_token: int = 1
    group_score: Literal["best", "best_two"] = "best_two"
    normalize: bool = False
    scale: float = 1.0
    bias: bool = False
    score_bias: bool = False


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MoE:
    """A mixture of gated experts, plus one shared expert when `shared` is given.

    `shared_gate` multiplies the shared expert's output by the sigmoid of a projection of its input.

    `clamp` and `alpha` are gpt-oss's SwiGLU: up in [-clamp, clamp], gate <= clamp, and
    `(up + 1) * gate * sigmoid(alpha * gate)`.
    """

    router: Router
    ffn_dim: int
    activation: Activation = "silu"
    bias: bool = False
    clamp: float | None = None
    alpha: float = 1.0
    shared: MLP | None = None
    shared_gate: bool = False


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LayerSpec:
    """One decoder layer: its attention, its feed-forward, where it normalises and how it adds up.

    `norm_in` normalises each block's input (the usual), `norm_out` its output before the residual
    is added (Gemma 3 has both, OLMo 2 only the latter), `norm_sum` the sum of both (the original
    transformer). The feed-forward reads what attention has added to ("serial"), the layer's own
    input ("parallel"), or that input as attention's norm left it ("parallel_shared"). `group` is
    the layer's page pool.
    """

    attention: Attention | LatentAttention
    ffn: MLP | MoE
    norm: Norm
    norm_in: bool = True
    norm_out: bool = False
    norm_sum: bool = False
    residual: Literal["serial", "parallel", "parallel_shared"] = "serial"
    residual_scale: float = 1.0
    group: int = 0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CacheGroup:
    """What one page pool stores: layers of one kind, window and shape.

    A page holds `num_kv_heads` x `planes` x page_size x `width` values; `planes` is 2 for keys and
    values, 1 for a latent that serves as both.
    """

    kind: Literal["full", "sliding", "latent"]
    num_layers: int
    num_kv_heads: int
    planes: int
    width: int
    window: int | None = None


POOLING_KINDS = ("last", "mean", "first")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Pooling:
    """How an embedding model turns the hidden states of a text into one vector.

    Raises: UnsupportedConfig for another kind.
    """

    # As in `Exec`: the check below is the one that callers see.
    __no_type_check__: ClassVar[bool] = True

    kind: Literal["last", "mean", "first"] = "last"
    normalize: bool = False

    def __post_init__(self) -> None:
        """Refuse a kind that does not exist."""
        if self.kind not in POOLING_KINDS or not isinstance(self.normalize, bool):
            raise UnsupportedConfig(
                f"Pooling(kind={self.kind!r}, normalize={self.normalize!r})",
                why=f"the kinds are {', '.join(POOLING_KINDS)}, and normalize is True or False",
                fix='use Pooling(kind="mean", normalize=True), for example',
            )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """All the forward pass needs to know about a checkpoint, and nothing about how to run it.

    `head` tells what follows the final norm: logits over the vocabulary, over `labels`, or nothing
    (a checkpoint of the bare model). `embed_dim` is the width of the embedding where a projection
    leads from it to `model_dim`, and back before the head.
    """

    family: str
    vocab_size: int
    model_dim: int
    max_context: int
    layers: tuple[LayerSpec, ...]
    final_norm: Norm | None
    tied: bool
    head: Literal["vocabulary", "labels", "none"] = "vocabulary"
    labels: tuple[str, ...] = ()
    pooling: Pooling | None = None
    dtype: str = "float32"
    embed_dim: int | None = None
    embed_scale: float = 1.0
    learned_positions: int | None = None
    logit_scale: float = 1.0
    final_softcap: float | None = None
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()
    pad_id: int | None = None

    @property
    def num_layers(self) -> int:
        """L, the number of decoder layers."""
        return len(self.layers)


def cache_groups(config: ModelConfig) -> tuple[CacheGroup, ...]:
    """Return the page pools the layers ask for, in the order of `LayerSpec.group`."""
    num_groups = 1 + max(spec.group for spec in config.layers)
    members = [[s for s in config.layers if s.group == g] for g in range(num_groups)]
    return tuple(_group(specs) for specs in members)


def _group(specs: list[LayerSpec]) -> CacheGroup:
    attention = specs[0].attention
    if isinstance(attention, LatentAttention):
        return CacheGroup(
            kind="latent",
            num_layers=len(specs),
            num_kv_heads=1,
            planes=1,
            width=attention.kv_rank + attention.rope_dim,
        )
    return CacheGroup(
        kind="sliding" if attention.window else "full",
        num_layers=len(specs),
        num_kv_heads=attention.num_kv_heads,
        planes=2,
        width=attention.head_dim,
        window=attention.window,
    )


def assign_groups(layers: tuple[LayerSpec, ...]) -> tuple[LayerSpec, ...]:
    """Give every layer its page pool, one per (kind, window, shape), in order of appearance."""
    keys: list[tuple[object, ...]] = []
    grouped = []
    for spec in layers:
        probe = _group([spec])
        key = (probe.kind, probe.num_kv_heads, probe.width, probe.window)
        if key not in keys:
            keys.append(key)
        grouped.append(dataclasses.replace(spec, group=keys.index(key)))
    return tuple(grouped)


def check_setting(settings: Any, name: str, smallest: int, largest: int) -> None:
    """Refuse a field of a settings dataclass that is not an integer in the given range.

    Raises: UnsupportedConfig.
    """
    value = getattr(settings, name)
    whole = isinstance(value, int) and not isinstance(value, bool)
    if not whole or not smallest <= value <= largest:
        raise UnsupportedConfig(
            f"{name}={value!r}",
            why=f"it must be an integer of at least {smallest}, at most {largest}",
            fix=f"the default is {type(settings).__dataclass_fields__[name].default}",
        )


ATTENTION_IMPLEMENTATIONS = ("auto", "cpu", "gpu", "xla", "reference")
KV_DTYPES = ("float32", "bfloat16", "float16", "int8", "float8_e4m3fn")
LARGEST_SETTING = 1 << 20
SMALLEST_SETTINGS = {
    "tile": 2,
    "page_size": 1,
    "prefill_chunk": 1,
    "score_chunk": 1,
    "candidates": 1,
    "top_logprobs": 0,
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Exec:
    """How to run; nothing else selects a code path.

    exact: run all rows in tiles of `tile` rows, so that a request's result is bit-identical
      whatever shares its batch. tile: rows per tile, at least 2 (XLA computes a single row
      differently).
    attention: implementation of the attention op ("cpu", "gpu", "xla", "reference"), or "auto": the
      best that runs where the program is compiled for.
    page_size: tokens per page of a cache that is made; a step takes it from the cache it is given.
    kv_dtype: dtype of the pages, None means the weights' dtype. "int8" and "float8_e4m3fn" ("fp8"
      for short) hold keys and values in eight bits, with a factor for every token and head. What
      has no cache does not round: by default `score` then differs from what `generate` reported.
    prefill_chunk: prompt tokens per prefill pass inside `generate`.
    score_chunk: positions whose logits exist at once in `score`.
    candidates: top logits that top_k, top_p and min_p look at before falling back to a full sort.
    top_logprobs: how many of the most likely tokens to report beside the chosen one.

    Raises: UnsupportedConfig for a value out of range, KernelUnavailable for an implementation.
    """

    # The checks below give typed errors; a type checker at run time would come before them.
    __no_type_check__: ClassVar[bool] = True

    exact: bool = False
    tile: int = 8
    attention: Literal["auto", "cpu", "gpu", "xla", "reference"] = "auto"
    page_size: int = 64
    kv_dtype: str | None = None
    prefill_chunk: int = 512
    score_chunk: int = 128
    candidates: int = 256
    top_logprobs: int = 0

    def __post_init__(self) -> None:
        """Refuse settings that could not run, before anything compiles."""
        if self.attention not in ATTENTION_IMPLEMENTATIONS:
            raise KernelUnavailable(
                f"attention={self.attention!r}",
                why="no such implementation is built",
                fix=f"use one of {', '.join(ATTENTION_IMPLEMENTATIONS)}",
            )
        # One name for one thing: settings are keys of compiled programs.
        if self.kv_dtype == "fp8":
            object.__setattr__(self, "kv_dtype", "float8_e4m3fn")
        if self.kv_dtype not in (None, *KV_DTYPES):
            raise UnsupportedConfig(
                f"kv_dtype={self.kv_dtype!r}",
                why="keys and values are not stored so",
                fix=f"use one of {', '.join(KV_DTYPES)}, or None for the weights' dtype",
            )
        if not isinstance(self.exact, bool):
            raise UnsupportedConfig(f"exact={self.exact!r}", fix="use True or False")
        for name, smallest in SMALLEST_SETTINGS.items():
            check_setting(self, name, smallest, LARGEST_SETTING)
