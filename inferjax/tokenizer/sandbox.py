"""A Jinja environment for templates that came with a checkpoint: no escape, bounded work.

Every loop, call and comparison spends from a budget of steps, seconds and bytes, and operators,
methods and filters whose results can be long ask before they make them. Methods of texts and
numbers, and filters, are those of a list, so that what a new version of Jinja or Python adds stays
out until it is known to be harmless. One operation on a text of 16 million characters is not
interrupted: it takes some hundredths of a second.
"""

import datetime
import re
from collections.abc import Callable
from typing import Any

import jinja2
import jinja2.nodes
import jinja2.sandbox
import jinja2.utils

from inferjax.tokenizer.budget import ITEM_BYTES, MAX_LENGTH, Budget
from inferjax.tokenizer.filters import bounded_filters, bounded_tests, join_parts, replace_text
from inferjax.tokenizer.instrument import GenerationBlock, instrument

# The largest templates in use have 5,000; 100,000 took 5 s and 600 MB to compile.
MAX_NODES = 25_000
# Arithmetic on long integers is not linear: 26 million bits took 2 s.
_BIT_COST = 256
_TEXT_METHODS = frozenset(
    {
        *("capitalize", "casefold", "count", "endswith", "find", "format", "format_map"),
        *("index", "isalnum", "isalpha", "isascii", "isdecimal", "isdigit", "isidentifier"),
        *("islower", "isnumeric", "isprintable", "isspace", "istitle", "isupper", "join"),
        *("lower", "lstrip", "partition", "removeprefix", "removesuffix", "replace", "rfind"),
        *("rindex", "rpartition", "rsplit", "rstrip", "split", "splitlines", "startswith"),
        *("strip", "swapcase", "title", "upper"),
    }
)
_METHODS: tuple[tuple[type | tuple[type, ...], frozenset[str]], ...] = (
    (str, _TEXT_METHODS),
    ((list, tuple), frozenset({"copy", "count", "index"})),
    (dict, frozenset({"copy", "get", "items", "keys", "values"})),
    ((int, float, complex, bytes), frozenset()),
)
_LINE_ENDS = "\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029"


class TemplateRefusal(Exception):
    """The template called `raise_exception`."""


class BoundedSandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """Jinja's immutable sandbox with a budget; one environment renders one text at a time."""

    intercepted_binops = frozenset({"+", "*", "**", "%", "//"})

    def __init__(self) -> None:
        self.budget = Budget()
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=["jinja2.ext.loopcontrols", GenerationBlock],
            finalize=self.weighed,
        )
        self.filters = bounded_filters(self, self.budget)
        self.tests = bounded_tests(self, self.budget)
        self.globals.update(raise_exception=_raise_exception, strftime_now=self._strftime_now)
        del self.globals["lipsum"]

    def compile_bounded(self, source: str, seconds: float) -> jinja2.Template:
        """Compile with calls of this environment in every loop, macro and comparison."""
        self.budget.start(seconds)  # Jinja evaluates constant expressions now.
        parsed = self.parse(source)
        if (count := sum(1 for _ in parsed.find_all(jinja2.nodes.Node))) > MAX_NODES:
            self.budget.refuse(f"a template of {count:,} parts")
        tree = instrument(parsed)
        tree.set_environment(self)
        return self.from_string(tree)

    def tick(self, num_bytes: int) -> str:
        """Count one iteration and what it writes; compiled into every loop."""
        self.budget.spend()
        self.budget.use(num_bytes)
        return ""

    def weighed(self, value: Any) -> Any:
        """Count a value and all it holds, and return it."""
        self.budget.weigh(value)
        return value

    def concatenate(self, *parts: object) -> str:
        """Join the operands of `~`."""
        return join_parts(self.budget, (str(self.weighed(part)) for part in parts))

    def cut(self, value: Any, start: Any, stop: Any, step: Any) -> Any:
        """Return a slice."""
        return self.budget.make(value[start:stop:step])

    def getitem(self, obj: Any, argument: Any) -> Any:
        """Look up a key: a tuple is weighed before it is hashed."""
        return super().getitem(obj, self._hashable(argument))

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Refuse, besides what the sandbox refuses, methods that no chat needs."""
        for kinds, names in _METHODS:
            if isinstance(obj, kinds):
                return attr in names and super().is_safe_attribute(obj, attr, value)
        return super().is_safe_attribute(obj, attr, value)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """Give `str.format` in its sandboxed form, unless a field is wide or of computed width."""
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None
        text: str = value.__self__
        pattern = text.replace("{{", "")
        if re.search(r"{[^{}]*{", pattern):
            self.budget.refuse("a field of computed width")

        def bounded(*args: Any, **kwargs: Any) -> str:
            length, _ = self.budget.weigh([*args, *kwargs.values()])
            self.budget.allow(len(text) + _widths(pattern) + text.count("{") * length)
            return self.budget.make(wrapped(*args, **kwargs))

        return bounded

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Apply an arithmetic operator whose result cannot be huge."""
        self.budget.spend()
        if operator == "%" and isinstance(left, str):
            length, _ = self.budget.weigh(right)
            self.budget.allow(_filled_length(left, length))
        self.budget.allow(_binop_length(operator, left, right))
        return self.budget.make(super().call_binop(context, operator, left, right))

    def call(self, context: Any, obj: Any, *args: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        """Call `obj` with what it compares or hashes weighed, and its result counted."""
        self.budget.spend()
        owner, name = getattr(obj, "__self__", None), getattr(obj, "__name__", "")
        if isinstance(owner, str):
            if name == "join":
                return join_parts(self.budget, *args, separator=owner)
            if name == "replace":
                return replace_text(self.budget, owner, *args)
            self.budget.use(_work(owner, name, *args))
        compares = isinstance(owner, list | tuple | dict) and name in ("count", "index")
        hashes = obj is dict or obj is jinja2.utils.Namespace
        if compares or hashes or name == "changed":
            self.budget.weigh([owner if compares else None, *args])
        for argument in args:
            self._hashable(argument)
        return self.budget.make(super().call(context, obj, *args, **kwargs))  # type: ignore[misc]

    def _hashable(self, value: Any) -> Any:
        return self.weighed(value) if isinstance(value, tuple) else value

    def _strftime_now(self, pattern: str) -> str:
        if len(pattern) > 100 or re.search(r"%[-_^#0]*[1-9]", pattern):
            self.budget.refuse(f"a date pattern of {len(pattern)} characters with widths")
        return datetime.datetime.now().strftime(pattern)


def _work(text: str, method: str, *args: Any) -> int:
    """Return about how many bytes a method of a text looks through, and makes objects of."""
    match method:
        case "startswith" | "endswith":
            return 0
        case "split" | "rsplit":
            separator = args[0] if args and isinstance(args[0], str) and args[0] else None
            pieces = len(text) // 2 if separator is None else text.count(separator)
            return len(text) + ITEM_BYTES * pieces
        case "splitlines":
            return len(text) + ITEM_BYTES * sum(map(text.count, _LINE_ENDS))
        case _:
            return len(text)


def _binop_length(operator: str, left: Any, right: Any) -> int:
    """Return an upper bound of the length a result can have, in characters, items or bits."""
    sized = (str, bytes, list, tuple)
    match operator:
        case "+" if isinstance(left, sized) and isinstance(right, sized):
            return len(left) + len(right)
        case "*" if isinstance(left, sized) != isinstance(right, sized):
            many, factor = (left, right) if isinstance(left, sized) else (right, left)
            length = len(many) * factor if isinstance(factor, int) else 0
            return length if isinstance(many, str) else length * 8
        case "*" | "//" | "%" if isinstance(left, int) and isinstance(right, int):
            return _BIT_COST * (left.bit_length() + right.bit_length())
        case "**" if isinstance(left, int) and isinstance(right, int):
            return _BIT_COST * left.bit_length() * right
        case _:
            return 0


def _filled_length(pattern: str, length: int) -> int:
    """Return an upper bound of what `%` makes of a pattern and values that are `length` long.

    A conversion's width or precision makes a string of that length.
    """
    if "*" in pattern:
        return MAX_LENGTH + 1
    return len(pattern) + _widths(pattern) + pattern.count("%") * length


def _widths(pattern: str) -> int:
    """Return the sum of all numbers in a pattern, which bounds the padding it can ask for."""
    return sum(int(number[:12]) for number in re.findall(r"[0-9]+", pattern))


def _raise_exception(message: str) -> None:
    raise TemplateRefusal(message)
