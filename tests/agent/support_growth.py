"""A built agent whose node has many running shares, and a count of what one step of another pod's life takes.

No loop of the agent runs: a test takes the steps that it counts. Real are all parts that `build` joins; only the kubelet's
PodResources socket is replaced by a channel that answers with bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from uuid import NAMESPACE_DNS, uuid5

from msgspec.structs import replace

from gpushare_agent.agent.auto_isolation import NodeSettings
from gpushare_agent.agent.composition import NodeAgent, build
from gpushare_agent.agent.kubelet.device_plugin import DevicePlugin
from gpushare_agent.core.kit.protobuf import bytes_field, integer_field, string_list
from gpushare_agent.core.model.allocations import Allocation, ContainerKey
from gpushare_agent.core.model.device_ids import DeviceIds
from gpushare_agent.core.model.names import VCORE_RESOURCE, VMEMORY_RESOURCE, PodUid, device_id
from gpushare_agent.core.model.pods import ContainerKind, Pod, PodPhase
from gpushare_agent.core.model.resources import ResourceKind
from gpushare_agent.core.settings.settings import load_settings
from gpushare_agent.core.wire.v1beta1 import PreferredAllocationRequest
from tests.support_core import container, pod
from tests.support_steps import Steps, counted

NODE, GPUS, CORES, BLOCKS = "node", 16, 1, 2
RESOURCES = (VCORE_RESOURCE, VMEMORY_RESOURCE)


def uid_of(name: str) -> PodUid:
    """One that the API server could have given, and so the name of a cgroup could have in it."""
    return PodUid(str(uuid5(NAMESPACE_DNS, name)))


def grown(few: dict[str, Steps], many: dict[str, Steps], allowed: dict[str, int]) -> str:
    """The steps of a pod's life that take more on the node with many shares: by more than a hundredth, and what is
    `allowed` more. Empty where none does."""
    found = []
    for step, steps in many.items():
        more = steps.more_than(few[step])
        if sum(more.values()) > few[step].count / 100 + allowed.get(step, 0):
            found.append(f"{step}: {few[step].count} grew by {sum(more.values())}: {dict(list(more.items())[:12])}")
    return "\n".join(found)


class _Channel:
    """The kubelet's PodResources, which lists what the agent's ledger has and the `admitted` pod, and each time pods and
    their devices in another order. `shares` are in both orders."""

    def __init__(self) -> None:
        self.shares: tuple[list[bytes], list[bytes]] = ([], [])
        self.admitted = b""
        self._lists = 0

    async def unary(self, method: str, request: bytes, kind: type) -> bytes:
        self._lists += 1
        pods, half = self.shares[self._lists % 2], len(self.shares[0]) // 2
        return b"".join((*pods[half:], self.admitted, *pods[:half]))

    def close(self) -> None: ...


class CrowdedNode:
    """An agent with `shares` running containers of 1 core and 2 memory blocks each, spread over 16 GPUs."""

    def __init__(self, agent: NodeAgent, channel: _Channel) -> None:
        self.agent = agent
        self._channel = channel

    @classmethod
    async def open(cls, shares: int, directory: Path, *flags: str) -> CrowdedNode:
        arguments = [
            "--driver=simulated", f"--simulated.gpus={GPUS}", "--simulated.gpu-memory-mib=81920", f"--node-name={NODE}",
            f"--root={directory}", f"--runtime.cgroup-root={directory}/cgroup", f"--runtime.proc-root={directory}/proc",
            "--web.port=0", "--isolation=none", *flags,
        ]  # fmt: skip
        settings = load_settings(arguments, {}).settings
        agent = build(NodeSettings(settings=settings))
        await agent.gpus.offer(await agent.gpus.read())
        agent.kubelet.tables.refresh()
        agent.kubelet.facts._read_version("v1.36.2")
        agent.kubelet.calls.open(agent.kubelet.admission)
        node = cls(agent, _Channel())
        agent.kubelet.pod_resources._channels["List"] = node._channel  # type: ignore[assignment]
        node._fill(shares)
        return node

    def _fill(self, shares: int) -> None:
        gpus, store = self.agent.node.gpus().gpus, self.agent.node.pods
        store.replace_all([
            self.pod(f"share-{n}", phase=PodPhase.RUNNING, has_started=True, running=frozenset({"main"}))
            for n in range(shares)
        ])  # fmt: skip
        for n in range(shares):
            uuid, own = gpus[n % GPUS].uuid, n // GPUS
            cores = frozenset(device_id(uuid, own * CORES + one) for one in range(CORES))
            blocks = frozenset(device_id(uuid, own * BLOCKS + one) for one in range(BLOCKS))
            share = Allocation(
                key=ContainerKey(uid_of(f"share-{n}"), "main"),
                namespace="default",
                pod_name=f"share-{n}",
                kind=ContainerKind.MAIN,
                gpus=(uuid,),
                ids={ResourceKind.VCORE: cores, ResourceKind.VMEMORY: blocks},
            )
            self.agent.node.cache.put(share)
            self._channel.shares[0].append(self._listed(share))
            self._channel.shares[1].insert(0, self._listed(share, is_backwards=True))

    def pod(self, name: str, **changes: object) -> Pod:
        return pod(name, container(cores=CORES, blocks=BLOCKS), uid=uid_of(name), resource_version="1", **changes)

    def _plugin(self, resource: str) -> DevicePlugin:
        return next(
            one.endpoint.plugin
            for one in self.agent.kubelet.registrar._resources
            if one.endpoint.plugin.resource == resource
        )

    def _listed(self, share: Allocation, *, is_backwards: bool = False) -> bytes:
        """The pod as a List answer has it."""
        ids: DeviceIds = self._plugin(VCORE_RESOURCE).ids
        devices = [
            bytes_field(2, bytes_field(1, name.encode()) + bytes_field(2, ids.write(one).encode()))
            for name, kind in zip(RESOURCES, (ResourceKind.VCORE, ResourceKind.VMEMORY), strict=True)
            for one in sorted(share.ids_of(kind))
        ]
        if is_backwards:
            devices.reverse()
        body = bytes_field(1, share.pod_name.encode()) + bytes_field(2, share.namespace.encode())
        return bytes_field(1, body + bytes_field(3, bytes_field(1, share.key.container.encode()) + b"".join(devices)))

    async def admit(self, admitted: Pod, order: tuple[str, ...] = RESOURCES) -> dict[str, Steps]:
        """What the kubelet does: List and GetPreferredAllocation, then Allocate, of each resource; the steps of each call.
        The pod is in the pod store already."""
        found: dict[str, Steps] = {}
        nothing = Allocation(
            key=ContainerKey(admitted.uid, "main"),
            namespace=admitted.namespace,
            pod_name=admitted.name,
            kind=ContainerKind.MAIN,
            gpus=(),
        )
        for resource in order:
            plugin, size = self._plugin(resource), admitted.containers[0].requests[resource]
            holders = self.agent.node.cache.holders(self.agent.node.names.by_name[resource])
            free = [row.id for row in plugin.table.devices if not holders.get(plugin.ids.read([row.id])[0])]
            held = self.agent.node.cache.get(ContainerKey(admitted.uid, "main"))
            self._channel.admitted = self._listed(held or nothing)
            request = bytes_field(1, string_list(1, free) + integer_field(3, size))
            with counted() as steps:
                [asked] = plugin.decoders[PreferredAllocationRequest](request)
                chosen, _ = await plugin._prefer(asked, float("inf"))
            found[f"GetPreferredAllocation {resource}"] = steps
            with counted() as steps:
                await plugin._allocate(plugin.ids.read(chosen))
            found[f"Allocate {resource}"] = steps
        return found

    def start(self, admitted: Pod) -> Pod:
        """The pod as the watch shows it once its container runs."""
        return replace(
            admitted, phase=PodPhase.RUNNING, has_started=True, running=frozenset({"main"}), resource_version="2"
        )

    def take(self, step: Callable[[], object]) -> Steps:
        """The steps of something synchronous."""
        with counted() as steps:
            step()
        return steps
