"""Our client of an API server, and makers of pods: as the API server has them, and parsed."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from gpushare_agent.agent.cluster.pod_store import PodStore
from gpushare_agent.core.kit.backoff import Backoff
from gpushare_agent.core.kube.client import KubeApi, open_kube_api
from gpushare_agent.core.kube.session import KubeTimeouts, ListLimits
from gpushare_agent.core.model.names import VCORE_RESOURCE, VMEMORY_RESOURCE
from gpushare_agent.core.model.pods import Pod
from tests import support_core
from tests.support_core import container
from tests.support_deadline import Changes

NODE = "node-1"
FAST = Backoff(base_s=0.005, cap_s=0.02)


class NotedBackoff(Backoff, frozen=True, kw_only=True):
    """Notes for which number of failures it was asked, and waits next to nothing."""

    base_s: float = 0.0
    cap_s: float = 0.0
    asked: list[int]

    def delay_s(self, failures: int) -> float:
        self.asked.append(failures)
        return 0.001


@asynccontextmanager
async def opened(
    url: str,
    *,
    timeouts: KubeTimeouts | None = None,
    user: dict[str, Any] | None = None,
    limits: ListLimits | None = None,
) -> AsyncIterator[KubeApi]:
    """Our client, configured by a kubeconfig file for that URL."""
    with kubeconfig_file(url, user) as kubeconfig:
        async with open_kube_api(kubeconfig=kubeconfig, timeouts=timeouts, limits=limits) as api:
            yield api


@contextmanager
def kubeconfig_file(url: str, user: dict[str, Any] | None = None) -> Iterator[Path]:
    """In a directory that is removed afterwards."""
    with TemporaryDirectory(prefix="gs", dir="/tmp") as directory:
        yield write_kubeconfig(Path(directory), url, user)


def write_kubeconfig(directory: Path, url: str, user: dict[str, Any] | None = None) -> Path:
    path = directory / "kubeconfig"
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "c",
        "contexts": [{"name": "c", "context": {"cluster": "k", "user": "u"}}],
        "clusters": [{"name": "k", "cluster": {"server": url}}],
        "users": [{"name": "u", "user": user or {"token": "secret"}}],
    }
    path.write_text(json.dumps(config))
    return path


def raw_pod(
    name: str = "p", *, uid: str = "", version: str = "1", cores: str | None = "30", **parts: Any
) -> dict[str, Any]:
    """A pod of the API with one container `main`; `parts` replace status, spec or add to metadata."""
    limits = {} if cores is None else {VCORE_RESOURCE: cores, VMEMORY_RESOURCE: "4", "cpu": "1"}
    main = {"name": "main", "image": "x", "resources": {"limits": limits}}
    metadata = {"name": name, "namespace": "default", "uid": uid or f"uid-{name}", "resourceVersion": version}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": metadata | parts.get("metadata", {}),
        "spec": {"nodeName": NODE, "containers": [main]} | parts.get("spec", {}),
        "status": {"phase": "Pending"} | parts.get("status", {}),
    }


def added(raw: dict[str, Any], kind: str = "ADDED") -> dict[str, Any]:
    return {"type": kind, "object": raw}


def bookmark(version: str) -> dict[str, Any]:
    return {"type": "BOOKMARK", "object": {"kind": "Pod", "metadata": {"resourceVersion": version}}}


def pod(name: str = "p", *, uid: str = "", version: str = "1", **fields: Any) -> Pod:
    """A parsed pod with one main container that asks for a share."""
    containers = fields.pop("containers", (container("main", 30),))
    return support_core.pod(name, *containers, uid=uid, resource_version=version, **({"node_name": NODE} | fields))


class Counted:
    """What was counted, in order; `wait` waits until there are so many."""

    def __init__(self) -> None:
        self.outcomes: list[str] = []
        self._changed = Changes()

    def note(self, outcome: str) -> None:
        self.outcomes.append(outcome)
        self._changed.set()

    async def wait(self, count: int) -> None:
        await self._changed.until(lambda: len(self.outcomes) >= count)


def pod_named(store: PodStore, name: str) -> Pod | None:
    return next((pod for pod in store.pods() if pod.name == name), None)


async def wait_store(store: PodStore, condition: Callable[[PodStore], bool]) -> None:
    await store.changes.wait_until(lambda: condition(store))


@asynccontextmanager
async def running(*bodies: Callable[[], Awaitable[Any]]) -> AsyncIterator[None]:
    """Runs endless bodies next to the test and cancels them at its end; one that fails fails the test."""
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(_awaited(body)) for body in bodies]
        yield
        for task in tasks:
            task.cancel()


async def _awaited(body: Callable[[], Awaitable[Any]]) -> None:
    await body()
