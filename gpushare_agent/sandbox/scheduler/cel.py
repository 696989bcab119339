"""CEL selectors of devices, as much of the language as a sandbox needs. Pure.

Known are `device.driver`, `device.attributes['domain'].name`, `device.capacity['domain'].name`, literals, lists, the
operators && || ! == != < <= > >= in, `quantity`, `semver`, `startsWith`, `lowerAscii`, `matches` without groups and classes,
and `compareTo`. Anything else is refused: a guess would allocate what a real scheduler does not. Python's own parser reads
the expression after its operators are translated; nothing of it is executed as Python.
"""

from __future__ import annotations

import ast
import keyword
import operator
import re
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any

from gpushare_agent.core.kube.objects import whole_number
from gpushare_agent.core.model.errors import Corrupt, Rejected
from gpushare_agent.core.placement.first_fit import Capacity, Device

MAX_EXPRESSION_CHARS = 10 * 1024
"""resource.k8s.io's own limit."""
_TOKEN = re.compile(
    r"""\s*("(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*'|\w+|&&|\|\||==|!=|<=|>=|[<>!()\[\],.-])\s*""", re.ASCII
)
_PATTERN = re.compile(r"\^?(?:[\w -]|\.[*+]?)*\$?", re.ASCII)
"""What RE2 and `re` read alike."""
MAX_REPEATS = 2
"""Of a pattern: each multiplies what `re` tries on a string, at most MAX_MATCHED_CHARS long, as an attribute is."""
MAX_MATCHED_CHARS = 64
MAX_MATCHES = 16
"""In an expression."""
_TRANSLATED = {"&&": "and", "||": "or", "!": "~", "true": "True", "false": "False"}
_OPERATORS: Mapping[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}  # fmt: skip


AttributeValue = str | int | bool
"""The value types of a device's attributes, except a version."""
Version = tuple[int, ...]


class SelectorFailed(Rejected):
    """The expression has no value for a device, for example because the device lacks an attribute."""


def version(text: str) -> Version:
    """Raises SelectorFailed. A pre-release is not compared."""
    match = re.fullmatch(r"([0-9]{1,9})\.([0-9]{1,9})\.([0-9]{1,9})", text)
    if match is None:
        raise SelectorFailed(f"{text!r:.80} is no version of three numbers")
    return tuple(map(int, match.groups()))


def parse_selector(expression: str) -> Callable[[Device], bool]:
    """Both this and the result raise Rejected for what is not known here, the result SelectorFailed too."""
    unknown = Rejected(
        f"the sandbox's scheduler cannot evaluate the CEL selector {expression!r:.200}; it knows comparisons of"
        " device.driver, device.attributes and device.capacity (docs/reference/sandbox.md)"
    )
    try:
        # Parsed only: nothing of the expression is ever run as Python.
        tree = ast.parse(_translated(expression), mode="eval").body
        if sum(isinstance(node, ast.Attribute) and node.attr == "matches" for node in ast.walk(tree)) > MAX_MATCHES:
            raise unknown
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise unknown from error

    def selects(device: Device) -> bool:
        try:
            return bool(_of_type(_value(tree, device), bool))
        except (NotImplementedError, RecursionError) as error:
            raise unknown from error

    return selects


def _translated(expression: str) -> str:
    words, position = [], 0
    if len(expression) > MAX_EXPRESSION_CHARS:
        raise ValueError(expression)
    while position < len(expression):
        match = _TOKEN.match(expression, position)
        # A word that is a keyword in Python would be parsed as one: in CEL it is a name that is not known.
        if match is None or (match[1] != "in" and keyword.iskeyword(match[1])):
            raise ValueError(expression)
        words.append(_TRANSLATED.get(match[1], match[1]))
        position = match.end()
    return " ".join(words)


