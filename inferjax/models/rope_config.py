"""Reads rope settings in both of Hugging Face's styles into a `Rope`.

The hub's style is `rope_theta` beside `rope_scaling`; the newer one is `rope_parameters`, flat or
one per kind of layer.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from inferjax.config import Rope
from inferjax.models.hf import MAX_CONTEXT, ConfigReader, served_context

# Both styles of one checkpoint may name the rule under either key.
_TYPE_KEYS = ("rope_type", "type")
LAYER_KINDS = ("full_attention", "sliding_attention")


def read_rope(
    reader: ConfigReader,
    *,
    dim: int,
    declared: int,
    theta: float = 10_000.0,
    default: Mapping[str, Any] | None = None,
    interleaved: bool = False,
    rotated: float | None = None,
    original_context: int | None = None,
    rules: Mapping[str, str] | None = None,
) -> Rope:
    """Return the one rope of a model whose layers all share it.

    `dim` is the head's width and `declared` the checkpoint's context; `theta`, `default` and
    `original_context` stand in for absent settings, and `rotated` for the share of a head that is
    rotated, where a family has one: None means that every head is rotated whole. `rules` maps the
    names that the family's configs use to the rules they stand for; None means all, by their names.

    Raises: UnsupportedConfig for an unknown rule, an unknown key, or a number out of range.
    """
    settings = rope_settings(reader)
    original = reader.integer(
        "original_max_position_embeddings", original_context, high=MAX_CONTEXT
    )
    theta = reader.number("rope_theta", theta, low=1.001)
    settings = settings or default or {}
    dim = rotated_dim(reader, settings, dim, rotated)
    rope = rope_rule(
        reader,
        settings,
        theta=theta,
        dim=dim,
        declared=declared,
        original_context=original,
        rules=rules,
    )
    return dataclasses.replace(rope, interleaved=interleaved)


def read_layer_ropes(
    reader: ConfigReader, *, dim: int, declared: int, theta: float, local_theta: float
) -> tuple[Rope, Rope]:
    """Return the ropes of global and of sliding layers, which rotate whole heads.

    Settings that are not given per kind of layer are the global ones'; `theta` and `local_theta`
    stand in for absent bases.

    Raises: UnsupportedConfig as `read_rope`.
    """
    settings = rope_settings(reader)
    if any(kind in settings for kind in LAYER_KINDS):
        full, sliding = (settings.get(kind) or {} for kind in LAYER_KINDS)
        unknown = sorted(set(settings) - set(LAYER_KINDS))
        if unknown or not isinstance(full, Mapping) or not isinstance(sliding, Mapping):
            reader.refuse("rope_parameters", settings, f"it must be one object per {LAYER_KINDS}")
    else:
        full, sliding = settings, {}
    rotated_dim(reader, full, dim, None)
    rotated_dim(reader, sliding, dim, None)
    return (
        rope_rule(reader, full, theta=theta, dim=dim, declared=declared),
        rope_rule(reader, sliding, theta=local_theta, dim=dim, declared=declared),
    )


def rotated_dim(
    reader: ConfigReader, settings: Mapping[str, Any], dim: int, default: float | None
) -> int:
    """Return how many dimensions of a head are rotated; in either style, under one key.

    Raises: UnsupportedConfig if the styles differ, or if the family rotates whole heads only.
    """
    key = "partial_rotary_factor"
    outer, inner = reader.value(key), settings.get(key)
    if outer is not None and inner is not None and outer != inner:
        reader.refuse(key, outer, f"the rope settings say {str(inner)[:40]}")
    given = ConfigReader({key: inner if outer is None else outer})
    if default is None:
        given.expect(key, 1)
        return dim
    share = given.number(key, default, high=1.0)
    if int(dim * share) < 2:
        given.refuse(key, share, f"it leaves nothing of {dim} dimensions to rotate")
    return int(dim * share)


def rope_settings(reader: ConfigReader) -> Mapping[str, Any]:
    """Return the rope dictionary of a config, under either name; {} if there is none."""
    old, new = reader.value("rope_scaling"), reader.value("rope_parameters")
    if old and new and old != new:
        reader.refuse("rope_scaling", old, "rope_parameters says something else")
    settings = old or new or {}
    if not isinstance(settings, Mapping):
        reader.refuse(
            "rope_parameters" if new else "rope_scaling", settings, "it must be an object"
        )
    return settings


def rope_rule(
    reader: ConfigReader,
    settings: Mapping[str, Any],
    *,
    theta: float,
    dim: int,
    declared: int,
    original_context: int | None = None,
    rules: Mapping[str, str] | None = None,
) -> Rope:
    """Return the `Rope` that one rope dictionary describes; the dictionary's own theta wins."""
    if dim % 2:
        reader.refuse("head_dim", dim, "rope rotates pairs of dimensions")
    inner = ConfigReader(settings, where="rope settings in config.json")
    known = {name: name for name in _RULES} if rules is None else rules
    kinds = [inner.choice(key, known) for key in _TYPE_KEYS if inner.value(key) is not None]
    if any(kind != kinds[0] for kind in kinds):
        inner.refuse("type", settings["type"], f"rope_type says {kinds[0]!r}")
    kind = kinds[0] if kinds else "default"
    # A share of the head, which `rotated_dim` has turned into `dim`.
    inner.value("partial_rotary_factor")
    rope = Rope(theta=inner.number("rope_theta", theta, low=1.001), dim=dim)
    rope = _RULES[kind](inner, rope, declared, original_context)
    inner.finish()
    served = served_context(reader, declared, extendable=rope.scaling == "dynamic")
    return dataclasses.replace(rope, max_context=served)


