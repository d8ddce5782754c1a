"""The shared library of the CPU kernels: its handlers run, and its absence has a reason."""

import ctypes
import functools
import shutil
import subprocess
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import native
from pallas_kernels.native import build, library
from pallas_kernels.unavailable import KernelUnavailable
from tests.kernels import native_library


def probe(words, variant: int = -1, max_threads: int = 0):
    call = jax.ffi.ffi_call(native.target("PkProbe"), jax.ShapeDtypeStruct((), jnp.uint32))
    return call(words, variant=np.int64(variant), max_threads=np.int64(max_threads))


@pytest.fixture
def forgotten():
    """Run a test with nothing loaded, and forget what it loaded."""
    cached = (library.unavailable_reason, library.target, library._library, library._register)
    for function in cached:
        function.cache_clear()
    yield
    for function in cached:
        function.cache_clear()


@pytest.mark.parametrize("size", [0, 1, 65536, 200_001])
def test_probe_sums_its_words_on_the_thread_pool(size):
    native_library.require()
    words = np.random.default_rng(0).integers(0, 2**32, size, np.uint32)
    for max_threads in (0, 1):
        got = jax.jit(functools.partial(probe, max_threads=max_threads))(words)
        assert int(got) == int(words.sum(dtype=np.uint64)) % 2**32


def test_probe_gives_one_sum_in_every_variant():
    native_library.require()
    words = jnp.arange(100_003, dtype=jnp.uint32)
    names = ["portable", "avx2", "avx512", "avx512bf16"]
    sums = {int(probe(words, names.index(name))) for name in native.variants()}
    assert sums == {100_003 * 100_002 // 2 % 2**32}
    assert native.variants()[0] == "portable"


def test_probe_refuses_a_variant_that_is_not_there():
    native_library.require()
    with pytest.raises(jax.errors.JaxRuntimeError, match="cannot run that variant"):
        probe(jnp.zeros(4, jnp.uint32), 17).block_until_ready()


def test_probe_refuses_a_result_that_is_no_single_number():
    call = jax.ffi.ffi_call(native.target("PkProbe"), jax.ShapeDtypeStruct((2,), jnp.uint32))
    with pytest.raises(jax.errors.JaxRuntimeError, match="one number"):
        call(jnp.ones(8, jnp.uint32), variant=np.int64(-1), max_threads=np.int64(0))


def test_missing_library_is_a_reason(forgotten, monkeypatch, tmp_path):
    monkeypatch.setattr(library, "FOLDER", tmp_path)
    shutil.copy(build.__file__, tmp_path)
    assert not native.available()
    assert "has not been built: `python -m pallas_kernels.native.build`" in (
        native.unavailable_reason() or ""
    )
    (tmp_path / build.FAILURE_NAME).write_text("no C++ compiler\n")
    library.unavailable_reason.cache_clear()
    assert "(no C++ compiler)" in (native.unavailable_reason() or "")
    with pytest.raises(KernelUnavailable, match="has not been built"):
        native.target("PkProbe")


def test_damaged_library_is_a_reason(forgotten, monkeypatch, tmp_path):
    monkeypatch.setattr(library, "FOLDER", tmp_path)
    shutil.copy(build.__file__, tmp_path)
    (tmp_path / build.LIBRARY_NAME).write_bytes(b"not a library")
    assert "does not load" in (native.unavailable_reason() or "")


def test_library_of_other_sources_is_a_reason(forgotten, monkeypatch):
    native_library.require()

    class Digest:
        restype = None

        def __call__(self) -> bytes:
            return b"0" * 16

    old = types.SimpleNamespace(pk_source_digest=Digest())
    monkeypatch.setattr(ctypes, "CDLL", lambda path: old)
    library._library.cache_clear()
    library.unavailable_reason.cache_clear()
    library.target.cache_clear()
    assert "built from other sources" in (native.unavailable_reason() or "")


def test_symbol_that_is_not_there_is_refused():
    native_library.require()
    with pytest.raises(KernelUnavailable, match="has no PkNothing"):
        native.target("PkNothing")


def test_build_without_a_compiler_says_so(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(build.BuildError, match="no C\\+\\+ compiler: no-such-compiler"):
        build.build()


def test_build_reports_what_the_compiler_said(tmp_path):
    if native_library.built():
        pytest.skip("no compiler")
    with pytest.raises(build.BuildError, match="failed"):
        build.build(
            tmp_path,
            flags=(
                "-include",
                "no/such/header.h",
            ),
        )
    assert list(tmp_path.iterdir()) == []


def test_variant_objects_share_no_code(tmp_path):
    """A weak symbol of a kernel source would be merged: an old CPU might run AVX-512 code."""
    native_library.require()
    if not shutil.which("nm"):
        pytest.skip("nm is not here")
    for source in (p for p in build.sources() if p.suffix == ".cc" and build.is_per_variant(p)):
        target = tmp_path / "kernel.o"
        command = [build.find_compiler(), *build.FLAGS, "-DPK_VARIANT=portable"]
        command += ["-DPK_VARIANT_PORTABLE", "-I", str(build.ROOT.parent)]
        subprocess.run([*command, "-c", str(source), "-o", str(target)], check=True)
        names = subprocess.run(
            ["nm", "-C", "--defined-only", str(target)], check=True, capture_output=True, text=True
        ).stdout.splitlines()
        weak = [n for n in names if any(f" {kind} " in n for kind in "WVu")]
        assert [n for n in weak if "pk::portable::" not in n] == []
