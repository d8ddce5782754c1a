"""Reads the rope of a GGUF file: its base, its share of a head, and the rule that bends it."""

import math
from collections.abc import Mapping
from typing import Any

from inferjax.models.gguf_format import Facts
from inferjax.models.hf import MAX_CONTEXT, ConfigReader

_FREQS = "rope_freqs.weight"
_LONG, _SHORT = "rope_factors_long.weight", "rope_factors_short.weight"
_MAX_DIVISORS = 32_768
_KINDS = {kind: kind for kind in ("none", "linear", "yarn", "longrope")}


def read_rope_keys(facts: Facts, config: Mapping[str, Any], rotated: str | None) -> dict[str, Any]:
    """Return the rope of all layers in Hugging Face's old style.

    `rotated` is the family's key for the share of a head that is rotated; without one, heads are
    rotated whole.
    """
    reader, width = facts.reader, config["head_dim"]
    found: dict[str, Any] = {
        "rope_theta": reader.number("rope.freq_base", 10_000.0),
        "rope_scaling": read_scaling(facts),
    }
    if rotated is None:
        reader.expect("rope.dimension_count", width)
    else:
        dims = reader.integer("rope.dimension_count", width, high=width)
        # Readers round the product down: 2 / 49 of 49 would be one.
        share = dims / width
        found[rotated] = share if int(width * share) == dims else math.nextafter(share, 1.0)
    return found


def read_scaling(facts: Facts) -> dict[str, Any] | None:
    """Return the rule that bends the frequencies as Hugging Face states it, None for no rule.

    Explicit divisors of the frequencies stand in tensors: one for every pair, or two for short and
    long contexts.
    """
    reader = facts.reader
    kind = reader.choice("rope.scaling.type", _KINDS, "linear")
    factor = _read_factor(reader)
    original = reader.integer("rope.scaling.original_context_length", None, high=MAX_CONTEXT)
    attention = reader.number("rope.scaling.attn_factor", 1.0)
    # Tells trainers where the weights come from.
    reader.value("rope.scaling.finetuned")
    explicit = _read_divisors(facts, kind)
    if explicit is not None:
        if factor != 1.0:
            reader.refuse("rope.scaling.factor", factor, "tensors state the factors")
        return {**explicit, "attention_factor": attention, **_original(original)}
    if attention != 1.0:
        reader.refuse("rope.scaling.attn_factor", attention, f"it has no meaning for {kind}")
    if kind == "yarn":
        return {"rope_type": "yarn", "factor": factor, **_original(original), **_yarn(reader)}
    if kind == "none" and factor != 1.0:
        reader.refuse("rope.scaling.factor", factor, "rope.scaling.type is 'none'")
    return None if factor == 1.0 else {"rope_type": "linear", "factor": factor}


def _read_factor(reader: ConfigReader) -> float:
    """Return by how much the context is stretched, under its old name or its new one."""
    old, new = (reader.number(f"rope.{key}", None) for key in ("scale_linear", "scaling.factor"))
    if old is not None and new is not None and old != new:
        reader.refuse("rope.scaling.factor", new, f"rope.scale_linear says {old:g}")
    # Zero stands for an absent factor.
    return new or old or 1.0


def _original(context: int | None) -> dict[str, int]:
    return {} if context is None else {"original_max_position_embeddings": context}


def _yarn(reader: ConfigReader) -> dict[str, float]:
    """Return YaRN's numbers; absent ones have Hugging Face's defaults."""
    reader.expect("rope.scaling.yarn_ext_factor", 1.0)
    keys = {"beta_fast": "yarn_beta_fast", "beta_slow": "yarn_beta_slow"}
    keys["attention_factor"] = "yarn_attn_factor"
    found = {name: reader.number(f"rope.scaling.{key}", None) for name, key in keys.items()}
    mscale = reader.number("rope.scaling.yarn_log_multiplier", 0.0)
    if mscale:
        found |= {"mscale": 1.0, "mscale_all_dim": mscale}
    return {name: value for name, value in found.items() if value is not None}


def _read_divisors(facts: Facts, kind: str) -> dict[str, Any] | None:
    """Return the divisors that tensors hold; one set of them serves contexts of all lengths."""
    reader = facts.reader
    two = [name for name in (_LONG, _SHORT) if name in facts.names]
    if _FREQS not in facts.names and not two:
        if kind == "longrope":
            reader.refuse("rope.scaling.type", kind, f"there is no {_LONG}")
        return None
    if kind == "yarn" or (two and _FREQS in facts.names):
        reader.refuse("rope.scaling.type", kind, f"{(two or [_FREQS])[0]} is there too")
    if len(two) == 1:
        reader.refuse("rope.scaling.type", kind, f"there is {two[0]}, but not its counterpart")
    names = (_LONG, _SHORT) if two else (_FREQS, _FREQS)
    long, short = (_read_list(facts, name) for name in names)
    return {"rope_type": "longrope", "long_factor": long, "short_factor": short}


def _read_list(facts: Facts, name: str) -> list[float]:
    values = facts.read(name)
    if values.size > _MAX_DIVISORS:
        facts.reader.refuse(name, values.size, f"no head has more than {2 * _MAX_DIVISORS} values")
    return [float(v) for v in values.reshape(-1)]
