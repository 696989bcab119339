"""GPUs in MIG mode in memory, which do what nvml.h says of instances; and their owner over them, which can be cut off at
each point of a call.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Iterator
from types import SimpleNamespace
from typing import Any, TypeVar

from msgspec import Struct, field
from msgspec.structs import replace

from gpushare_agent.agent.gpus.simulated.instances import SimulatedInstances, layout_of
from gpushare_agent.agent.mig.decisions.plan import MadeInstance
from gpushare_agent.agent.mig.instances import MigInstances
from gpushare_agent.core.claims.devices import placement_device_name
from gpushare_agent.core.formats.mig_profiles import has_room, mig_profiles
from gpushare_agent.core.formats.simulated_gpus import SimulatedInstance
from gpushare_agent.core.model.errors import Conflict, NotFound, Rejected, Unavailable
from gpushare_agent.core.model.gpus import GpuInventory
from gpushare_agent.core.model.mig import MigGpuInstance, MigPlacement
from gpushare_agent.core.model.names import GpuUuid
from gpushare_agent.core.settings.settings import Settings
from tests.support_core import inventory
from tests.support_node import node_of

T = TypeVar("T")

PRODUCT, MIB = "NVIDIA A100-SXM4-40GB", 40960
PROFILES = mig_profiles(PRODUCT, MIB)
BY_NAME = {one.name: one for one in PROFILES}
BY_ID = {one.id: one for one in PROFILES}


def gpu_uuid(index: int) -> GpuUuid:
    return GpuUuid(f"GPU-00000000-0000-0000-0000-{index:012x}")


def place(profile: str, start: int, gpu: int = 0) -> MigPlacement:
    return MigPlacement(gpu_uuid(gpu), BY_NAME[profile].id, start)


def named(one: MigPlacement) -> str:
    return placement_device_name(one, BY_ID[one.profile].name)


def slices_of(one: MigPlacement) -> set[int]:
    return set(range(one.start, one.start + BY_ID[one.profile].size))


def fits(where: MigPlacement, others: Iterable[MigPlacement]) -> bool:
    placed = [(BY_ID[one.profile], one.start) for one in others if one.parent == where.parent]
    return has_room(PROFILES, placed, BY_ID[where.profile], where.start)


class Real(Struct):
    """An instance that exists. `maker` is "agent" or another's name; `users` are what keeps it from being destroyed."""

    gi: int
    place: MigPlacement
    maker: str
    uuid: str = ""
    users: set[str] = field(default_factory=set)

    @property
    def simulated(self) -> SimulatedInstance:
        profile, start = self.place.profile, self.place.start
        return SimulatedInstance(gi=self.gi, name=BY_ID[profile].name, profile=profile, start=start, uuid=self.uuid)


class Hardware:
    """`wrong` is what must never be: an instance of another's or one in use that was destroyed."""

    def __init__(self, gpus: int = 1) -> None:
        found = inventory(gpus, memory_mib=MIB)
        parents = tuple(replace(gpu, uuid=gpu_uuid(gpu.index), name=PRODUCT) for gpu in found.gpus)
        self._whole = replace(found, gpus=parents)
        self.gpus: dict[GpuUuid, list[Real]] = {gpu.uuid: [] for gpu in parents}
        self.without_mig: set[GpuUuid] = set()
        self.lives = 0
        self.wrong: list[str] = []
        self.problem = ""

    def inventory(self) -> GpuInventory:
        """As the simulated driver shows such GPUs."""
        own = {
            gpu.index: [one.simulated for one in self.gpus[gpu.uuid]]
            for gpu in self._whole.gpus
            if gpu.uuid not in self.without_mig
        }
        found = SimulatedInstances().partition(self._whole, own, own, ())
        layouts = tuple(layout_of(gpu, own[gpu.index], self.problem) for gpu in found.mig_partitioned)
        return replace(found, mig_layouts=layouts)

    def all(self) -> Iterator[Real]:
        for instances in self.gpus.values():
            yield from instances

    def at(self, where: MigPlacement) -> Real | None:
        return next((one for one in self.gpus[where.parent] if one.place == where), None)

    def create(self, where: MigPlacement, maker: str = "agent", *, is_new: bool = False) -> Iterator[str]:
        """The steps of a creation, each with what is done once it was taken. Raises Conflict."""
        if where.parent in self.without_mig:
            raise NotFound("the GPU is not in MIG mode")
        instances, one = self.gpus[where.parent], self.at(where)
        if one is not None and (one.uuid or is_new):
            raise Conflict("INSUFFICIENT_RESOURCES")
        if one is None:
            if not fits(where, [each.place for each in instances]):
                raise Conflict("INSUFFICIENT_RESOURCES")
            gi = next(number for number in range(1, 99) if all(number != each.gi for each in instances))
            instances.append(one := Real(gi=gi, place=where, maker=maker))
            yield "a GPU instance is there"
        self.lives += 1
        one.uuid = f"MIG-{self.lives:04}"
        yield "the instance is whole"

    def destroy(self, where: GpuUuid, gi: int, maker: str = "agent") -> Iterator[str]:
        """As `create`. Raises Conflict: somebody uses it."""
        one = next((each for each in self.gpus[where] if each.gi == gi), None)
        if one is None:
            return
        if one.uuid and one.users - {"monitor"}:
            raise Conflict("IN_USE")
        if maker == "agent" and one.maker != "agent":
            self.wrong.append(f"{one} was destroyed")
        one.uuid = ""
        yield "the compute instance is gone"
        if one.users:
            raise Conflict("IN_USE")
        self.gpus[where].remove(one)
        yield "the instance is gone"

    def by_hand(self, where: MigPlacement) -> bool:
        """Somebody else makes one; False where it does not fit."""
        if self.at(where) is not None:
            return False
        try:
            list(self.create(where, maker="hand"))
        except Conflict:
            return False
        return True

    def removed_by_hand(self, one: Real) -> None:
        self.gpus[one.place.parent].remove(one)

    def reboot(self) -> None:
        for instances in self.gpus.values():
            instances.clear()


