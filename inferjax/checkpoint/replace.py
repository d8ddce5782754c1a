"""Writes a folder so that it appears whole or not at all, and never harms the one it replaces."""

import contextlib
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np
from jax.experimental import multihost_utils

from inferjax.errors import CheckpointError


def check_replaceable(path: Path, *, overwrite: bool) -> None:
    """Refuse what a new folder must not replace.

    Raises: CheckpointError if `path` exists and is not to be overwritten, or is no folder, or if
    nothing can be made where it would be.
    """
    if path.exists() and not overwrite:
        raise CheckpointError(
            f"{path} exists already",
            why="a checkpoint is never overwritten by accident",
            fix="choose another folder, or say overwrite=True (--overwrite)",
        )
    if path.exists() and not path.is_dir():
        raise CheckpointError(
            f"{path} is a file",
            why="a checkpoint is saved as a folder",
            fix="choose another name, or move the file away",
        )
    there = next(folder for folder in path.absolute().parents if folder.exists())
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        raise CheckpointError(
            f"{path} cannot be made",
            why=f"{there} is {'not writable by you' if there.is_dir() else 'a file'}",
            fix="choose another place",
        )


@contextlib.contextmanager
def replacing(path: Path, *, overwrite: bool) -> Iterator[Path]:
    """Give a new folder beside `path` to write to; on success it becomes `path`.

    Whatever interrupts the writing, a folder that was there before stays as it was. Only between
    two renames at the end does it bear another name, under which `previous_of` finds it. Several
    processes of jax write to one folder, which the first of them makes and renames.

    Raises: CheckpointError if `path` exists and is not to be overwritten, or cannot be written, in
      any of the processes.
    """
    first = jax.process_index() == 0
    with together(path):
        check_replaceable(path, overwrite=overwrite)
    fresh = path.with_name(f".{path.name}.saving-{_agreed(os.getpid())}")
    try:
        with together(path):
            if first:
                _remove_abandoned(path)
                fresh.mkdir(parents=True)
        with together(path):
            yield fresh
        with together(path):
            if first:
                _sync(fresh)
                _swap(fresh, path)
    except OSError as error:
        raise CheckpointError(
            f"{path} cannot be saved",
            why=str(error),
            fix="check that the folder is writable and that the disk has room",
        ) from error
    finally:
        if first:
            shutil.rmtree(fresh, ignore_errors=True)


def previous_of(path: Path) -> Path:
    """Return where a checkpoint is while it is being replaced."""
    return path.with_name(f".{path.name}.previous")


def _agreed(number: int) -> int:
    """Return the number that the first process has."""
    if jax.process_count() == 1:
        return number
    return int(multihost_utils.broadcast_one_to_all(np.int32(number)))


@contextlib.contextmanager
def together(path: Path) -> Iterator[None]:
    """Wait until all processes have taken a step; where it fails in one, it fails in all.

    Raises: CheckpointError in the processes that could have gone on.
    """
    succeeded = False
    try:
        yield
        succeeded = True
    finally:
        all_succeeded = _everywhere(succeeded)
    if not all_succeeded:
        raise CheckpointError(
            f"{path} cannot be saved",
            why="another process could not do its part: its own error says why",
            fix="mend that, and save again from all processes",
        )


def _everywhere(value: bool) -> bool:
    """Tell whether all processes say yes; one process waits for none."""
    if jax.process_count() == 1:
        return value
    return bool(np.all(multihost_utils.process_allgather(np.asarray(value))))


def _swap(fresh: Path, path: Path) -> None:
    previous = previous_of(path)
    if path.exists():
        shutil.rmtree(previous, ignore_errors=True)
        path.rename(previous)
    fresh.rename(path)
    shutil.rmtree(previous, ignore_errors=True)


def _remove_abandoned(path: Path) -> None:
    """Remove what saves of processes that are gone have left behind."""
    for folder in path.parent.glob(f".{path.name}.saving-*"):
        number = re.fullmatch(r"saving-(\d+)", folder.name.rpartition(".")[2])
        if number is not None and not _is_alive(int(number[1])):
            shutil.rmtree(folder, ignore_errors=True)


def _is_alive(process: int) -> bool:
    if process == os.getpid():
        return False
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True


def _sync(folder: Path) -> None:
    """Bring all files to the disk before the folder gets its final name."""
    for file in folder.rglob("*"):
        if file.is_file():
            descriptor = os.open(file, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
