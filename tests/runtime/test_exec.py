"""Settings that cannot run are refused by name; the table of kernels matches what Exec accepts."""

import pytest

import inferjax as ij
from inferjax.config import ATTENTION_IMPLEMENTATIONS, SMALLEST_SETTINGS
from inferjax.errors import KernelUnavailable, UnsupportedConfig
from pallas_kernels.paged_attention import IMPLEMENTATIONS


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
    with pytest.raises(UnsupportedConfig, match="int8"):
        ij.Exec(kv_dtype="int8")


def test_exec_accepts_exactly_the_kernels_that_exist():
    assert set(ATTENTION_IMPLEMENTATIONS) == {"auto", *IMPLEMENTATIONS}
