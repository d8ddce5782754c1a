"""Puts calls into a parsed template, through which its environment sees what it is about to do."""

from typing import Any

import jinja2.ext
import jinja2.nodes
import jinja2.visitor

# What a list or a dictionary takes, and each of its places.
_BASE_BYTES, _PLACE_BYTES = 64, 100


def instrument(tree: jinja2.nodes.Template) -> jinja2.nodes.Template:
    """Return a template with the calls in place."""
    return _Instrument().visit(tree)


class _Instrument(jinja2.visitor.NodeTransformer):
    """Put a call of `tick` into every loop, macro and block, and replace what makes or compares.

    `~` becomes a call of `concatenate`, a slice one of `cut`, and what is compared, or is a key,
    passes through `weighed`. `EnvironmentAttribute` reads from the environment itself, so a
    template cannot shadow the names.
    """

    def visit_For(self, node: jinja2.nodes.For) -> jinja2.nodes.Node:
        return self._with_tick(node)

    def visit_Macro(self, node: jinja2.nodes.Macro) -> jinja2.nodes.Node:
        return self._with_tick(node)

    def visit_CallBlock(self, node: jinja2.nodes.CallBlock) -> jinja2.nodes.Node:
        return self._with_tick(node)

    def visit_Block(self, node: jinja2.nodes.Block) -> jinja2.nodes.Node:
        return self._with_tick(node)

    def visit_Concat(self, node: jinja2.nodes.Concat) -> jinja2.nodes.Node:
        self.generic_visit(node)
        return _environment_call("concatenate", node.nodes)

    def visit_Getitem(self, node: jinja2.nodes.Getitem) -> jinja2.nodes.Node:
        self.generic_visit(node)
        if not isinstance(node.arg, jinja2.nodes.Slice):
            return node
        bounds = (node.arg.start, node.arg.stop, node.arg.step)
        return _environment_call("cut", [node.node, *(b or _const(None) for b in bounds)])

    def visit_Compare(self, node: jinja2.nodes.Compare) -> jinja2.nodes.Node:
        self.generic_visit(node)
        node.expr = _weighed(node.expr)
        for operand in node.ops:
            operand.expr = _weighed(operand.expr)
        return node

    def visit_Pair(self, node: jinja2.nodes.Pair) -> jinja2.nodes.Node:
        self.generic_visit(node)
        node.key = _weighed(node.key)
        return node

    def _with_tick(self, node: Any) -> jinja2.nodes.Node:
        cost = _cost(node)
        self.generic_visit(node)
        tick = jinja2.nodes.Output([_environment_call("tick", [_const(cost)])], lineno=node.lineno)
        node.body.insert(0, tick)
        if getattr(node, "test", None) is not None:
            node.test = jinja2.nodes.And(_ticked_true(), node.test)
        return node


class GenerationBlock(jinja2.ext.Extension):
    """Accept `{% generation %}`, which marks tokens for training; the inside renders as it is."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Any) -> list[jinja2.nodes.Node]:
        """Return the nodes inside the block."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _cost(node: jinja2.nodes.Node) -> int:
    """Return the bytes that the text and the literals inside a node take each time it runs."""
    cost = sum(len(text.data) for text in node.find_all(jinja2.nodes.TemplateData))
    for literal in node.find_all((jinja2.nodes.List, jinja2.nodes.Tuple, jinja2.nodes.Dict)):
        cost += _BASE_BYTES + _PLACE_BYTES * len(literal.items)  # type: ignore[attr-defined]
    return cost


def _weighed(node: jinja2.nodes.Expr) -> jinja2.nodes.Expr:
    if isinstance(node, jinja2.nodes.Const):
        return node
    return _environment_call("weighed", [node])


def _ticked_true() -> jinja2.nodes.Expr:
    """Return an expression that ticks and is true: a loop's filter runs before its body."""
    return jinja2.nodes.Compare(
        _environment_call("tick", [_const(0)]), [jinja2.nodes.Operand("eq", _const(""))]
    )


def _const(value: object) -> jinja2.nodes.Const:
    return jinja2.nodes.Const(value)


def _environment_call(name: str, args: list[jinja2.nodes.Expr]) -> jinja2.nodes.Call:
    return jinja2.nodes.Call(jinja2.nodes.EnvironmentAttribute(name), list(args), [], None, None)
