"""Whether the node can give shares at all, at the agent's start: what `gpushare-agent check` calls an error for them; and
whether the kubelet has registered the driver of claims and the API server has its ResourceSlice.

A rollout stops at a node whose agent is not Ready, and an incoming instance that could give no share leaves the kubelet
to the agent that serves. Once nothing is in the way it stays so: what an isolation needs may go and come while the agent
runs (isolation/part.py), and an agent that is not Ready would be ended at once, without a handover. State owned:
what is in the way.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import structlog

from gpushare_agent.agent.delivery.cdi_specs import CdiWatch
from gpushare_agent.agent.gpus.part import NodeDriver
from gpushare_agent.agent.isolation.isolations import Isolations
from gpushare_agent.agent.kubelet.records import LEFT_REMEDY, KubeletCheckpoint, describe_left, vdevices
from gpushare_agent.agent.node import Node
from gpushare_agent.agent.runtime.node_probes import connect_to_socket
from gpushare_agent.core.kit.supervision import bounded
from gpushare_agent.core.model.errors import AgentError, Unavailable
from gpushare_agent.core.model.gpus import Gpu

if TYPE_CHECKING:
    from gpushare_agent.agent.dra.part import DraPart

log = structlog.get_logger(__name__)

PERIOD_S = 2.0
CONNECT_TIMEOUT_S = 5.0
Look = Callable[[], Awaitable[object]]


class ShareReadiness:
    """`looks` by what they look at: each is bounded, changes nothing on the node, and raises AgentError with the
    remedy. `claims` is None where no GPU is for claims."""

    def __init__(self, looks: Mapping[str, Look], *, claims: DraPart | None = None) -> None:
        self._looks = looks
        self._claims = claims
        self._problems: tuple[str, ...] = ("what shares need on this node has not been looked at yet",)
        self.period_s = PERIOD_S
        self.is_met = asyncio.Event()
        """Shares and claims can be given, or could be once."""

    def not_ready(self) -> list[str]:
        """Why this is not so, nothing where it is."""
        if self.is_met.is_set():
            return []
        return [*self._problems, *(self._claims.not_served() if self._claims is not None else ())]

    def take_over(self, previous: ShareReadiness) -> None:
        """Begins as Ready where the generation before the reload was."""
        if previous.is_met.is_set():
            self.is_met.set()

    async def look(self) -> bool:
        """Whether shares can be given, looked at now where they could not before."""
        if self.is_met.is_set() or not self._problems:
            # Never asked again: a rollout ends an agent that is not Ready, at once and without a handover.
            return True
        problems = tuple(
            [f"{name}: {problem}" for name, one in self._looks.items() if (problem := await problem_of(one))]
        )
        # Every two seconds the same would fill the log.
        if problems and problems != self._problems:
            log.error("no_shares_possible", problems=problems, then="the agent is not Ready before they are")
        self._problems = problems
        return not problems

    async def run(self) -> None:
        """Looks until it is met."""
        while not await self.look():  # noqa: ASYNC110 - a file system notifies nobody of what it lets be written
            await asyncio.sleep(self.period_s)
        if self._claims is not None:
            await self._claims.wait_served()
        self.is_met.set()


async def problem_of(look: Look) -> str:
    try:
        await look()
    except AgentError as e:
        return str(e)
    return ""


def build(
    node: Node, isolation: Isolations, driver: NodeDriver, claims: DraPart | None, records: KubeletCheckpoint
) -> ShareReadiness:
    """What shares need other than GPUs: the kubelet's PodResources socket, what each isolation needs, CDI names, the NVLink
    fabric, and that no running container has its files in an earlier directory."""
    socket = node.settings.kubelet.pod_resources_socket
    return ShareReadiness(
        {
            **({"kubelet.pod_resources_socket": partial(_connect, socket)} if socket is not None else {}),
            **isolation.looks(),
            "cdi": partial(_look_for_names, isolation.cdi_watch, node, driver),
            "NVLink fabric": partial(_look_at_fabric, node, driver),
            "containers": partial(_look_for_left, node, records, claims),
        },
        # Claims that an earlier agent has left are served without the right to publish more.
        claims=claims if node.settings.has_claims else None,
    )


async def _connect(socket: Path) -> None:
    """Connects and sends nothing: a List could disturb an admission of the agent that serves. Raises Unavailable."""
    async with bounded(CONNECT_TIMEOUT_S, f"{socket} does not answer within {CONNECT_TIMEOUT_S:g} s"):
        await connect_to_socket(socket)


async def _look_for_names(watch: CdiWatch | None, node: Node, driver: NodeDriver) -> None:
    """Looks whether CDI has the names of the GPUs. Raises Unavailable."""
    if watch is not None and (gpus := await _gpus(node, driver)):
        await watch.look(gpus)


async def _look_at_fabric(node: Node, driver: NodeDriver) -> None:
    """Raises Unavailable where no GPU has joined its NVLink fabric; one of several costs itself alone."""
    gpus = await _gpus(node, driver)
    if gpus and all(gpu.has_joined is False for gpu in gpus):
        raise Unavailable(f"no GPU can be given; of GPU {gpus[0].label}: {gpus[0].unhealthy_reason}")


async def _look_for_left(node: Node, records: KubeletCheckpoint, claims: DraPart | None) -> None:
    """Raises Unavailable where containers run whose files another directory has: the agent that serves keeps them."""
    found = await claims.claims.vdevices() if claims is not None else {}
    try:
        entries = await records.read()
    except AgentError:
        entries = ()  # a new kubelet has no record
    # The record also has pods that have ended since the last Allocate. Not before it is read: the pods may come meanwhile.
    pods = node.pods
    running = {pod.uid for pod in pods.pods() if not pod.is_terminal}
    found |= vdevices(one for one in entries if one.pod_uid in running or not pods.is_synced)
    if left := describe_left(found, node.settings.virtual_manager.path):
        raise Unavailable(f"{left}; {LEFT_REMEDY}")


async def _gpus(node: Node, driver: NodeDriver) -> Sequence[Gpu]:
    gpus = node.gpus().gpus
    # An agent that does not serve yet has an empty inventory.
    if not gpus:
        try:
            gpus = (await driver.read()).gpus
        except AgentError:
            return ()  # `fail_on_init_error` says whether the agent starts without a driver
    return gpus
