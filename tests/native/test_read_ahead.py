"""Helpers that wait read what the step before read next, and no more than their cache holds."""

import subprocess
from pathlib import Path

import pytest

from pallas_kernels.native import build

HERE = Path(__file__).parent


def test_what_came_next_is_read_ahead(tmp_path):
    try:
        compiler = build.find_compiler()
    except build.BuildError as error:
        pytest.skip(str(error))
    program = tmp_path / "driver"
    command = [compiler, "-std=c++17", "-O1", "-w", "-I", str(build.ROOT.parent)]
    subprocess.run([*command, HERE / "read_ahead_driver.cc", "-o", program], check=True)
    done = subprocess.run([program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
