"""The native library for tests: built when it is missing or stale, skipped when it cannot be."""

import functools

import pytest

from pallas_kernels import native
from pallas_kernels.native import build, library


@functools.cache
def built() -> str | None:
    """Return why there is no library of the present sources, or None."""
    try:
        build.find_compiler()
    except build.BuildError as error:
        return str(error)
    if not native.available():
        build.build()
        for cached in (library.unavailable_reason, library.target, library._library):
            cached.cache_clear()
    return native.unavailable_reason()


def require() -> None:
    """Skip the calling test, or the module, where no compiler is."""
    if reason := built():
        pytest.skip(reason, allow_module_level=True)
