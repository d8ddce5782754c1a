"""Loads the shared library, says why it cannot, and registers its handlers with XLA."""

import ctypes
import functools
import importlib.util
import threading
from pathlib import Path
from types import ModuleType

import jax

from pallas_kernels.unavailable import KernelUnavailable

FOLDER = Path(__file__).parent
REBUILD = "`python -m pallas_kernels.native.build` builds it"
_LOCK = threading.Lock()


def available() -> bool:
    """Return whether the native kernels can run in this process."""
    return unavailable_reason() is None


@functools.cache
def unavailable_reason() -> str | None:
    """Return why the native kernels cannot run, or None when they can."""
    try:
        target("PkProbe")
    except KernelUnavailable as error:
        return str(error)
    return None


@functools.cache
def variants() -> tuple[str, ...]:
    """Return the instruction sets that the library holds and this processor runs, best last.

    Raises: KernelUnavailable.
    """
    names = _library().pk_variants
    names.restype = ctypes.c_char_p
    return tuple(names().decode().split())


@functools.cache
def target(symbol: str) -> str:
    """Register the library's handler `symbol` once, and return the name for `jax.ffi.ffi_call`.

    Raises: KernelUnavailable when the library is missing, stale, of another ABI, or has no such
    symbol.
    """
    library = _library()
    name = f"pallas_kernels.{symbol}"
    try:
        capsule = jax.ffi.pycapsule(getattr(library, symbol))
    except AttributeError as error:
        raise KernelUnavailable(f"the native library has no {symbol}: {REBUILD} anew") from error
    with _LOCK:
        _register(name, capsule)
    return name


@functools.cache
def _register(name: str, capsule: object) -> None:
    try:
        jax.ffi.register_ffi_target(name, capsule, platform="cpu")
    except Exception as error:  # jaxlib's own exception type, by version
        raise KernelUnavailable(
            f"this jaxlib refuses the native library ({error}): {REBUILD} for this jaxlib"
        ) from error


@functools.cache
def _library() -> ctypes.CDLL:
    build = _build_module()
    path = FOLDER / build.LIBRARY_NAME
    if not path.exists():
        note = FOLDER / build.FAILURE_NAME
        why = f" ({note.read_text(encoding='utf-8').strip()})" if note.exists() else ""
        raise KernelUnavailable(f"the native library has not been built{why}: {REBUILD}")
    try:
        library = ctypes.CDLL(str(path))
        digest = library.pk_source_digest
    except (OSError, AttributeError) as error:
        raise KernelUnavailable(f"the native library does not load ({error}): {REBUILD}") from error
    digest.restype = ctypes.c_char_p
    if digest().decode() != build.source_digest():
        raise KernelUnavailable(f"the native library was built from other sources: {REBUILD} anew")
    return library


def _build_module() -> ModuleType:
    """Load build.py as a file: `python -m` would find it imported already, and warn."""
    spec = importlib.util.spec_from_file_location("_pallas_kernels_build", FOLDER / "build.py")
    if spec is None or spec.loader is None:
        raise KernelUnavailable("pallas_kernels/native/build.py is missing: install again")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