def _value(node: ast.AST, device: Device) -> Any:
    """Raises NotImplementedError for what is not known, SelectorFailed."""
    match node:
        # No floats: attributes and capacities have none.
        case ast.Constant(value=bool() | int() | str()):
            return node.value
        case ast.List():
            return [_value(one, device) for one in node.elts]
        case ast.BoolOp():
            return _joined(node, device)
        case ast.UnaryOp(op=ast.Invert()):
            return not _of_type(_value(node.operand, device), bool)
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() as number)):
            return -number
        case ast.Compare(left=left, ops=[compared], comparators=[right]):
            return _compared(compared, _value(left, device), _value(right, device))
    return _called(node, device)


def _called(node: ast.AST, device: Device) -> Any:
    match node:
        case ast.Call(func=ast.Name(id="quantity"), args=[ast.Constant(value=str() as text)], keywords=[]):
            return Fraction(whole(text, SelectorFailed))
        case ast.Call(func=ast.Name(id="semver"), args=[ast.Constant(value=str() as text)], keywords=[]):
            return version(text)
        case ast.Call(func=ast.Name(id="has"), args=[ast.Attribute() as attribute], keywords=[]):
            try:
                _value(attribute, device)
            except SelectorFailed:
                return False
            return True
        case ast.Call(func=ast.Attribute(value=target, attr="startsWith"), args=[prefix], keywords=[]):
            return _of_type(_value(target, device), str).startswith(_of_type(_value(prefix, device), str))
        case ast.Call(func=ast.Attribute(value=target, attr="lowerAscii"), args=[], keywords=[]):
            return _of_type(_value(target, device), str).encode().lower().decode()
        case ast.Call(
            func=ast.Attribute(value=target, attr="matches"), args=[ast.Constant(value=str() as pattern)], keywords=[]
        ) if _PATTERN.fullmatch(pattern) and pattern.count("*") + pattern.count("+") <= MAX_REPEATS:
            text = _of_type(_value(target, device), str)
            if len(text) > MAX_MATCHED_CHARS:
                raise NotImplementedError("matches")
            return re.search(pattern, text) is not None
        case ast.Call(func=ast.Attribute(value=target, attr="compareTo"), args=[other], keywords=[]):
            left = _value(target, device)
            right = _of_type(_value(other, device), type(left))
            return (left > right) - (left < right)
        case ast.Attribute(value=ast.Name(id="device"), attr="driver"):
            return device.key[0]
        case ast.Attribute(
            value=ast.Subscript(
                value=ast.Attribute(value=ast.Name(id="device"), attr="attributes" | "capacity" as group),
                slice=ast.Constant(value=str() as domain),
            ),
            attr=name,
        ):
            values: Mapping[str, Any] = device.attributes if group == "attributes" else device.capacity
            # As in CEL: the expression has no value for a device without the attribute.
            if f"{domain}/{name}" not in values:
                raise SelectorFailed(f"no such key: {name}")
            found = values[f"{domain}/{name}"]
            return Fraction(found.value) if isinstance(found, Capacity) else found
    raise NotImplementedError(ast.dump(node)[:80])


def _joined(node: ast.BoolOp, device: Device) -> bool:
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


def _compared(compared: ast.cmpop, left: Any, right: Any) -> bool:
    # A list of literals on the right, as in `device.driver in ['a', 'b']`.
    if isinstance(compared, ast.In):
        return left in _of_type(right, list)
    # CEL compares nothing of two types: an error and not false.
    right = _of_type(right, type(left))
    # Quantities and versions are ordered by compareTo alone.
    if not isinstance(compared, ast.Eq | ast.NotEq) and type(left) not in (int, str):
        raise SelectorFailed(f"{left!r:.80} has no order; use compareTo")
    return _OPERATORS[type(compared)](left, right)


def _of_type(value: Any, kind: type) -> Any:
    # type() and not isinstance: a bool is an int in Python.
    if type(value) is not kind:
        raise SelectorFailed(f"{value!r:.80} is compared with, or used as, another kind of value")
    return value


def whole(quantity: object, failure: type[Rejected] = Rejected) -> int:
    """Raises `failure`."""
    try:
        return whole_number(quantity, "a quantity")
    except Corrupt as error:
        raise failure(str(error)) from error
