"""CEL selectors of devices, as far as a sandbox needs them. Pure.

Known: `device.driver`, `device.attributes['domain'].name`, `device.capacity['domain'].name`, literals, lists, the operators
&& || ! == != < <= > >= in, `has`, `quantity`, `semver`, and of values `startsWith`, `endsWith`, `contains`, `compareTo`,
`isGreaterThan`, `isLessThan`. Anything else is refused: a guess would allocate what a real scheduler does not. The
expression is read by Python's own parser after its operators are translated; nothing of it is executed as Python.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from gpushare_agent.cluster.kube.quantities import whole_number
from gpushare_agent.model.errors import Corrupt, Rejected

MAX_EXPRESSION_CHARS = 10 * 1024
"""resource.k8s.io's own limit."""
_TOKEN = re.compile(
    r"""\s*(?P<text>r?"(?:\\.|[^"\\\n])*"|r?'(?:\\.|[^'\\\n])*')|\s*(?P<word>[A-Za-z_][A-Za-z0-9_]*)"""
    r"""|\s*(?P<number>[0-9]+)|\s*(?P<operator>&&|\|\||==|!=|<=|>=|[<>!()\[\],.-])"""
)
_OPERATORS = {"&&": "and", "||": "or", "!": "~"}
_WORDS = {"true": "True", "false": "False"}


@dataclass(frozen=True, slots=True, order=True)
class Version:
    numbers: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceView:
    """Names with their domain: `gpushare-agent/uuid`. Capacities are Fractions."""

    driver: str
    attributes: Mapping[str, Any]
    capacity: Mapping[str, Any]


class SelectorFailed(Rejected):
    """The expression has no value for a device, as of an attribute that it does not have."""


def version(text: str) -> Version:
    """Raises SelectorFailed. A pre-release is not compared."""
    match = re.fullmatch(r"([0-9]{1,9})\.([0-9]{1,9})\.([0-9]{1,9})", text)
    if match is None:
        raise SelectorFailed(f"{text!r:.80} is no version of three numbers")
    return Version(tuple(map(int, match.groups())))


def parse_selector(expression: str) -> Callable[[DeviceView], bool]:
    """Raises Rejected for what is not known here; the result raises SelectorFailed."""
    if len(expression) > MAX_EXPRESSION_CHARS:
        raise _unknown(expression)
    try:
        tree = ast.parse(_translated(expression), mode="eval").body
        _check(tree)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise _unknown(expression) from error

    def selects(device: DeviceView) -> bool:
        found = _value(tree, device)
        if not isinstance(found, bool):
            raise SelectorFailed(f"the selector {expression!r:.200} gives no yes or no")
        return found

    return selects


def _unknown(expression: str) -> Rejected:
    return Rejected(
        f"the sandbox's scheduler cannot evaluate the CEL selector {expression!r:.200}; it knows comparisons of"
        " device.driver, device.attributes and device.capacity (docs/sandbox.md)"
    )


def _translated(expression: str) -> str:
    words, position, expression = [], 0, expression.strip()
    while position < len(expression):
        match = _TOKEN.match(expression, position)
        if match is None:
            raise ValueError(expression)
        token = match[0].strip()
        words.append(_OPERATORS.get(token) or _WORDS.get(token, token))
        position = match.end()
    return " ".join(words)


_NODES = (
    ast.BoolOp, ast.And, ast.Or, ast.UnaryOp, ast.Invert, ast.USub, ast.Compare, ast.Eq, ast.NotEq, ast.Lt, ast.LtE, ast.Gt,
    ast.GtE, ast.In, ast.Call, ast.Name, ast.Load, ast.Attribute, ast.Subscript, ast.Constant, ast.List,
)  # fmt: skip
_FUNCTIONS = frozenset({"has", "quantity", "semver"})
_METHODS = frozenset({"startsWith", "endsWith", "contains", "compareTo", "isGreaterThan", "isLessThan"})


def _check(tree: ast.AST) -> None:
    for node in ast.walk(tree):
        is_known = isinstance(node, _NODES)
        if isinstance(node, ast.Compare):
            is_known = len(node.ops) == 1
        if isinstance(node, ast.Call):
            name, names = (node.func.id, _FUNCTIONS) if isinstance(node.func, ast.Name) else (
                getattr(node.func, "attr", ""), _METHODS)  # fmt: skip
            is_known = name in names and len(node.args) == 1 and not node.keywords
        if isinstance(node, ast.Name):
            is_known = node.id == "device" or node.id in _FUNCTIONS
        if not is_known:
            raise ValueError(ast.dump(node)[:80])


