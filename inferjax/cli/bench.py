"""`inferjax bench latency`: how fast prefill and decode are, beside what the machine allows."""

import argparse
import json

from inferjax.cli.session import add_exec_arguments, add_model_arguments, exec_from, load_model
from inferjax.cli.setup import EXIT_OK, keep_compiled_programs


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the benchmarks and their flags."""
    kinds = parser.add_subparsers(dest="kind", metavar="KIND", required=True)
    latency = kinds.add_parser("latency", help="prefill and decode tokens/s at given batches")
    add_model_arguments(latency)
    add_exec_arguments(latency)
    latency.add_argument(
        "--batch", type=_sizes, default=(1, 8, 32), metavar="B,B", help="sequences"
    )
    latency.add_argument(
        "--context", type=int, default=128, metavar="S", help="tokens already in the cache"
    )
    latency.add_argument(
        "--prefill", type=_sizes, default=(512,), metavar="T,T", help="prompt tokens"
    )
    latency.add_argument(
        "--steps", type=int, default=16, metavar="K", help="tokens per decode dispatch"
    )
    latency.add_argument("--repeats", type=int, default=5, metavar="N", help="runs per median")
    latency.add_argument(
        "--json", action="store_true", help="print one JSON object as the last line"
    )


def run(args: argparse.Namespace) -> int:
    """Measure and print a table; with --json also one JSON line."""
    from inferjax.bench import latency, report

    keep_compiled_programs()
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
    print(f"{args.model} on {report.hardware_line()}")
    print(latency.table(result))
    if args.json:
        facts = {"hardware": report.hardware(), "versions": report.versions()}
        print(json.dumps({"model": args.model, **result, **facts}))
    return EXIT_OK


def _sizes(text: str) -> tuple[int, ...]:
    return tuple(int(word) for word in text.split(","))
