"""The whole agent on the embedded node, for tests of faults: opened in this process or as a child, killed at any moment
of the kubelet's conversation, and compared with what the kubelet has on record and what containers really hold."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aiohttp import ClientSession
from msgspec.structs import replace

from gpushare_agent.agent.auto_isolation import resolve_isolation
from gpushare_agent.agent.composition import NodeAgent, build
from gpushare_agent.agent.dra.claim_files import ClaimFiles
from gpushare_agent.agent.dra.decisions.edits import PreparedClaim, prepare_claim
from gpushare_agent.agent.gpus.simulated.driver import simulated_uuid
from gpushare_agent.agent.program import run_generation
from gpushare_agent.core.claims.claim import read_claim
from gpushare_agent.core.model.device_ids import DeviceIds
from gpushare_agent.core.model.names import GpuUuid
from gpushare_agent.core.model.resources import ResourceKind
from gpushare_agent.core.settings.settings import load_settings
from tests.dra.support_claims import NODE, edit_policy, raw_claim, result
from tests.sandbox.support_sandbox import Held, NodeUnderTest
from tests.settings.support_settings import clean_environment
from tests.support_core import inventory, used_cores
from tests.support_deadline import DEADLINE_S as DEADLINE_S  # noqa: PLC0414 - exported on
from tests.support_deadline import poll_until as poll_until  # noqa: PLC0414
from tests.support_json import undecoded
from tests.support_process import running_process


@dataclass(frozen=True, slots=True)
class InnerAgent:
    """An agent in this process. `task` is its life: to cancel it is to end the agent."""

    parts: NodeAgent
    task: asyncio.Task[None]

    def count(self, name: str, **labels: str) -> float:
        """The sum of a counter of /metrics over the labels that are not given, 0 where it was never counted."""
        families = self.parts.node.metrics.registry.collect()
        samples = (one for family in families for one in family.samples if one.name == name)
        return sum(one.value for one in samples if labels.items() <= one.labels.items())

    async def page(self, path: str) -> tuple[int, str]:
        """Status and text of a page of its web port."""
        return await _page(await self.parts.observability.web.wait_listening(), path)

    def held(self) -> Held:
        """The ledger: what each container holds, as the kubelet names it."""
        ids = DeviceIds(gpu.uuid for gpu in self.parts.node.gpus().gpus)
        return {
            (a.key.pod_uid, a.key.container): (
                frozenset(map(ids.write, a.ids_of(ResourceKind.VCORE))),
                frozenset(map(ids.write, a.ids_of(ResourceKind.VMEMORY))),
            )
            for a in self.parts.node.cache
        }

    def holders_of(self, kind: ResourceKind = ResourceKind.VCORE) -> int:
        """How many IDs of the resource are held."""
        return len(self.parts.node.cache.holders(kind))

    def uuid_of(self, index: int) -> str:
        return str(self.parts.node.inventory.current.gpus[index].uuid)

    def used_by_gpu(self) -> dict[str, int]:
        return {str(gpu): cores for gpu, cores in used_cores(self.parts.node.cache).items()}


@asynccontextmanager
async def open_agent(
    node: NodeUnderTest, *flags: str, wait: bool = True, list_timeout_s: float = DEADLINE_S
) -> AsyncIterator[InnerAgent]:
    """An agent in this process, registered, its pods listed, the kubelet's version read and its devices allocatable, unless
    `wait` is false.

    `list_timeout_s` bounds a PodResources List: a process that holds agents, kubelet and API server may stand still for
    longer than the second that an agent allows, and than the five of an admission.
    """
    found = await resolve_isolation(load_settings(node.arguments(*flags), {}).settings)
    parts = build(found)
    parts.kubelet.gate.list_timeout_s = list_timeout_s
    for resource in parts.kubelet.registrar._resources:
        resource.endpoint.plugin.call_timeout_s = DEADLINE_S
    parts.node.cache.subscribe(lambda old, new: node.api.signal.notify())
    parts.node.pods.subscribe(lambda old, new: node.api.signal.notify())
    async with asyncio.TaskGroup() as group:
        agent = InnerAgent(parts, group.create_task(run_generation(parts), name="agent"))
        try:
            if wait:
                # What the kubelet shows may be of an agent that has just ended.
                await poll_until(lambda: not parts.kubelet.not_ready(), "both resources registered")
                await node.wait_registered()
                await wait_synced(parts)
                await parts.kubelet.facts.wait_known(timeout_s=DEADLINE_S)
            yield agent
        finally:
            agent.task.cancel()
            await asyncio.wait({agent.task})


async def _page(port: int, path: str) -> tuple[int, str]:
    async with ClientSession() as session, session.get(f"http://127.0.0.1:{port}{path}") as answer:
        return answer.status, await answer.text()


async def page_of_child(node: NodeUnderTest, path: str) -> tuple[int, str]:
    """Status and text of a page of the newest child's web port."""
    await poll_until(lambda: node.log_lines("web_listening"), "the web port")
    return await _page(node.log_lines("web_listening")[-1]["port"], path)


