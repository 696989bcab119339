"""The node of isolations' services: real states that a test holds, and nobody who hears what is said."""

from __future__ import annotations

from typing import Any

from gpushare_agent.agent.isolation.part import IsolationHost
from gpushare_agent.core.model.allocations import Allocation
from gpushare_agent.core.model.names import PodUid
from tests.support_core import allocation, container, ids, pod


def host_of(node: Any, **others: Any) -> IsolationHost:
    """`others` as IsolationHost has them."""

    def nobody(*_: object) -> None: ...

    given = {"warn": nobody, "note": nobody, "choose_again": nobody, "driver": None, "runtime": None, "cgroups": None}
    return IsolationHost(node=node, **given | {"volumes": {}} | others)


def add_share(node: Any, uid: PodUid, cores: int = 30, blocks: int = 8, **annotations: str) -> Allocation:
    """The node gets to know container `main` of a pod with so much of its first GPU."""
    owner = pod("share", container(cores=cores, blocks=blocks), uid=uid, annotations=annotations)
    made = allocation(owner, "main", ids(0, range(cores)), ids(0, range(blocks)))
    node.pods.upsert(owner)
    node.cache.put(made)
    return made
