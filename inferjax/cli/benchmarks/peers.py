"""`inferjax bench peers`: the same shapes on other engines, in turns."""

import argparse
from typing import Any

from inferjax.cli.benchmarks.flags import add_sizes
from inferjax.cli.session import DEFAULT_MODEL
from inferjax.cli.setup import cache_folder


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    parser.add_argument("--model", default=DEFAULT_MODEL, metavar="NAME_OR_PATH")
    parser.add_argument(
        "--python",
        action="append",
        default=[],
        metavar="PATH",
        help="a Python that has llama-cpp-python, transformers or vllm installed; may be repeated",
    )
    parser.add_argument(
        "--run",
        dest="runs",
        nargs="+",
        default=(),
        metavar="ENGINE[:WEIGHTS]",
        help="what to run, such as inferjax:int8 or llama.cpp:bf16 (default: all that is there)",
    )
    add_sizes(parser, "--batch", (1, 8, 32), "sequences")
    parser.add_argument("--context", type=int, default=128, metavar="S", help="prompt tokens")
    parser.add_argument("--steps", type=int, default=128, metavar="K", help="tokens to decode")
    parser.add_argument("--prefill", type=int, default=512, metavar="S", help="prompt to prefill")
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="rounds per median")
    parser.add_argument(
        "--most-s",
        type=int,
        default=600,
        metavar="S",
        help="seconds after which a process is ended",
    )
    parser.add_argument("--kv", default="", metavar="DTYPE", help="inferjax's cache")


def measure(args: argparse.Namespace) -> tuple[dict[str, Any], str]:
    """Return the figures and their table."""
    from inferjax.bench import rivals

    result = rivals.measure(
        rivals.Plan(
            source=args.model,
            cache_dir=cache_folder(),
            pythons=tuple(args.python),
            runs=tuple(args.runs),
            batches=args.batch,
            context=args.context,
            steps=args.steps,
            prefill=args.prefill,
            rounds=args.rounds,
            most_s=args.most_s,
            kv=args.kv,
        )
    )
    return result, rivals.table(result)
