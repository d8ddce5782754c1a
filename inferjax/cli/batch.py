"""`inferjax generate --batch IN.jsonl -o OUT.jsonl`: a file of requests through the engine."""

import argparse
import contextlib
import hashlib
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

import tqdm

from inferjax.cli.batch_file import Line, Results, read_lines
from inferjax.cli.batch_line import Ask, Reader, failure, parse, result_of
from inferjax.cli.options import engine_config, from_fields
from inferjax.cli.session import exec_from, load_model
from inferjax.cli.setup import (
    EXIT_INTERRUPTED,
    EXIT_OK,
    EXIT_PARTIAL,
    keep_compiled_programs,
    show_progress,
)
from inferjax.engine import Engine
from inferjax.errors import InferjaxError, InvalidInput
from inferjax.sampling import SamplingParams

# Requests in the engine at a time: enough to choose from, few enough to keep in memory.
WINDOW = 1024
BAR = "{percentage:3.0f}%|{bar}| {elapsed}<{remaining}{postfix}"


def run(args: argparse.Namespace, defaults: dict[str, object]) -> int:
    """Generate for every line that has no result yet; return the exit code.

    Raises: InvalidInput, UnsupportedConfig, and what loading raises; never for a single line.
    """
    sampling = from_fields(args, SamplingParams, defaults=defaults)
    config, exec = engine_config(args), exec_from(args)
    keep_compiled_programs()
    with contextlib.ExitStack() as stack:
        source = stack.enter_context(_open(args.batch, args.output))
        results = Results(args.output, _settings(args, sampling), overwrite=args.overwrite)
        stack.enter_context(results)
        model = load_model(args, quiet=args.quiet)
        engine = Engine(model, config, exec=exec)
        stack.callback(engine.close)
        templated = model.tokenizer is not None and model.tokenizer.has_chat_template
        reader = Reader(sampling=sampling, chat=templated if args.chat is None else args.chat)
        tally = Tally(_size(source), quiet=args.quiet)
        try:
            todo = _without_results(read_lines(source), results, tally)
            window = min(WINDOW, config.max_waiting)
            run_lines(engine, todo, reader, results, ended=tally.ended, window=window)
        except KeyboardInterrupt:
            tally.close("interrupted; the same command goes on from here")
            return EXIT_INTERRUPTED
        tally.close(f"{results.num_failed} lines of the file failed")
    return EXIT_PARTIAL if results.num_failed else EXIT_OK


def run_lines(
    engine: Engine,
    lines: Iterator[Line],
    reader: Reader,
    results: Results,
    *,
    ended: Callable[[Line, int], object],
    window: int = WINDOW,
) -> None:
    """Run lines through the engine, at most `window` at a time, and write what becomes of each.

    `ended(line, num_tokens)` is called after a line's result is written. Whatever interrupts this
    leaves results whole and the engine without work.
    """
    running: dict[str, tuple[Line, dict[str, object], Ask]] = {}
    try:
        while True:
            while len(running) < window and (line := next(lines, None)) is not None:
                label: dict[str, object] = {"id": None}
                try:
                    fields = parse(line.content)
                    label = {"id": fields.get("id")}
                    ask = reader.ask(fields)
                    running[ask.submit(engine)] = line, label, ask
                except InferjaxError as error:
                    results.write(line, {**label, **failure(error)})
                    ended(line, 0)
            if not running:
                return
            for delta in engine.step():
                if delta.completion is not None:
                    line, label, ask = running.pop(delta.request_id)
                    results.write(line, {**label, **result_of(delta.completion, ask.sampling)})
                    ended(line, delta.completion.usage.completion_tokens)
    finally:
        for name in running:
            # It may have ended in the step that was interrupted.
            with contextlib.suppress(InvalidInput):
                engine.abort(name)


class Tally:
    """Counts lines and tokens, and shows them while the run lasts.

    `size` is that of the input in bytes, None if nobody knows: its lines are not counted first.
    """

    def __init__(self, size: int | None, *, quiet: bool = False) -> None:
        self._quiet = quiet
        self._num_lines = self._num_skipped = self._num_tokens = 0
        self._start = time.perf_counter()
        self._bar = tqdm.tqdm(
            total=size, bar_format=BAR, disable=not show_progress(quiet=quiet), leave=False
        )

    def skipped(self, line: Line) -> None:
        """Count a line that has a result already."""
        self._num_skipped += 1
        self._bar.update(len(line.content))

    def ended(self, line: Line, num_tokens: int) -> None:
        """Count a line whose result has been written."""
        self._num_lines += 1
        self._num_tokens += num_tokens
        self._bar.set_postfix_str(self._speed(), refresh=False)
        self._bar.update(len(line.content))

    def close(self, last: str) -> None:
        """Say what was done, and something more."""
        self._bar.close()
        before = f", {self._num_skipped} had a result already" if self._num_skipped else ""
        if not self._quiet:
            print(f"{self._speed()}{before}; {last}", file=sys.stderr)

    def _speed(self) -> str:
        seconds = time.perf_counter() - self._start
        rate = self._num_tokens / seconds if seconds > 0 else 0.0
        return f"{self._num_lines} lines, {self._num_tokens} tokens, {rate:.1f} tokens/s"


def _without_results(lines: Iterator[Line], results: Results, tally: Tally) -> Iterator[Line]:
    for line in lines:
        if line in results:
            tally.skipped(line)
        else:
            yield line


@contextlib.contextmanager
def _open(source: Path, target: Path) -> Iterator[BinaryIO]:
    """Open the input, "-" for stdin, unless the output would overwrite it."""
    if str(source) == "-":
        yield sys.stdin.buffer
        return
    try:
        file = source.open("rb")
    except OSError as error:
        raise InvalidInput(
            f"{source} cannot be read", why=str(error), fix="give a file of JSON lines"
        ) from error
    with file:
        if target.exists() and target.samefile(source):
            raise InvalidInput(
                f"{source} is both input and output",
                why="results would be written into the requests",
                fix="choose another output file",
            )
        yield file


def _size(file: BinaryIO) -> int | None:
    """Return the bytes of a file, None for a pipe."""
    return os.fstat(file.fileno()).st_size or None


def _settings(args: argparse.Namespace, sampling: SamplingParams) -> str:
    """Return a digest of what decides results beside the lines."""
    deciding = (args.model, args.dtype, args.quantize, args.exact, args.kv, args.chat, sampling)
    return hashlib.sha256(repr(deciding).encode()).hexdigest()[:16]
