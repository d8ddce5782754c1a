"""What attention-sink streaming costs in quality: the likelihood of a long text beyond the context.

Every way reads the same text and is measured on the same tokens, those behind the first context.
"""

import dataclasses
import math
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from inferjax.checkpoint.load import Model
from inferjax.config import Exec
from inferjax.engine.config import EngineConfig
from inferjax.engine.engine import Engine
from inferjax.engine.overflow import Middle, middle_of
from inferjax.errors import InvalidInput
from inferjax.runtime.score import score
from inferjax.sampling import SamplingParams

# Rows that are scored at a time.
SCORE_ROWS = 4


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What to measure: a text of at most `num_tokens` through a context of `context` tokens."""

    context: int = 256
    sink_tokens: int = 16
    num_tokens: int = 4096


def measure(model: Model, text: str, plan: Plan, *, exec: Exec = Exec()) -> dict[str, Any]:
    """Read the text in every way and return plain values.

    Raises: InvalidInput when it is too short, UnsupportedConfig for a model that cannot stream.
    """
    if model.tokenizer is None:
        raise InvalidInput("the model has no tokenizer", fix="choose one that can read text")
    longest = min(plan.num_tokens, model.config.max_context)
    tokens = model.tokenizer.encode(text)[:longest]
    if len(tokens) < 2 * plan.context:
        raise InvalidInput(
            f"a text of {len(tokens)} tokens and a context of {plan.context}",
            why="only tokens beyond the context are measured, and a few say nothing",
            fix=f"give a text of at least {2 * plan.context} tokens, or a shorter context",
        )
    middle = middle_of(plan.context, plan.sink_tokens, exec.page_size)
    ways = {
        "full": lambda: _full(model, tokens, exec),
        "recomputed": lambda: _recomputed(model, tokens, middle, exec),
        "lossy_sinks": lambda: _streamed(model, tokens, plan.context, plan.sink_tokens, exec),
        "no_sinks": lambda: _streamed(model, tokens, plan.context, 0, exec),
    }
    rows = {}
    for name, way in ways.items():
        began = time.perf_counter()
        rows[name] = _row(way(), plan.context, time.perf_counter() - began)
    return {
        "plan": dataclasses.asdict(plan),
        "page_size": exec.page_size,
        "num_tokens": len(tokens),
        "num_measured": len(tokens) - plan.context,
        "dropped_at_once": middle.size,
        "ways": rows,
    }


TITLES = {
    "full": "all tokens before (the model's whole context)",
    "recomputed": "the same tokens kept, computed anew after every drop",
    "lossy_sinks": "streaming with sinks",
    "no_sinks": "streaming without sinks",
}


def table(result: dict[str, Any]) -> str:
    """Return a result of `measure` for people."""
    plan, best = result["plan"], result["ways"]["full"]["nll"]
    lines = [
        f"{result['num_measured']} tokens behind the first {plan['context']}; a full context of "
        f"{plan['context']} keeps {plan['sink_tokens']} sinks and drops "
        f"{result['dropped_at_once']}",
        "",
        f"{'what a token is predicted from':54}nats/token   worse by  perplexity  seconds",
    ]
    for name, row in result["ways"].items():
        lines.append(
            f"{TITLES[name]:54}{row['nll']:10.4f}{row['nll'] - best:+11.4f}"
            f"{row['perplexity']:12.2f}{row['seconds']:9.1f}"
        )
    return "\n".join(lines)


def _row(logprobs: Sequence[float], context: int, seconds: float) -> dict[str, float]:
    """Return the figures of log-probabilities whose first one is that of token 1."""
    mean = -float(np.mean(logprobs[context - 1 :]))
    return {"nll": mean, "perplexity": math.exp(mean), "seconds": seconds}


def _full(model: Model, tokens: list[int], exec: Exec) -> list[float]:
    row = np.array([tokens], np.int32)
    return np.asarray(score(model.params, model.config, row, exec=exec))[0].tolist()


def _recomputed(model: Model, tokens: list[int], middle: Middle, exec: Exec) -> list[float]:
    """Score what streaming keeps, as a text of its own, after every drop."""
    kept = middle.context - middle.size
    ends = range(middle.context, len(tokens), middle.size)
    rows = [tokens[: middle.context]]
    for end in ends:
        recent = tokens[end - (kept - middle.start) : end + middle.size]
        rows.append(tokens[: middle.start] + recent)
    scored = _scored(model, rows, middle.context, exec)
    return sum((row[kept - 1 :] for row in scored[1:]), scored[0])


def _scored(model: Model, rows: list[list[int]], width: int, exec: Exec) -> list[list[float]]:
    lengths = np.array([len(row) for row in rows], np.int32)
    padded = np.zeros((-(-len(rows) // SCORE_ROWS) * SCORE_ROWS, width), np.int32)
    lengths = np.pad(lengths, (0, len(padded) - len(rows)), constant_values=1)
    for i, row in enumerate(rows):
        padded[i, : len(row)] = row
    found = []
    for first in range(0, len(rows), SCORE_ROWS):
        part = slice(first, first + SCORE_ROWS)
        values = score(model.params, model.config, padded[part], lengths[part], exec=exec)
        found += np.asarray(values).tolist()
    pairs = zip(found, lengths, strict=True)
    return [row[: length - 1] for row, length in pairs][: len(rows)]


def _streamed(
    model: Model, tokens: list[int], context: int, sink_tokens: int, exec: Exec
) -> list[float]:
    """Let the engine generate the text, token by forced token."""
    config = EngineConfig(
        max_running=1,
        max_len=context,
        overflow="lossy_sinks",
        sink_tokens=sink_tokens,
        prefill_buckets=(),
        decode_buckets=(),
        decode_steps=32,
        max_logprobs=0,
        prefix_caching=False,
    )
    forced = tokens[1:]
    sampling = SamplingParams(
        temperature=0.0, forced_token_ids=forced, max_tokens=len(forced), ignore_eos=True
    )
    engine = Engine(model, config, exec=exec)
    try:
        deltas = engine.stream(tokens[:1], sampling)
        return [logprob for delta in deltas for logprob in delta.tokens.logprobs]
    finally:
        engine.close()
