"""Reads the JSON of one request part by part, so that the event loop may run other tasks between two parts.

What is decoded at once is PART_CHARS at most: the time for which the loop waits does not depend on a request's length. A
thread would not help: Python's decoder keeps the interpreter's lock. What the parts mean is messages.py's. State owned: the
place in one request.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from json.decoder import scanstring  # type: ignore[attr-defined]  # undocumented, in C
from typing import Any

from gpushare_agent.model.errors import Corrupt

FREE_VALUES = 10_000
BYTES_OF_A_VALUE = 16
"""Of a longer request, on average and at least: real ones have 20 and more. What is made of small ones only, such as empty
objects, takes 35 times its size in memory, and is refused before it is decoded."""
PART_CHARS = 1024 * 1024
"""Of a pod, a node, or the list of names: 20,000 names of 50 characters, 256 containers of 4 KiB each. The costliest takes
40 ms to decode."""
TRIED_CHARS = (2 * 1024, 32 * 1024, PART_CHARS)
"""Lengths of text given to Python's decoder, which takes no end position, one after the other until a value is complete."""
STEP_CHARS = 32 * 1024
"""Decoded in one step, where parts are small; some milliseconds."""
MAX_FIELDS = 64
"""Of a request's top level, whose names are folded one by one."""

_DECODER = json.JSONDecoder()
_BLANKS = re.compile(r"[ \t\r\n]*")


class JsonReader:
    """Reads the JSON of one request from its beginning to its end. `what` names it in errors; all raise Corrupt."""

    def __init__(self, content: bytes, what: str) -> None:
        values = sum(map(content.count, (b",", b"{", b"[")))  # at least so many, and those in texts
        if values > FREE_VALUES + len(content) // BYTES_OF_A_VALUE:
            raise Corrupt(f"{what}: {values} values in {len(content)} bytes are no scheduler's request")
        self._what = what
        try:
            self._text = content.decode("utf-8")
        except UnicodeDecodeError as e:
            raise self._malformed(str(e)) from e
        self._at = self._step_began = 0

    def fields(self) -> Iterator[str]:
        """The names of an object's fields in small letters; the caller reads the value of each before the next."""
        for number, key in enumerate(self.entries(), start=1):
            if number > MAX_FIELDS:
                raise Corrupt(f"{self._what}: more than {MAX_FIELDS} fields are no scheduler's request")
            yield key.lower()

    def entries(self) -> Iterator[str]:
        """An object's keys, unchanged and of any number; as `fields` otherwise."""
        if self.next_char() != "{":
            self.part()
            raise Corrupt(f"{self._what}: is not an object")
        for _ in self._members("}"):
            key = self.part()
            if not isinstance(key, str) or self.next_char() != ":":
                raise self._malformed(f"a field is expected at {self._at}")
            self._at += 1
            yield key

    def elements(self) -> Iterator[int]:
        """Positions in a list; the caller reads the value of each before the next."""
        return self._members("]")

    def _members(self, closing: str) -> Iterator[int]:
        self._at += 1
        if self.next_char() == closing:
            self._at += 1
            return
        number = 0
        while True:
            yield number
            number += 1
            char = self.next_char()
            if char not in ("," + closing) or not char:
                raise self._malformed(f"{closing} or a comma is expected at {self._at}")
            self._at += 1
            if char == closing:
                return

    def part(self) -> Any:
        """One value of at most PART_CHARS."""
        return self.part_and_text()[0]

    def part_and_text(self) -> tuple[Any, str]:
        """The value and its JSON; the JSON of a string is left empty."""
        if self.next_char() == '"':  # a text needs no bound: a mebibyte of escapes takes 3 ms
            return self._string(), ""
        for most in TRIED_CHARS:
            text = self._text[self._at : self._at + most]
            try:
                value, end = _DECODER.raw_decode(text)
            except (ValueError, RecursionError) as e:
                if len(text) < most or isinstance(e, RecursionError):
                    raise self._malformed(str(e)) from e
                continue
            self._at += end
            return value, text[:end]
        raise Corrupt(f"{self._what}: one value at {self._at} is longer than {PART_CHARS} characters, or malformed")

    def _string(self) -> str:
        value: str
        try:
            value, self._at = scanstring(self._text, self._at + 1)
        except ValueError as e:
            raise self._malformed(str(e)) from e
        return value

    def next_char(self) -> str:
        """The next character that is no blank; empty at the end."""
        found = _BLANKS.match(self._text, self._at)
        self._at = found.end() if found else self._at
        return self._text[self._at : self._at + 1]

    def end(self) -> None:
        if self.next_char():
            raise self._malformed(f"more follows at {self._at}")

    def is_step(self) -> bool:
        """Whether enough was read since the last step."""
        if self._at - self._step_began < STEP_CHARS:
            return False
        self._step_began = self._at
        return True

    def _malformed(self, error: str) -> Corrupt:
        return Corrupt(f"{self._what}: the request is no JSON ({error})")
