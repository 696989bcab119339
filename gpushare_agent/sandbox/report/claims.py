"""What ResourceClaims give to a node's pods, from the API server's objects and the kubelet alone."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from msgspec import Struct

from gpushare_agent.cluster.kube.objects import whole_number
from gpushare_agent.model.gpus import Gpu
from gpushare_agent.model.names import MIB, GpuUuid
from gpushare_agent.sandbox.kubelet.container_config import VDEVICE_VARIABLE, container_of
from gpushare_agent.sandbox.node import EmbeddedNode
from gpushare_agent.sandbox.pod_manifest import RawObject
from gpushare_agent.sandbox.scheduler.claims import claim_names, results_of

_DEVICE = "gpu-"


class ClaimedShare(Struct, frozen=True, kw_only=True):
    """One result of a claim: its part of one GPU."""

    claim: str
    request: str
    gpu: int
    cores: int
    memory_mib: int


def claimed_shares(node: EmbeddedNode, namespace: str, name: str) -> list[ClaimedShare]:
    """Of the claim, as far as it is allocated on the node."""
    found = []
    for raw in node.api.store.all("resourceclaims"):
        metadata = raw["metadata"]
        if (metadata["namespace"], metadata["name"]) != (namespace, name):
            continue
        for one in results_of(raw):
            number = one.device.removeprefix(_DEVICE)
            if one.pool == node.name and number.isdigit():
                amounts = one.consumed_capacity or {}
                cores, memory = (whole_number(amounts.get(name, 0), name) for name in ("cores", "memory"))
                found.append(
                    ClaimedShare(
                        claim=metadata["name"],
                        request=one.request,
                        gpu=int(number),
                        cores=cores,
                        memory_mib=memory // MIB,
                    )
                )
    return found


def shares_of_container(node: EmbeddedNode, pod: RawObject, container: str) -> list[ClaimedShare]:
    """Those that the container names; none of a pod that has no node."""
    if not pod["spec"].get("resourceClaims") or not pod["spec"].get("nodeName"):
        return []
    names = claim_names(pod)
    found: list[ClaimedShare] = []
    for entry in (container_of(pod, container).get("resources") or {}).get("claims") or ():
        shares = claimed_shares(node, pod["metadata"]["namespace"], names.get(entry["name"], ""))
        wanted = entry.get("request")
        found += [one for one in shares if not wanted or one.request.partition("/")[0] == wanted]
    return list(dict.fromkeys(found))


def sliced_health(node: EmbeddedNode, gpus: Sequence[Gpu]) -> dict[GpuUuid, bool]:
    """Of the GPUs in the node's slices, whether nothing is wrong with them: a device that is has a taint."""
    by_name = {f"{_DEVICE}{gpu.index}": gpu.uuid for gpu in gpus}
    devices = [
        device
        for raw in node.api.store.all("resourceslices")
        if raw["spec"].get("nodeName") == node.name
        for device in raw["spec"].get("devices") or ()
    ]
    return {by_name[one["name"]]: not one.get("taints") for one in devices if one["name"] in by_name}


def vdevice_directory(node: EmbeddedNode, pod_uid: str, container: str) -> Path | None:
    """Where a running container's claim has its vDevice files, None where it has none."""
    found = node.kubelet.runtime.find(pod_uid, container)
    path = found.env.get(VDEVICE_VARIABLE) if found is not None and found.is_running else None
    return None if path is None else Path(path).parent


def waiting_message(node: EmbeddedNode, pod: RawObject, reason: str) -> str:
    """The newest Event of a pending pod with this reason: its status does not say why its claims are not prepared."""
    found = [one for one in node.api.events() if one.get("reason") == reason]
    events = [one for one in found if one.get("involvedObject", {}).get("uid") == pod["metadata"]["uid"]]
    return str(events[-1].get("message")) if events else ""
