"""Several embedded nodes on one API server, with one scheduler: what a scheduler extender can be tried on.

The agents and the extender are not part of it: give each node's `agent_arguments()` to an agent, and the address of the
extender to `open_embedded_cluster`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from msgspec import Struct

from gpushare_agent.sandbox.api.access import make_certificate
from gpushare_agent.sandbox.api.server import EmbeddedApiServer
from gpushare_agent.sandbox.behaviour import KubeletTimes
from gpushare_agent.sandbox.node import EmbeddedNode, open_node_on, running_task
from gpushare_agent.sandbox.pod_controllers import PodControllers
from gpushare_agent.sandbox.scheduler.extender_calls import open_extender_calls
from gpushare_agent.sandbox.scheduler.extender_scheduler import ExtenderScheduler, SchedulerTimes
from gpushare_agent.sandbox.scheduler.node_fit import EmbeddedScheduler
from gpushare_agent.sandbox.state_directory import NodePaths, prepare_state_directory

_HISTORY = 20_000
"""Changes that a watch may lag behind: with many nodes a moment has more of them."""


class EmbeddedCluster(Struct, frozen=True, kw_only=True):
    """Running nodes, in the order of their names as given. `paths` are those of the whole, not of a node."""

    paths: NodePaths
    api: EmbeddedApiServer
    nodes: tuple[EmbeddedNode, ...]


def paths_of_node(whole: NodePaths, name: str, count: int) -> NodePaths:
    """A single node lies in the state directory itself, several in a directory of their name below."""
    return whole if count == 1 else NodePaths(state=whole.state / name)


@asynccontextmanager
async def open_embedded_cluster(
    state: Path,
    *,
    node_names: Sequence[str],
    extender_url: str = "",
    kubelet_version: str = "1.36",
    seed: int = 0,
    times: KubeletTimes | None = None,
    scheduler_times: SchedulerTimes | None = None,
) -> AsyncIterator[EmbeddedCluster]:
    """The nodes run until the block ends.

    With `extender_url`, the prefix before the verbs, the scheduler asks the extender there; it may come later: pods wait
    until it answers. Raises StartupError.
    """
    paths = prepare_state_directory(state)
    certificate = await asyncio.to_thread(make_certificate, paths.state)
    async with AsyncExitStack() as stack:
        api = await stack.enter_async_context(
            EmbeddedApiServer(version=kubelet_version, seed=seed, history_limit=_HISTORY, certificate=certificate)
        )
        api.write_kubeconfig(paths.kubeconfig)
        await stack.enter_async_context(running_task("pod controllers", PodControllers(api).run))
        await stack.enter_async_context(_scheduling(api, extender_url, scheduler_times, seed))
        nodes = []
        for number, name in enumerate(node_names):
            own = prepare_state_directory(paths_of_node(paths, name, len(node_names)).state)
            opened = open_node_on(
                api, own, node_name=name, kubelet_version=kubelet_version, seed=seed + number, times=times, cgroups=None
            )  # fmt: skip
            nodes.append(await stack.enter_async_context(opened))
        yield EmbeddedCluster(paths=paths, api=api, nodes=tuple(nodes))


@asynccontextmanager
async def _scheduling(
    api: EmbeddedApiServer, extender_url: str, times: SchedulerTimes | None, seed: int
) -> AsyncIterator[None]:
    if not extender_url:
        async with running_task("scheduler", EmbeddedScheduler(api=api).run):
            yield
        return
    async with (
        open_extender_calls(extender_url) as extender,
        running_task("scheduler", ExtenderScheduler(api=api, extender=extender, times=times, seed=seed).run),
    ):
        yield
