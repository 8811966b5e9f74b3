"""Decides whether a chat template's time and memory are bounded by the size of its input.

Such a template runs in this process. It loops once over the messages, and once over the parts of each, and
writes there only that message or part and short constants. No variable concatenates two texts, so nothing
grows from step to step. Any other template runs in `jaxllm.text.child_process`.
"""

import dataclasses
from collections.abc import Mapping, Set
from typing import TypeGuard

from jinja2 import nodes

MAX_SOURCE_CHARACTERS = 1 << 16
_MAX_WORD_CHARACTERS = 256
_FILTERS = frozenset({"trim", "length", "lower", "string", "first", "last", "default"})
_METHODS = frozenset({"strip", "lstrip", "rstrip", "startswith", "endswith"})
_FUNCTIONS = frozenset({"raise_exception", "strftime_now"})
# Tests that look at the type of a value alone.
_KINDS = frozenset(
    {"defined", "undefined", "none", "string", "mapping", "number", "boolean", "sequence", "iterable"}
)
# Most steps of a template, because each may read or write the whole input.
_MAX_STEPS = 256
_MESSAGES = frozenset({"messages", "tools", "documents"})


def is_bounded(tree: nodes.Template, special: Mapping[str, str]) -> bool:
    """Whether a parsed template is bounded; `special` are the named tokens that it may write."""
    short = all(len(each) <= _MAX_WORD_CHARACTERS for each in special.values())
    steps = sum(1 for _ in tree.find_all((nodes.Expr, nodes.For)))
    if steps > _MAX_STEPS:
        return False
    words = frozenset({*special, "add_generation_prompt", "loop", "strftime_now", "raise_exception"})
    return short and _all_bounded(tree.body, _Scope(small=words - _MESSAGES, large=frozenset(), loops=0))


@dataclasses.dataclass(frozen=True)
class _Scope:
    """The sizes of names at a point of the template.

    Attributes:
      small: names of values of a fixed size.
      large: names of parts of the innermost loop's message. Outside of loops all names may be large.
      loops: number of loops around the point.
    """

    small: Set[str]
    large: Set[str]
    loops: int

    def readable(self, name: str) -> bool:
        """Whether a name may be written or searched at a point that is reached many times."""
        return not self.loops or name in self.small or name in self.large


def _all_bounded(body: list[nodes.Node], scope: _Scope) -> bool:
    for node in body:
        if isinstance(node, nodes.Assign):
            name = node.target.name if isinstance(node.target, nodes.Name) else ""
            if not name or name in ("loop", *_FUNCTIONS) or not _part(node.node, scope):
                return False
            if _small(node.node, scope):
                scope = dataclasses.replace(scope, small=scope.small | {name}, large=scope.large - {name})
            else:
                scope = dataclasses.replace(scope, small=scope.small - {name}, large=scope.large | {name})
        elif not _statement(node, scope):
            return False
        elif isinstance(node, nodes.If):
            scope = _after(node, scope)
    return True


def _after(node: nodes.If, scope: _Scope) -> _Scope:
    """The scope after a condition that may have assigned names."""
    assigned = {
        each.target.name for each in node.find_all(nodes.Assign) if isinstance(each.target, nodes.Name)
    }
    # Within a loop only small values and parts of its message can be assigned, so they stay readable.
    return dataclasses.replace(scope, small=scope.small - assigned, large=scope.large | assigned)


def _statement(node: nodes.Node, scope: _Scope) -> bool:
    if isinstance(node, nodes.Break | nodes.Continue):
        return True
    if isinstance(node, nodes.Output):
        return all(isinstance(each, nodes.TemplateData) or _expression(each, scope) for each in node.nodes)
    if isinstance(node, nodes.If):
        branches = [node.body, node.else_, *(each.body for each in node.elif_)]
        tests = [node.test, *(each.test for each in node.elif_)]
        return all(_expression(each, scope) for each in tests) and all(
            _all_bounded(each, scope) for each in branches
        )
    if isinstance(node, nodes.For):
        root = _root(node.iter)
        if root is None or not isinstance(node.target, nodes.Name) or node.recursive or node.test:
            return False
        # The outer loop may run over any input, the inner one over a part of its message.
        if scope.loops > 1 or (scope.loops and root not in scope.large):
            return False
        inner = _Scope(
            # Names assigned outside of the loop may be as large as all messages together.
            small=scope.small - {node.target.name},
            large=frozenset({node.target.name}),
            loops=scope.loops + 1,
        )
        return _all_bounded(node.body, inner) and _all_bounded(node.else_, scope)
    return False


