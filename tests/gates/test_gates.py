"""The recorded table of `make gates`: of these kernels, complete, and within its budgets."""

import json

from pallas_kernels.paged_attention.gpu_targets import TARGETS
from tests.gates.points import POINTS, RECORDED, digest
from tests.gates.verdict import complaints


def recorded() -> dict:
    return json.loads(RECORDED.read_text())


def test_table_was_recorded_from_the_kernels_as_they_are():
    assert recorded()["sources"] == digest(), "the kernels have changed: run `make gates`"


def test_every_kernel_keeps_its_budget():
    points = recorded()["points"]
    assert sorted(points) == sorted(point.name for point in POINTS)
    assert [line for point in POINTS for line in complaints(point, points[point.name])] == []


def test_table_is_small_and_knows_every_target():
    assert len({point.name for point in POINTS}) == len(POINTS) <= 40
    assert {point.target for point in POINTS} == set(TARGETS)


def test_a_kernel_that_spills_grows_or_does_without_tensor_cores_is_found():
    point = POINTS[0]
    good = {
        "registers": point.max_registers,
        "spilled": 0,
        "shared_memory": 1,
        "instructions": {"wgmma": 1, "tma": 1},
    }
    assert complaints(point, good) == []
    for bad, text in (
        ({"registers": point.max_registers + 1}, "registers"),
        ({"spilled": 4}, "4 bytes are spilled"),
        ({"shared_memory": 120_000}, "for 2 an SM"),
        ({"instructions": {"tma": 1}}, "wgmma"),
    ):
        (line,) = complaints(point, {**good, **bad})
        assert text in line
