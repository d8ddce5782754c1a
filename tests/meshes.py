"""Meshes of the simulated devices, and what the compiled programs exchange on them."""

import re
from collections import Counter

import jax
from jax.sharding import AxisType, Mesh

COLLECTIVE = re.compile(
    r"= (?P<type>.*?) "
    r"(?P<kind>all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter)(-start)?\("
)


def mesh_of(data: int, model: int, kind: AxisType = AxisType.Auto) -> Mesh:
    return jax.make_mesh((data, model), ("data", "model"), axis_types=(kind, kind))


def collectives(compiled_text: str) -> Counter[tuple[str, str]]:
    """Count what is exchanged, by kind and type; XLA may merge several into one of a tuple."""
    found: Counter[tuple[str, str]] = Counter()
    for line in compiled_text.splitlines():
        if match := COLLECTIVE.search(line):
            for one in re.findall(r"\w+\[[\d,]*\]", match["type"]):
                found[match["kind"], one] += 1
    return found
