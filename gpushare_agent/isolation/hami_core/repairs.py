"""What killed and concurrent processes leave wrong in HAMi-core's shared region: locks that nobody alive can hold, and host
PIDs that are missing or another's. Pure.

A process that is killed while it holds one leaves it taken, and the container's next processes wait in cuInit:

| lock | is held for | by whom | a holder that died |
|---|---|---|---|
| slots | microseconds, to enter or leave the process slots | `owner_pid` | the library's next process frees it after 10 s, but not where the owner's number was not written yet or no longer |
| postinit | seconds, the end of cuInit: a context is made to find the process's host PID | not written | each next process waits 330 s and then goes on without its host PID: its compute is not limited |

The region is the tenant's: its PIDs are compared with the kernel's, and the worst that a false region brings is that two
processes of its own container count each other's use as their own. Source: HAMi-core 8f3a89c, `lock_shrreg` and `lock_postinit` in
src/multiprocess/multiprocess_memory_limit.c, `postInit` in src/libvgpu.c.

A process finds its host PID, at the end of cuInit, as the one that the driver lists after it has made a context and did not
list before. It finds none where another process of the GPU ends in between, for then the list is no longer than before, and
another container's where that starts in between. A process without one has no limit of compute until one stands in its slot,
where it looks every 120 ms; with a wrong one its use is not counted. The kernel knows which is right. Source: `getextrapid`
in src/utils.c, `utilization_watcher` and `update_host_pid` in src/multiprocess.
"""  # noqa: E501 - a table

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from enum import StrEnum

from msgspec import Struct
from msgspec.structs import replace

from gpushare_agent.isolation.hami_core.region_format import RegionHead, RegionTail, Slot
from gpushare_agent.model.gpus import KernelModule

SLOTS_S = 10.0
"""Without an owner the lock is taken for the time of two instructions."""
CONFIRM_S = 1.0
"""One more poll: whoever the first one missed has a slot and is in the cgroup by the second."""
WAITING_S = 5.0
"""The count of waiters is too high by those that were killed while they waited, so it is not believed at once."""
POSTINIT_S = 30.0
"""Longer than a context takes on a GPU whose driver was not loaded."""


class LockName(StrEnum):
    SLOTS = "slots"
    POSTINIT = "postinit"


class Held(Struct, frozen=True, kw_only=True):
    """A lock that was taken at each poll since `since`, seconds, while `sign` did not change: no process got on.
    `candidates` are the PIDs, in the container, that were in cuInit at the first of these polls: the holder is among them.
    `in_init` are those that are there now, `waiters` how many say that they wait for the lock."""

    since: float
    sign: Hashable = None
    candidates: frozenset[int] = frozenset()
    in_init: frozenset[int] = frozenset()
    waiters: int = 0


def held_locks(
    head: RegionHead, tail: RegionTail, slots: Sequence[Slot], before: Mapping[LockName, Held], now: float
) -> dict[LockName, Held]:
    """The locks that are taken. `slots` were read after the others: a process has its slot before it takes the postinit
    lock, and writes its host PID there before it gives the lock back."""
    found: dict[LockName, Held] = {}
    # With an owner the library itself frees it after 10 s.
    if head.lock.value == 0 and head.owner_pid == 0:
        found[LockName.SLOTS] = Held(since=now)
    if tail.postinit_lock.value == 0:
        in_init = frozenset(slot.pid for slot in slots if not slot.host_pid)
        found[LockName.POSTINIT] = Held(
            since=now,
            sign=frozenset((slot.pid, slot.host_pid) for slot in slots if slot.host_pid),
            candidates=in_init,
            in_init=in_init,
            waiters=tail.postinit_lock.waiters,
        )
    return {name: _continued(held, before.get(name)) for name, held in found.items()}


def _continued(held: Held, before: Held | None) -> Held:
    # Another process got its host PID meanwhile, so somebody had the lock and gave it back.
    if before is None or before.sign != held.sign:
        return held
    return replace(held, since=before.since, candidates=before.candidates)


def is_left(name: LockName, held: Held, now: float, alive: Collection[int] | None) -> bool:
    """Whether nobody holds it. `alive` are the PIDs, in any namespace, of the container's processes as the kernel has them;
    None where they are not known."""
    age = now - held.since
    if name is LockName.SLOTS:
        return age >= SLOTS_S
    # All that were in cuInit when it was seen taken first are dead, and the holder was one of them.
    if alive is not None and held.candidates.isdisjoint(alive):
        return age >= CONFIRM_S
    # Everybody in cuInit says that it waits, so nobody of them holds it.
    if alive is not None and held.waiters >= len(held.in_init.intersection(alive)):
        return age >= WAITING_S
    return age >= POSTINIT_S


SlotPids = tuple[int, int]
"""A process's PID in the container, and its host PID, 0 where it found none."""


def can_correct(module: KernelModule | None) -> bool:
    """Whether the driver has one PID for a process: open kernel modules from 515 to 569 have two, and compute is not limited
    there in any case."""
    return module is None or module.lists_namespace_pids == module.samples_namespace_pids


def right_host_pids(
    slots: Iterable[SlotPids], namespace_pids: Mapping[int, tuple[int, ...]], module: KernelModule | None
) -> dict[int, int]:
    """The host PIDs that differ from what stands in the slots, by the number of the slot.

    `namespace_pids` has all processes of the container by the host's PID, with their PIDs in the namespaces below that. A
    slot's process that is not among them has ended; a PID that two of them have, in namespaces of their own, is left alone.
    """
    found: dict[int, list[int]] = {}
    for host_pid, inside in namespace_pids.items():
        found.setdefault(inside[-1] if inside else host_pid, []).append(host_pid)
    is_inside = module is not None and module.lists_namespace_pids
    right = {}
    for number, (pid, known) in enumerate(slots):
        # Two with one PID are in PID namespaces of their own: which of them has the slot is not known.
        host_pids = found.get(pid, [])
        if len(host_pids) == 1 and (reported := pid if is_inside else host_pids[0]) != known:
            right[number] = reported
    return right
