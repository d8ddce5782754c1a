"""What every test starts from: eight simulated CPU devices, strict dtypes, checked shapes."""

import os
import sys
from collections.abc import Iterator

# Before jax is imported anywhere: its device count is fixed at the first import.
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
).strip()

# Before inferjax is imported anywhere: every annotated array shape is checked at run time.
from jaxtyping import install_import_hook

install_import_hook(["inferjax", "pallas_kernels"], "typechecker.check")

from pathlib import Path  # noqa: E402

import jax  # noqa: E402
import numpy as np  # noqa: E402
import pytest  # noqa: E402

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

ROOT = Path(__file__).resolve().parent.parent

# Most of the tests' time goes into compiling: workers and later runs share what was compiled.
jax.config.update("jax_compilation_cache_dir", str(ROOT / ".pytest_cache" / "compiled"))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Let a classic fault be part of a whole run: see tests/mutations/faults.py."""
    parser.addoption("--mutate", metavar="FAULT", help="run with a fault of tests/mutations")


def pytest_configure(config: pytest.Config) -> None:
    """Put the fault in place before any test is imported."""
    if name := config.getoption("--mutate"):
        sys.path.insert(0, str(ROOT / "tests" / "mutations"))
        from apply import apply
        from faults import FAULTS

        if name not in FAULTS:
            raise pytest.UsageError(f"no fault is called {name!r}: {', '.join(FAULTS)}")
        apply(FAULTS[name], pytest.MonkeyPatch())


MAX_MEMORY_MAPS = 30_000


@pytest.fixture(scope="module", autouse=True)
def _few_memory_maps() -> Iterator[None]:
    """Drop compiled programs before there are too many: each takes about ten memory maps.

    Linux gives a process 65,530 of them by default, and XLA aborts it when they are used up.
    """
    yield
    maps = Path("/proc/self/maps")
    if maps.exists() and maps.read_bytes().count(b"\n") > MAX_MEMORY_MAPS:
        from engines import drop_programs

        drop_programs()


@pytest.fixture(scope="session")
def root() -> Path:
    """Return the root of the checkout."""
    return ROOT


@pytest.fixture(scope="session")
def tiny() -> Path:
    """Return the folder of the tiny reference checkpoints, one sub-folder a family."""
    return ROOT / "checkpoints" / "tiny"


@pytest.fixture
def rng() -> np.random.Generator:
    """Return a NumPy generator with a fixed seed."""
    return np.random.default_rng(0)
