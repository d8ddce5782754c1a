"""`inferjax bench load`: how long loading takes and how much memory, beside the limit."""

import argparse
from typing import Any

from inferjax.cli.session import add_model_arguments
from inferjax.cli.setup import cache_folder


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    add_model_arguments(parser)
    parser.add_argument(
        "--rounds", type=int, default=3, metavar="N", help="loads of each kind (default 3)"
    )


def measure(args: argparse.Namespace) -> tuple[dict[str, Any], str]:
    """Return the figures and their table."""
    from inferjax.bench import load

    plan = load.Plan(
        source=args.model,
        dtype=args.dtype,
        quantize=args.quantize,
        cache_dir=cache_folder(),
        rounds=args.rounds,
    )
    result = load.measure(plan)
    return result, load.table(result)
