"""`inferjax bench throughput`: the engine under one load."""

import argparse
import dataclasses
from pathlib import Path
from typing import Any

from inferjax.cli.benchmarks.flags import MIX_HELP, add_load_arguments, mix_from
from inferjax.cli.benchmarks.warm import warm_engine
from inferjax.cli.setup import show_progress
from inferjax.errors import InvalidInput

# With a file, these still say how many requests, how long a line without max_tokens is, and when.
FLAGS_BESIDE_A_FILE = ("num_requests", "output_len", "seed")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    load = parser.add_mutually_exclusive_group()
    load.add_argument(
        "--request-rate",
        type=float,
        metavar="R",
        help="requests arrive at random, R a second (default: all at once)",
    )
    load.add_argument(
        "--max-concurrency", type=int, metavar="N", help="keep N requests under way all the time"
    )
    parser.add_argument(
        "--input",
        type=Path,
        metavar="FILE.jsonl",
        help='requests from a file, a line each: {"prompt": text or ids, "max_tokens": n}',
    )
    add_load_arguments(parser)


def measure(args: argparse.Namespace) -> tuple[dict[str, Any], str]:
    """Return the figures and their table."""
    from inferjax.bench import throughput
    from inferjax.bench.serving import parse_goals
    from inferjax.bench.workload import draw_asks

    mix, goals, load = mix_from(args), parse_goals(args.goodput), _load(args)
    asks = None if args.input is None else _from_file(args, mix)
    with warm_engine(args) as warm:
        if asks is None:
            asks = draw_asks(mix, warm.model.config.vocab_size)
        result = throughput.measure(
            warm.engine,
            warm.roofline,
            asks,
            load,
            goals=goals,
            progress=show_progress(quiet=args.json),
        )
    source = {"input": str(args.input)} if args.input else {"mix": dataclasses.asdict(mix)}
    values = {**source, **result, "compiling": warm.compiling, **warm.settings}
    return values, f"{warm.compiled}\n{throughput.table(result)}"


def _load(args: argparse.Namespace) -> Any:
    from inferjax.bench.throughput import Load
    from inferjax.bench.workload import Mix

    return Load(
        request_rate=args.request_rate,
        max_concurrency=args.max_concurrency,
        seed=getattr(args, "seed", Mix().seed),
    )


def _from_file(args: argparse.Namespace, mix: Any) -> Any:
    from inferjax.bench.workload import read_asks

    idle = [n for n in MIX_HELP if hasattr(args, n) and n not in FLAGS_BESIDE_A_FILE]
    if idle:
        raise InvalidInput(
            f"--input together with {', '.join('--' + n.replace('_', '-') for n in idle)}",
            why="the file decides what prompts look like",
            fix="leave one out",
        )
    limit = getattr(args, "num_requests", None)
    return read_asks(args.input, num_tokens=mix.output_len, limit=limit)
