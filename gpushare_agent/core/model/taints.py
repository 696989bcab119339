"""Taints keep a pod from a node, or a claim from a device; tolerations let it in. Format: Kubernetes core/v1."""

from __future__ import annotations

from msgspec import Struct


class Toleration(Struct):
    key: str | None = None
    operator: str | None = None
    value: str | None = None
    effect: str | None = None

    def tolerates(self, taint: Taint) -> bool:
        if self.effect not in (None, "", taint.effect) or self.key not in (None, "", taint.key):
            return False
        # Without a key it tolerates every taint, which Kubernetes allows with Exists alone.
        return self.operator == "Exists" or (bool(self.key) and (self.value or "") == (taint.value or ""))


class Taint(Struct, frozen=True):
    key: str
    effect: str
    value: str | None = None

    def __str__(self) -> str:
        return f"{self.key}{f'={self.value}' if self.value else ''}:{self.effect}"
