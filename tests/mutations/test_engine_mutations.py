"""Every fault of the table turns a test of the default run red."""

import importlib
import inspect
from collections.abc import Callable

import jaxtyping
import pytest
from apply import apply
from fault import Fault
from faults import FAULTS

# What a fault that is badly written raises, and not one that shows.
MISTAKES = (NameError, SyntaxError, TypeError)


@pytest.fixture(autouse=True)
def unchecked():
    """Leave out the checks of argument types, which take four fifths of the time."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.mark.parametrize("name", FAULTS)
def test_fault_turns_a_test_red(name, monkeypatch):
    fault = FAULTS[name]
    check = check_of(fault)
    apply(fault, monkeypatch)
    # It may end in any way but well.
    with pytest.raises(Exception) as caught:  # noqa: PT011
        check(*fault.args)
    assert not isinstance(caught.value, MISTAKES)


@pytest.mark.parametrize("name", FAULTS)
def test_fault_is_checked_by_a_case_of_the_default_run(name):
    fault = FAULTS[name]
    check = check_of(fault)
    given = dict(zip(inspect.signature(check).parameters, fault.args, strict=True))
    for mark in getattr(check, "pytestmark", []):
        assert mark.name not in ("slow", "model")
        if mark.name == "parametrize":
            assert chosen(given, mark) in cases_of(mark)


def check_of(fault: Fault) -> Callable[..., None]:
    module, _, name = fault.check.partition(".")
    return getattr(importlib.import_module(module), name)


def names_of(mark: pytest.Mark) -> list[str]:
    names = mark.args[0]
    return [n.strip() for n in names.split(",")] if isinstance(names, str) else list(names)


def chosen(given: dict[str, object], mark: pytest.Mark) -> tuple[object, ...]:
    return tuple(given[name] for name in names_of(mark))


def cases_of(mark: pytest.Mark) -> list[tuple[object, ...]]:
    """Return the values of every case that is not marked as slow."""
    cases = []
    for case in mark.args[1]:
        if isinstance(case, type(pytest.param())):
            cases += [] if case.marks else [tuple(case.values)]
        else:
            cases.append(tuple(case) if len(names_of(mark)) > 1 else (case,))
    return cases
