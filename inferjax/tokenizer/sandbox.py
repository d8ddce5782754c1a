"""A Jinja environment for templates that came with a checkpoint: no escape, bounded work.

Bounded: loop iterations, macro and block calls and the values written out (counted, and the clock
is read at each), recursion, and the length of what operators, `join`, `replace`, `format`,
`indent`, `sum` and `tojson` make. Absent: padding functions, which make long strings of short ones.
Not bounded: one filter, comparison or string method is not interrupted while it works, so a hostile
template can still spend seconds on megabytes, or forever comparing lists nested by doubling.
"""

import dataclasses
import datetime
import json
import re
import time
from collections.abc import Callable, Iterable
from typing import Any

import jinja2
import jinja2.ext
import jinja2.filters
import jinja2.nodes
import jinja2.sandbox
import jinja2.visitor

MAX_STEPS = 500_000
MAX_LENGTH = 16_000_000
MAX_SECONDS = 5.0
# Arithmetic on long integers is not linear: 26 million bits took 2 s.
_BIT_COST = 256
_MAX_JSON_INDENT = 16
_ABSENT_FILTERS = (
    *("batch", "center", "pprint", "random", "slice"),
    *("urlencode", "urlize", "wordwrap", "xmlattr"),
)
_ABSENT_METHODS = frozenset({"center", "ljust", "rjust", "zfill", "expandtabs", "translate"})


class TemplateRefusal(Exception):
    """The template called `raise_exception`."""


class BudgetExceeded(Exception):
    """The template did more work than a chat needs."""


@dataclasses.dataclass(slots=True)
class Budget:
    """What one rendering may still spend."""

    steps: int = MAX_STEPS
    deadline_s: float = 0.0
    length: int = MAX_LENGTH

    def start(self, seconds: float) -> None:
        """Refill for one rendering of at most `seconds`."""
        self.steps, self.deadline_s = MAX_STEPS, time.monotonic() + seconds

    def spend(self, steps: int = 1) -> None:
        """Count steps. Raises: BudgetExceeded when they or the time are used up."""
        self.steps -= steps
        if self.steps < 0:
            raise BudgetExceeded(f"more than {MAX_STEPS:,} steps")
        if time.monotonic() > self.deadline_s:
            raise BudgetExceeded("time is up")

    def allow(self, length: int) -> None:
        """Admit a value of `length` characters or items before it is made."""
        if length > self.length:
            raise BudgetExceeded(f"a value of {length:,} characters or items")


class BoundedSandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """Jinja's immutable sandbox with a budget; one environment renders one text at a time."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        self.budget = Budget()
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=["jinja2.ext.loopcontrols", _GenerationBlock],
            finalize=self._admit,
        )
        self.filters.update(self._bounded_filters())
        for name in _ABSENT_FILTERS:
            del self.filters[name]
        self.globals.update(raise_exception=_raise_exception, strftime_now=_strftime_now)
        del self.globals["lipsum"]

    def compile_bounded(self, source: str, seconds: float) -> jinja2.Template:
        """Compile with a step counter in every loop and macro, and with bounded concatenation."""
        self.budget.start(seconds)  # Jinja evaluates constant expressions now.
        tree = _Instrument().visit(self.parse(source))
        tree.set_environment(self)
        return self.from_string(tree)

    def tick(self) -> str:
        """Count one iteration; compiled into every loop."""
        self.budget.spend()
        return ""

    def concatenate(self, *parts: object) -> str:
        """Join the operands of `~`."""
        return self._join(map(self._text, parts))

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Refuse, besides what the sandbox refuses, methods that pad or format strings."""
        if isinstance(obj, str) and attr in _ABSENT_METHODS:
            return False
        return super().is_safe_attribute(obj, attr, value)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """Give `str.format` in its sandboxed form, unless a field is wide or of computed width."""
        wrapped = super().wrap_str_format(value)
        if wrapped is not None:
            pattern = value.__self__.replace("{{", "")
            is_computed = re.search(r"{[^{}]*{", pattern) is not None
            self.budget.allow(MAX_LENGTH + 1 if is_computed else _widths(pattern))
        return wrapped

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Apply an arithmetic operator whose result cannot be huge."""
        self.budget.allow(_binop_length(operator, left, right))
        return super().call_binop(context, operator, left, right)

    def call(self, context: Any, obj: Any, *args: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        """Call `obj`, with `str.join` and `str.replace` bounded."""
        owner, name = getattr(obj, "__self__", None), getattr(obj, "__name__", "")
        if isinstance(owner, str) and name == "join":
            return self._join(*args, separator=owner)
        if isinstance(owner, str) and name == "replace":
            return self._replace(owner, *args)
        return super().call(context, obj, *args, **kwargs)  # type: ignore[misc]

    def _bounded_filters(self) -> dict[str, Callable]:
        do_indent = self.filters["indent"]

        def join(value: Iterable, d: str = "", attribute: Any = None) -> str:
            get = jinja2.filters.make_attrgetter(self, attribute)
            return self._join((self._text(get(item)) for item in value), separator=str(d))

        def indent(s: str, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
            added = width if isinstance(width, int) else len(width)
            self.budget.allow(len(s) + (s.count("\n") + 1) * added)
            return do_indent(s, width, first, blank)

        def fill(value: str, *args: Any, **kwargs: Any) -> str:
            self.budget.allow(_binop_length("%", value, None))
            return value % (kwargs or args)

        return {
            "format": fill,
            "join": join,
            "indent": indent,
            "replace": self._replace,
            "string": self._text,
            "sum": self._sum,
            "tojson": self._to_json,
        }

    def _admit(self, value: Any) -> Any:
        """Count a value and all it holds: lists nested by doubling print at endless length."""
        pending = [value]
        while pending:
            self.budget.spend()
            match pending.pop():
                case str() as text:
                    self.budget.allow(len(text))
                case dict() as mapping:
                    pending += [*mapping.keys(), *mapping.values()]
                case list() | tuple() as items:
                    pending += items
        return value

    def _text(self, value: Any) -> str:
        return str(self._admit(value))

    def _sum(
        self, iterable: Iterable, attribute: Any = None, start: float | int = 0
    ) -> float | int:
        if not isinstance(start, (int, float)):
            raise BudgetExceeded("a sum of things other than numbers")
        get = jinja2.filters.make_attrgetter(self, attribute)
        return sum(map(get, iterable), start)

    def _join(self, parts: Iterable[str], *, separator: str = "") -> str:
        kept, length = [], 0
        for part in parts:
            length += len(part) + len(separator)
            self.budget.allow(length)
            kept.append(part)
        return separator.join(kept)

    def _replace(self, s: str, old: str, new: str, count: int = -1) -> str:
        s, old, new = str(s), str(old), str(new)
        found = len(s) + 1 if not old else s.count(old)
        self.budget.allow(len(s) + found * len(new))
        return s.replace(old, new, -1 if count is None else count)

    def _to_json(
        self,
        value: Any,
        ensure_ascii: bool = False,
        indent: int | str | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        """Write JSON as chat templates expect it: Unicode as it is, nothing HTML-escaped."""
        width = indent if isinstance(indent, int) else len(indent or "")
        if width > _MAX_JSON_INDENT:
            raise BudgetExceeded(f"JSON indented by {width:,}")
        text = json.dumps(
            self._admit(value),
            ensure_ascii=ensure_ascii,
            indent=indent,
            separators=separators,
            sort_keys=sort_keys,
        )
        self.budget.allow(len(text))
        return text


class _Instrument(jinja2.visitor.NodeTransformer):
    """Put a call of `tick` into every loop and macro, and make `~` a call of `concatenate`.

    `EnvironmentAttribute` reads from the environment itself, so a template cannot shadow the names.
    """

    def visit_For(self, node: jinja2.nodes.For) -> jinja2.nodes.Node:
        return self._with_tick(node)

    def visit_Macro(self, node: jinja2.nodes.Macro) -> jinja2.nodes.Node:
        return self._with_tick(node)

    def visit_Block(self, node: jinja2.nodes.Block) -> jinja2.nodes.Node:
        return self._with_tick(node)

    def visit_Concat(self, node: jinja2.nodes.Concat) -> jinja2.nodes.Node:
        self.generic_visit(node)
        return _environment_call("concatenate", node.nodes)

    def _with_tick(self, node: Any) -> jinja2.nodes.Node:
        self.generic_visit(node)
        tick = jinja2.nodes.Output([_environment_call("tick", [])], lineno=node.lineno)
        node.body.insert(0, tick)
        if getattr(node, "test", None) is not None:
            node.test = jinja2.nodes.And(_ticked_true(), node.test)
        return node


def _ticked_true() -> jinja2.nodes.Expr:
    """Return an expression that ticks and is true: a loop's filter runs before its body."""
    return jinja2.nodes.Compare(
        _environment_call("tick", []),
        [jinja2.nodes.Operand("eq", jinja2.nodes.Const(""))],
    )


def _environment_call(name: str, args: list[jinja2.nodes.Expr]) -> jinja2.nodes.Expr:
    return jinja2.nodes.Call(jinja2.nodes.EnvironmentAttribute(name), list(args), [], None, None)


class _GenerationBlock(jinja2.ext.Extension):
    """Accept `{% generation %}`, which marks tokens for training; the inside renders as it is."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Any) -> list[jinja2.nodes.Node]:
        """Return the nodes inside the block."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _binop_length(operator: str, left: Any, right: Any) -> int:
    """Return an upper bound of the length a result can have, in characters, items or bits."""
    sized_left, sized_right = (
        isinstance(left, (str, list, tuple)),
        isinstance(right, (str, list, tuple)),
    )
    match operator:
        case "+" if sized_left and sized_right:
            return len(left) + len(right)
        case "*" if sized_left != sized_right:
            sized, factor = (left, right) if sized_left else (right, left)
            return len(sized) * factor if isinstance(factor, int) else 0
        case "*" if isinstance(left, int) and isinstance(right, int):
            return _BIT_COST * (left.bit_length() + right.bit_length())
        case "**" if isinstance(left, int) and isinstance(right, int):
            return _BIT_COST * left.bit_length() * right
        case "%" if isinstance(left, str):
            # A conversion's width or precision makes a string of that length.
            return _widths(left) if "*" not in left else MAX_LENGTH + 1
        case _:
            return 0


def _widths(pattern: str) -> int:
    """Return the sum of all numbers in a pattern, which bounds the padding it can ask for."""
    return sum(int(number[:12]) for number in re.findall(r"[0-9]+", pattern))


def _raise_exception(message: str) -> None:
    raise TemplateRefusal(message)


def _strftime_now(pattern: str) -> str:
    if len(pattern) > 100 or re.search(r"%[-_^#0]*[1-9]", pattern):
        raise BudgetExceeded(f"a date pattern of {len(pattern)} characters with widths")
    return datetime.datetime.now().strftime(pattern)
