"""`inferjax bench latency`: how fast prefill and decode are."""

import argparse
from typing import Any

from inferjax.cli.benchmarks.flags import add_sizes
from inferjax.cli.session import add_exec_arguments, add_model_arguments, exec_from, load_model


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    add_model_arguments(parser)
    add_exec_arguments(parser)
    add_sizes(parser, "--batch", (1, 8, 32), "sequences")
    parser.add_argument(
        "--context", type=int, default=128, metavar="S", help="tokens already in the cache"
    )
    add_sizes(parser, "--prefill", (512,), "prompt tokens")
    parser.add_argument(
        "--steps", type=int, default=16, metavar="K", help="tokens per decode dispatch"
    )
    parser.add_argument("--repeats", type=int, default=5, metavar="N", help="runs per median")


def measure(args: argparse.Namespace) -> tuple[dict[str, Any], str]:
    """Return the figures and their table."""
    from inferjax.bench import latency

    model = load_model(args, quiet=args.json)
    result = latency.measure(
        model.params,
        model.config,
        exec=exec_from(args),
        plan=latency.Plan(
            batches=args.batch,
            context=args.context,
            prefills=args.prefill,
            steps=args.steps,
            repeats=args.repeats,
        ),
    )
    return result, latency.table(result)
