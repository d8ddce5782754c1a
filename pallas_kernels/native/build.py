"""Builds the shared library of the CPU kernels with whatever C++ compiler there is.

    python -m pallas_kernels.native.build

It imports nothing but the standard library, so that the installer can run it before jax is there.
"""

import concurrent.futures
import hashlib
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LIBRARY_NAME = "libpallas_kernels.so"
FAILURE_NAME = "build_failure.txt"

# No contraction: a row must round alike in every tile shape, so fused products are spelled out.
FLAGS = ("-std=c++17", "-O3", "-fPIC", "-fvisibility=hidden", "-fno-math-errno")
FLAGS += ("-ffp-contract=off", "-Wall", "-Wno-psabi")
# GCC takes the undefined operands inside its own intrinsics for ours.
FLAGS += ("-Wno-uninitialized", "-Wno-maybe-uninitialized")
# A library in a wheel must not depend on how new the C++ library of the machine is.
LINK_FLAGS = ("-static-libstdc++", "-static-libgcc") if sys.platform == "linux" else ()
# A variant's name is its namespace; cpu_features.h decides when each may run.
X86_VARIANTS = {
    "avx2": "-mavx2 -mfma -mf16c",
    "avx512": "-mavx2 -mfma -mf16c -mavx512f -mavx512bw -mavx512dq -mavx512vl -mavx512vnni",
    "avx512bf16": "-mavx2 -mfma -mf16c -mavx512f -mavx512bw -mavx512dq -mavx512vl -mavx512vnni"
    " -mavx512bf16",
}


class BuildError(RuntimeError):
    """The library could not be built; the message says what failed."""


def build(
    folder: Path | None = None, *, compiler: str | None = None, flags: tuple[str, ...] = ()
) -> Path:
    """Compile every .cc of pallas_kernels into one library in `folder`, and return its path.

    The finished file replaces an older one in one step, so concurrent builds do no harm.

    Raises: BuildError.
    """
    folder = ROOT / "native" if folder is None else folder
    command = [compiler or find_compiler(), *FLAGS, *flags, "-isystem", str(_jaxlib_headers())]
    command += ["-I", str(ROOT.parent)]
    digest = source_digest()
    with tempfile.TemporaryDirectory(prefix="pallas_kernels_") as scratch:
        variants = _supported_variants(command, Path(scratch))
        command += [f'-DPK_SOURCE_DIGEST="{digest}"', *(f"-DPK_HAS_{v.upper()}" for v in variants)]
        jobs = _jobs(command, variants, Path(scratch))
        with concurrent.futures.ThreadPoolExecutor(os.cpu_count() or 1) as pool:
            list(pool.map(_run, jobs))
        objects = [job[-1] for job in jobs]
        # Beside its destination: a rename is atomic on one file system only.
        unfinished = folder / f".{LIBRARY_NAME}.{os.getpid()}"
        try:
            link = [command[0], "-shared", *LINK_FLAGS, *flags, "-pthread"]
            _run([*link, *objects, "-o", str(unfinished)])
            unfinished.replace(folder / LIBRARY_NAME)
        finally:
            unfinished.unlink(missing_ok=True)
    return folder / LIBRARY_NAME


def find_compiler() -> str:
    """Return the compiler that $CXX names, or the first of c++, g++ and clang++ that exists.

    Raises: BuildError when there is none.
    """
    wanted = os.environ.get("CXX")
    for name in [wanted] if wanted else ["c++", "g++", "clang++"]:
        if path := shutil.which(name):
            return path
    raise BuildError(f"no C++ compiler: {wanted or 'c++, g++ and clang++ are not there'}")


def sources() -> list[Path]:
    """Return every C++ file of the package, headers included."""
    return sorted(p for end in ("*.cc", "*.h") for p in ROOT.rglob(end))


def source_digest() -> str:
    """Return a digest of all C++ files: a library of other sources is stale."""
    digest = hashlib.sha256()
    for path in sources():
        digest.update(path.relative_to(ROOT).as_posix().encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def is_per_variant(source: Path) -> bool:
    """Return whether a source holds loops, compiled once for every variant."""
    return source.name.startswith("cpu_kernel")


def _jaxlib_headers() -> Path:
    spec = importlib.util.find_spec("jaxlib")
    if spec is None or not spec.submodule_search_locations:
        raise BuildError("jaxlib, which has XLA's headers, is not installed")
    return Path(spec.submodule_search_locations[0]) / "include"


def _supported_variants(command: list[str], scratch: Path) -> list[str]:
    """Return the variants whose flags this compiler knows, on this architecture."""
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return []
    empty = scratch / "empty.cc"
    empty.write_text("int pk_empty;\n", encoding="utf-8")
    tries = {
        name: [*command, *flags.split(), "-fsyntax-only", str(empty)]
        for name, flags in X86_VARIANTS.items()
    }
    return [n for n, t in tries.items() if subprocess.run(t, capture_output=True).returncode == 0]


def _jobs(command: list[str], variants: list[str], scratch: Path) -> list[list[str]]:
    """Return one compiler run for each object file, whose path is the last argument."""
    jobs = []
    for index, source in enumerate(p for p in sources() if p.suffix == ".cc"):
        for variant in ["portable", *variants] if is_per_variant(source) else [""]:
            extra = X86_VARIANTS.get(variant, "").split()
            if variant:
                extra += [f"-DPK_VARIANT={variant}", f"-DPK_VARIANT_{variant.upper()}"]
            target = scratch / f"{index}_{variant}.o"
            jobs.append([*command, *extra, "-c", str(source), "-o", str(target)])
    return jobs


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        lines = (done.stderr or done.stdout).strip().splitlines()
        raise BuildError(f"{Path(command[0]).name} failed:\n" + "\n".join(lines[:20]))
    if done.stderr.strip():
        sys.stderr.write(done.stderr)


def main() -> int:
    """Build in place and say where; the exit status is 1 when that fails."""
    try:
        print(build())
    except BuildError as error:
        print(f"The native kernels were not built: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
