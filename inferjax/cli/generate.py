"""`inferjax generate`: one prompt in, one answer out, its speed on stderr."""

import argparse
import dataclasses
import json
import sys
from typing import Any

from inferjax.cli import session
from inferjax.cli.reply import Reply
from inferjax.cli.setup import EXIT_INTERRUPTED, EXIT_OK

# The most likely answer, so that the same command prints the same text.
DEFAULTS: dict[str, object] = {"temperature": 0.0, "max_tokens": 256}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's flags."""
    parser.add_argument("prompt", metavar="PROMPT", help="the text; - reads it from stdin")
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
    session.add_arguments(parser, DEFAULTS)


def run(args: argparse.Namespace) -> int:
    """Print the answer on stdout."""
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
