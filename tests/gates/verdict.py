"""What is wrong with a compiled kernel."""

from pallas_kernels.paged_attention.gpu_targets import TARGETS
from tests.gates.points import Point

# While one instance computes, another's pages are on their way; two wide pages are enough for both,
# and tiles of many queries have a warpgroup that only asks for pages.
WIDE, MANY = 256, 512


def complaints(point: Point, measured: dict) -> list[str]:
    """Return a sentence for everything that a kernel must not do."""
    target, found = TARGETS[point.target], []
    if measured["spilled"]:
        found.append(f"{measured['spilled']} bytes are spilled")
    if measured["registers"] > point.max_registers:
        found.append(f"{measured['registers']} registers, not {point.max_registers}")
    instances = 1 if point.width >= WIDE or point.tokens >= MANY else 2
    if measured["shared_memory"] * instances > target.shared_memory:
        found.append(f"{measured['shared_memory']} bytes of shared memory, for {instances} an SM")
    missing = {target.product, target.copies} - set(measured["instructions"])
    if missing:
        found.append(f"no instructions of {', '.join(sorted(missing))}")
    return [f"{point.name}: {sentence}" for sentence in found]
