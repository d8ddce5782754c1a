"""What a command does before it computes: folders, the compilation cache, and the terminal."""

import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from inferjax.errors import InvalidInput

EXIT_OK, EXIT_PARTIAL, EXIT_ERROR, EXIT_INTERRUPTED = 0, 1, 2, 130


def cache_folder() -> Path:
    """Return where models and compiled programs are kept; INFERJAX_CACHE_DIR moves it."""
    from inferjax.checkpoint.catalog import default_cache_dir

    chosen = os.environ.get("INFERJAX_CACHE_DIR")
    return Path(chosen).expanduser() if chosen else default_cache_dir()


def keep_compiled_programs() -> None:
    """Let jax store compiled programs in the cache folder, unless the user chose a place."""
    import jax

    if jax.config.jax_compilation_cache_dir is None:
        jax.config.update("jax_compilation_cache_dir", str(cache_folder() / "compiled"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)


def check_target(path: Path) -> None:
    """Refuse a file that could not be written in the end, before anything is computed.

    Raises: InvalidInput.
    """
    if not path.parent.is_dir():
        raise InvalidInput(
            f"{path.parent} is no folder", why=f"{path.name} goes there", fix="make it first"
        )
    if path.is_dir():
        raise InvalidInput(f"{path} is a folder", why="a file is written", fix="name a file in it")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise InvalidInput(
            f"{path} cannot be written",
            why="the file, or its folder, may not be changed by you",
            fix="choose another place",
        )


def show_progress(*, quiet: bool = False) -> bool:
    """Return whether progress bars make sense: a person watches and no machine reads."""
    return not quiet and sys.stderr.isatty()


@contextmanager
def warnings_in_a_line() -> Iterator[None]:
    """Show what is warned of on stderr in one line, without the place in the code."""

    def show(message: Warning | str, *_place: object) -> None:
        print(f"inferjax: {message}", file=sys.stderr)

    with warnings.catch_warnings():
        warnings.showwarning = show
        yield
