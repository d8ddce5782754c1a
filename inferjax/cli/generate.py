"""`inferjax generate`: one prompt in, one answer out; or a file of them, with --batch."""

import argparse
import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

from inferjax.cli import session
from inferjax.cli.options import ENGINE_HELP, add_engine_fields
from inferjax.cli.reply import Reply
from inferjax.cli.setup import EXIT_INTERRUPTED, EXIT_OK
from inferjax.errors import InvalidInput

# The most likely answer, so that the same command prints the same text.
DEFAULTS: dict[str, object] = {"temperature": 0.0, "max_tokens": 256}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's flags."""
    parser.add_argument(
        "prompt", nargs="?", metavar="PROMPT", help="the text; - reads it from stdin"
    )
    wrap = parser.add_mutually_exclusive_group()
    wrap.add_argument(
        "--chat",
        action="store_true",
        default=None,
        help="wrap the prompt as a user's message (the default for an instruct model)",
    )
    wrap.add_argument(
        "--raw", dest="chat", action="store_false", help="continue the prompt as it stands"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--no-stream", action="store_true", help="print the answer when it is done")
    parser.add_argument("--quiet", action="store_true", help="do not measure and show the limit")
    _add_batch_arguments(parser)
    session.add_arguments(parser, DEFAULTS)
    add_engine_fields(parser)


def _add_batch_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "batch",
        "A line of IN.jsonl is an object with a prompt (text, token ids or messages) or messages, "
        "and if need be id, priority, cache_salt and sampling fields; flags hold for what a line "
        "leaves out. Results are written as they end, and the same command goes on where it was "
        "broken off. The exit code is 1 when some lines failed: they have an error instead of "
        "samples, and the others are not touched.",
    )
    group.add_argument(
        "--batch", type=Path, metavar="IN.jsonl", help="answer every line; - reads from stdin"
    )
    group.add_argument(
        "-o", "--output", type=Path, metavar="OUT.jsonl", help="where the results go"
    )
    group.add_argument(
        "--overwrite", action="store_true", help="start anew instead of going on with OUT.jsonl"
    )


def run(args: argparse.Namespace) -> int:
    """Print the answer on stdout, or run a batch.

    Raises: InvalidInput for flags that do not go together.
    """
    _check_flags(args)
    if args.batch is not None:
        from inferjax.cli import batch

        return batch.run(args, DEFAULTS)
    text = sys.stdin.read() if args.prompt == "-" else args.prompt
    with session.open_session(args, DEFAULTS, quiet=args.json or args.quiet) as opened:
        prompt_ids = encode(opened.model, text, chat=args.chat)
        streaming = not (args.json or args.no_stream)
        reply = opened.reply(prompt_ids, _write if streaming else str)
        if not args.json:
            print("" if streaming else reply.text, flush=True)
        facts = None if args.quiet else session.speed(reply, opened.weight_bytes)
    if args.json:
        print(json.dumps(_report(args, prompt_ids, reply, facts), ensure_ascii=False))
    elif facts is not None:
        session.print_speed(reply, facts)
    return EXIT_INTERRUPTED if reply.finish_reason == "interrupted" else EXIT_OK


def _check_flags(args: argparse.Namespace) -> None:
    """Refuse flags that would be ignored."""
    engine = [f"--{n.replace('_', '-')}" for n in ENGINE_HELP if hasattr(args, n)]
    alone = {"PROMPT": args.prompt, "--json": args.json, "--no-stream": args.no_stream}
    batch = {"--output": args.output, "--overwrite": args.overwrite}
    if args.batch is None:
        found = [flag for flag, value in batch.items() if value] + engine
        if args.prompt is None or found:
            raise InvalidInput(
                f"{', '.join(found) or 'nothing to answer'}, and no --batch",
                why="these flags are those of a batch" if found else "there is no prompt either",
                fix="give --batch IN.jsonl -o OUT.jsonl, or a PROMPT and none of them",
            )
        return
    found = [flag for flag, value in alone.items() if value]
    if args.output is None or found:
        raise InvalidInput(
            f"--batch with {', '.join(found)}" if found else "--batch without --output",
            why="a batch reads its prompts from a file, and writes JSON lines to another",
            fix="write inferjax generate --batch IN.jsonl -o OUT.jsonl",
        )


def encode(model: Any, text: str, *, chat: bool | None) -> list[int]:
    """Return the prompt's tokens; `chat=None` wraps it when the checkpoint has a chat template."""
    tokenizer = model.tokenizer
    if chat or (chat is None and tokenizer.has_chat_template):
        messages = [{"role": "user", "content": text}]
        return tokenizer.apply_chat_template(messages)
    return tokenizer.encode(text)


def _write(piece: str) -> None:
    sys.stdout.write(piece)
    sys.stdout.flush()


def _report(
    args: argparse.Namespace,
    prompt_ids: list[int],
    reply: Reply,
    facts: dict[str, float | None] | None,
) -> dict[str, object]:
    from inferjax.bench.report import hardware, versions

    return {
        "model": args.model,
        "prompt_token_ids": prompt_ids,
        **dataclasses.asdict(reply),
        "speed": facts,
        "hardware": hardware(),
        "versions": versions(),
    }
