"""A place for an API that is opened after its users were built.

The agent registers with the kubelet first and opens the API server's client later; services are made before that, take
orders at once, and wait here for the door. One value, put once (a second put replaces it).
"""

from __future__ import annotations

import asyncio
from typing import Generic, TypeVar

T = TypeVar("T")


class ApiSlot(Generic[T]):
    """`get` waits until `put` was called; the caller bounds the wait where it matters."""

    def __init__(self, value: T | None = None) -> None:
        self._value: T | None = None
        self._is_filled = asyncio.Event()
        if value is not None:
            self.put(value)

    def put(self, value: T) -> None:
        self._value = value
        self._is_filled.set()

    async def get(self) -> T:
        while self._value is None:
            await self._is_filled.wait()
        return self._value