class Killed(Exception):  # noqa: N818
    """The process ends here: nothing after it is done."""


class Driver:
    """The calls of a node's driver. `cut` is asked before the call and after each of its steps, and may raise an error, or
    Killed, after which the call never returns. A GPU in `hanging` does not answer."""

    def __init__(self, hardware: Hardware) -> None:
        self.hardware = hardware
        self.calls: list[tuple[str, MigPlacement | int]] = []
        self.cut: Callable[[str], None] = lambda where: None
        self.hanging: dict[GpuUuid, asyncio.Event] = {}
        self.most_at_once: dict[GpuUuid, int] = {}
        self._open: dict[GpuUuid, int] = {}
        self.killed = asyncio.Event()

    async def create_instance(self, where: MigPlacement, *, is_new: bool = False) -> MigGpuInstance:
        self.calls.append(("create", where))
        await self._take("create", where.parent, lambda: self.hardware.create(where, is_new=is_new))
        return MigGpuInstance(gi=0, profile=where.profile, start=where.start, size=1)

    async def destroy_instance(self, parent: GpuUuid, instance: MigGpuInstance) -> None:
        self.calls.append(("destroy", instance.gi))
        await self._take("destroy", parent, lambda: self.hardware.destroy(parent, instance.gi))

    async def _take(self, call: str, parent: GpuUuid, steps: Callable[[], Iterable[str]]) -> None:
        self._open[parent] = self._open.get(parent, 0) + 1
        self.most_at_once[parent] = max(self.most_at_once.get(parent, 0), self._open[parent])
        try:
            await asyncio.sleep(0)
            if (hangs := self.hanging.get(parent)) is not None:
                await hangs.wait()
            if self.hardware.problem:
                raise Rejected(self.hardware.problem)
            self.cut(f"before {call}")
            for step in steps():
                self.cut(step)
                await asyncio.sleep(0)
        except Killed:
            self.killed.set()
            await asyncio.Event().wait()
        finally:
            self._open[parent] -= 1


class Records:
    """As InstanceRecords, in memory. `cut` is asked before and after each write."""

    def __init__(self) -> None:
        self.content: list[MadeInstance] = []
        self.cut: Callable[[str], None] = lambda where: None
        self.killed: Callable[[], None] = lambda: None

    async def load(self) -> list[MadeInstance]:
        return list(self.content)

    async def save(self, made: Iterable[MadeInstance]) -> None:
        await asyncio.sleep(0)
        try:
            self.cut("before the records")
            self.content = list(made)
            self.cut("after the records")
        except Killed:
            self.killed()
            await asyncio.Event().wait()
        await asyncio.sleep(0)


