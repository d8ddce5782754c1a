"""Tables of a plan, for people; and the same as plain values, for programs."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from inferjax.cli.plan_model import Found
from inferjax.planner import Model, Plan, Point
from inferjax.planner.cache import read_bytes, sequence_bytes, token_bytes
from inferjax.planner.hardware import CHIPS
from inferjax.planner.model import largest_leaf

# What each binding term of a step is, in words.
TERMS = {
    "weights": "reading the weights",
    "kv": "reading keys and values",
    "compute": "arithmetic",
    "links": "messages between chips",
    "fixed": "what a step costs beside its bytes",
}


def report(found: Found, model: Model, plan: Plan) -> str:
    """Return a plan as tables."""
    parts = [
        _heading(found, model, plan),
        _listed("memory of one chip", _memory(model, plan)),
        _listed("a token of every user, at least", _step(plan)),
        _listed("the first token, at least", _first(plan)),
        _listed("cost, at most this good", _cost(plan)),
        _listed("what more would save", _savings(plan)),
        curve_table(plan.curve),
    ]
    parts += ["\n".join(f"note: {note}" for note in (*found.notes, *plan.notes))]
    return "\n\n".join(part for part in parts if part)


def _heading(found: Found, model: Model, plan: Plan) -> str:
    config, active = model.config, model.num_active_parameters
    used = f", {active / 1e9:,.1f} of them used by a token" if active < model.num_parameters else ""
    bits = 8 * model.weight_bytes / model.num_parameters
    chips = f"{plan.mesh.num_chips} x {plan.chip.name}"
    return (
        f"{found.name} on {chips}, {plan.mesh}; config from {found.origin}\n"
        f"{model.num_parameters / 1e9:,.2f} billion parameters{used}; {stored_as(model)} weights, "
        f"{bits:.2f} bits each; {model.kv_dtype} keys and values\n"
        f"{plan.load.batch} users of {plan.load.context:,} tokens; the model's context is "
        f"{config.max_context:,}"
    )


def stored_as(model: Model) -> str:
    """Say how most weights are stored."""
    leaf = largest_leaf(model)
    if leaf.form is None:
        return leaf.dtype
    group = f" in groups of {leaf.form.group}" if leaf.form.group else ""
    return f"{leaf.form.format}{group}"


def _memory(model: Model, plan: Plan) -> list[tuple[str, str]]:
    room, config = plan.room, model.config
    per_token = token_bytes(config, model.kv_dtype)
    read = read_bytes(config, plan.load.context, model.kv_dtype)
    held = sequence_bytes(config, plan.load.context, model.kv_dtype, page_size=plan.load.page_size)
    return [
        ("weights", f"{_gb(room.weight_bytes)} of {_gb(model.weight_bytes)} in all"),
        ("workspace of a step", _gb(room.workspace_bytes)),
        ("kept back", _gb(room.reserved_bytes)),
        ("left to the cache", f"{_gb(room.cache_bytes)} of {_gb(room.memory_bytes)}"),
        ("keys and values", f"{per_token:,} bytes a token on all chips together"),
        ("", f"{_gb(read)} read for a token, {_gb(held)} held by a user"),
        ("users that fit", f"{room.users:,}"),
    ]


def _step(plan: Plan) -> list[tuple[str, str]]:
    step, point = plan.decode.step, plan.decode
    return [
        ("weights", _ms(step.weights_s)),
        ("keys and values", _ms(step.kv_s)),
        ("arithmetic", _ms(step.compute_s)),
        ("messages", _ms(step.link_s)),
        *([("beside these", _ms(step.fixed_s))] if step.fixed_s else []),
        ("time per token", f"{_ms(step.seconds)}, set by {TERMS[step.binds]}"),
        ("tokens/s", f"{point.tok_s:,.1f}; {point.user_tok_s:,.1f} of each user"),
    ]


def _first(plan: Plan) -> list[tuple[str, str]]:
    first = plan.first_token
    return [
        ("network", _ms(first.network_s)),
        ("queue", _ms(first.queue_s)),
        ("prefill", f"{_ms(first.prefill_s)}, set by {TERMS[first.prefill_binds]}"),
        ("time to first token", _ms(first.seconds)),
    ]


def _cost(plan: Plan) -> list[tuple[str, str]]:
    cost, rows = plan.cost, []
    if cost.output_dollars_per_million is not None:
        rows.append(("million output tokens", f"${cost.output_dollars_per_million:,.3f}"))
    if cost.input_dollars_per_million is not None:
        rows.append(("million input tokens", f"${cost.input_dollars_per_million:,.3f}"))
    if cost.joules_per_output_token is not None:
        rows.append(("energy of an output token", f"{cost.joules_per_output_token:,.2f} J"))
    return rows


def _savings(plan: Plan) -> list[tuple[str, str]]:
    rows = []
    if (prefix := plan.prefix) is not None:
        rows.append(
            (
                f"{prefix.num_tokens:,} shared tokens",
                f"{_ms(prefix.saved_s)} of each prefill; {prefix.users:,} users fit instead of "
                f"{prefix.users_without:,}",
            )
        )
    if (drafts := plan.speculation) is not None:
        rows.append(
            (
                f"{drafts.draft_len} drafted tokens",
                f"{drafts.tokens_per_step:.2f} tokens a step of {_ms(drafts.step_s)}: "
                f"{drafts.speedup:.2f} times as fast",
            )
        )
    return rows


def curve_table(curve: Sequence[Point]) -> str:
    """Return the trade-off as a table."""
    if not curve:
        return ""
    lines = ["   users  ms per token  tokens/s of each  tokens/s of all  set by"]
    for point in curve:
        lines.append(
            f"{point.batch:8,}{point.step.seconds * 1e3:14.2f}{point.user_tok_s:18.1f}"
            f"{point.tok_s:17,.1f}  {point.step.binds}"
        )
    return "\n".join(lines)


def values(found: Found, model: Model, plan: Plan) -> dict[str, Any]:
    """Return a plan as plain values for JSON."""
    facts = {
        "name": found.name,
        "config_from": found.origin,
        "family": model.config.family,
        "num_parameters": model.num_parameters,
        "num_active_parameters": model.num_active_parameters,
        "weight_bytes": model.weight_bytes,
        "stored_as": stored_as(model),
        "kv_dtype": model.kv_dtype,
        "kv_bytes_per_token": token_bytes(model.config, model.kv_dtype),
    }
    given = dataclasses.asdict(plan)
    given["room"]["cache_bytes"] = plan.room.cache_bytes
    given["first_token"]["seconds"] = plan.first_token.seconds
    return {"model": facts, **given, "notes": (*found.notes, *plan.notes)}


def known() -> str:
    """Return the tables of chips and of models, which plans can be made for by name."""
    from inferjax.planner.public_models import HUB_IDS

    rows = [("chip", "memory", "bandwidth", "bf16", "int8", "fp8", "links", "power")]
    for chip in CHIPS.values():
        fp8 = "-" if chip.fp8_flops is None else f"{chip.fp8_flops / 1e12:,.0f}"
        rows.append(
            (
                chip.name,
                f"{chip.memory_bytes / 1e9:.0f} GB",
                f"{chip.bandwidth / 1e9:,.0f} GB/s",
                f"{chip.bf16_flops / 1e12:,.0f}",
                f"{chip.int8_flops / 1e12:,.0f}",
                fp8,
                f"{chip.link.bytes_s / 1e9:,.0f} GB/s {chip.link.kind}",
                "-" if chip.watts is None else f"{chip.watts:.0f} W",
            )
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
    models = ", ".join(HUB_IDS)
    return "\n".join([*lines, "(dense TFLOP/s)", "", f"models: {models}"])


def _listed(title: str, rows: Sequence[tuple[str, str]]) -> str:
    if not rows:
        return ""
    width = max(len(name) for name, _ in rows)
    return "\n".join([title, *(f"  {name.ljust(width)}  {value}".rstrip() for name, value in rows)])


def _gb(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:,.2f} GB" if abs(num_bytes) >= 1e7 else f"{num_bytes / 1e6:,.3f} MB"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.2f} ms" if seconds >= 1e-4 or not seconds else f"{seconds:.2g} s"
