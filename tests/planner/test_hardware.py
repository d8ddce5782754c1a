"""The table of chips, and what the planner may import."""

import ast

import pytest

from inferjax.planner import CHIPS, chip_named, measured_chip
from inferjax.planner.hardware import ALIASES


@pytest.mark.parametrize("name", CHIPS)
def test_chip_has_a_source_and_plausible_rates(name):
    chip = CHIPS[name]
    assert chip.name == name
    assert len(chip.source) > 10
    assert 16e9 <= chip.memory_bytes <= 200e9
    # Between 100 and 600 operations a byte: all of them are made for products of matrices.
    assert 100 < chip.bf16_flops / chip.bandwidth < 600
    assert chip.int8_flops == pytest.approx(2 * chip.bf16_flops, rel=0.01) or name == "rtx-4090"
    assert chip.f32_flops <= chip.bf16_flops
    assert chip.network.bytes_s < chip.link.bytes_s


def test_h100_is_the_data_sheets():
    chip = chip_named("h100")
    assert (chip.memory_bytes, chip.bandwidth, chip.watts) == (80e9, 3.35e12, 700)
    assert (chip.bf16_flops, chip.fp8_flops) == (989.4e12, 1978.9e12)
    assert (chip.link.kind, chip.link.bytes_s, chip.link.num_chips) == ("switch", 450e9, 8)


@pytest.mark.parametrize("alias", [*ALIASES, "H100", "tpu_v5e"])
def test_chip_is_found_by_its_other_names(alias):
    assert chip_named(alias).name in CHIPS


def test_measured_chip_is_alone():
    chip = measured_chip(memory_bytes=24e9, bandwidth=30e9, flops=1e11)
    assert (chip.bf16_flops, chip.f32_flops) == (1e11, 1e11)
    assert chip.link.num_chips == 1


def test_planner_is_arithmetic_only(root):
    """No array is made: nothing in the folder imports jax, and nothing measures."""
    for path in sorted((root / "inferjax" / "planner").glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            roots = {name.split(".")[0] for name in names}
            assert not roots & {"jax", "jaxlib", "flax", "time", "numpy"}, path.name
