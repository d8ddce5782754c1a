"""The one forward: every prefill, decode step, verification and score runs these layers."""

from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from inferjax.config import MLP, Attention, LatentAttention, LayerSpec, ModelConfig, MoE
from inferjax.errors import InvalidInput, ShapeError, UnsupportedModel
from inferjax.layers.attention import attention
from inferjax.layers.context import Dense, Paged
from inferjax.layers.mla import latent_attention
from inferjax.layers.mlp import mlp
from inferjax.layers.moe import moe
from inferjax.layers.norm import normalize
from inferjax.layers.rope import Rotation, rotation
from inferjax.models.params import check_params
from inferjax.params import (
    AttentionParams,
    LatentParams,
    LayerParams,
    MLPParams,
    MoEParams,
    NormParams,
    Params,
)
from inferjax.quant.linear import linear, lookup

Taps = dict[str, Float[Array, "B T D"]]


def run_layers[C: (Dense, Paged)](
    params: Params,
    config: ModelConfig,
    tokens: Int[Array, "B T"],
    context: C,
    *,
    moe_tile: int | None,
    taps: tuple[str, ...] = (),
) -> tuple[Float[Array, "B T D"], C, Taps]:
    """Run embedding, all layers and the final norm.

    `moe_tile` fixes the rows per expert tile; None chooses by the number of tokens. `taps` names
    activations to return: "embed", "layers.<i>" (the residual after layer i), "final".
    """
    check_params(params, config)
    seen: Taps = {}

    def tap(name: str, x: Array) -> None:
        if name in taps:
            seen[name] = x

    x = embed(params, config, tokens, context.positions)
    tap("embed", x)
    slots, turns = _layer_slots(config), _rotations(config, context.positions)
    for i, (spec, w) in enumerate(zip(config.layers, params.layers, strict=True)):
        with jax.named_scope(f"layer_{i}"):
            x, context = run_layer(x, w, context, slots[i], turns[i], spec=spec, moe_tile=moe_tile)
        tap(f"layers.{i}", x)
    if params.final_norm is not None and config.final_norm is not None:
        x = normalize(x, params.final_norm, config.final_norm)
    tap("final", x)
    return x, context, seen


def embed(
    params: Params, config: ModelConfig, tokens: Int[Array, "B T"], positions: Int[Array, "B T"]
) -> Float[Array, "B T D"]:
    """Look tokens up, scale and project them, and add learned positions: what the model has."""
    x = lookup(params.embed, tokens)
    if config.embed_scale != 1.0:
        # Rounded to the weights' dtype first, as the models that scale were trained.
        x = x * jnp.asarray(config.embed_scale, x.dtype)
    if params.project_in is not None:
        x = linear(x, params.project_in, "BTE,ED->BTD")
    if params.positions is not None:
        x = x + lookup(params.positions, jnp.maximum(positions, 0)).astype(x.dtype)
    return x


def unembed(
    params: Params, config: ModelConfig, hidden: Float[Array, "*rows D"]
) -> Float[Array, "*rows V"]:
    """Return float32 logits, which half precision has not rounded: ties would be common.

    Raises: UnsupportedModel for a model without a head over its vocabulary.
    """
    check_head(config, "vocabulary")
    head = params.embed if params.head is None else params.head
    logits = linear(project_out(params, hidden), head, "...D,VD->...V", dtype=jnp.float32)
    if config.logit_scale != 1.0:
        logits = logits * config.logit_scale
    if config.final_softcap is not None:
        logits = config.final_softcap * jnp.tanh(logits / config.final_softcap)
    return logits


def label_logits(
    params: Params, config: ModelConfig, hidden: Float[Array, "*rows D"]
) -> Float[Array, "*rows C"]:
    """Return a classifier's float32 logits, one per label.

    Raises: UnsupportedModel for a model without a head over labels.
    """
    check_head(config, "labels")
    head: Any = params.labels
    return linear(project_out(params, hidden), head, "...D,CD->...C", dtype=jnp.float32)


def project_out(params: Params, hidden: Float[Array, "*rows D"]) -> Float[Array, "*rows E"]:
    """Lead back to the embedding's width where it differs from the model's."""
    if params.project_out is None:
        return hidden
    return linear(hidden, params.project_out, "...D,DE->...E")


_HEADS = {
    "vocabulary": "next-token logits: use generate, score or forward",
    "labels": "logits over labels: use classify",
    "none": "no head: use embed or activations",
}


