"""`inferjax bench sweep`: the engine under several loads, with a plot."""

import argparse
import json
from pathlib import Path
from typing import Any

from inferjax.cli.benchmarks.flags import add_load_arguments, add_sizes, mix_from
from inferjax.cli.benchmarks.warm import warm_engine
from inferjax.cli.setup import check_target, show_progress
from inferjax.errors import MissingPackage

CONCURRENCY = (1, 2, 4, 8, 16)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    add_sizes(parser, "--concurrency", CONCURRENCY, "requests under way, one number per run")
    parser.add_argument(
        "--request-rates",
        type=_rates,
        metavar="R,R",
        help="instead: requests a second, arriving at random",
    )
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        default=Path("sweep"),
        metavar="PREFIX",
        help="write PREFIX.json and PREFIX.png (default sweep)",
    )
    parser.add_argument(
        "--plot",
        action=argparse.BooleanOptionalAction,
        help="draw the plot, or fail; by default it is drawn where matplotlib is installed",
    )
    add_load_arguments(parser)


def measure(args: argparse.Namespace) -> tuple[dict[str, Any], str]:
    """Return the figures and their table, after writing the files."""
    from inferjax.bench import report, sweep
    from inferjax.bench.serving import parse_goals

    json_path, png_path = (args.output.with_name(args.output.name + e) for e in (".json", ".png"))
    note = _why_no_plot(args)
    for path in (json_path,) if note else (json_path, png_path):
        check_target(path)
    mix, goals, loads = mix_from(args), parse_goals(args.goodput), _loads(args)
    largest = max((load.max_concurrency or 0 for load in loads), default=0)
    defaults = {"max_running": largest} if largest else {}
    with warm_engine(args, **defaults) as warm:
        result = sweep.measure_levels(
            warm.engine,
            warm.roofline,
            mix,
            loads,
            vocab_size=warm.model.config.vocab_size,
            goals=goals,
            progress=show_progress(quiet=args.json),
        )
    values = {**result, "compiling": warm.compiling, **warm.settings}
    whole = {"kind": "sweep", "model": args.model, **values, **report.where()}
    json_path.write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")
    if note is None:
        from inferjax.bench import plot

        plot.draw(result, png_path, title=f"{args.model} on {report.hardware_line()}")
    written = f"written: {json_path}" + (f", {png_path}" if note is None else "; " + note)
    return values, f"{warm.compiled}\n{sweep.table(result)}\n{written}"


def _why_no_plot(args: argparse.Namespace) -> str | None:
    """Return why there will be no plot, or None if there will be one.

    Raises: MissingPackage for one that is asked for.
    """
    from inferjax.bench.plot import check_matplotlib

    if args.plot is False:
        return "no plot, as asked"
    try:
        check_matplotlib()
    except MissingPackage as error:
        if args.plot:
            raise
        return f"no plot: {error.what}; {error.fix}"
    return None


def _loads(args: argparse.Namespace) -> list[Any]:
    from inferjax.bench.throughput import Load
    from inferjax.bench.workload import Mix

    seed = getattr(args, "seed", Mix().seed)
    if args.request_rates:
        return [Load(request_rate=rate, seed=seed) for rate in args.request_rates]
    return [Load(max_concurrency=count, seed=seed) for count in args.concurrency]


def _rates(text: str) -> tuple[float, ...]:
    return tuple(float(word) for word in text.split(","))
