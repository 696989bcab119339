"""The owner of the instances that are made on demand.

One loop compares, for each GPU, what claims want with what the driver shows, and makes the next call to the driver; what
comes next is in decisions/plan.py. A GPU has one call at a time, others do not wait for it. After a call its GPU is left
alone until the inventory was read again: a list from before would show what is no longer so.

State owned: `_held`, the places of each claim; `_made`, what was made here, with its file; the calls under way.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, NoReturn

import structlog
from msgspec import Struct

from gpushare_agent.agent.mig.decisions.plan import (
    MadeInstance,
    MigState,
    Step,
    Wishes,
    blocked,
    exclude,
    foreign,
    next_step,
    settle,
)
from gpushare_agent.agent.mig.own_node import OwnNode
from gpushare_agent.agent.mig.records import InstanceRecords
from gpushare_agent.agent.node import Node
from gpushare_agent.core.claims.devices import placement_device_name
from gpushare_agent.core.kit.backoff import Backoff
from gpushare_agent.core.kit.supervision import ChangeSignal, Reconciler, ReportOnce, bounded, forever, wait_while
from gpushare_agent.core.model.errors import AgentError, Conflict, RefusalReason, Refused, Unavailable
from gpushare_agent.core.model.gpus import Gpu, GpuInventory
from gpushare_agent.core.model.mig import MigLayout, MigPlacement, MigProfile
from gpushare_agent.core.model.names import GpuUuid

if TYPE_CHECKING:
    from gpushare_agent.agent.gpus.part import NodeDriver

log = structlog.get_logger(__name__)

HOLD_S = 10.0
"""The longest that one call waits for a claim's instances. The claim calls again until the kubelet's patience ends."""
CALL_S = 60.0
"""The driver's own limit is shorter."""
LEAVE_S = 12.0
"""The NVML driver answers within 10 s that it got no answer."""
RETRY_S = 5.0
RETRY = Backoff(base_s=1.0, cap_s=60.0)
_DONE = {MigState.CREATING: "made", MigState.DESTROYING: "destroyed"}


class _Failure(Struct, frozen=True):
    """The last call for a place failed so many times in a row, and is not tried before `until`. `is_short`: the place was
    not free although nothing lay there."""

    times: int
    until: float
    why: str
    is_short: bool


