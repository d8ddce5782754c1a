"""How a model family looks in GGUF files: a table of names, and of what the converter changed."""

import dataclasses
from collections.abc import Callable, Collection, Mapping
from typing import Any, Literal, cast

import numpy as np
from einops import rearrange
from jaxtyping import Shaped

from inferjax.config import Attention, LayerSpec, ModelConfig
from inferjax.models.hf import REQUIRED, ConfigReader

Values = Shaped[np.ndarray, "..."]
Transform = Callable[[Values], Values]
ReadTensor = Callable[[str], Values]

# Settings that are stored as tensors, and are read with the metadata.
ROPE_TENSORS = frozenset(
    {"rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"}
)
# Hugging Face's name of a layer's part -> its name in a GGUF file. A star stands for a number: the
# parts are stored as one tensor.
LAYER_PARTS: Mapping[str, str] = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
TOP_PARTS: Mapping[str, str] = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
}
QK_NORMS: Mapping[str, str] = {
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
}
SANDWICH_PARTS: Mapping[str, str] = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
EXPERT_PARTS: Mapping[str, str] = {
    "mlp.gate": "ffn_gate_inp",
    "mlp.experts.*.gate_proj": "ffn_gate_exps",
    "mlp.experts.*.up_proj": "ffn_up_exps",
    "mlp.experts.*.down_proj": "ffn_down_exps",
}


@dataclasses.dataclass(frozen=True, slots=True)
class Setting:
    """A metadata key, without the architecture's prefix, and its key in a Hugging Face config.

    A default of None leaves the config's key out; a window of zero is none.
    """

    key: str
    name: str
    kind: Literal["count", "number", "flag", "window"] = "number"
    default: Any = REQUIRED


NO_EXPERTS: Mapping[str, Any] = {"expert_count": 0, "expert_used_count": 0}
EXPERTS = (
    Setting("expert_count", "num_experts", "count"),
    Setting("expert_used_count", "num_experts_per_tok", "count"),
)
WINDOW = Setting("attention.sliding_window", "sliding_window", "window", None)
RMS_EPS = Setting("attention.layer_norm_rms_epsilon", "rms_norm_eps")
LAYER_EPS = Setting("attention.layer_norm_epsilon", "layer_norm_eps")


@dataclasses.dataclass(frozen=True, slots=True)
class Facts:
    """What a file says: its metadata, the names of its tensors, and those that are settings."""

    reader: ConfigReader
    names: Collection[str]
    read: ReadTensor

    def has(self, part: str, layer: int = 0) -> bool:
        """Tell whether a layer has a tensor; the biases of fused projections are those of each."""
        fused = part.replace("attn_q.", "attn_qkv.")
        return any(f"blk.{layer}.{name}" in self.names for name in (part, fused))


@dataclasses.dataclass(frozen=True, slots=True)
class Undo:
    """What gives a tensor Hugging Face's values and layout again."""

    values: Callable[[Values, ModelConfig], Values]
    transposed: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Part:
    """A stored tensor of the shape `whole`, or the part of it that begins at element `begin`."""

    name: str
    whole: tuple[int, ...]
    shape: tuple[int, ...]
    begin: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class Stored:
    """Where one of Hugging Face's tensors is, and what makes it of its parts; None: nothing."""

    parts: tuple[Part, ...]
    build: Callable[..., Values] | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GgufFormat:
    """How a family looks in a GGUF file.

    From its metadata follows a Hugging Face config, so that one reader serves both. `settings` are
    its keys beyond the usual ones, `expected` those with one value that is implemented, `present`
    Hugging Face's switches that a tensor of the first layer implies, `constants` what every file of
    the architecture means without saying it, and `derive` the rest, from the file and the config as
    far as it is known. `renamed` has the usual keys under a family's own names. `rotated` is the
    family's key for the share of a head that is rotated, if it has one; `rope` is false without
    any rope.

    `when` tells from the metadata which family a file is of where families share an architecture.
    `parts` and `top` map the names of tensors, `undo` lists what the converter changed, and
    `special` finds the tensors whose layout it changed beyond that.
    """

    architecture: str
    when: Callable[[Mapping[str, object]], bool] = lambda _metadata: True
    eps: Setting = RMS_EPS
    settings: tuple[Setting, ...] = ()
    expected: Mapping[str, Any] = dataclasses.field(default_factory=lambda: NO_EXPERTS)
    present: Mapping[str, str] = dataclasses.field(default_factory=dict)
    constants: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    derive: Callable[[Facts, Mapping[str, Any]], Mapping[str, Any]] = lambda _facts, _config: {}
    renamed: Mapping[str, str] = dataclasses.field(default_factory=dict)
    heads: Callable[[Facts, int], Mapping[str, Any]] | None = None
    rope: bool = True
    rotated: str | None = None
    layers: str = "model.layers."
    parts: Mapping[str, str] = dataclasses.field(default_factory=lambda: LAYER_PARTS)
    top: Mapping[str, str] = dataclasses.field(default_factory=lambda: TOP_PARTS)
    undo: Mapping[str, Undo] = dataclasses.field(default_factory=dict)
    special: Mapping[str, Callable[[str, tuple[int, ...], LayerSpec, Collection[str]], Stored]] = (
        dataclasses.field(default_factory=dict)
    )

    @property
    def ignored_tensors(self) -> frozenset[str]:
        """The tensors that no weight is made of."""
        return ROPE_TENSORS if self.rope else frozenset()


def unpermute(
    values: Shaped[np.ndarray, "rows *rest"], heads: int
) -> Shaped[np.ndarray, "rows *rest"]:
    """Undo the order of a head's rows that has a pair's two side by side."""
    return rearrange(values, "(n pair two) ... -> (n two pair) ...", n=heads, two=2)


def first_attention(config: ModelConfig) -> Attention:
    """Return the attention of a model whose layers have equally many heads."""
    return cast(Attention, config.layers[0].attention)


# Files of the first architecture and its relatives keep the pairs that a rope rotates together.
PERMUTED: Mapping[str, Undo] = {
    "self_attn.q_proj": Undo(lambda v, config: unpermute(v, first_attention(config).num_q_heads)),
    "self_attn.k_proj": Undo(lambda v, config: unpermute(v, first_attention(config).num_kv_heads)),
}
TRANSPOSED = Undo(lambda values, _config: values.T, transposed=True)


def minus_one(*parts: str) -> Mapping[str, Undo]:
    """Take back the one that is added to the weights of norms which Hugging Face stores less it."""
    undo = Undo(lambda values, _config: values.astype(np.float32) - np.float32(1.0))
    return dict.fromkeys(("model.norm", *parts), undo)
