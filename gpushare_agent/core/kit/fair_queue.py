"""A bounded queue that one tenant cannot fill for the others. State owned: what waits, in the order of the turns."""

from __future__ import annotations

from collections import OrderedDict, deque
from typing import Generic, TypeVar

T = TypeVar("T")

TURNS_OF_THE_LIMIT = 4
"""This many times `limit` tenants are remembered after their turn."""


class FairQueue(Generic[T]):
    """Tenants take turns, within a tenant its subjects (of a namespace the pods), and a subject's items keep their order.

    Where more than `limit` items wait, the newest item of the tenant with the most is dropped. Among equals it is a tenant
    that had a turn lately, so that somebody with more namespaces than `limit` keeps nobody new out; then the one that puts
    the item. A put takes time in proportion to `limit` then.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._len = 0
        self._tenants: OrderedDict[str, OrderedDict[str, deque[T]]] = OrderedDict()
        self._served: OrderedDict[str, None] = OrderedDict()
        """The tenants that had a turn lately, the last one at the end."""

    def __len__(self) -> int:
        return self._len

    def put(self, tenant: str, subject: str, item: T) -> T | None:
        """Puts the item; returns what is dropped for it, which may be the item itself. None where there is room."""
        # Put first, then dropped: what is dropped may be the item itself, where its tenant has most.
        self._tenants.setdefault(tenant, OrderedDict()).setdefault(subject, deque()).append(item)
        self._len += 1
        if self._len <= self._limit:
            return None
        # among equals the one whose turn is last
        name, subjects = max(
            reversed(self._tenants.items()),
            key=lambda one: (sum(map(len, one[1].values())), one[0] in self._served, one[0] == tenant),
        )
        of = max(reversed(subjects.items()), key=lambda one: (len(one[1]), (name, one[0]) == (tenant, subject)))[0]
        # The newest: a subject's first item says what began, later ones mostly repeat it.
        dropped = subjects[of].pop()
        self._taken(name, of)
        return dropped

    def pop(self) -> T:
        """The next item; its subject and its tenant have their next turn after the others. Raises KeyError: none waits."""
        if not self._len:
            raise KeyError("the queue is empty")
        name, subjects = next(iter(self._tenants.items()))
        subject, items = next(iter(subjects.items()))
        item = items.popleft()
        subjects.move_to_end(subject)
        self._tenants.move_to_end(name)
        self._taken(name, subject)
        self._served[name] = None
        self._served.move_to_end(name)
        # Bounded: namespaces come and go without end.
        if len(self._served) > TURNS_OF_THE_LIMIT * self._limit:
            self._served.popitem(last=False)
        return item

    def _taken(self, tenant: str, subject: str) -> None:
        self._len -= 1
        subjects = self._tenants[tenant]
        if not subjects[subject]:
            del subjects[subject]
        if not subjects:
            del self._tenants[tenant]
