"""`inferjax bench KIND`: measurements beside what the machine allows."""

import argparse
import importlib
import json

from inferjax.cli.setup import EXIT_OK, keep_compiled_programs

# name: (module with add_arguments(parser) and measure(args) -> (values, text), one line of help)
KINDS = {
    "latency": (
        "inferjax.cli.benchmarks.latency",
        "prefill and decode tokens/s at given batches",
    ),
    "throughput": (
        "inferjax.cli.benchmarks.throughput",
        "requests and tokens/s of the engine under a load, and how long requests take",
    ),
    "sweep": (
        "inferjax.cli.benchmarks.sweep",
        "throughput against latency under several loads, as a table, JSON and a plot",
    ),
    "overhead": (
        "inferjax.cli.benchmarks.overhead",
        "what the engine adds to the bare decode function",
    ),
    "policy": (
        "inferjax.cli.benchmarks.policy",
        "time of the scheduler alone, with thousands of requests waiting",
    ),
    "load": (
        "inferjax.cli.benchmarks.load",
        "seconds and memory of loading a model, beside reading its files and writing its weights",
    ),
    "peers": (
        "inferjax.cli.benchmarks.peers",
        "the same shapes on llama.cpp, transformers and vLLM, where they are installed",
    ),
    "plan": (
        "inferjax.cli.benchmarks.plan",
        "decode tokens/s that the planner predicts for this machine, beside what is measured",
    ),
    "sinks": (
        "inferjax.cli.benchmarks.sinks",
        "what a text loses in quality when it outgrows its context and older tokens are dropped",
    ),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the benchmarks and their flags."""
    kinds = parser.add_subparsers(dest="kind", metavar="KIND", required=True)
    for name, (module_name, text) in KINDS.items():
        module = importlib.import_module(module_name)
        kind = kinds.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
        module.add_arguments(kind)
        kind.add_argument(
            "--json", action="store_true", help="print one JSON object as the last line"
        )
        kind.set_defaults(measure=module.measure)


def run(args: argparse.Namespace) -> int:
    """Measure and print a table; with --json also one JSON line."""
    from inferjax.bench import report

    keep_compiled_programs()
    values, text = args.measure(args)
    subject = getattr(args, "model", "the scheduler")
    print(f"{subject} on {report.hardware_line()}")
    print(text)
    if args.json:
        print(json.dumps({"kind": args.kind, "model": subject, **values, **report.where()}))
    return EXIT_OK
