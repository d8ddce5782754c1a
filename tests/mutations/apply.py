"""Puts a fault in place: one function compiled from changed source, wherever it is referred to."""

import importlib
import inspect
import sys
import textwrap
from typing import Any

import pytest
from fault import Fault


def apply(fault: Fault, patch: pytest.MonkeyPatch) -> None:
    """Make a fault part of the package until `patch` is undone.

    Programs that call the function anew: those that were traced before do not know of the fault.
    """
    _put(fault.target, patch, fault.old, fault.new)
    for program in fault.programs:
        _put(program, patch)


def _put(target: str, patch: pytest.MonkeyPatch, old: str = "", new: str = "") -> None:
    module_name, _, path = target.partition(":")
    module = importlib.import_module(module_name)
    *classes, name = path.split(".")
    owner: Any = module
    for each in classes:
        owner = getattr(owner, each)
    original = vars(owner)[name]
    changed = _compiled(original, name, vars(module), old, new)
    if classes:
        patch.setattr(owner, name, changed)
        return
    for user in list(sys.modules.values()):
        for alias, value in list(vars(user).items()):
            if value is original:
                patch.setattr(user, alias, changed)


def _compiled(original: Any, name: str, namespace: dict[str, Any], old: str, new: str) -> Any:
    """Return the function, its decorators included, from its source with `old` replaced."""
    plain = inspect.unwrap(original.fget if isinstance(original, property) else original)
    lines, first = inspect.getsourcelines(plain)
    source = textwrap.dedent("".join(lines))
    if old and source.count(old) != 1:
        pytest.fail(f"{name} has {source.count(old)} times: {old!r}. Has the code changed?")
    # Tracebacks then show the right lines of the right file.
    source = "\n" * (first - 1) + source.replace(old, new)
    found: dict[str, Any] = {}
    exec(compile(source, inspect.getfile(plain), "exec"), namespace, found)
    return found[name]
