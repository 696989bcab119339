"""A cluster of raw objects for advice about it: what is allocated on its nodes, its quota and its budgets."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from msgspec import Raw

from gpushare_agent.core.cli.command_line import CommandLine
from gpushare_agent.core.kube.client import ALL_NODES, LIVE_PODS
from gpushare_agent.core.kube.session import Watched
from gpushare_agent.core.model.errors import NotFound
from gpushare_agent.core.settings.settings import load_settings
from gpushare_agent.kubectl.cluster_reading import ReadCluster, read_cluster_view
from gpushare_agent.kubectl.plugin import PLUGIN_LINE
from tests.cli.support_cli import api_server, raw_list
from tests.support_json import undecoded

SETTINGS = load_settings([], {"NODE_NAME": "desk"}).settings
CORES, BLOCKS = "tencent.com/vcuda-core", "tencent.com/vcuda-memory"
MODEL = "gaia.tencent.com/gpu-model"
BLOCK_MIB = 256
T = TypeVar("T")
Object = dict[str, Any]


class Cluster:
    """Objects that an API server would list, by path. An extender keeps the quota."""

    def __init__(self, nodes: Sequence[Object], pods: Sequence[Object], quota: Mapping[str, Any] | None = None) -> None:
        self.nodes, self.pods, self.quota = list(nodes), list(pods), quota

    async def list_all(self, watched: Watched, read: Callable[[Raw], T | None]) -> tuple[list[T], str]:
        objects = {ALL_NODES.path: self.nodes, LIVE_PODS.path: [*self.pods, extender()]}.get(watched.path)
        if watched.path.endswith("/configmaps"):
            objects = [] if self.quota is None else [{"data": {"gpu_quota": json.dumps(self.quota)}}]
        if objects is None:
            raise NotFound(watched.what)
        return [found for one in objects if (found := read(undecoded(one))) is not None], "1"

    async def read(self) -> ReadCluster:
        return await read_cluster_view(self, SETTINGS)  # type: ignore[arg-type] # it lists, and no more is asked of it


async def ran(cluster: Cluster, directory: Path, *words: str, line: CommandLine = PLUGIN_LINE, **answers: Any) -> int:
    """A command of the plugin on an API server with the cluster and no quota, and with further `answers` by path."""
    lists = {
        "/api/v1/nodes": raw_list(cluster.nodes),
        "/api/v1/pods": raw_list(cluster.pods),
        "/api/v1/namespaces/kube-system/configmaps": raw_list([]),
    }
    async with api_server(directory, lists | answers) as (_, kubeconfig):
        return await asyncio.to_thread(line.main, [*words, kubeconfig], {})


def node(
    name: str,
    gpus: Sequence[int],
    *,
    held: Mapping[str, Mapping[int, Sequence[int]]] | None = None,
    cordoned: Sequence[int] = (),
    sick: Sequence[int] = (),
    labels: Mapping[str, str] | None = None,
    cpu: str = "64",
    **spec: Any,
) -> Object:
    """`gpus` are their memory blocks."""
    cards = [
        {
            "index": index,
            "uuid": f"GPU-{name}-{index}",
            "name": "A100",
            "memory_mib": blocks * BLOCK_MIB,
            "is_healthy": index not in sick and index not in cordoned,
            **({"cordoned": True} if index in cordoned else {}),
            **({"would_be_healthy": True} if index in cordoned and index not in sick else {}),
        }
        for index, blocks in enumerate(gpus)
    ]
    counts = {CORES: str(len(gpus) * 100), BLOCKS: str(sum(gpus)), "cpu": cpu, "memory": "64Gi", "pods": "110"}
    return {
        "metadata": {
            "name": name,
            "labels": {"kubernetes.io/hostname": name, **(labels or {})},
            "annotations": {
                "gpushare-agent/gpus": json.dumps({"schema": 1, "memory_block_mib": BLOCK_MIB, "gpus": cards}),
                "gpushare-agent/allocations": json.dumps({"schema": 1, "allocations": held or {}}),
            },
        },
        "spec": spec,
        "status": {"capacity": counts, "allocatable": counts},
    }


def pod(
    name: str,
    *requests: tuple[int, int],
    on: str = "",
    owner: str = "ReplicaSet",
    cpu: str = "1",
    said: str = "",
    **spec: Any,
) -> Object:
    """One container for each (cores, blocks). `said` is by the scheduler."""
    containers, conditions = [], [{"type": "PodScheduled", "status": "False", "message": said}] if said else []
    for number, (cores, blocks) in enumerate(requests):
        limits = {key: str(count) for key, count in ((CORES, cores), (BLOCKS, blocks)) if count} | {"cpu": cpu}
        containers.append({"name": f"c{number}", "resources": {"limits": limits, "requests": limits}})
    owners = [{"kind": owner, "name": "o", "uid": "o", "controller": True}] if owner else []
    return {
        "metadata": {
            "name": name, "namespace": "ns", "uid": name, "labels": {"app": name}, "ownerReferences": owners,
        },
        "spec": {"containers": containers, **({"nodeName": on} if on else {}), **spec},
        "status": {"phase": "Running" if on else "Pending", "conditions": conditions},
    }  # fmt: skip


def extender(*, is_ready: bool = True) -> Object:
    raw = pod("extender", on="elsewhere", owner="")
    raw["metadata"]["labels"] = {"app.kubernetes.io/name": "gpushare-agent-extender"}
    raw["status"]["conditions"] = [{"type": "Ready", "status": str(is_ready)}]
    return raw


def cards_of(raw: Object) -> list[Object]:
    found: list[Object] = json.loads(raw["metadata"]["annotations"]["gpushare-agent/gpus"])["gpus"]
    return found


def held_of(raw: Object) -> dict[str, dict[str, list[int]]]:
    found: dict[str, dict[str, list[int]]] = json.loads(raw["metadata"]["annotations"]["gpushare-agent/allocations"])[
        "allocations"
    ]
    return found


def set_held(raw: Object, held: Mapping[str, Mapping[Any, Sequence[int]]]) -> None:
    raw["metadata"]["annotations"]["gpushare-agent/allocations"] = json.dumps({"schema": 1, "allocations": held})
