"""The entry point: choose a command, run it, and turn errors into a message and an exit code.

Nothing heavy is imported here: `inferjax --help` answers at once.
"""

import argparse
import importlib
import os
import sys
import traceback
from collections.abc import Sequence
from importlib.metadata import version

from inferjax.cli.setup import EXIT_ERROR, EXIT_INTERRUPTED, EXIT_OK
from inferjax.errors import InferjaxError

# name: (module with add_arguments(parser) and run(args) -> exit code, one line of help)
COMMANDS = {
    "generate": ("inferjax.cli.generate", "answer or continue a prompt"),
    "chat": ("inferjax.cli.chat", "talk with a model"),
    "models": ("inferjax.cli.models", "list the catalog, or describe one checkpoint"),
    "plan": ("inferjax.cli.plan", "say what fits on which chips, how fast, and at what cost"),
    "convert": ("inferjax.cli.convert", "write a checkpoint in another format"),
    "quality": ("inferjax.cli.quality", "measure what fewer bits cost on a text"),
    "launch": ("inferjax.cli.launch", "run a program in several processes that share a mesh"),
    "bench": ("inferjax.cli.bench", "measure speed beside the limits of this machine"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit code.

    0, 1 when part of a batch failed, 2 for an error, 130 after Ctrl-C.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    args = parser_for(words).parse_args(words)
    try:
        return args.run(args)
    except InferjaxError as error:
        if args.traceback:
            traceback.print_exc()
        else:
            print(f"inferjax: {error}", file=sys.stderr)
        return EXIT_ERROR
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader (`| head`) has gone; the interpreter must not fail again while it flushes.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_OK


def parser_for(words: Sequence[str]) -> argparse.ArgumentParser:
    """Return the parser for a command line, with the arguments of the command it names.

    The other commands are known by name and help only, so that their modules are not imported.
    """
    parser = argparse.ArgumentParser(
        prog="inferjax",
        description="Run language models as pure JAX functions.",
        epilog="`inferjax COMMAND --help` explains a command.",
    )
    parser.add_argument("--version", action="version", version=f"inferjax {version('inferjax')}")
    parser.add_argument("--traceback", action="store_true", help="show where an error was raised")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    chosen = next((word for word in words if not word.startswith("-")), None)
    for name, (module_name, text) in COMMANDS.items():
        command = commands.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
        command.add_argument(
            "--traceback",
            action="store_true",
            default=argparse.SUPPRESS,
            help="show where an error was raised",
        )
        if name == chosen:
            module = importlib.import_module(module_name)
            module.add_arguments(command)
            command.set_defaults(run=module.run)
    return parser