class Owner:
    """The owner of the instances of some GPUs, which a test can kill and start again."""

    def __init__(self, gpus: int = 1, *, idle_s: float = 600.0, **settings: Any) -> None:
        self.hardware = Hardware(gpus)
        self.driver, self.records = Driver(self.hardware), Records()
        self.records.killed = self.driver.killed.set
        self.now, self.is_answering = 1000.0, True
        self.seen: Any = SimpleNamespace(
            current=self.hardware.inventory(), is_read=True, cordoned={}, unhealthy_reasons={}
        )
        self.settings = Settings.model_validate(
            {
                "node_name": "node",
                "mig": {"on_demand": ["all"], "idle_s": idle_s},
                "state_directory": "/unused",
                **settings,
            }
        )
        self.counts: Callable[[], dict[str, float]] = dict
        self.outcomes: list[tuple[str, str]] = []
        self._task: asyncio.Task[Any] | None = None
        self._begun: list[asyncio.Task[Any]] = []
        self.mig = self._new()

    def _new(self) -> MigInstances:
        node = node_of(settings=self.settings, inventory=self.seen, metrics=self)
        made = MigInstances(node, self.driver, self.poll, self.records, clock=lambda: self.now)  # type: ignore[arg-type]
        made.own_node.is_known = True
        return made

    # As AgentMetrics:

    def show_mig_instances(self, count: Callable[[], dict[str, float]]) -> None:
        self.counts = count

    def mig_called(self, call: str, outcome: str, duration_s: float) -> None:
        self.outcomes.append((call, outcome))

    async def poll(self) -> bool:
        await asyncio.sleep(0)
        if self.is_answering:
            self.seen.current = self.hardware.inventory()
        return self.is_answering

    def begin(self, what: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """In a task that ends with the owner at the latest: the process may be killed while a call waits."""
        task = asyncio.create_task(what)  # noqa: TID251 - a group would wait for it
        self._begun.append(task)
        return task

    async def start(self) -> None:
        await self.poll()
        await self.mig.load()
        self._task = self.begin(self.mig.run())

    async def stop(self) -> None:
        begun, self._begun = self._begun, []
        for task in begun:
            task.cancel()
        if begun:
            await asyncio.wait(begun)

    async def restart(self, held: dict[str, dict[str, GpuUuid]] | None = None) -> None:
        """Of the process; `held` is what the claims' records have."""
        await self.stop()
        self.driver.killed.clear()
        self.driver.hanging.clear()
        self.mig = self._new()
        await self.poll()
        await self.mig.load()
        self.mig.restore(held or {})
        self._task = self.begin(self.mig.run())
        await self.quiet()

    async def later(self, seconds: float = 0.0) -> None:
        """So much time goes by, and the inventory is read again."""
        self.now += seconds
        await self.poll()
        self.mig.changed()
        await self.quiet()

    async def quiet(self) -> None:
        """Until nothing more happens by itself."""
        for _ in range(40):
            for _ in range(25):
                await asyncio.sleep(0)
            if self._task is not None and self._task.done():
                self._task.result()
            if not self.mig.is_calling and not self.mig._stale:
                return

    async def hold(self, uid: str, *places: MigPlacement) -> str:
        """Why not; empty where the claim has its instances."""
        refused = await self.mig.hold(uid, [named(one) for one in places])
        return refused.detail if refused is not None else ""

    async def leave_idle(self, where: MigPlacement) -> None:
        """Claim `a` has held it."""
        await self.hold("a", where)
        self.mig.release("a")

    async def killed_while_holding(self, uid: str, where: MigPlacement) -> None:
        """At the point of `raise_at`; then it is started again."""
        task = self.begin(self.hold(uid, where))
        await self.driver.killed.wait()
        task.cancel()
        await self.restart()

    async def reload(self) -> None:
        """In the same process, whose calls are given up."""
        before = self.mig
        await self.stop()
        self.mig = self._new()
        self.mig.take_over(before)
        await self.start()

    def on(self, gpu: int = 0) -> list[tuple[str, int]]:
        """What there is, by profile and start."""
        return sorted((BY_ID[one.place.profile].name, one.place.start) for one in self.hardware.gpus[gpu_uuid(gpu)])

    def raise_at(self, where: str, error: Exception | None = None) -> None:
        """The next call gets this far: then it raises, or the process is killed."""

        def cut(here: str) -> None:
            if here == where:
                self.driver.cut = self.records.cut = lambda _: None
                raise error or Killed

        self.driver.cut = self.records.cut = cut


POINTS = (
    *("before the records", "after the records", "before create", "before destroy", "a GPU instance is there"),
    *("the instance is whole", "the compute instance is gone", "the instance is gone"),
)
"""Where a process can be killed."""
SLOW = Unavailable("the driver does not answer")