def _expression(node: nodes.Node | None, scope: _Scope) -> bool:
    """Whether a value takes no more time and memory than its operands."""
    if node is None or isinstance(node, nodes.Const):
        return True
    if isinstance(node, nodes.Not | nodes.Neg):
        return _expression(node.node, scope)
    if isinstance(node, nodes.And | nodes.Or | nodes.Add):
        return _expression(node.left, scope) and _expression(node.right, scope)
    if isinstance(node, nodes.Concat):
        return all(_expression(each, scope) for each in node.nodes)
    if isinstance(node, nodes.CondExpr):
        return all(_expression(each, scope) for each in (node.test, node.expr1, node.expr2))
    if isinstance(node, nodes.Mod):
        # With a text on the left it would be a format string.
        return _root(node.left) == "loop" and isinstance(node.right, nodes.Const)
    if isinstance(node, nodes.Compare):
        sides = [node.expr, *(each.expr for each in node.ops)]
        equal = all(each.op in ("eq", "ne") for each in node.ops)
        # Comparing any value with a constant costs nothing.
        word = equal and len(sides) == 2 and any(isinstance(each, nodes.Const) for each in sides)
        return all((word and _root(each) is not None) or _expression(each, scope) for each in sides)
    if isinstance(node, nodes.Test):
        return not (node.args or node.kwargs or node.dyn_args or node.dyn_kwargs) and (
            (node.name in _KINDS and _root(node.node) is not None) or _expression(node.node, scope)
        )
    if isinstance(node, nodes.Call) and isinstance(node.node, nodes.Name):
        plain = not (node.kwargs or node.dyn_args or node.dyn_kwargs)
        return plain and node.node.name in _FUNCTIONS and all(map(_word, node.args))
    if isinstance(node, nodes.Filter) and node.name == "tojson":
        # `tojson` doubles backslashes, so its result is written and never stored: repeated, it would grow
        # each time.
        plain = not (node.args or node.kwargs or node.dyn_args or node.dyn_kwargs)
        return plain and _part(node.node, scope)
    return _part(node, scope)


def _part(node: nodes.Node | None, scope: _Scope) -> bool:
    """Whether a value is a constant, or a part of the input, perhaps trimmed."""
    if node is None or isinstance(node, nodes.Const):
        return True
    if isinstance(node, nodes.Name):
        return scope.readable(node.name)
    if isinstance(node, nodes.Getattr):
        return _part(node.node, scope)
    if isinstance(node, nodes.Getitem):
        if _is_split(node.node) and not isinstance(node.arg, nodes.Slice):
            return _index(node.arg) and _split(node.node, scope)
        return _index(node.arg) and _part(node.node, scope)
    if isinstance(node, nodes.Filter):
        plain = not (node.kwargs or node.dyn_args or node.dyn_kwargs)
        if plain and node.name in ("first", "last") and _is_split(node.node):
            return not node.args and _split(node.node, scope)
        return (
            plain and node.name in _FILTERS and all(map(_word, node.args)) and _part(node.node, scope)
            and not (node.name == "trim" and node.args)
        )  # fmt: skip
    if isinstance(node, nodes.Call) and isinstance(node.node, nodes.Getattr):
        plain = not (node.kwargs or node.dyn_args or node.dyn_kwargs)
        words = plain and node.node.attr in _METHODS and all(map(_word, node.args))
        return words and _part(node.node.node, scope)
    return False


def _is_split(node: nodes.Node | None) -> TypeGuard[nodes.Call]:
    return isinstance(node, nodes.Call) and isinstance(node.node, nodes.Getattr) and node.node.attr == "split"


def _split(node: nodes.Call, scope: _Scope) -> bool:
    """Whether one part of a split text is bounded. (All parts written as a list would have quotes and
    backslashes doubled, and could be split again.)"""
    assert isinstance(node.node, nodes.Getattr)
    plain = not (node.kwargs or node.dyn_args or node.dyn_kwargs)
    return plain and all(map(_word, node.args)) and _part(node.node.node, scope)


def _small(node: nodes.Node, scope: _Scope) -> bool:
    # `loop.previtem` and `loop.nextitem` are messages, not small values.
    return isinstance(node, nodes.Const) or (
        isinstance(node, nodes.Name) and node.name in scope.small and node.name != "loop"
    )


def _word(node: nodes.Node) -> bool:
    return isinstance(node, nodes.Const) and (
        not isinstance(node.value, str) or len(node.value) <= _MAX_WORD_CHARACTERS
    )


def _index(node: nodes.Node) -> bool:
    ends = (node.start, node.stop, node.step) if isinstance(node, nodes.Slice) else (node,)
    return all(
        each is None
        or isinstance(each, nodes.Const)
        or (isinstance(each, nodes.Neg) and isinstance(each.node, nodes.Const))
        for each in ends
    )


def _root(node: nodes.Node) -> str | None:
    """The first name in a path of attributes and items; None for any other value."""
    while isinstance(node, nodes.Getattr | nodes.Getitem):
        if isinstance(node, nodes.Getitem) and not _index(node.arg):
            return None
        node = node.node
    return node.name if isinstance(node, nodes.Name) else None
