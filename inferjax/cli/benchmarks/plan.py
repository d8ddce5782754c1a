"""`inferjax bench plan`: what `inferjax plan --chip local` predicts, beside what is measured."""

import argparse
from typing import Any

from inferjax.cli.benchmarks.flags import add_sizes
from inferjax.cli.session import add_exec_arguments, add_model_arguments, exec_from, load_model


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    add_model_arguments(parser)
    add_exec_arguments(parser)
    add_sizes(parser, "--batch", (1, 32), "sequences")
    add_sizes(parser, "--context", (128, 512, 1024), "tokens already in the cache")
    parser.add_argument(
        "--steps", type=int, default=16, metavar="K", help="tokens per decode dispatch"
    )
    parser.add_argument("--repeats", type=int, default=5, metavar="N", help="runs per median")


def measure(args: argparse.Namespace) -> tuple[dict[str, Any], str]:
    """Return the figures and their table."""
    from inferjax.bench import prediction

    model = load_model(args, quiet=args.json)
    result = prediction.compare(
        model.params,
        model.config,
        batches=args.batch,
        contexts=args.context,
        steps=args.steps,
        repeats=args.repeats,
        exec=exec_from(args),
    )
    return result, prediction.table(result)
