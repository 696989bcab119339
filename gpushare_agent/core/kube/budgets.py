"""PodDisruptionBudgets: which pods may be evicted now, and how many. Pure. Format: Kubernetes policy/v1.

The rules are those of the API server's eviction: a pod of two budgets is never evicted, nor a pod of a budget when the
controller has not seen the budget's newest version.
"""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Raw, Struct, field
from msgspec.json import Decoder

from gpushare_agent.core.kit.json_schema import NULL, Entries, decoded, texts
from gpushare_agent.core.kube.objects import ObjectMeta
from gpushare_agent.core.kube.scheduling import Requirement
from gpushare_agent.core.kube.session import Watched

BUDGETS = Watched(what="the PodDisruptionBudgets", path="/apis/policy/v1/poddisruptionbudgets")


class Budget(Struct, frozen=True, kw_only=True):
    """`allowed` more pods of its namespace that its selector chooses may be evicted now."""

    namespace: str
    name: str
    labels: Mapping[str, str]
    requirements: tuple[Requirement, ...]
    allowed: int

    def covers(self, namespace: str, labels: Mapping[str, str]) -> bool:
        """An empty selector chooses every pod of the namespace."""
        return (
            namespace == self.namespace
            and all(labels.get(key) == value for key, value in self.labels.items())
            and all(one.holds(labels) for one in self.requirements)
        )


class _Selector(Struct, rename="camel"):
    raw_labels: Raw = field(name="matchLabels", default=NULL)
    raw_expressions: Raw = field(name="matchExpressions", default=NULL)
    expressions = Entries(Requirement, of="raw_expressions")


class _Spec(Struct):
    selector: _Selector | None = None


class _Status(Struct, rename="camel"):
    disruptions_allowed: int = 0
    observed_generation: int = 0


class _Meta(ObjectMeta, rename="camel"):
    generation: int = 0


class _Json(Struct, kw_only=True):
    metadata: _Meta
    spec: _Spec | None = None
    status: _Status | None = None


_BUDGET = Decoder(_Json)


def read_budget(raw: Raw) -> Budget | None:
    """None where it chooses no pod. Raises Corrupt: what cannot be read might forbid any eviction."""
    read = decoded(_BUDGET, raw, "PodDisruptionBudget")
    meta, selector, status = read.metadata, read.spec.selector if read.spec else None, read.status or _Status()
    if selector is None:
        return None
    return Budget(
        namespace=meta.namespace or "",
        name=meta.name or "",
        labels=texts(selector.raw_labels),
        requirements=tuple(selector.expressions),
        allowed=max(0, status.disruptions_allowed) if status.observed_generation >= meta.generation else 0,
    )
