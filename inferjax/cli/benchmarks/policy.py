"""`inferjax bench policy`: time of the scheduler alone."""

import argparse
from typing import Any

from inferjax.cli.benchmarks.flags import add_sizes
from inferjax.cli.setup import show_progress


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    add_sizes(parser, "--waiting", (0, 10_000, 100_000), "sequences that wait")
    for flag, default, text in (
        ("--running", 256, "sequences that decode"),
        ("--steps", 200, "steps of every case"),
    ):
        parser.add_argument(
            flag, type=int, default=default, metavar="N", help=f"{text} (default {default})"
        )


def measure(args: argparse.Namespace) -> tuple[dict[str, Any], str]:
    """Return the figures and their table."""
    from inferjax.bench import policy

    plan = policy.Plan(running=args.running, waiting=args.waiting, steps=args.steps)
    result = policy.measure(plan, progress=show_progress(quiet=args.json))
    return result, policy.table(result)
