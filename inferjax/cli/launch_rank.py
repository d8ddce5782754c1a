"""One rank of `inferjax launch`: join the others, then run the program as if it were alone.

Not for people: the launcher passes the coordinates of the rank as arguments.
"""

import argparse
import io
import os
import runpy
import signal
import sys
import threading
import traceback
from collections.abc import Sequence
from pathlib import Path

# A rank that hangs is missed after this time; the default of jax is 100 s.
_HEARTBEAT_S = 30
# Ranks may end far apart: one writes results that the others do not have. Lost ones are missed
# anyway; the default of jax aborts a rank that has waited for the others for 300 s.
_SHUTDOWN_S = 30 * 24 * 3600


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program of a rank; return its exit code."""
    args = _parser().parse_args(argv)
    _end_with_launcher(args.guard)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True)
    try:
        _join(args)
        code = _run(args.kind, args.name, args.words, silent=args.rank > 0)
    except BaseException as error:
        code = _code_of(error)
    if code:
        # At exit jax waits for the other ranks, which wait for this one: leave without it.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="inferjax.cli.launch_rank")
    parser.add_argument("--coordinator", required=True, help="address and port of rank 0")
    for name in ("--rank", "--count", "--devices", "--start-timeout", "--guard"):
        parser.add_argument(name, type=int, required=True)
    parser.add_argument("kind", choices=["script", "module", "command"])
    parser.add_argument("name")
    parser.add_argument("words", nargs=argparse.REMAINDER)
    return parser


def _end_with_launcher(guard: int) -> None:
    """End the process group when the launcher is gone, however it went."""
    os.set_inheritable(guard, False)

    def watch() -> None:
        while os.read(guard, 1):
            pass
        os.killpg(os.getpgrp(), signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()


def _join(args: argparse.Namespace) -> None:
    import jax

    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.config.update("jax_num_cpu_devices", args.devices)
    # It would keep SIGTERM from ending the rank.
    jax.config.update("jax_enable_preemption_service", False)
    first = args.rank * args.devices
    jax.distributed.initialize(
        args.coordinator,
        num_processes=args.count,
        process_id=args.rank,
        local_device_ids=range(first, first + args.devices),
        initialization_timeout=args.start_timeout,
        heartbeat_timeout_seconds=_HEARTBEAT_S,
        shutdown_timeout_seconds=_SHUTDOWN_S,
        # Otherwise rank 0 would listen to every network.
        coordinator_bind_address=args.coordinator,
    )


def _run(kind: str, name: str, words: list[str], *, silent: bool) -> int:
    if kind == "command":
        from inferjax.cli import main as cli

        if silent:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return cli.main([name, *words])
    sys.argv = [name, *words]
    if kind == "module":
        runpy.run_module(name, run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = str(Path(name).resolve().parent)
        runpy.run_path(name, run_name="__main__")
    return 0


def _code_of(error: BaseException) -> int:
    """Return the exit code that Python would give, after printing what it would print."""
    if isinstance(error, SystemExit):
        if error.code is None or isinstance(error.code, int):
            return error.code or 0
        print(error.code, file=sys.stderr)
        return 1
    traceback.print_exception(error)
    return 1


if __name__ == "__main__":
    sys.exit(main())