class MigInstances:
    """Places are named as their devices in the slice (`placement_device_name`). `load` and `restore` once, then `run`.
    `poll` reads the inventory, and is False where the driver does not answer."""

    def __init__(
        self,
        node: Node,
        driver: NodeDriver,
        poll: Callable[[], Awaitable[bool]],
        records: InstanceRecords,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.own_node = OwnNode(name=node.settings.node_name, changed=self.changed)
        self._node, self._driver, self._poll, self._records, self._clock = node, driver, poll, records, clock
        self._held: dict[str, dict[str, GpuUuid]] = {}
        self._made: dict[MigPlacement, MadeInstance] = {}
        self._written: list[MadeInstance] = []
        self._wanted: dict[MigPlacement, None] = {}
        self._idle_since: dict[MigPlacement, float] = {}
        self._failures: dict[MigPlacement, _Failure] = {}
        self._in_doubt: set[MigPlacement] = set()
        self._refused: set[MigPlacement] = set()
        self._busy: set[GpuUuid] = set()
        self._stale: set[GpuUuid] = set()
        self._places: dict[str, MigPlacement] = {}
        self._profiles: dict[GpuUuid, tuple[MigProfile, ...]] = {}
        self._changes = ChangeSignal()
        self._file_lock = asyncio.Lock()
        self._steps, self._polls, self._reported = Reconciler(), Reconciler(), ReportOnce()
        self._group: asyncio.TaskGroup | None = None
        self._shown: object = None
        self._looked_at, self._is_leaving = 0.0, False
        self.on_change: Callable[[], None] = lambda: None
        """`gpus`, `made` or `blocked` differ. Called at once, and must not block."""
        if node.settings.mig.on_demand:
            node.metrics.show_mig_instances(self._counts)

    @property
    def gpus(self) -> Mapping[str, Gpu]:
        """The instances that are there and whole, made here, by the name of their place: as the inventory has them."""
        found = {gpu.uuid: gpu for gpu in self._node.gpus().gpus if gpu.mig is not None and not gpu.is_gone}
        return {_name(one): found[one.uuid] for one in self._made.values() if one.is_ready and one.uuid in found}

    @property
    def made(self) -> Collection[GpuUuid]:
        """The UUIDs of all instances that were made here: no devices of their own in the slice."""
        # Also one that the driver shows before the call that makes it has returned.
        found = {one.uuid for one in self._made.values()}
        for layout in self._layouts().values():
            others = foreign(layout, self._made_on(layout.parent))
            mine = [one for one in layout.instances if one not in others]
            found |= {GpuUuid(one.uuid) for instance in mine for one in instance.compute}
        return found - {GpuUuid("")}

    @property
    def blocked(self) -> Mapping[MigPlacement, str]:
        """The places that no claim can get now, with the reason: instances of others, or half-destroyed ones, lie there."""
        return {place: why for one in self._layouts().values() for place, why in self._blocked_on(one).items()}

    def _blocked_on(self, layout: MigLayout) -> Mapping[MigPlacement, str]:
        return blocked(layout, self._made_on(layout.parent), self._wishes(layout.parent))

    @property
    def is_calling(self) -> bool:
        """A call to the driver is under way."""
        return bool(self._busy)

    async def load(self) -> None:
        """What an agent before this one has made, as it recorded it. Raises Unavailable."""
        self._written = await self._records.load()
        self._made = {one.place: one for one in self._written}
        self._learn()

    def restore(self, held: Mapping[str, Mapping[str, GpuUuid]]) -> None:
        """The places of claims that are prepared, by the UID of each, as an agent before this one recorded them, with the
        instance that it got."""
        self._held = {uid: dict(places) for uid, places in held.items()}

    def take_over(self, previous: MigInstances) -> None:
        """What the generation before a reload knew and no file has. Its calls may still be carried out."""
        self._in_doubt, self._refused = set(previous._in_doubt), set(previous._refused)
        self._idle_since = dict(previous._idle_since)
        self.own_node.take_over(previous.own_node)

    async def hold(self, uid: str, places: Collection[str], at_most_s: float = HOLD_S) -> Refused | None:
        """Returns once an instance is at each of these places; each is this claim's until `release`, and made where there is
        none. Returns a refusal at once where waiting here does not help: the caller tries again. Idempotent. If cancelled,
        the places stay held."""
        self._learn()
        if refused := self._reserve(uid, places):
            return refused
        ends_at = self._clock() + min(at_most_s, HOLD_S)
        while missing := {*places} - self.gpus.keys():
            seen = self._changes.count
            for name in sorted(missing):
                place = self._places[name]
                if (layout := self._layouts().get(place.parent)) is None:
                    return not_yet(
                        f"GPU {place.parent} is not in MIG mode now, or the driver does not show it ({name})"
                    )
                if place not in self._wanted and not self._is_ready(place):
                    self._wanted[place] = None
                    self.changed()
                # Of this GPU alone: many claims wait, and each is woken by each change.
                if why := self._blocked_on(layout).get(place):
                    return not_yet(f"no instance can be made for {name}: {why}")
            left_s = ends_at - self._clock()
            if left_s <= 0 or not await self._changes.wait(seen, left_s):
                late = (
                    "the driver has"
                    if self.own_node.is_known
                    else f"node {self.own_node.name} could not be read, so the agent has"
                )
                return not_yet(f"{late} not made {', '.join(sorted(missing))} yet")
            if uid not in self._held:
                return not_yet("the claim was ended meanwhile")
        return None

    def release(self, uid: str) -> None:
        """The claim has ended: its instances are idle, and kept to be used again."""
        places = {*self._resolved(self._held.pop(uid, {}))} - self._held_places()
        self._idle_since |= dict.fromkeys(places, self._clock())
        self.changed()

    def changed(self) -> None:
        """The inventory, or who may change it."""
        self._steps.request()

    async def run(self) -> NoReturn:
        """Makes and destroys, until cancelled: a call that is under way then may still be carried out. Only for the agent
        that serves the node: of two one alone may call the driver and write the file."""
        async with asyncio.TaskGroup() as group:
            self._group = group
            polls = partial(self._polls.run, self._refresh, lambda: RETRY_S if self._stale else None)
            group.create_task(forever("mig polls", polls))
            self.changed()
            await self._steps.run(self._step, self._due_s)
        raise AssertionError("unreachable: the loop does not return")

    async def leave(self) -> None:
        """Begins no further call, and returns once the last one was answered: the next agent takes what a call makes after
        its first look for another's. One that hangs is waited for
        LEAVE_S."""
        self._is_leaving = True
        await wait_while(lambda: self.is_calling, LEAVE_S, poll_s=0.01)

    # ---- what is wanted ----

    def _reserve(self, uid: str, places: Collection[str]) -> Refused | None:
        """No await in here: two claims cannot have places that exclude each other. Claims may share one place:
        the ledger has their parts of it."""
        unknown = sorted({*places} - self._places.keys())
        if unknown:
            return not_yet(
                f"no GPU of this node that makes MIG instances on demand has a place {', '.join(unknown)} now"
            )
        layouts, wanted = self._layouts(), [self._places[name] for name in places]
        others = [(other, at) for other, names in self._held.items() if other != uid for at in self._resolved(names)]
        for place in wanted:
            for other, at in (*others, *((uid, at) for at in wanted)):
                if exclude(layouts, at, place):
                    why = f"its instance cannot be next to that of claim {other} on GPU {place.parent}"
                    return not_yet(f"{why}, which has not ended yet")
        held = self._held.setdefault(uid, {})
        for name in places:
            held.setdefault(name, GpuUuid(""))
        for place in wanted:
            made = self._made.get(place)
            if made is not None and made.state is MigState.DESTROYING:
                self._failures.pop(place, None)  # of what is no longer to be destroyed
        return None

    def _wishes(self, parent: GpuUuid) -> Wishes:
        now, node, settings = self._clock(), self._node, self._node.settings
        held = self._held_places()
        idle_s = 0.0 if self.own_node.is_draining else settings.mig.idle_s
        gpu = next((one for one in node.gpus().mig_partitioned if one.uuid == parent), None)
        no_making = ""
        if gpu is not None and gpu.is_selected(settings.excluded_gpus):
            no_making = f"GPU {gpu.label} is excluded (setting excluded_gpus)"
        elif (reason := node.inventory.cordoned.get(parent)) is not None:
            no_making = f"GPU {parent if gpu is None else gpu.label} is cordoned{f': {reason}' if reason else ''}"
        return Wishes(
            held=held,
            wanted=[place for place in self._wanted if place.parent == parent],
            claimed={
                self._places[name]: uuid
                for places in self._held.values()
                for name, uuid in places.items()
                if uuid and name in self._places and self._places[name].parent == parent
            },
            expired={place for place, since in self._idle_since.items() if now - since >= idle_s},
            in_doubt=self._in_doubt,
            refused=self._refused,
            failed={place: one.why for place, one in self._failures.items()},
            waiting={place for place, one in self._failures.items() if now < one.until},
            short={place for place, one in self._failures.items() if one.is_short},
            no_making=no_making,
            no_calls=self.own_node.managed,
        )

    def _held_places(self) -> set[MigPlacement]:
        """Those of claims, and whose instance the ledger has: an agent that knew no places may have given it as a device
        of its own."""
        used = {uuid for allocation in self._node.cache for uuid in allocation.gpus}
        held = {place for names in self._held.values() for place in self._resolved(names)}
        return held | {place for place, one in self._made.items() if one.uuid in used}

    def _resolved(self, names: Iterable[str]) -> Iterator[MigPlacement]:
        return (self._places[name] for name in names if name in self._places)

    def _learn(self) -> None:
        """The places by their names, also those of a GPU that is lost, or not in MIG mode any more."""
        for layout in self._node.gpus().mig_layouts:
            if self._profiles.get(layout.parent) == layout.profiles:
                continue
            self._profiles[layout.parent] = layout.profiles
            for place, profile in layout.placements.items():
                self._places[placement_device_name(place, profile.name)] = place
        self._places |= {_name(one): one.place for one in self._made.values()}

    # ---- what is ----

    def _layouts(self) -> dict[GpuUuid, MigLayout]:
        return {one.parent: one for one in self._node.gpus().mig_layouts}

    def _made_on(self, parent: GpuUuid) -> list[MadeInstance]:
        return [one for one in self._made.values() if one.place.parent == parent]

    def _replace(self, parent: GpuUuid, made: Iterable[MadeInstance]) -> None:
        self._made = {place: one for place, one in self._made.items() if place.parent != parent}
        self._made |= {one.place: one for one in made}

    def _counts(self) -> dict[str, float]:
        held = self._held_places()
        counts = Counter({"creating": 0, "held": 0, "idle": 0, "destroying": 0})
        for one in self._made.values():
            counts[one.state.value if not one.is_ready else "held" if one.place in held else "idle"] += 1
        counts["foreign"] = sum(len(foreign(one, self._made_on(one.parent))) for one in self._layouts().values())
        return {state: float(count) for state, count in counts.items()}

    # ---- the loop ----

    async def _step(self) -> None:
        self._learn()
        inventory, layouts = self._node.gpus(), self._layouts()
        self._give_up(inventory, layouts)
        held = self._held_places()
        now = self._looked_at = self._clock()
        for parent, layout in layouts.items():
            # With a problem the list may be an earlier one.
            if parent in self._busy or parent in self._stale or layout.problem:
                continue
            self._replace(parent, settle(layout, self._made_on(parent), self._wishes(parent)))
            self._refused = {place for place in self._refused if place.parent != parent}
        self._in_doubt &= {place for place, one in self._made.items() if not one.is_ready}
        self._wanted = {place: None for place in self._wanted if place in held and not self._is_ready(place)}
        idle = [place for place, one in self._made.items() if one.is_ready and place not in held]
        self._idle_since = {place: self._idle_since.get(place, now) for place in idle}
        unsettled = {*self._wanted, *(place for place, one in self._made.items() if not one.is_ready)}
        self._failures = {place: one for place, one in self._failures.items() if place in unsettled}
        # An own node that was not read yet may be another's to divide.
        if self.own_node.is_known and not self._is_leaving:
            self._start_calls(layouts)
        self._notify()
        try:
            await self._save()
        except Unavailable as e:
            self._report("mig_records_not_written", str(e))

    def _give_up(self, inventory: GpuInventory, layouts: Mapping[GpuUuid, MigLayout]) -> None:
        """Forgets what was made on GPUs that are no longer in MIG mode, and what no claim has on those that the setting
        names no more: these instances are the administrator's."""
        held, selectors = self._held_places(), self._node.settings.mig.on_demand
        whole = {gpu.uuid for gpu in inventory.gpus if gpu.mig is None and gpu.mig_mode is False}
        left = {gpu.uuid for gpu in inventory.mig_partitioned if not gpu.is_selected(selectors)} - layouts.keys()
        for place in [*self._made]:
            if place.parent in whole or (place.parent in left and place not in held):
                log.warning("mig_instance_given_up", place=_name(self._made.pop(place)), gpu=place.parent)

    def _start_calls(self, layouts: Mapping[GpuUuid, MigLayout]) -> None:
        for parent, layout in layouts.items():
            if parent in self._busy or parent in self._stale or self._group is None:
                continue
            if step := next_step(layout, self._made_on(parent), self._wishes(parent)):
                self._busy.add(parent)
                self._group.create_task(self._carry_out(step), name=f"mig call on {parent}")

    async def _carry_out(self, step: Step) -> None:
        made, place = step.made, step.made.place
        before, was_in_doubt = self._made.get(place), place in self._in_doubt
        began_at, outcome, is_called = self._clock(), "failed", False
        self._made[place] = made
        try:
            # Before the driver is called: what is made must be known as made here, whatever happens next.
            await self._save()
            if step.instance is not None and place in self._held_places() and not was_in_doubt:
                outcome = "left"  # a claim took it meanwhile
                return
            is_called = True
            self._in_doubt.add(place)
            async with bounded(CALL_S, f"the driver did not answer within {CALL_S:g} s"):
                if step.instance is None:
                    await self._driver.create_instance(place, is_new=made.gi is None)
                else:
                    await self._driver.destroy_instance(place.parent, step.instance)
            self._answered(place.parent)
            self._failures.pop(place, None)
            self._reported.is_over(_name(made))
            outcome = "done"
            log.info(f"mig_instance_{_DONE[made.state]}", place=_name(made))
        except AgentError as e:
            if is_called and not isinstance(e, Unavailable):
                self._answered(place.parent)
                if step.instance is None and made.gi is None and not was_in_doubt:
                    self._refused.add(place)
            self._failed(made, str(e), is_short=step.instance is None and isinstance(e, Conflict))
        finally:
            if not is_called:
                self._made.pop(place, None)  # it may have been given up
                self._made |= {place: before} if before is not None else {}
            call = "create" if step.instance is None else "destroy"
            self._node.metrics.mig_called(call, outcome, self._clock() - began_at)
            self._busy.discard(place.parent)
            self._stale.add(place.parent)
            self._polls.request()

    def _answered(self, parent: GpuUuid) -> None:
        """The driver's calls for a GPU are carried out in their order: none before this one is under way any more."""
        self._in_doubt = {place for place in self._in_doubt if place.parent != parent}

    def _failed(self, made: MadeInstance, why: str, *, is_short: bool) -> None:
        last = self._failures.get(made.place)
        times = last.times + 1 if last is not None else 1
        until = self._clock() + RETRY.delay_s(times)
        self._failures[made.place] = _Failure(times, until, why, is_short)
        self._report(f"mig_instance_not_{_DONE[made.state]}", why, _name(made))

    def _report(self, event: str, why: str, subject: str = "") -> None:
        if self._reported.is_new(why, subject):
            log.warning(event, error=why, place=subject, then="it is tried again")

    async def _refresh(self) -> None:
        """Reads the inventory after calls: one reading for all that have ended before it began."""
        stale = set(self._stale)
        if stale and await self._poll():
            self._stale -= stale
        self.changed()

    def _due_s(self) -> float | None:
        """Until something is due that nothing else announces."""
        now = self._clock()
        idle_s = 0.0 if self.own_node.is_draining else self._node.settings.mig.idle_s
        times = [one.until for one in self._failures.values()]
        times += [since + idle_s for since in self._idle_since.values()]
        if sorted(self._made.values(), key=attrgetter("place")) != self._written:
            times.append(now + RETRY_S)
        # What has become due since the last step looked, as while it saved, too.
        return min((max(at - now, 0.0) for at in times if at > self._looked_at), default=None)

    async def _save(self) -> None:
        """Raises Unavailable."""
        async with self._file_lock:
            made = sorted(self._made.values(), key=attrgetter("place"))
            if made != self._written:
                await self._records.save(made)
                self._written = made

    def _is_ready(self, place: MigPlacement) -> bool:
        return place in self._made and self._made[place].is_ready

    def _notify(self) -> None:
        self._changes.notify()
        shown = (self.made, self.blocked)
        if shown != self._shown:
            self._shown = shown
            self.on_change()


def _name(made: MadeInstance) -> str:
    return placement_device_name(made.place, made.profile)


def not_yet(why: str) -> Refused:
    """What the caller tries again."""
    return Refused(RefusalReason.NOT_READY, f"{why.removesuffix('.')}. The kubelet tries again.")
