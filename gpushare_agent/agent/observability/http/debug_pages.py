"""The contents of the debug pages: the agent's state as values for JSON or as text.

Values of tenants' variables, and of annotations and labels that the agent does not use, are left out: they may be
secrets. So are the variables of stack frames. Answers are bounded; `left_out` counts what did not fit. No state.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter
from types import FrameType
from typing import Any, TypeVar

from msgspec import Struct

from gpushare_agent.agent.observability.display import graph_text
from gpushare_agent.agent.observability.node_snapshot import NodeSnapshot, topology_document
from gpushare_agent.core.model.allocations import Allocation
from gpushare_agent.core.model.names import split_device_id
from gpushare_agent.core.model.pods import Pod
from gpushare_agent.core.settings.reference import all_keys, text_of
from gpushare_agent.core.settings.settings import Settings

T = TypeVar("T")
Page = dict[str, Any]
"""A page as JSON; docs/how-to/debug.md describes it."""

MAX_ROWS = 1000
MAX_TASKS = 5000
MAX_FRAMES = 40
_NAMES_SHOWN = 20
_TEXT_SHOWN = 300
_OWN_ANNOTATIONS = ("tencent.com/", "ALIYUN_COM_GPU_MEM_")
"""What the agent reads or writes itself; none of it is secret."""
_PACKAGE_ROOTS = ("site-packages/", "lib/python")
"""A file's path is shown from here on."""
_PLAIN_FUTURES = ("FutureIter", "Future")
"""Every wait ends in one of these."""


class DebugSources(Struct, frozen=True, kw_only=True):
    """Where the pages read. `now` is the monotonic clock of `Allocation.allocated_at`."""

    settings: Settings
    snapshot: Callable[[], NodeSnapshot]
    allocations: Callable[[], Iterable[Allocation]]
    pods: Callable[[], Iterable[Pod]]
    now: Callable[[], float]


def allocations_page(sources: DebugSources) -> Page:
    """The ledger: each container's devices."""
    rows, left_out = _bounded(sorted(sources.allocations(), key=lambda a: (a.namespace, a.pod_name, a.key)))
    return {"allocations": [_allocation(row, sources.now()) for row in rows], "left_out": left_out}


def _allocation(allocation: Allocation, now: float) -> Page:
    return {
        "namespace": allocation.namespace,
        "pod": allocation.pod_name,
        "pod_uid": allocation.key.pod_uid,
        "container": allocation.container_name,
        "kind": allocation.kind,
        "is_whole": allocation.is_whole,
        "gpus": allocation.gpus,
        # By kind of resource and GPU, the numbers of its device IDs.
        "devices": dict(sorted((kind.value, device_ranges(ids)) for kind, ids in allocation.ids.items())),
        "age_seconds": round(now - allocation.allocated_at, 3),
    }


def device_ranges(ids: Iterable[str]) -> dict[str, str]:
    """Numbers by GPU, with runs as `0-24`: a share of memory has hundreds of IDs."""
    numbers: defaultdict[str, list[int]] = defaultdict(list)
    for device in ids:
        split = split_device_id(device)
        if split is None:
            # An ID of another plugin, from the kubelet's record: shown as it is, without a number.
            numbers[device[:_TEXT_SHOWN]] = []
        else:
            numbers[split[0]].append(split[1])
    return {gpu: _runs(sorted(found)) for gpu, found in sorted(numbers.items())}


def _runs(numbers: Sequence[int]) -> str:
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1] = [runs[-1][0], number]
        else:
            runs.append([number])
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def pods_page(sources: DebugSources) -> Page:
    """The pod store, as the informer left it."""
    rows, left_out = _bounded(sorted(sources.pods(), key=lambda pod: (pod.namespace, pod.name, pod.uid)))
    return {"pods": [_pod(row) for row in rows], "left_out": left_out}


def _pod(pod: Pod) -> Page:
    return {
        "namespace": pod.namespace,
        "name": pod.name,
        "uid": pod.uid,
        "phase": pod.phase,
        "node": pod.node_name,
        "resource_version": pod.resource_version,
        "is_deleting": pod.is_deleting,
        "is_static": pod.is_static,
        "has_started": pod.has_started,
        "controller_kind": pod.controller_kind,
        "reason": pod.reason[:_TEXT_SHOWN],
        "message": pod.message[:_TEXT_SHOWN],
        "running": sorted(pod.running),
        "container_ids": dict(sorted(pod.container_ids.items())),
        "containers": [
            {
                "name": container.name,
                "kind": container.kind,
                "position": container.position,
                "requests": dict(sorted(container.requests.items())),
                "env_names": sorted(container.env),
            }
            for container in pod.containers
        ],
        "annotations": {
            # Tools keep whole manifests with secrets in annotations (kubectl's last-applied-configuration).
            name: value[:_TEXT_SHOWN] if name.startswith(_OWN_ANNOTATIONS) else "(not shown)"
            for name, value in sorted(pod.annotations.items())
        },
        "label_names": sorted(pod.labels),
    }