def check_head(config: ModelConfig, wanted: Literal["vocabulary", "labels"]) -> None:
    """Refuse a checkpoint with another head than a function needs.

    Raises: UnsupportedModel.
    """
    if config.head != wanted:
        raise UnsupportedModel(
            f"the checkpoint has no head for {_HEADS[wanted].partition(':')[0]}",
            why=f"it was saved with {_HEADS[config.head].partition(':')[0]}",
            fix=_HEADS[config.head].partition(": ")[2],
        )


def check_taps(taps: Any, config: ModelConfig) -> tuple[str, ...]:
    """Return the names as a tuple.

    Raises: InvalidInput for something that is not a name of this model's.
    """
    known = tap_names(config)
    names = tuple(taps) if isinstance(taps, list | tuple) else (taps,)
    unknown = [name for name in names if name not in known]
    if unknown:
        raise InvalidInput(
            f"unknown tap {unknown[0]!r}",
            why=f"this model has {', '.join(known)}",
            fix="name some of these",
        )
    return names


def tap_names(config: ModelConfig) -> tuple[str, ...]:
    """Return every name that `taps` accepts."""
    return ("embed", *(f"layers.{i}" for i in range(config.num_layers)), "final")


@jax.jit(static_argnames=("spec", "moe_tile"))
def run_layer[C: (Dense, Paged)](
    x: Float[Array, "B T D"],
    w: LayerParams,
    context: C,
    slot: Int[Array, ""],
    turn: Rotation | None,
    *,
    spec: LayerSpec,
    moe_tile: int | None,
) -> tuple[Float[Array, "B T D"], C]:
    """Run one layer; `slot` is its index within its cache group, `turn` what its rope does.

    An inner jit, with that index as an array: equal layers are traced and lowered once
    (30 layers: 0.6 s instead of 1.7 s of CPU time, and compiling falls from 13 to 9 s).
    """
    normed = _maybe_norm(x, w.attention_in, spec)
    match spec.attention, w.attention:
        case Attention() as kind, AttentionParams() as weights:
            y, context = attention(normed, weights, kind, context, spec.group, slot, turn)
        case LatentAttention() as kind, LatentParams() as weights if turn is not None:
            y, context = latent_attention(normed, weights, kind, context, spec.group, slot, turn)
        case _:
            raise _mismatch(spec)
    total = _add(x, y, w.attention_out, spec)
    match spec.residual:
        case "serial":
            normed = _maybe_norm(total, w.ffn_in, spec)
        case "parallel":
            normed = _maybe_norm(x, w.ffn_in, spec)
    match spec.ffn, w.ffn:
        case MLP() as kind, MLPParams() as weights:
            y = mlp(normed, weights, kind)
        case MoE() as kind, MoEParams() as weights:
            y = moe(normed, weights, kind, moe_tile)
        case _:
            raise _mismatch(spec)
    return _add(total, y, w.ffn_out, spec), context


def _add(x: Array, y: Array, w: NormParams | None, spec: LayerSpec) -> Float[Array, "B T D"]:
    """Add a block's output to the residual; its norm comes before the sum or after it."""
    if not spec.norm_sum:
        y = _maybe_norm(y, w, spec)
    total = x + (y if spec.residual_scale == 1.0 else y * spec.residual_scale)
    return _maybe_norm(total, w, spec) if spec.norm_sum else total


def _mismatch(spec: LayerSpec) -> ShapeError:
    return ShapeError(
        f"the weights of a layer are not of the kind {spec}",
        why="params and config belong to different models",
        fix="pass the params and the config of one loaded model",
    )


def _maybe_norm(x: Array, w: NormParams | None, spec: LayerSpec) -> Array:
    return x if w is None else normalize(x, w, spec.norm)


def _layer_slots(config: ModelConfig) -> list[Int[Array, ""]]:
    """Return each layer's index within its cache group."""
    counts: dict[int, int] = {}
    slots: list[int] = []
    for spec in config.layers:
        slots.append(counts.get(spec.group, 0))
        counts[spec.group] = slots[-1] + 1
    return [jnp.int32(slot) for slot in slots]


def _rotations(config: ModelConfig, positions: Int[Array, "B T"]) -> list[Rotation | None]:
    """Return every layer's rotation; layers with the same rope have the same one."""
    ropes = [spec.attention.rope for spec in config.layers]
    # Not a set, whose order differs from process to process: so would the program.
    order = dict.fromkeys(ropes)
    turns = {rope: None if rope is None else rotation(positions, rope) for rope in order}
    return [turns[rope] for rope in ropes]
