"""`inferjax chat`: a conversation; Ctrl-C stops a reply, /exit or Ctrl-D ends it all."""

import argparse
import contextlib
import sys
from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

from inferjax.cli import session
from inferjax.errors import InvalidInput

DEFAULTS: dict[str, object] = {"temperature": 0.7, "top_p": 0.95, "max_tokens": 512}
HELP = "/reset forgets the conversation, /speed shows the last reply's speed, /exit ends."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's flags."""
    parser.add_argument(
        "--system", metavar="TEXT", help="instructions that precede the conversation"
    )
    session.add_arguments(parser, DEFAULTS)


def run(args: argparse.Namespace) -> int:
    """Read lines until the user leaves."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  input() then has line editing and history
    with session.open_session(args, DEFAULTS) as opened:
        print(f"{args.model}. {HELP}", file=sys.stderr)
        Conversation(opened, system=args.system).talk()
    return 0


@runtime_checkable
class Speaker(Protocol):
    """What a conversation needs of a session."""

    @property
    def model(self) -> Any:
        """The loaded model, for its tokenizer."""
        ...

    @property
    def weight_bytes(self) -> int:
        """What one decoded token reads."""
        ...

    def reply(self, prompt_ids: list[int], emit: Callable[[str], object]) -> Any:
        """Generate one reply, giving its text to `emit` piece by piece."""
        ...


class Conversation:
    """The messages so far."""

    def __init__(
        self,
        opened: Speaker,
        *,
        system: str | None = None,
        read: Callable[[str], str] = input,
        write: Callable[[str], object] = sys.stdout.write,
        note: Callable[[str], object] = sys.stderr.write,
    ) -> None:
        self.opened, self.system, self.read = opened, system, read
        self.write, self.note = write, note
        self.last = None
        self.reset()

    def reset(self) -> None:
        """Forget everything but the instructions."""
        self.messages: list[dict[str, str]] = []
        if self.system:
            self.messages.append({"role": "system", "content": self.system})

    def talk(self) -> None:
        """Answer line after line; Ctrl-C at the prompt only abandons the line."""
        while True:
            try:
                line = self.read("> ").strip()
            except EOFError:
                self.note("\n")
                return
            except KeyboardInterrupt:
                self.note("\n/exit or Ctrl-D ends the conversation\n")
                continue
            if line == "/exit":
                return
            if line:
                self.answer(line)

    def answer(self, line: str) -> None:
        """Run a /command, or add a message and its reply; drop a message that cannot be run."""
        if line.startswith("/"):
            self.command(line)
            return
        self.messages.append({"role": "user", "content": line})
        try:
            prompt_ids = self.opened.model.tokenizer.apply_chat_template(self.messages)
            self.last = self.opened.reply(prompt_ids, self._show)
        except InvalidInput as error:
            self.messages.pop()
            self.note(f"{error}\n/reset forgets the conversation\n")
            return
        self.write("\n")
        self.messages.append({"role": "assistant", "content": self.last.text})

    def command(self, line: str) -> None:
        """Run one of the /commands."""
        if line == "/reset":
            self.reset()
        elif line == "/speed" and self.last is not None:
            session.print_speed(self.last, session.speed(self.last, self.opened.weight_bytes))
        else:
            self.note(f"{HELP}\n")

    def _show(self, piece: str) -> None:
        self.write(piece)
        sys.stdout.flush()
