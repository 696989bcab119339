"""Which nodes may have room for pods of one shape: what makes a replay of thousands of nodes quick.

A node that had no room has none until something on it ends. So a node that was found full is left out until then, and no
try looks at it twice. The rest stand in a ring: each try begins behind the last one's nodes, as kube-scheduler does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence


class Ring:
    """The mutable state is: the names in the ring, in order and as a set, and how many of them are behind the last try."""

    def __init__(self, eligible: Iterable[str]) -> None:
        self._eligible = frozenset(eligible)
        self._names = sorted(self._eligible)
        self._members = set(self._eligible)
        self._passed = 0

    def __len__(self) -> int:
        return len(self._names)

    def next(self, count: int) -> list[str]:
        """The next nodes, fewer only where the ring has fewer. `keep` has to follow before anything else."""
        if self._passed + count > len(self._names):
            self._names = self._names[self._passed :] + self._names[: self._passed]
            self._passed = 0
        return self._names[self._passed : self._passed + count]

    def keep(self, looked_at: Sequence[str], fitting: Sequence[str]) -> None:
        """Of the nodes that `next` gave only these stay in."""
        if len(fitting) != len(looked_at):
            kept = set(fitting)
            self._members.difference_update([name for name in looked_at if name not in kept])
            self._names[self._passed : self._passed + len(looked_at)] = fitting
        self._passed += len(fitting)

    def add(self, name: str) -> None:
        """Something on the node has ended: it may have room again."""
        if name not in self._members and name in self._eligible:
            self._members.add(name)
            self._names.append(name)

    def has_any(self, is_fit: Callable[[str], bool]) -> bool:
        """Whether a node fits. Those found not to are left out from now on."""
        first = next((position for position, name in enumerate(self._names) if is_fit(name)), len(self._names))
        self._members.difference_update(self._names[:first])
        del self._names[:first]
        return bool(self._names)
