"""`inferjax bench overhead`: what the engine adds to the bare decode function."""

import argparse
from typing import Any

from inferjax.cli.benchmarks.flags import add_sizes
from inferjax.cli.session import add_exec_arguments, add_model_arguments, exec_from, load_model
from inferjax.cli.setup import show_progress


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    add_model_arguments(parser)
    add_exec_arguments(parser)
    add_sizes(parser, "--batch", (8, 32), "sequences")
    for flag, default, text in (
        ("--context", 32, "tokens of the prompts"),
        ("--tokens", 64, "tokens that every sequence decodes"),
        ("--steps", 8, "tokens per decode dispatch"),
        ("--rounds", 5, "rounds of both, in turn"),
    ):
        parser.add_argument(
            flag, type=int, default=default, metavar="N", help=f"{text} (default {default})"
        )


def measure(args: argparse.Namespace) -> tuple[dict[str, Any], str]:
    """Return the figures and their table."""
    from inferjax.bench import overhead

    model = load_model(args, quiet=args.json)
    plan = overhead.Plan(
        batches=args.batch,
        context=args.context,
        num_tokens=args.tokens,
        steps=args.steps,
        rounds=args.rounds,
    )
    result = overhead.measure(
        model, plan, exec=exec_from(args), progress=show_progress(quiet=args.json)
    )
    return result, overhead.table(result)
