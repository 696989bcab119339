"""One promise of a program that this one follows, and what became of it.

Each such program has a module here with its PROMISES, by the titles of its tables; SOURCES in sources.py lists them. The
tables of the migration pages are made of the rows (tests/docs/generated.py), and test_promises.py has that each names a test
that exists.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum

from msgspec import Struct


class Verdict(Enum):
    """What of the promise is so here: all; something else serves its users; nothing."""

    KEPT = "kept"
    DIFFERENT = "different"
    NOT = "not"


class Promise(Struct, frozen=True, kw_only=True):
    """`source` is the file or section of the program that promises it, `have` what its users have, and `here` what they do
    with it or find in its place, both as cells of a table. `proof` is the test: `tests/FOLDER/FILE.py::NAME`."""

    source: str
    have: str
    here: str
    proof: str
    verdict: Verdict


Promises = Mapping[str, Sequence[Promise]]


SAME = "the same"


def kept(source: str, have: str, proof: str, here: str = SAME) -> Promise:
    """What users have works as it is."""
    return Promise(source=source, have=have, here=here, proof=proof, verdict=Verdict.KEPT)


def different(source: str, have: str, here: str, proof: str) -> Promise:
    """`here` says what differs, why, and what users do."""
    return Promise(source=source, have=have, here=here, proof=proof, verdict=Verdict.DIFFERENT)


def not_kept(source: str, have: str, here: str, proof: str = "") -> Promise:
    """`here` says why not. A proof has the line that users get; without one nothing tells them but the page."""
    return Promise(source=source, have=have, here=here, proof=proof, verdict=Verdict.NOT)


def tables(promises: Promises) -> str:
    """The tables of a page: what differs, with what to do. What is the same is no work, so it is named below."""
    lines: list[str] = []
    for title, rows in promises.items():
        lines += [f"### {title}", ""]
        told = sorted((row for row in rows if row.here != SAME), key=lambda row: row.verdict is Verdict.KEPT)
        if told:
            lines += ["| what you have | here |", "|---|---|"]
            lines += [f"| {row.have} | {'**not**: ' if row.verdict is Verdict.NOT else ''}{row.here} |" for row in told]
            lines.append("")
        if same := [row.have for row in rows if row.here == SAME]:
            lines += [f"**The same**: {' · '.join(same)}.", ""]
    return "\n".join(lines)
