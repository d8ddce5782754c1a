"""Processes that run and end together: started, listened to, watched, and never left behind.

Each rank leads a process group of its own. A group is ended as a whole, also after its rank has
ended by itself. Ranks hold the reading end of a pipe of which only this process has the writing
end: however this process ends, they see it and end their groups.
"""

import contextlib
import dataclasses
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import IO, TextIO

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_LINE_BYTES = 2**16


@dataclasses.dataclass(frozen=True, slots=True)
class Ended:
    """A rank that has ended; `code` is its exit code, or minus the signal that killed it."""

    rank: int
    code: int


# What ends a run, in the order in which it happens.
type Event = Ended | signal.Signals | OSError
type Events = queue.SimpleQueue[Event]


def supervise(
    command: Callable[[int, int], list[str]], count: int, *, grace_s: float
) -> Event | None:
    """Run `command(rank, guard)` for every rank; return what ended the run early, or None.

    That is the first rank that ended with an error, the signal that this process was sent, or the
    error of writing what ranks print. All ranks, and what is in their process groups, have ended
    when it returns: by SIGTERM, and after `grace_s` seconds by SIGKILL. `guard` is a file
    descriptor of the rank that reads an end of file once this process is gone.
    """
    events: Events = queue.SimpleQueue()
    processes: list[subprocess.Popen[bytes]] = []
    readers: list[threading.Thread] = []
    guard, held = os.pipe()
    with _signals_to(events):
        try:
            for rank in range(count):
                process = _start(command(rank, guard), guard)
                processes.append(process)
                readers += _listen(rank, process, events)
                _in_thread(_wait, rank, process, events)
            return _first_loss(processes, events)
        finally:
            _end(processes, grace_s)
            for reader in readers:
                reader.join(timeout=2.0)
            os.close(guard)
            os.close(held)


@contextlib.contextmanager
def _signals_to(events: Events) -> Iterator[None]:
    """Turn signals into events: none is lost, and none interrupts the ending of ranks."""

    def note(number: int, _frame: object) -> None:
        events.put(signal.Signals(number))

    before = {number: signal.signal(number, note) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _start(words: list[str], guard: int) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        words,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        pass_fds=(guard,),
        start_new_session=True,
    )


def _listen(
    rank: int, process: subprocess.Popen[bytes], events: Events
) -> Iterator[threading.Thread]:
    for pipe, stream in ((process.stdout, sys.stdout), (process.stderr, sys.stderr)):
        yield _in_thread(_copy_lines, rank, pipe, stream, events)


def _copy_lines(rank: int, pipe: IO[bytes], stream: TextIO, events: Events) -> None:
    """Print whole lines in one piece each, so that those of ranks do not mix.

    Reads to the end whatever happens: a rank whose output nobody takes would wait for ever.
    """
    coding = stream.encoding or "utf-8"
    while line := pipe.readline(_LINE_BYTES):
        text = line.decode(errors="replace").removesuffix("\n")
        try:
            stream.write(f"[{rank}] {text}\n".encode(coding, "backslashreplace").decode(coding))
            stream.flush()
        except OSError as error:
            # The reader (`| head`) has gone, or the disk is full; the interpreter must not fail
            # again while it flushes.
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
            events.put(signal.SIGPIPE if isinstance(error, BrokenPipeError) else error)
    pipe.close()


def _wait(rank: int, process: subprocess.Popen[bytes], events: Events) -> None:
    events.put(Ended(rank, process.wait()))


def _in_thread(function: Callable[..., None], *args: object) -> threading.Thread:
    thread = threading.Thread(target=function, args=args, daemon=True)
    thread.start()
    return thread


def _first_loss(processes: list[subprocess.Popen[bytes]], events: Events) -> Event | None:
    for _ in processes:
        event = events.get()
        if not isinstance(event, Ended) or event.code:
            return event
        _send(processes[event.rank], signal.SIGKILL)  # what it may have left behind
    return None


def _end(processes: list[subprocess.Popen[bytes]], grace_s: float) -> None:
    for process in processes:
        _send(process, signal.SIGTERM)
    deadline = time.monotonic() + grace_s
    for process in processes:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(max(deadline - time.monotonic(), 0.0))
    for process in processes:
        _send(process, signal.SIGKILL)
        process.wait()


def _send(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    """Send a signal to a rank and all that it started, if there still is any."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, number)
