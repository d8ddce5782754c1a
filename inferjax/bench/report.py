"""Where a measurement was made: hardware and versions, as plain values for JSON."""

import importlib.metadata
import os
import platform
from pathlib import Path

import jax

from pallas_kernels import native

PACKAGES = ("inferjax", "jax", "jaxlib", "flax", "numpy")


def hardware() -> dict[str, object]:
    """Return the devices, the processor, its cores, and the instruction set of native kernels."""
    devices = jax.devices()
    return {
        "platform": devices[0].platform,
        "device": devices[0].device_kind,
        "num_devices": len(devices),
        "processor": _processor(),
        "num_cores": os.cpu_count(),
        "native_kernels": native.variants()[-1] if native.available() else "none",
    }


def versions() -> dict[str, str]:
    """Return the versions that decide speed and results."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        found[name] = importlib.metadata.version(name)
    return found


def where() -> dict[str, object]:
    """Return what every JSON result ends with."""
    return {"hardware": hardware(), "versions": versions()}


def hardware_line() -> str:
    """Return one line for people."""
    facts = hardware()
    names = [str(facts["processor"])]
    if facts["platform"] != "cpu":
        names.insert(0, f"{facts['num_devices']} x {facts['device']}")
    names += [f"{facts['num_cores']} cores", f"native kernels: {facts['native_kernels']}"]
    return f"{', '.join(names)}, jax {versions()['jax']}"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
