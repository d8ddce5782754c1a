import jax.numpy as jnp

from inferjax.bench import limits, report
from pallas_kernels import native


def test_bandwidth_and_matmul_are_measured_in_plausible_units():
    """A unit slip (bits, MB, 2**30 for 1e9 is the small one) is a factor of eight or more."""
    assert 0.5 < limits.measure_bandwidth_gbps(8 << 20, repeats=3) < 20_000
    assert 0.5 < limits.measure_matmul_gflops(128, repeats=3) < 10_000_000


def test_median_seconds_does_not_count_the_first_call():
    calls = []
    limits.median_seconds(lambda: calls.append(0) or jnp.zeros(1), repeats=4)
    assert len(calls) == 5


def test_report_names_device_and_versions():
    assert report.hardware()["platform"] == "cpu"
    assert report.versions()["inferjax"]
    assert f"jax {report.versions()['jax']}" in report.hardware_line()


def test_a_report_names_the_instruction_set_that_native_kernels_use(monkeypatch):
    best = native.variants()[-1] if native.available() else "none"
    assert report.hardware()["native_kernels"] == best
    assert f"native kernels: {best}," in report.hardware_line()
    monkeypatch.setattr(native, "available", lambda: False)
    assert "native kernels: none," in report.hardware_line()
