"""Jinja's filters and tests as templates may use them: those that chats need, within a budget."""

import functools
import json
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jinja2
import jinja2.filters

from inferjax.tokenizer.budget import ITEM_BYTES, Budget

# What else Jinja has is absent: it pads, wraps, draws lots, writes HTML, or takes the square of a
# text's length.
_KEPT = frozenset(
    {
        *("abs", "attr", "capitalize", "count", "d", "default", "dictsort", "e", "escape"),
        *("first", "float", "groupby", "int", "items", "last", "length", "list", "lower"),
        *("map", "max", "min", "reject", "rejectattr", "reverse", "safe", "select"),
        *("selectattr", "sort", "title", "trim", "truncate", "unique", "upper", "wordcount"),
    }
)
_COMPARING = frozenset({"sort", "unique", "groupby", "min", "max", "dictsort"})
_COMPARING_TESTS = frozenset(
    {
        *("==", "!=", "<", "<=", ">", ">=", "eq", "equalto", "ne", "lt", "lessthan", "le"),
        *("gt", "greaterthan", "ge", "in"),
    }
)
# These return what they are given, or a part of it.
_PASSING = frozenset({"d", "default", "first", "last", "attr", "min", "max", "safe"})
_MAX_JSON_INDENT = 16
_MAX_DIGITS = 64


def bounded_filters(environment: jinja2.Environment, budget: Budget) -> dict[str, Callable]:
    """Return all filters that templates may use."""
    kept = {name: _bounded(name, environment.filters[name], budget) for name in _KEPT}
    return kept | {name: f for name, f in _own_filters(environment, budget).items()}


def bounded_tests(environment: jinja2.Environment, budget: Budget) -> dict[str, Callable]:
    """Return all tests; what is compared is weighed."""

    def weighing(test: Callable) -> Callable:
        @functools.wraps(test)
        def weighed(*args: Any) -> bool:
            for arg in args:
                budget.weigh(arg)
            return test(*args)

        return weighed

    tests = environment.tests
    return {n: weighing(test) if n in _COMPARING_TESTS else test for n, test in tests.items()}


def join_parts(budget: Budget, parts: Iterable[str], separator: str = "") -> str:
    """Join texts whose total length is admitted as they come."""
    kept, length = [], 0
    for part in parts:
        length += len(part) + len(separator)
        budget.allow(length)
        kept.append(part)
    return budget.make(separator.join(kept))


def replace_text(budget: Budget, s: str, old: str, new: str, count: int | None = -1) -> str:
    """Replace as `str.replace` does, in what is no longer than admitted."""
    s, old, new = str(s), str(old), str(new)
    found = len(s) + 1 if not old else s.count(old)
    budget.allow(len(s) + found * len(new))
    return budget.make(s.replace(old, new, -1 if count is None else count))


def _bounded(name: str, function: Callable, budget: Budget) -> Callable:
    @functools.wraps(function)
    def bounded(*args: Any, **kwargs: Any) -> Any:
        budget.spend()
        for arg in args:
            if name in _COMPARING:
                budget.weigh(arg)
            if isinstance(arg, str):
                # As a list every character is an object.
                is_split = name in _COMPARING or name in ("list", "wordcount")
                budget.use(len(arg) * (ITEM_BYTES if is_split else 1))
        result = function(*args, **kwargs)
        if isinstance(result, Iterator):
            result = budget.collect(result)
        return result if name in _PASSING else budget.make(result)

    return bounded


def _own_filters(environment: jinja2.Environment, budget: Budget) -> dict[str, Callable]:
    do_indent = environment.filters["indent"]

    def text(value: Any) -> str:
        budget.weigh(value)
        return budget.make(str(value))

    def join(value: Iterable, d: str = "", attribute: Any = None) -> str:
        get = jinja2.filters.make_attrgetter(environment, attribute)
        return join_parts(budget, (text(get(item)) for item in value), str(d))

    def indent(s: str, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
        added = width if isinstance(width, int) else len(width)
        budget.allow(len(s) + (s.count("\n") + 1) * added)
        return budget.make(do_indent(s, width, first, blank))

    def fill(value: str, *args: Any, **kwargs: Any) -> str:
        return environment.call_binop(None, "%", value, kwargs or args)  # type: ignore[attr-defined]

    def sum_numbers(iterable: Iterable, attribute: Any = None, start: float | int = 0) -> float:
        if not isinstance(start, (int, float)):
            budget.refuse("a sum of things other than numbers")
        get = jinja2.filters.make_attrgetter(environment, attribute)
        return sum(map(get, iterable), start)

    def round_number(value: float, precision: int = 0, method: Any = "common") -> float:
        if not -_MAX_DIGITS <= precision <= _MAX_DIGITS:
            budget.refuse(f"a number rounded to {str(precision)[:40]} digits")
        return jinja2.filters.do_round(value, precision, method)

    def replace(s: str, old: str, new: str, count: int | None = None) -> str:
        return replace_text(budget, s, old, new, count)

    return {
        "format": fill,
        "indent": indent,
        "join": join,
        "replace": replace,
        "round": round_number,
        "string": text,
        "sum": sum_numbers,
        "tojson": functools.partial(_to_json, budget),
    }


def _to_json(
    budget: Budget,
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Write JSON as chat templates expect it: Unicode as it is, nothing HTML-escaped."""
    width = indent if isinstance(indent, int) else len(indent or "")
    if width > _MAX_JSON_INDENT or any(len(part) > _MAX_JSON_INDENT for part in separators or ()):
        budget.refuse(f"JSON indented by {str(width)[:40]}, or with long separators")
    length, depth = budget.weigh(value)
    budget.allow(length + length // 32 * width * depth)
    text = json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )
    budget.allow(len(text))
    return budget.make(text)