def topology_page(sources: DebugSources) -> Page:
    """The GPUs, the matrix of links and the tree as in /api/v1/node, and the tree as people read it."""
    snapshot = sources.snapshot()
    return {
        "gpus": [
            {
                "index": gpu.index,
                "minor": gpu.minor,
                "uuid": gpu.uuid,
                "bus_id": gpu.bus_id,
                "name": gpu.name,
                "numa": gpu.numa_node,
                "health": gpu.health,
                "health_reason": gpu.unhealthy_reason,
                "nvlinks": [{"number": link.number, "remote_bus_id": link.remote_bus_id} for link in gpu.nvlinks],
            }
            for gpu in sorted(snapshot.inventory.gpus, key=lambda gpu: gpu.index)
        ],
        "unreadable": [{"index": index, "reason": reason} for index, reason in snapshot.inventory.unreadable],
        **topology_document(snapshot.inventory),
        "graph": graph_text(snapshot).splitlines(),
    }


def settings_page(sources: DebugSources) -> Page:
    """Every setting in force. None is a secret: files that hold one are named, never read here."""
    values = {key: attrgetter(key.name)(sources.settings) for key in all_keys()}
    shown = {key.name: {"value": text_of(value), "is_default": value == key.default} for key, value in values.items()}
    return {"settings": shown}


def tasks_page(tasks: Iterable[asyncio.Task[object]]) -> str:
    """Every task with where it waits, those that wait at the same place together."""
    listed, left_out = _bounded(sorted(tasks, key=lambda task: task.get_name()), MAX_TASKS)
    by_stack: defaultdict[tuple[str, ...], list[str]] = defaultdict(list)
    for task in listed:
        by_stack[task_stack(task)].append(task.get_name())
    rows = sorted(by_stack.items(), key=lambda item: (-len(item[1]), item[1], item[0]))
    # The largest groups first, so that single tasks are cut.
    shown = rows[:MAX_ROWS]
    left_out += sum(len(names) for _, names in rows[MAX_ROWS:])
    head = f"{len(listed)} tasks at {len(rows)} places; innermost frame last\n"
    return head + "".join(map(_group, shown)) + (f"\n{left_out} further tasks\n" if left_out else "")


def _group(row: tuple[tuple[str, ...], list[str]]) -> str:
    stack, names = row
    more = f", and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else ""
    title = f"{len(names)} x " if len(names) > 1 else ""
    return f"\n{title}{', '.join(names[:_NAMES_SHOWN])}{more}\n" + "".join(f"  {line}\n" for line in stack)


def task_stack(task: asyncio.Task[object]) -> tuple[str, ...]:
    """The frames from the task's coroutine to what it awaits, outermost first. Task.get_stack() knows only the
    outermost of one that waits."""
    lines: list[str] = []
    waits_for: object = task.get_coro()
    while waits_for is not None and len(lines) < MAX_FRAMES:
        frame = _frame_of(waits_for)
        if frame is None:
            # An Event's or a Queue's future says nothing; a task's or a thread's name does.
            if type(waits_for).__name__ not in _PLAIN_FUTURES:
                lines.append(f"waits for {type(waits_for).__name__}")
            break
        lines.append(_frame_line(frame))
        waits_for = _awaited(waits_for)
    return tuple(lines)


def _frame_of(awaited: object) -> FrameType | None:
    """The frame of a coroutine, a generator or an asynchronous generator."""
    for name in ("cr_frame", "gi_frame", "ag_frame"):
        frame = getattr(awaited, name, None)
        if isinstance(frame, FrameType):
            return frame
    return None


def _awaited(awaiting: object) -> object:
    for name in ("cr_await", "gi_yieldfrom", "ag_await"):
        if hasattr(awaiting, name):
            found: object = getattr(awaiting, name)
            return found
    return None


def _frame_line(frame: FrameType) -> str:
    code = frame.f_code
    path = code.co_filename
    for root in _PACKAGE_ROOTS:
        # The interpreter's path says nothing, and makes lines too long for a terminal.
        path = path.rpartition(root)[2]
    own = path.rfind("gpushare_agent/")
    path = path[own:] if own > 0 else path
    return f"{code.co_qualname} at {path}:{frame.f_lineno}"


def _bounded(rows: Sequence[T], limit: int = MAX_ROWS) -> tuple[Sequence[T], int]:
    return rows[:limit], max(0, len(rows) - limit)
