"""`inferjax convert`: a checkpoint of any format, written as Orbax or safetensors."""

import argparse
import dataclasses
import json
import time
from pathlib import Path
from typing import Any

from inferjax.cli.options import add_quantize_argument
from inferjax.cli.setup import EXIT_OK, cache_folder, show_progress, warnings_in_a_line
from inferjax.errors import InvalidInput


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's flags."""
    parser.add_argument("source", help="a folder, a .gguf or .safetensors file, or a model's name")
    parser.add_argument("destination", type=Path, help="the folder to write")
    parser.add_argument(
        "--format",
        choices=("safetensors", "orbax"),
        default="safetensors",
        help="safetensors is what Hugging Face tools load (the default), orbax what JAX tools do",
    )
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16", "float16"),
        help="dtype of the weights that are written as arrays (default: the checkpoint's)",
    )
    add_quantize_argument(parser)
    parser.add_argument(
        "--recipe",
        choices=("rtn", "awq", "gptq"),
        default="rtn",
        help="how --quantize chooses codes: rtn rounds to nearest (the default), awq and gptq look "
        "at what the model computes on --calibration",
    )
    parser.add_argument(
        "--calibration",
        type=Path,
        nargs="+",
        metavar="FILE",
        help="texts like those that the model is for, .txt or .jsonl: 32 windows of 512 tokens, "
        "taken at equal distances",
    )
    parser.add_argument(
        "--shard-bytes", default="5GB", metavar="N", help="largest file, such as 500MB or 5GB"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace an existing folder")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Load the source and save it."""
    from inferjax.checkpoint.load import load
    from inferjax.checkpoint.replace import check_replaceable
    from inferjax.checkpoint.save import save

    began, shard_bytes = time.perf_counter(), parse_size(args.shard_bytes)
    progress = show_progress(quiet=args.json)
    quantize, texts = _quantize(args), _calibration(args)
    check_replaceable(args.destination.expanduser(), overwrite=args.overwrite)
    calibrating = args.recipe != "rtn"
    dtype = args.dtype or _stored_dtype(args.source, packed=quantize != "none")
    with warnings_in_a_line():
        model = load(
            args.source,
            dtype=dtype,
            quantize="none" if calibrating else quantize,
            progress=progress,
            cache_dir=cache_folder(),
        )
    if calibrating:
        model = _calibrated(model, quantize, args.recipe, texts, progress=progress)
    path = save(
        model,
        args.destination,
        format=args.format,
        overwrite=args.overwrite,
        shard_bytes=shard_bytes,
        progress=progress,
    )
    report = _report(path, model, args.format, dtype, time.perf_counter() - began)
    print(json.dumps(report) if args.json else _sentence(report))
    return EXIT_OK


def _quantize(args: argparse.Namespace) -> str:
    """Return how weights are packed on the way: as they are stored, if the format can hold that.

    Raises: InvalidInput for a format that cannot.
    """
    if args.format == "orbax":
        return args.quantize or ("none" if args.dtype else "native")
    if args.quantize not in (None, "none"):
        raise InvalidInput(
            f"--quantize {args.quantize} with --format {args.format}",
            why="Hugging Face's safetensors folder holds arrays",
            fix="add --format orbax",
        )
    return "none"


def _calibration(args: argparse.Namespace) -> list[str]:
    """Return the texts that a recipe looks at, none where it needs none.

    Raises: InvalidInput for flags that do not go together.
    """
    from inferjax.calibrate.texts import read_texts

    if args.recipe == "rtn":
        if args.calibration:
            raise InvalidInput(
                "--calibration without a recipe",
                why="rounding to nearest looks at no text",
                fix="add --recipe gptq or --recipe awq",
            )
        return []
    if args.quantize in (None, "none", "native") or not args.calibration:
        raise InvalidInput(
            f"--recipe {args.recipe} lacks a scheme or a text",
            why="a recipe chooses the codes of a scheme for what the model computes on a text",
            fix="add --quantize int4, for example, and --calibration FILE",
        )
    return [text for path in args.calibration for text in read_texts(path)]


def _calibrated(model: Any, scheme: str, recipe: str, texts: list[str], *, progress: bool) -> Any:
    from inferjax.calibrate import quantize
    from inferjax.calibrate.texts import NUM_WINDOWS, WINDOW, cut_windows, tokenizer_of

    length = min(WINDOW, model.config.max_context)
    tokens = cut_windows(tokenizer_of(model), texts, window=length, limit=NUM_WINDOWS)
    params = quantize(
        model.params, model.config, scheme, recipe=recipe, tokens=tokens, progress=progress
    )
    return dataclasses.replace(model, params=params)


def _stored_dtype(source: str, *, packed: bool) -> str:
    """Return the dtype of the checkpoint: on a CPU `load` would widen to float32, to compute."""
    from inferjax.checkpoint.load import arrays_dtype, config_only

    if packed:
        return arrays_dtype(source, cache_dir=cache_folder())
    return config_only(source, cache_dir=cache_folder()).dtype


def _report(path: Path, model: Any, form: str, dtype: str, seconds: float) -> dict[str, Any]:
    from inferjax.models.quantized import packed_formats

    files = [file for file in path.rglob("*") if file.is_file()]
    return {
        "path": str(path),
        "format": form,
        "dtype": dtype,
        "packed": packed_formats(model.params),
        "num_files": len(files),
        "num_bytes": sum(file.stat().st_size for file in files),
        "seconds": round(seconds, 2),
    }


def _sentence(report: dict[str, Any]) -> str:
    return (
        f"{report['path']}: {', '.join([report['format'], report['dtype'], *report['packed']])}, "
        f"{report['num_files']} files, "
        f"{report['num_bytes'] / 1e6:,.1f} MB, written in {report['seconds']:.1f} s"
    )


def parse_size(text: str) -> int:
    """Return the bytes of a size such as "500MB".

    Raises: InvalidInput for anything else.
    """
    units = {"": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9}
    number = text.rstrip("kKmMgGbB")
    unit = text[len(number) :].lower()
    if unit not in units or not number.isdecimal() or not int(number[:12]):
        raise InvalidInput(f"{text[:40]!r} is no size", fix="give one like 500MB or 5GB")
    return int(number[:12]) * units[unit]
