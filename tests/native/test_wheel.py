"""A wheel carries the native kernels to machines without a compiler."""

import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CHECK = """
import jax, numpy as np
from pallas_kernels import native
from pallas_kernels.quant_matmul import pack, quant_matmul
assert "site-packages" in native.__file__, native.__file__
print(native.unavailable_reason())
weight = pack(np.eye(16, dtype=np.float32), "bfloat16")
print(quant_matmul(np.ones((1, 16), np.float32), weight, implementation="cpu").sum())
"""


@pytest.mark.slow
def test_a_wheel_brings_kernels_that_run_without_a_compiler(tmp_path):
    source = tmp_path / "source"
    shutil.copytree(
        ROOT,
        source,
        ignore=shutil.ignore_patterns(".*", "*.so", "tests", "tiny", "tiny_gguf", "__pycache__"),
    )
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(build, cwd=source, check=True)
    [wheel] = tmp_path.glob("inferjax-*.whl")
    assert "-py3-none-" in wheel.name
    assert "pallas_kernels/native/libpallas_kernels.so" in zipfile.ZipFile(wheel).namelist()

    venv.create(tmp_path / "env", with_pip=False, system_site_packages=False)
    [packages] = (tmp_path / "env").glob("lib/*/site-packages")
    zipfile.ZipFile(wheel).extractall(packages)
    # jax and what it needs come from this environment, behind the wheel's own packages.
    [ours] = [path for path in sys.path if path.endswith("site-packages")]
    (packages / "others.pth").write_text(ours + "\n")
    done = subprocess.run(
        [str(tmp_path / "env" / "bin" / "python"), "-c", CHECK],
        cwd=tmp_path,
        env={"PATH": ""},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == ["None", "16.0"], done.stdout + done.stderr
