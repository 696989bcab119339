"""Which host PIDs in HAMi-core's shared region are missing or wrong. Pure.

A process finds its host PID, at the end of cuInit, as the one that the driver lists after it has made a context and did not
list before. It finds none where another process of the GPU ends in between, for then the list is no longer than before, and
another container's where that starts in between. A process without one has no limit of compute until one stands in its slot,
where it looks every 120 ms; with a wrong one its use is not counted. The kernel knows which is right.

Source: HAMi-core 8f3a89c, `getextrapid` in src/utils.c, `utilization_watcher` and `update_host_pid` in src/multiprocess.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from gpushare_agent.model.gpus import KernelModule

SlotPids = tuple[int, int]
"""A process's PID in the container, and its host PID, 0 where it found none."""


def can_correct(module: KernelModule | None) -> bool:
    """Whether the driver has one PID for a process: open kernel modules from 515 to 569 have two, and compute is not limited
    there in any case."""
    return module is None or module.lists_namespace_pids == module.samples_namespace_pids


def right_host_pids(
    slots: Iterable[SlotPids], namespace_pids: Mapping[int, tuple[int, ...]], module: KernelModule | None
) -> dict[int, int]:
    """By the number of the slot, those that differ from what stands there.

    `namespace_pids` has all processes of the container by the host's PID, with their PIDs in the namespaces below that. A
    slot's process that is not among them has ended; a PID that two of them have, in namespaces of their own, is left alone.
    """
    found: dict[int, list[int]] = {}
    for host_pid, inside in namespace_pids.items():
        found.setdefault(inside[-1] if inside else host_pid, []).append(host_pid)
    is_inside = module is not None and module.lists_namespace_pids
    right = {}
    for number, (pid, known) in enumerate(slots):
        host_pids = found.get(pid, [])
        if len(host_pids) == 1 and (reported := pid if is_inside else host_pids[0]) != known:
            right[number] = reported
    return right