def _unscaled(inner: ConfigReader, rope: Rope, declared: int, original: int | None) -> Rope:
    del inner, declared, original
    return rope


def _linear(inner: ConfigReader, rope: Rope, declared: int, original: int | None) -> Rope:
    del declared, original
    return dataclasses.replace(rope, scaling="linear", factor=_factor(inner))


def _dynamic(inner: ConfigReader, rope: Rope, declared: int, original: int | None) -> Rope:
    """Hugging Face stretches the base only beyond the declared context, whatever else is stated."""
    inner.expect("original_max_position_embeddings", declared)
    if original not in (None, declared):
        inner.refuse("original_max_position_embeddings", original, f"expected {declared}")
    if rope.dim <= 2:
        inner.refuse("rope_type", "dynamic", "it needs more than 2 rotated dimensions")
    factor = inner.number("factor", low=1.0, high=1e6)
    return dataclasses.replace(rope, scaling="dynamic", factor=factor, original_context=declared)


def _llama3(inner: ConfigReader, rope: Rope, declared: int, original: int | None) -> Rope:
    low, high = inner.positive("low_freq_factor"), inner.positive("high_freq_factor")
    if low >= high:
        inner.refuse("high_freq_factor", high, f"it must exceed low_freq_factor ({low:g})")
    return dataclasses.replace(
        rope,
        scaling="llama3",
        factor=_factor(inner),
        original_context=_original(inner, declared, original),
        low_freq_factor=low,
        high_freq_factor=high,
    )


def _yarn(inner: ConfigReader, rope: Rope, declared: int, original: int | None) -> Rope:
    """Zero stands for an absent beta or mscale, as it does in Hugging Face."""
    context = _original(inner, declared, original)
    attention_factor = inner.number("attention_factor", None)
    fast = inner.number("beta_fast", 0.0) or 32.0
    slow = inner.number("beta_slow", 0.0) or 1.0
    if not 1e-3 <= slow <= fast:
        inner.refuse("beta_slow", slow, f"it must be from 0.001 to beta_fast ({fast:g})")
    return dataclasses.replace(
        rope,
        scaling="yarn",
        factor=_factor(inner, declared / context),
        original_context=context,
        attention_factor=attention_factor,
        beta_fast=fast,
        beta_slow=slow,
        mscale=inner.number("mscale", 0.0),
        mscale_all_dim=inner.number("mscale_all_dim", 0.0),
        truncate=inner.flag("truncate", True),
    )


def _longrope(inner: ConfigReader, rope: Rope, declared: int, original: int | None) -> Rope:
    context = _original(inner, declared, original)
    if context < 2:
        inner.refuse("original_max_position_embeddings", context, "it must be at least 2")
    return dataclasses.replace(
        rope,
        scaling="longrope",
        factor=_factor(inner, declared / context),
        original_context=context,
        attention_factor=inner.number("attention_factor", None),
        long_factor=inner.numbers("long_factor", rope.dim // 2),
        short_factor=inner.numbers("short_factor", rope.dim // 2),
    )


def _factor(inner: ConfigReader, default: float | None = None) -> float:
    """Return by how much the context is stretched; only some rules have a default."""
    given = inner.number("factor", default, low=1e-3, high=1e6)
    if given is None:
        inner.refuse("factor", None, "the rule is defined by it")
    return given


def _original(inner: ConfigReader, declared: int, outer: int | None) -> int:
    """Return the context before scaling: stated beside the rope, within it, or the declared one."""
    within = inner.integer("original_max_position_embeddings", declared, high=MAX_CONTEXT)
    return within if outer is None else outer


_RULES: Mapping[str, Callable[[ConfigReader, Rope, int, int | None], Rope]] = {
    "default": _unscaled,
    "linear": _linear,
    "dynamic": _dynamic,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
}
