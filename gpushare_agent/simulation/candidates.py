"""The nodes that may fit pods of one shape: this makes a replay of thousands of nodes quick.

A node that a pod does not fit stays so until a pod on it ends, and is left out until then. The others form a ring: each try
begins after the nodes of the last one, as in kube-scheduler.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence


class Ring:
    """State owned: the names in the ring, in order and as a set, and how many of them are behind the last try."""

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

    def keep(self, examined: Sequence[str], fitting: Sequence[str]) -> None:
        """Of the nodes that `next` gave only these stay in."""
        if len(fitting) != len(examined):
            kept = set(fitting)
            self._members.difference_update([name for name in examined if name not in kept])
            self._names[self._passed : self._passed + len(examined)] = fitting
        self._passed += len(fitting)

    def add(self, name: str) -> None:
        """A pod on the node has ended: others may fit again."""
        if name not in self._members and name in self._eligible:
            self._members.add(name)
            self._names.append(name)

    def has_any(self, is_fit: Callable[[str], bool]) -> bool:
        """Whether a node fits. Those found not to are left out from now on."""
        first = next((position for position, name in enumerate(self._names) if is_fit(name)), len(self._names))
        self._members.difference_update(self._names[:first])
        del self._names[:first]
        return bool(self._names)
