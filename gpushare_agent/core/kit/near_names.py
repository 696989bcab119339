"""Finds the known name that a mistyped one was meant to be: for settings, options, commands, resources and annotations."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

AMONG_OWN = 0.6
"""How similar two names must be, 1 is equal: where every unknown name is a mistake."""
AMONG_OTHERS = 0.85
"""The same where other programs have names, too: tencent.com/gpu and tencent.com/vcuda-core have less in common."""


def nearest(name: str, known: Iterable[str], alike: float = AMONG_OWN) -> str:
    """The known name that is most like it; empty where none is."""
    # Sorted, because difflib takes the first of equally near names.
    found = get_close_matches(name, sorted(known), n=1, cutoff=alike)
    return found[0] if found else ""


def did_you_mean(name: str, known: Iterable[str], prefix: str = "") -> str:
    """The nearest among one's own names as the end of a message, empty where none is near."""
    found = nearest(name, known)
    return f" (did you mean {prefix}{found}?)" if found else ""
