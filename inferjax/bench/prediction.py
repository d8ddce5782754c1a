"""What the planner predicts for this machine beside what it does."""

import dataclasses
from typing import Any

from inferjax.bench import latency
from inferjax.bench.machine import measure_chip
from inferjax.config import Exec, ModelConfig
from inferjax.params import Params
from inferjax.planner import Chip, Load, Mesh, Model, make_model
from inferjax.planner.leaves import loaded_leaves
from inferjax.planner.search import decode_point


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One batch and context: tokens a second as predicted and as measured, and what binds."""

    batch: int
    context: int
    predicted_tok_s: float
    measured_tok_s: float
    ratio: float
    binds: str


def loaded_model(params: Params, config: ModelConfig, exec: Exec) -> Model:
    """Return the planner's view of loaded weights."""
    return make_model(
        config,
        dtype=config.dtype,
        kv_dtype=exec.kv_dtype,
        leaves=loaded_leaves(config, params),
    )


def compare(
    params: Params,
    config: ModelConfig,
    *,
    batches: tuple[int, ...],
    contexts: tuple[int, ...],
    steps: int,
    repeats: int,
    exec: Exec,
) -> dict[str, Any]:
    """Measure the machine, predict, decode, and return both; nothing else should run.

    Raises: InvalidInput for sizes that do not fit the model.
    """
    model = loaded_model(params, config, exec)
    chip = measure_chip(model, rows=batches, exec=exec, repeats=repeats)
    rows = []
    for context in contexts:
        plan = latency.Plan(
            batches=batches, context=context, prefills=(1,), steps=steps, repeats=repeats
        )
        found = latency.measure(params, config, plan=plan, exec=exec)["rows"]
        measured = {row["batch"]: row["tok_s"] for row in found if row["kind"] == "decode"}
        rows += [_row(model, chip, n, context, steps, measured[n]) for n in batches]
    return {
        "chip": dataclasses.asdict(chip),
        "weight_bytes": model.weight_bytes,
        "kv_dtype": model.kv_dtype,
        "rows": [dataclasses.asdict(row) for row in rows],
    }


def table(result: dict[str, Any]) -> str:
    """Return a result of `compare` for people."""
    chip = result["chip"]
    lines = [
        f"{result['weight_bytes'] / 1e6:,.0f} MB of weights, {result['kv_dtype']} keys and values; "
        f"measured now: {chip['bandwidth'] / 1e9:.1f} GB/s of memory, "
        f"{chip['f32_flops'] / 1e9:.0f} GFLOP/s, and in steps",
    ]
    for step in chip["measured"]:
        lines.append(
            f"  of {step['rows']}: {step['product_bytes_s'] / 1e9:.1f} GB/s of weights, "
            f"{step['kv_bytes_s'] / 1e9:.1f} GB/s of keys and values, "
            f"{step['step_s'] * 1e3:.2f} ms beside them"
        )
    lines += ["", "  batch  context  predicted  measured  predicted / measured  set by"]
    for row in result["rows"]:
        lines.append(
            f"{row['batch']:7}{row['context']:9}{row['predicted_tok_s']:11.1f}"
            f"{row['measured_tok_s']:10.1f}{row['ratio']:22.2f}  {row['binds']}"
        )
    return "\n".join(lines)


def _row(model: Model, chip: Chip, batch: int, context: int, steps: int, measured: float) -> Row:
    # Between the first step and the last.
    load = Load(batch=batch, context=context + steps // 2)
    point = decode_point(model, chip, Mesh(), load, batch)
    return Row(
        batch=batch,
        context=context,
        predicted_tok_s=point.tok_s,
        measured_tok_s=measured,
        ratio=point.tok_s / measured,
        binds=point.step.binds,
    )
