"""The pods of each embedded node, and a wake-up for each: with twenty kubelets not every change is every kubelet's.

State owned: the index. It is fed with every change of the object store.
"""

from __future__ import annotations

from gpushare_agent.sandbox.api_store import Change, ObjectKey, RawObject, key_of
from gpushare_agent.sandbox.change_signal import ChangeSignal


class PodsByNode:
    def __init__(self) -> None:
        self._pods: dict[str, dict[ObjectKey, RawObject]] = {}
        self._signals: dict[str, ChangeSignal] = {}

    def of(self, node_name: str) -> list[RawObject]:
        """In the order in which they were bound."""
        return list(self._pods.get(node_name, {}).values())

    def signal_of(self, node_name: str) -> ChangeSignal:
        """Its count grows with every change of a pod of the node."""
        return self._signals.setdefault(node_name, ChangeSignal())

    def note(self, change: Change) -> None:
        if change.resource != "pods":
            return
        before, after = _node_name(change.before), _node_name(change.after)
        if before and before != after and change.before is not None:
            self._pods[before].pop(key_of(change.before), None)
        if after and change.after is not None:
            self._pods.setdefault(after, {})[key_of(change.after)] = change.after
        for name in sorted({before, after} - {""}):
            self.signal_of(name).notify()


def _node_name(raw: RawObject | None) -> str:
    return "" if raw is None else str(raw["spec"].get("nodeName") or "")
