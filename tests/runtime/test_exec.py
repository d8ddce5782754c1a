"""Settings that cannot run are refused by name; the table of kernels matches what Exec accepts."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from tiny_models import tiny_model

import inferjax as ij
from inferjax.config import ATTENTION_IMPLEMENTATIONS, SMALLEST_SETTINGS
from inferjax.errors import KernelUnavailable, UnsupportedConfig
from pallas_kernels import native, unavailable
from pallas_kernels.paged_attention import IMPLEMENTATIONS

PACKAGE = Path(ij.__file__).parent


@pytest.mark.parametrize("name", sorted(SMALLEST_SETTINGS))
def test_exec_refuses_a_setting_below_its_range(name):
    with pytest.raises(UnsupportedConfig, match=f"{name}=-1"):
        ij.Exec(**{name: -1})
    with pytest.raises(UnsupportedConfig, match=f"{name}=2.0"):
        ij.Exec(**{name: 2.0})


def test_exec_refuses_a_tile_of_one_row():
    with pytest.raises(UnsupportedConfig, match="at least 2"):
        ij.Exec(exact=True, tile=1)


def test_exec_refuses_a_kernel_that_is_not_built():
    with pytest.raises(KernelUnavailable, match="mosaic"):
        ij.Exec(attention="mosaic")


def test_exec_refuses_a_cache_dtype_it_cannot_store():
    with pytest.raises(UnsupportedConfig, match="int4"):
        ij.Exec(kv_dtype="int4")


def test_exec_accepts_exactly_the_kernels_that_exist():
    assert set(ATTENTION_IMPLEMENTATIONS) == {"auto", *IMPLEMENTATIONS}


def test_a_kernel_that_cannot_run_is_a_typed_error(monkeypatch):
    def missing(symbol):
        raise unavailable.KernelUnavailable(f"no library with {symbol}")

    monkeypatch.setattr(native, "target", missing)
    model = tiny_model("llama")
    cache = ij.init_cache(model.config, num_pages=4, exec=ij.Exec(page_size=8))
    inputs = ij.make_inputs([[1, 2, 3]], lengths=[3], block_tables=(np.array([[1]], np.int32),))
    with pytest.raises(KernelUnavailable, match="no library with PkKvWrite") as caught:
        ij.extend(model.params, model.config, cache, inputs, exec=ij.Exec(attention="cpu"))
    assert 'use attention="auto"' in str(caught.value)


def test_a_gpu_kernel_asked_for_without_a_gpu_is_a_typed_error():
    model = tiny_model("llama")
    cache = ij.init_cache(model.config, num_pages=4, exec=ij.Exec(page_size=16))
    inputs = ij.make_inputs([[1, 2, 3]], lengths=[3], block_tables=(np.array([[1]], np.int32),))
    with pytest.raises(KernelUnavailable, match="JAX sees no NVIDIA GPU") as caught:
        ij.extend(model.params, model.config, cache, inputs, exec=ij.Exec(attention="gpu"))
    assert 'use attention="auto"' in str(caught.value)


def test_no_setting_is_ignored():
    sources = [path.read_text() for path in PACKAGE.rglob("*.py") if path != PACKAGE / "config.py"]
    names = {field.name for field in dataclasses.fields(ij.Exec)}
    read = {name for name in names if any(f"exec.{name}" in source for source in sources)}
    assert names == read
