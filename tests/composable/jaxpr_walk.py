"""Reading programs: every equation of a jaxpr, and the HLO of what was compiled."""

import re
from collections.abc import Iterator
from typing import Any

import jax
import jax.extend.core as jex


def equations(jaxpr: Any, *, enter_cond: bool = True) -> Iterator[Any]:
    """Yield every equation, those of nested jaxprs included."""
    for eqn in jaxpr.eqns:
        yield eqn
        if eqn.primitive.name == "cond" and not enter_cond:
            continue
        for inner in nested_jaxprs(eqn):
            yield from equations(inner, enter_cond=enter_cond)


def nested_jaxprs(eqn: Any) -> Iterator[Any]:
    for value in eqn.params.values():
        for item in value if isinstance(value, tuple | list) else (value,):
            if isinstance(item, jex.ClosedJaxpr):
                yield item.jaxpr
            elif isinstance(item, jex.Jaxpr):
                yield item


def sizes(variables: Any) -> list[int]:
    """Return the number of elements of each variable or literal."""
    return [v.aval.size for v in variables if hasattr(v.aval, "size")]


def shape_text(array: jax.Array) -> str:
    """Return a float32 array's shape as HLO writes it."""
    return "f32[" + ",".join(map(str, array.shape)) + "]"


def computations(hlo: str) -> dict[str, list[str]]:
    """Return the lines of each computation of an HLO module, by name."""
    found: dict[str, list[str]] = {}
    name = None
    for line in hlo.splitlines():
        head = re.match(r"(?:ENTRY )?%?([\w.\-]+) .*\{$", line)
        if head and not line.startswith(" "):
            name = head.group(1)
            found[name] = []
        elif name is not None:
            found[name].append(line.strip())
    return found