@asynccontextmanager
async def open_child(
    node: NodeUnderTest,
    *flags: str,
    wait: bool = True,
    stderr: int | None = None,
    program: Sequence[str] = ("-m", "gpushare_agent"),
) -> AsyncIterator[asyncio.subprocess.Process]:
    """An agent as a process of its own, its log in the node's `agent.log` or `stderr`; killed at the end if it runs.

    `wait`: until it is registered and, as far as its log can be read, has listed its pods and read the kubelet's version.
    """
    before = {event: len(node.log_lines(event)) for event in ("ready", "kubelet_version") if stderr is None}
    with node.paths.agent_log.open("ab") as log:
        async with running_process(
            *(sys.executable, *program, "run", *node.arguments(*flags)),
            env=clean_environment(),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=log,
            stderr=log if stderr is None else stderr,
        ) as child:
            if wait:
                await node.wait_registered()
                for event, count in before.items():
                    await poll_until(lambda: len(node.log_lines(event)) > count, event)  # noqa: B023 - in this turn
            yield child


# --- moments ---


class _Reported(list[Any]):
    """A list that tells of each entry at once, before whoever made it goes on."""

    def __init__(self, before: Sequence[Any], tell: Callable[[Any], None]) -> None:
        super().__init__(before)
        self._tell = tell

    def append(self, entry: Any) -> None:
        super().append(entry)
        self._tell(entry)


class Moments:
    """Names the moments of the kubelet's conversation as they come, and does something at one of them.

    `Method asked` is before a call is sent, `Method answered` before the kubelet goes on with the answer, `List` after a
    List has come and before it is answered. Only calls about pods named in `pods` count, all where it is empty.
    """

    def __init__(self, node: NodeUnderTest, *pods: str) -> None:
        self.seen: list[str] = []
        self._pods = pods
        self._acts: dict[int, Callable[[], object]] = {}
        self._next: tuple[str, Callable[[], object]] | None = None
        calls = node.calls
        calls.open_calls = _Reported(calls.open_calls, lambda call: self._note(call.pod_name, call.method, "asked"))
        calls.calls = _Reported(calls.calls, lambda call: self._note(call.pod_name, call.method, "answered"))
        calls.pod_resources_calls = _Reported(calls.pod_resources_calls, self._listed)

    def at(self, number: int, act: Callable[[], object]) -> None:
        """Do this at the moment of that number, counted from 0."""
        self._acts[number] = act

    def at_next(self, moment: str, act: Callable[[], object]) -> None:
        """Do this when a moment of that name comes next."""
        self._next = (moment, act)

    def _listed(self, call: Any) -> None:
        inside = [c for c in call.inside if not self._pods or c.pod_name in self._pods]
        if inside and call.method == "List":
            self._tell("List")

    def _note(self, pod: str, method: str, what: str) -> None:
        if not self._pods or pod in self._pods:
            self._tell(f"{method} {what}")

    def _tell(self, moment: str) -> None:
        number = len(self.seen)
        self.seen.append(moment)
        if (act := self._acts.pop(number, None)) is not None:
            act()
        if self._next is not None and self._next[0] == moment:
            act, self._next = self._next[1], None
            act()


async def wait_synced(parts: NodeAgent) -> None:
    """The API server has listed the node's pods once."""
    await parts.node.pods.changes.wait_until(lambda: parts.node.pods.is_synced, DEADLINE_S)


def write_faults(
    path: Path, *, lost: dict[str, str] | None = None, all_lost: str = "", mig: dict[str, list[str]] | None = None
) -> None:
    """The simulated driver's faults, replaced in one step."""
    new = path.with_suffix(".new")
    new.write_text(json.dumps({"lost": lost or {}, "all_lost": all_lost, "mig": mig or {}}))
    new.replace(path)


def counted_for_costs(agent: InnerAgent) -> bool:
    """Whether it counts GPU-seconds of any container."""
    return any("".join(series.lines) for series in agent.parts.observability.consumption.series())


def record_claim(node: NodeUnderTest, isolation: str = "none") -> None:
    """As an earlier agent left it: 40 cores of the first GPU. Files, if the isolation has any, are in /etc/gpu-manager."""
    gpu = replace(inventory(1).gpus[0], uuid=GpuUuid(simulated_uuid(node.name, 0)))
    claim = read_claim(undecoded(raw_claim(result())), pool=NODE)
    made = prepare_claim(claim, {"gpu-0": gpu}, (), edit_policy(isolation), 256)
    assert isinstance(made, PreparedClaim)
    ClaimFiles(node.paths.claim_records, node.paths.cdi).save(made)
