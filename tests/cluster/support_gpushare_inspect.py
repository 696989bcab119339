"""What GPUShare's `kubectl inspect gpushare` shows, computed as it does from the objects of the API server: cmd/inspect of
gpushare-device-plugin 45fb8b8 (nodeinfo.go, podinfo.go, display.go)."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

GPU_MEM, GPU_COUNT = "aliyun.com/gpu-mem", "aliyun.com/gpu-count"
PENDING = -1
"""The GPU of a pod that no annotation says the place of."""


class Inspected(NamedTuple):
    """A line of its table: `used/total` of each GPU, what is pending, `used/total` of the node."""

    gpus: tuple[str, ...]
    pending: int | None
    node: str


def inspect_node(node: Mapping[str, Any], pods: Iterable[Mapping[str, Any]]) -> Inspected:
    """Of the pods of all nodes. A GPU's total is the node's divided by the number of GPUs."""
    allocatable = node["status"]["allocatable"]
    count, total = int(allocatable.get(GPU_COUNT, 0)), int(allocatable.get(GPU_MEM, 0))
    used: Counter[int] = Counter()
    for pod in pods:
        is_here = pod["spec"].get("nodeName") == node["metadata"]["name"]
        if is_here and pod.get("status", {}).get("phase") not in ("Succeeded", "Failed"):
            used.update(inspect_pod(pod["metadata"].get("annotations", {}), _memory(pod)))
    pending = used.get(PENDING)
    shown = sum(used[index] for index in range(count)) + (pending or 0)
    return Inspected(tuple(f"{used[index]}/{total // count}" for index in range(count)), pending, f"{shown}/{total}")


def inspect_pod(annotations: Mapping[str, str], units: int) -> dict[int, int]:
    """Units by GPU of a pod that asks for so many in all: by container where that is annotated, else all on one GPU."""
    if not units:
        return {}
    found: Counter[int] = Counter()
    for gpus in json.loads(annotations.get("scheduler.framework.gpushare.allocation", "{}")).values():
        found.update({int(gpu): count for gpu, count in gpus.items()})
    return dict(found) or {int(annotations.get("ALIYUN_COM_GPU_MEM_IDX", PENDING)): units}


def _memory(pod: Mapping[str, Any]) -> int:
    """Of main containers alone."""
    return sum(int(one.get("resources", {}).get("limits", {}).get(GPU_MEM, 0)) for one in pod["spec"]["containers"])
