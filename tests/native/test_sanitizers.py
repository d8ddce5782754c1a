"""The native kernels under sanitizers: of addresses, undefined behaviour, and data races."""

import concurrent.futures
import subprocess
from pathlib import Path

import pytest

from pallas_kernels import native
from pallas_kernels.native import build

HERE = Path(__file__).parent
# A driver, and the folder whose loops it runs.
DRIVERS = {
    "quant_matmul": ("driver.cc", "quant_matmul"),
    "kv_write": ("write_driver.cc", "kv_write"),
    "grouped_matmul": ("grouped_driver.cc", "quant_matmul"),
    "paged_attention": ("attention_driver.cc", "paged_attention"),
}
FLAGS = ["-std=c++17", "-g1", "-pthread", "-fno-sanitize-recover=all", "-ffp-contract=off"]


def run(command: list[str]) -> subprocess.CompletedProcess:
    return subprocess.run(command, capture_output=True, text=True)


def compile_driver(folder: Path, kernel: str, sanitizer: str, level: str) -> Path:
    """Build a kernel's driver with the portable loops and this machine's best ones."""
    best = native.variants()[-1] if native.available() else "portable"
    command = [build.find_compiler(), *FLAGS, level, f"-fsanitize={sanitizer}", "-w"]
    command += ["-I", str(build.ROOT.parent), "-I", str(HERE.parents[1])]
    driver_name, kernel_of_loops = DRIVERS[kernel]
    source, loops = HERE / driver_name, build.ROOT / kernel_of_loops / "cpu_kernel.cc"
    driver = [f"-DPK_HAS_{best.upper()}", "-c", str(source), "-o", str(folder / "driver.o")]
    jobs = [[*command, *driver]]
    for name in sorted({"portable", best}):
        flags = [*build.X86_VARIANTS.get(name, "").split(), f"-DPK_VARIANT={name}"]
        flags.append(f"-DPK_VARIANT_{name.upper()}")
        jobs.append([*command, *flags, "-c", str(loops), "-o", str(folder / f"{name}.o")])
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        for done in pool.map(run, jobs):
            assert done.returncode == 0, done.stderr[:4000]
    program = folder / "driver"
    linked = run([*command, *[job[-1] for job in jobs], "-o", str(program)])
    if linked.returncode:
        pytest.skip(f"this compiler links no {sanitizer} sanitizer: {linked.stderr.strip()[-200:]}")
    return program


# Checks of undefined behaviour make the kernel slow to compile, optimised code most of all.
@pytest.mark.parametrize(
    ("sanitizer", "level"),
    [pytest.param("address,undefined", "-O0", marks=pytest.mark.slow), ("thread", "-O1")],
)
@pytest.mark.parametrize("kernel", sorted(DRIVERS))
def test_sanitizers_find_nothing(tmp_path, kernel, sanitizer, level):
    try:
        build.find_compiler()
    except build.BuildError as error:
        pytest.skip(str(error))
    program = compile_driver(tmp_path, kernel, sanitizer, level)
    done = subprocess.run([program], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[:4000]
    assert done.stdout.split()[0] == "portable"
