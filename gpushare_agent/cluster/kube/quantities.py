"""Kubernetes quantities of extended resources: whole, not negative, at most 2**63 - 1.

Format: apimachinery's resource.Quantity, `<signedNumber><suffix>` with suffixes n u m k M G T P E, Ki Mi Gi Ti Pi Ei,
or a decimal exponent.
"""

from __future__ import annotations

import re
from fractions import Fraction

from gpushare_agent.model.errors import Corrupt

_QUANTITY = re.compile(
    r"([+-]?)([0-9]{1,40}\.?[0-9]{0,40}|\.[0-9]{1,40})(?:([numkMGTPE]|[KMGTPE]i)|[eE]([+-]?[0-9]{1,3}))?"
)
_DECIMAL_POWERS = {"n": -9, "u": -6, "m": -3, "k": 3, "M": 6, "G": 9, "T": 12, "P": 15, "E": 18}
_BINARY_POWERS = {"Ki": 10, "Mi": 20, "Gi": 30, "Ti": 40, "Pi": 50, "Ei": 60}
_MAX = 2**63 - 1
_PLAIN_DIGITS = 18


def whole_number(quantity: object, what: str) -> int:
    """The number of a quantity of an extended resource; JSON numbers are accepted as manifests write them.

    Raises:
        Corrupt: no quantity, not whole, negative, or beyond 64 bits; the text names `what`.
    """
    if isinstance(quantity, str) and quantity.isascii() and quantity.isdigit() and len(quantity) <= _PLAIN_DIGITS:
        return int(quantity)  # as nearly all are; the way below costs twenty times as much
    value = _value(quantity)
    if value is None:
        raise Corrupt(f"{what}: {_shown(quantity)} is no Kubernetes quantity")
    if value < 0:
        raise Corrupt(f"{what}: {_shown(quantity)} is negative")
    if value.denominator != 1 or value > _MAX:
        raise Corrupt(f"{what}: {_shown(quantity)} is no whole number of at most 64 bits")
    return value.numerator


def _value(quantity: object) -> Fraction | None:
    if isinstance(quantity, bool) or not isinstance(quantity, str | int | float):
        return None
    if isinstance(quantity, int):
        return Fraction(quantity)
    match = _QUANTITY.fullmatch(quantity if isinstance(quantity, str) else repr(quantity))
    if match is None:
        return None
    sign, number, suffix, exponent = match.groups()
    value = Fraction(number.rstrip(".")) * (-1 if sign == "-" else 1)
    if suffix in _BINARY_POWERS:
        return value * (1 << _BINARY_POWERS[suffix])
    power = int(exponent) if exponent else _DECIMAL_POWERS.get(suffix, 0)
    scale: int = 10 ** abs(power)
    return value * scale if power >= 0 else value / scale


def _shown(quantity: object) -> str:
    text = repr(quantity)
    return text if len(text) <= 80 else text[:79] + "…"