def _value(node: ast.AST, device: DeviceView) -> Any:
    match node:
        case ast.Constant():
            return node.value
        case ast.List():
            return [_value(one, device) for one in node.elts]
        case ast.BoolOp():
            return _joined(node, device)
        case ast.UnaryOp(op=ast.Invert()):
            return not _of_type(_value(node.operand, device), bool)
        case ast.UnaryOp():
            return -_of_type(_value(node.operand, device), int)
        case ast.Compare():
            return _compared(node.ops[0], _value(node.left, device), _value(node.comparators[0], device))
        case ast.Call(func=ast.Name(id="has")):
            return _is_there(node.args[0], device)
        case ast.Call(func=ast.Name(id=name)):
            text = _of_type(_value(node.args[0], device), str)
            return version(text) if name == "semver" else _quantity(text)
        case ast.Call(func=ast.Attribute(value=target, attr=name)):
            return _method(name, _value(target, device), _value(node.args[0], device))
    return _field(node, device)


def _joined(node: ast.BoolOp, device: DeviceView) -> bool:
    """A part that decides hides another's failure, on either side, as in CEL."""
    decides = isinstance(node.op, ast.Or)
    failure: SelectorFailed | None = None
    for part in node.values:
        try:
            if _of_type(_value(part, device), bool) == decides:
                return decides
        except SelectorFailed as error:
            failure = failure or error
    if failure is not None:
        raise failure
    return not decides


def _field(node: ast.AST, device: DeviceView) -> Any:
    """`device.driver`, or the value behind a domain and a name."""
    match node:
        case ast.Attribute(value=ast.Name(id="device"), attr="driver"):
            return device.driver
        case ast.Attribute(value=ast.Subscript() as group, attr=str() as name):
            return _looked_up(group, name, device)
        case ast.Subscript(value=ast.Subscript() as group, slice=ast.Constant(value=str() as name)):
            return _looked_up(group, name, device)
        case ast.Subscript(value=ast.Attribute(), slice=ast.Constant(value=str() as domain)):
            values = _group(node.value, device)
            return [name.partition("/")[2] for name in values if name.partition("/")[0] == domain]
    raise SelectorFailed(f"the sandbox's scheduler knows no {ast.unparse(node)[:80]}")


def _group(node: ast.AST, device: DeviceView) -> Mapping[str, Any]:
    match node:
        case ast.Attribute(value=ast.Name(id="device"), attr="attributes"):
            return device.attributes
        case ast.Attribute(value=ast.Name(id="device"), attr="capacity"):
            return device.capacity
    raise SelectorFailed(f"the sandbox's scheduler knows no {ast.unparse(node)[:80]}")


def _looked_up(group: ast.Subscript, name: str, device: DeviceView) -> Any:
    values = _group(group.value, device)
    domain = group.slice.value if isinstance(group.slice, ast.Constant) else None
    if not isinstance(domain, str):
        raise SelectorFailed(f"the sandbox's scheduler knows no {ast.unparse(group)[:80]}")
    try:
        return values[f"{domain}/{name}"]
    except KeyError:
        raise SelectorFailed(f"no such key: {name}") from None


def _is_there(node: ast.AST, device: DeviceView) -> bool:
    try:
        _field(node, device)
    except SelectorFailed as error:
        if str(error).startswith("no such key"):
            return False
        raise
    return True


def _compared(operator: ast.cmpop, left: Any, right: Any) -> bool:
    if isinstance(operator, ast.In):
        return left in _of_type(right, list)
    right = _of_type(right, type(left))
    if isinstance(operator, ast.Eq | ast.NotEq):
        return bool((left == right) is isinstance(operator, ast.Eq))
    if not isinstance(left, int | str) or isinstance(left, bool):
        raise SelectorFailed(f"{left!r:.80} has no order; use compareTo")
    if isinstance(operator, ast.Lt | ast.GtE):
        return bool((left < right) is isinstance(operator, ast.Lt))
    return bool((left > right) is isinstance(operator, ast.Gt))


def _method(name: str, target: Any, argument: Any) -> Any:
    argument = _of_type(argument, type(target))
    if isinstance(target, str):
        texts = {"startsWith": target.startswith, "endsWith": target.endswith, "contains": target.__contains__}
        if name in texts:
            return texts[name](argument)
    elif isinstance(target, Fraction | Version):
        order = (target > argument) - (target < argument)
        orders = {"compareTo": order, "isGreaterThan": order > 0, "isLessThan": order < 0}
        if name in orders:
            return orders[name]
    raise SelectorFailed(f"{target!r:.80} has no {name}")


def _quantity(text: str) -> Fraction:
    try:
        return Fraction(whole_number(text, "quantity"))
    except Corrupt as error:
        raise SelectorFailed(str(error)) from error


def _of_type(value: Any, kind: type) -> Any:
    if type(value) is not kind:
        raise SelectorFailed(f"{value!r:.80} is compared with, or used as, another kind of value")
    return value
