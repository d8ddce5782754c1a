"""`inferjax bench sinks`: what attention-sink streaming costs in quality."""

import argparse
from pathlib import Path
from typing import Any

from inferjax.cli.session import add_model_arguments, load_model
from inferjax.errors import InvalidInput

PAGE_SIZE = 16


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    add_model_arguments(parser)
    parser.add_argument(
        "--text", type=Path, nargs="+", required=True, metavar="FILE", help="a long text, in parts"
    )
    for flag, default, text in (
        ("--context", 256, "tokens that the model sees at a time"),
        ("--sink-tokens", 16, "first tokens that are never dropped"),
        ("--num-tokens", 4096, "the most tokens of the text, at most the model's context"),
        ("--page-size", PAGE_SIZE, "tokens of a page: drops are whole pages"),
    ):
        parser.add_argument(
            flag, type=int, default=default, metavar="N", help=f"{text} (default {default})"
        )


def measure(args: argparse.Namespace) -> tuple[dict[str, Any], str]:
    """Return the figures and their table."""
    from inferjax.bench import sinks
    from inferjax.config import Exec

    plan = sinks.Plan(
        context=args.context, sink_tokens=args.sink_tokens, num_tokens=args.num_tokens
    )
    exec, text = Exec(page_size=args.page_size), "\n".join(map(_read, args.text))
    result = sinks.measure(load_model(args, quiet=args.json), text, plan, exec=exec)
    return {"text": [path.name for path in args.text], **result}, sinks.table(result)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInput(
            f"{path} cannot be read", why=str(error), fix="give a text file in UTF-8"
        ) from error
