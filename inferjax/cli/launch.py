"""`inferjax launch`: run one program in several processes that share a mesh.

Every rank is a process of `inferjax.cli.launch_rank`, which learns its coordinates from its own
arguments, joins the others by `jax.distributed`, and then runs the program: `jax.devices()` are
those of all ranks. What they print comes out here line by line, marked with the rank.
"""

import argparse
import signal
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

from inferjax.cli.launch_processes import Ended, supervise
from inferjax.cli.setup import EXIT_OK
from inferjax.errors import InvalidInput, RankLost

HELP = """
PROGRAM is a script (train.py --lr 1), a module (-m package.module), or a command of inferjax
(plan llama-3-70b). All ranks run it with the same arguments. A rank that crashes,
is killed or exits with an error ends all of them, and the exit code is 2; Ctrl-C ends all of them
too. A rank that hangs is missed after half a minute. Of a command of inferjax only rank 0 prints
its results; none takes a mesh yet, so each rank does the whole of it: cut models in a script.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's flags."""
    parser.epilog = HELP
    parser.add_argument(
        "-n", "--processes", type=int, required=True, metavar="N", help="how many ranks"
    )
    parser.add_argument(
        "--devices-per-process",
        type=int,
        default=1,
        metavar="K",
        help="devices of a rank: its GPUs, or simulated ones on a CPU (1)",
    )
    parser.add_argument(
        "--start-timeout",
        type=int,
        default=120,
        metavar="SECONDS",
        help="how long ranks wait for each other at the start (120)",
    )
    parser.add_argument(
        "--grace",
        type=float,
        default=5.0,
        metavar="SECONDS",
        help="between asking ranks to end and killing them (5)",
    )
    parser.add_argument(
        "program", nargs=argparse.REMAINDER, metavar="-- PROGRAM ...", help="what every rank runs"
    )


def run(args: argparse.Namespace) -> int:
    """Run the ranks until all have ended; 128 plus its number after a signal.

    Raises: InvalidInput for arguments that cannot be, and where ranks' output cannot be written;
      RankLost if a rank ends with an error.
    """
    _check_numbers(args)
    program = program_of(args.program)
    with _reserved_port() as held:
        port = held.getsockname()[1]

        def command(rank: int, guard: int) -> list[str]:
            flags = {
                "--coordinator": f"127.0.0.1:{port}",
                "--rank": rank,
                "--count": args.processes,
                "--devices": args.devices_per_process,
                "--start-timeout": args.start_timeout,
                "--guard": guard,
            }
            words = [f"{name}={value}" for name, value in flags.items()]
            return [sys.executable, "-m", "inferjax.cli.launch_rank", *words, "--", *program]

        end = supervise(command, args.processes, grace_s=args.grace)
    if isinstance(end, Ended):
        raise _lost(end, args.processes)
    if isinstance(end, OSError):
        raise InvalidInput(
            "what the ranks print cannot be written",
            why=str(end),
            fix="all ranks were ended; send their output where there is room",
        )
    return EXIT_OK if end is None else 128 + end


def program_of(words: Sequence[str]) -> list[str]:
    """Return the kind of a program ("script", "module", "command"), its name and its arguments.

    `python` in front is understood, and `inferjax` in front of its commands.

    Raises: InvalidInput for what is none of them.
    """
    from inferjax.cli.main import COMMANDS

    words = list(words[1:] if words[:1] == ["--"] else words)
    if words[:1] and Path(words[0]).name in ("python", "python3"):
        words = words[1:]
    elif words[:1] == ["inferjax"]:
        words = words[1:] or ["nothing"]
    if words[:1] == ["-m"] and len(words) > 1:
        return ["module", *words[1:]]
    if words and Path(words[0]).is_file():
        return ["script", *words]
    if words and words[0] in COMMANDS and words[0] != "launch":
        return ["command", *words]
    raise InvalidInput(
        f"launch cannot run {words[0]!r:.80}" if words else "launch has nothing to run",
        why="it is no file, no -m MODULE and no command of inferjax that ranks can run",
        fix="write inferjax launch -n 2 -- script.py, or -- -m module, or -- generate ...",
    )


def _check_numbers(args: argparse.Namespace) -> None:
    numbers = {
        "--processes": args.processes,
        "--devices-per-process": args.devices_per_process,
        "--start-timeout": args.start_timeout,
        "--grace": args.grace,
    }
    for name, value in numbers.items():
        if not value >= (0 if name == "--grace" else 1):
            raise InvalidInput(f"{name} is {value}", why="it is too small", fix=f"{name} 2, say")


def _reserved_port() -> socket.socket:
    """Return a socket that keeps a port for rank 0, without listening itself.

    Programs that do not share ports cannot take it meanwhile, and the coordinator of jax does: no
    other launcher is given the same port between this choice and the start of rank 0.
    """
    held = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    held.bind(("127.0.0.1", 0))
    return held


def _lost(end: Ended, count: int) -> RankLost:
    if end.code < 0:
        known = {number.value: f" ({number.name})" for number in signal.Signals}
        how = f"was killed by signal {-end.code}{known.get(-end.code, '')}"
        why = "something outside of it, such as the kernel when memory is short, or a crash"
    else:
        how = f"exited with code {end.code}"
        why = f"its own last lines, marked [{end.rank}], say more"
    return RankLost(
        f"rank {end.rank} of {count} {how}",
        why=why,
        fix="all other ranks were ended; start them again once it is mended",
        rank=end.rank,
        code=end.code,
    )
