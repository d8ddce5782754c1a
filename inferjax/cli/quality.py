"""`inferjax quality MODEL`: what fewer bits cost, as a table over schemes and recipes."""

import argparse
import json
from pathlib import Path
from typing import Any

from inferjax.cli.setup import (
    EXIT_OK,
    cache_folder,
    check_target,
    keep_compiled_programs,
    show_progress,
)
from inferjax.errors import InvalidInput


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's flags."""
    from inferjax.bench.quality import Plan
    from inferjax.calibrate.texts import NUM_WINDOWS, WINDOW

    plan = Plan()
    parser.add_argument("model", metavar="MODEL", help="a folder, a .gguf file or a model's name")
    parser.add_argument(
        "--text",
        type=Path,
        nargs="+",
        metavar="FILE",
        help="texts to predict, .txt or .jsonl (default: half of the topics of Python's reference)",
    )
    parser.add_argument(
        "--calibration",
        type=Path,
        nargs="+",
        metavar="FILE",
        help="other texts, which recipes look at (default: the other half of the topics)",
    )
    for flag, default, text in (
        ("--schemes", plan.schemes, "how weights are stored"),
        ("--recipes", plan.recipes, "how codes are chosen"),
        ("--kv", plan.kv, "how keys and values are stored, beside float32 weights"),
    ):
        shown = ",".join(default) or "none"
        parser.add_argument(
            flag, type=_names, default=default, metavar="A,B", help=f"{text} (default {shown})"
        )
    for flag, default, text in (
        ("--window", WINDOW, "tokens of a window: all but its first are predicted"),
        ("--num-windows", NUM_WINDOWS, "the most windows to predict, 0 for all"),
        ("--calibration-windows", NUM_WINDOWS, "the most windows that recipes look at"),
    ):
        parser.add_argument(
            flag, type=int, default=default, metavar="N", help=f"{text} (default {default})"
        )
    parser.add_argument("--json", type=Path, metavar="OUT", help="write the figures as JSON")
    parser.add_argument("--plot", type=Path, metavar="OUT", help="write a picture (PNG)")


def run(args: argparse.Namespace) -> int:
    """Measure, and print the table."""
    from inferjax.bench import quality, quality_plot, report
    from inferjax.bench.plot import check_matplotlib
    from inferjax.checkpoint.load import load

    plan = quality.Plan(schemes=args.schemes, recipes=args.recipes, kv=args.kv)
    quality.variants_of(plan)
    for flag in ("window", "num_windows", "calibration_windows"):
        if getattr(args, flag) < (2 if flag == "window" else 0):
            raise InvalidInput(f"--{flag.replace('_', '-')} {getattr(args, flag)} is too few")
    if args.plot:
        check_matplotlib()
    for path in (args.json, args.plot):
        if path is not None:
            check_target(path)
    texts, others = _texts(args)
    keep_compiled_programs()
    progress = show_progress()
    model = load(args.model, dtype="float32", progress=progress, cache_dir=cache_folder())
    windows = _windows(model, texts, args.window, args.num_windows)
    calibration = _windows(model, others, args.window, args.calibration_windows)
    result = quality.measure(
        model.params, model.config, windows, calibration, plan, progress=progress
    )
    subject = f"{args.model} on {report.hardware_line()}"
    print(f"{subject}\n{quality.table(result)}")
    if args.json:
        names = {"model": args.model, "text": _names_of(args.text)}
        values = {**names, "calibration": _names_of(args.calibration), **result, **report.where()}
        args.json.write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")
    if args.plot:
        quality_plot.draw(result, args.plot, title=subject)
    return EXIT_OK


def _texts(args: argparse.Namespace) -> tuple[list[str], list[str]]:
    """Return what is predicted and what recipes look at, which must be different texts."""
    from inferjax.calibrate.texts import python_reference, read_texts

    texts, others = ([text] for text in python_reference())
    if args.text:
        texts = [text for path in args.text for text in read_texts(path)]
    if args.calibration:
        others = [text for path in args.calibration for text in read_texts(path)]
    if set(texts) & set(others):
        raise InvalidInput(
            "the same text is predicted and calibrated on",
            why="a recipe that has seen the text looks better than it is",
            fix="give --calibration another file",
        )
    return texts, others


def _windows(model: Any, texts: list[str], window: int, limit: int) -> Any:
    from inferjax.calibrate.texts import cut_windows, tokenizer_of

    return cut_windows(tokenizer_of(model), texts, window=window, limit=limit or None)


def _names_of(paths: list[Path] | None) -> list[str]:
    return [path.name for path in paths] if paths else ["pydoc_data.topics"]


def _names(text: str) -> tuple[str, ...]:
    return tuple(word for word in text.split(",") if word)
