"""Flags that several benchmarks have, and what they stand for."""

import argparse
from typing import Any

from inferjax.cli.options import add_engine_fields, add_fields, from_fields
from inferjax.cli.session import add_exec_arguments, add_model_arguments

# What each field of bench.workload.Mix does.
MIX_HELP = {
    "num_requests": "requests",
    "input_len": "tokens of a prompt, beside the shared prefix",
    "output_len": "tokens that every request generates",
    "range_ratio": "lengths vary by this share in both directions",
    "shared_prefix": "tokens that prompts begin with in common",
    "num_prefixes": "different shared prefixes, used in turn",
    "seed": "seed of prompts, lengths and arrivals",
}


def add_sizes(
    parser: argparse.ArgumentParser, flag: str, default: tuple[int, ...], text: str
) -> None:
    """Add a flag that takes numbers with commas."""
    shown = ",".join(str(size) for size in default)
    parser.add_argument(
        flag, type=_sizes, default=default, metavar="N,N", help=f"{text} (default {shown})"
    )


def add_load_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of a benchmark that puts a load on the engine."""
    from inferjax.bench.workload import Mix

    add_model_arguments(parser)
    add_exec_arguments(parser)
    add_fields(parser, Mix, title="requests", texts=MIX_HELP, defaults={})
    parser.add_argument(
        "--goodput",
        nargs="+",
        default=(),
        metavar="NAME:MS",
        help="also count requests/s within limits of ttft, tpot and e2el in milliseconds",
    )
    add_engine_fields(parser)


def mix_from(args: argparse.Namespace) -> Any:
    """Return the `Mix` of the flags.

    Raises: InvalidInput.
    """
    from inferjax.bench.workload import Mix

    return from_fields(args, Mix, defaults={})


def _sizes(text: str) -> tuple[int, ...]:
    return tuple(int(word) for word in text.split(","))
