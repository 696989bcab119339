"""The last day of use and of each GPU's changes: where points are placed, what the file keeps, what a wrong one costs."""

from __future__ import annotations

import base64
import json
import math
import os
import random
import tracemalloc
import zlib
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from msgspec.structs import replace
from structlog.testing import capture_logs

from gpushare_agent.agent.observability.saved_past import (
    FILE,
    MAX_BYTES,
    MAX_CHANGES,
    MAX_REASON_CHARS,
    GpuChanges,
    SavedPast,
    _Document,
    _read,
)
from gpushare_agent.agent.observability.usage_history import (
    DAY_POINTS,
    DAY_S,
    MAX_CONTAINERS,
    MAX_GPUS,
    DayHistory,
    UsageHistory,
)
from gpushare_agent.core.kit.json_schema import converted
from gpushare_agent.core.model.allocations import ContainerKey
from gpushare_agent.core.model.errors import Corrupt, NodeEventReason, Unavailable
from gpushare_agent.core.model.gpu_health import GpuEvent, GpuEventKind
from gpushare_agent.core.model.names import MIB, GpuUuid
from gpushare_agent.core.model.usage import ContainerUse, GpuSample, UsageRound
from tests.agent.support_agent import poll_until
from tests.cluster.support_kube import running
from tests.fakes.clock import FakeClock
from tests.observability.support_usage import UUIDS, allocation, inventory, key_of

STEP_S = DAY_S / DAY_POINTS
BEGAN_AT = 1_700_000_100.0  # the beginning of a step
A, B = key_of(1), key_of(2)


class Node:
    """What is recent is made of one round in each of its steps of five seconds; `after` is one more step of the day."""

    def __init__(self, directory: Path | None = None, *, at: float = BEGAN_AT) -> None:
        self.steady, self.wall = FakeClock(1000.0), FakeClock(at)
        self.allocations = {A: allocation(A, pod="a"), B: allocation(B, pod="b")}
        self.recent = UsageHistory(900.0, 180, allocations=lambda: self.allocations, clock=self.steady)
        self.day = DayHistory(DAY_S, DAY_POINTS, clock=self.wall)
        self.changes = GpuChanges(clock=self.wall)
        self.past = SavedPast(
            directory=directory, recent=self.recent, day=self.day, changes=self.changes, gpus=lambda: self.gpus
        )
        self.gpus = inventory()

    def add(self, sm: float, *keys: ContainerKey, gpus: int = 1) -> None:
        uuids = [GpuUuid(f"GPU-{number}") for number in range(gpus)]
        self.recent.add(
            UsageRound(
                sampled_at=self.wall.now,
                gpus={uuid: GpuSample(uuid=uuid, sm_ratio=sm, memory_used_bytes=80 * MIB) for uuid in uuids},
                containers={
                    (key, UUIDS[0]): ContainerUse(
                        key=key, uuid=UUIDS[0], pids=(), memory_bytes=int(sm * 1000) * MIB, sm_ratio=sm
                    )
                    for key in keys
                },
            )
        )

    def after(self, sm: float | None, *keys: ContainerKey, s: float = STEP_S, gpus: int = 1) -> None:
        """None: no round."""
        self.steady.now += s - 1.0
        if sm is not None:
            self.add(sm, *keys, gpus=gpus)
        self.steady.now += 1.0
        self.wall.now += s
        self.day.fold(self.recent)

    def document(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(b"".join(self.day.pieces()))
        return found

    def ratios(self, uuid: str = "GPU-0") -> list[float | None]:
        values: list[float | None] = self.document()["gpus"][uuid]["sm_ratio"]
        return values


def test_a_point_is_the_mean_of_five_minutes() -> None:
    """Of the rounds of that time alone; the whole document has the shape of the last minutes'."""
    node = Node()
    node.add(0.9, A)
    node.steady.now += STEP_S - 20.0
    for sm in (0.2, 0.4):
        node.steady.now += 5.0
        node.add(sm, A)
    node.steady.now += 10.0
    node.wall.now += STEP_S
    node.day.fold(node.recent)
    found = node.document()
    assert {name: found[name] for name in ("at", "step_seconds")} == {"at": BEGAN_AT + STEP_S, "step_seconds": STEP_S}
    curve = found["containers"][f"{A.pod_uid}/main"]
    assert len(curve["sm_ratio"]) == DAY_POINTS
    assert (curve["sm_ratio"][-2:], curve["memory_bytes"][-1]) == ([None, 0.3], 300 * MIB)
    assert (curve["namespace"], curve["pod"], curve["gpus"]) == ("default", "a", ["GPU-0"])
    assert found.keys() == json.loads(b"".join(node.recent.pieces())).keys()


def test_what_is_not_known_is_a_gap_also_before_the_next_point() -> None:
    """A curve from before a long pause is not shown as if it were of now."""
    node = Node()
    node.after(0.25)
    node.after(None)
    node.after(0.5)
    assert node.ratios()[-3:] == [0.25, None, 0.5]
    node.wall.now += 3 * STEP_S
    assert node.ratios()[-6:] == [0.25, None, 0.5, None, None, None]
    assert node.document()["at"] == BEGAN_AT + 6 * STEP_S


def test_a_container_that_has_ended_is_shown_for_its_day() -> None:
    """With its name. After it nothing of it is left."""
    node = Node()
    node.after(0.5, A, B)
    node.allocations.clear()
    for _ in range(DAY_POINTS - 1):
        node.after(0.25, A)
    assert node.document()["containers"][f"{B.pod_uid}/main"]["sm_ratio"] == [0.5] + [None] * (DAY_POINTS - 1)
    assert node.document()["containers"][f"{B.pod_uid}/main"]["pod"] == "b"
    node.after(0.25, A)
    assert [*node.document()["containers"]] == [f"{A.pod_uid}/main"]


def test_pods_that_ended_first_give_way_to_those_that_run() -> None:
    """A day of pods that start and fail in a loop."""
    node = Node()
    for number in range(0, MAX_CONTAINERS + 20, 4):
        node.after(0.5, A, *(key_of(9000 - number - n) for n in range(4)))
    found = node.document()["containers"]
    assert len(found) == MAX_CONTAINERS
    assert f"{A.pod_uid}/main" in found and f"{key_of(9000 - MAX_CONTAINERS - 19).pod_uid}/main" in found
    assert not found.keys() & {f"{key_of(9000 - number).pod_uid}/main" for number in range(20)}


JUMPS = st.one_of(st.just(0.0), st.integers(-12, 12).map(lambda n: n * STEP_S), st.floats(-2 * DAY_S, 2 * DAY_S))


@example([(0.0, 0.2), (-STEP_S, 0.7)])
@given(st.lists(st.tuples(JUMPS, st.sampled_from([None, 0.1, 0.2, 0.7])), min_size=1, max_size=30))
def test_a_clock_that_jumps_moves_no_point_and_fills_none(steps: list[tuple[float, float | None]]) -> None:
    """Compared with a plain dictionary: what would be in the future is dropped, and a step keeps its first point."""
    node, wanted, newest = Node(at=BEGAN_AT + 10 * DAY_S), dict[int, float](), None
    for jump, sm in steps:
        node.wall.now += jump
        node.after(sm)
        slot = int(node.wall.now // STEP_S) - 1
        if slot == newest:
            continue
        newest = slot
        wanted = {known: value for known, value in wanted.items() if slot - DAY_POINTS < known < slot}
        if sm is not None:
            wanted[slot] = sm
    if not wanted:
        assert node.document()["gpus"] == {} or set(node.ratios()) == {None}
        return
    assert newest is not None
    assert node.ratios() == [wanted.get(slot) for slot in range(newest - DAY_POINTS + 1, newest + 1)]


def test_a_few_bytes_make_no_gigabyte() -> None:
    """A curve is unpacked no further than it can be."""
    packed = base64.b64encode(zlib.compress(b"\0" * 100_000_000)).decode()
    raw = {"version": 1, "slot": 5, "gpus": [{"uid": "GPU-0", "last": 5, "points": packed[:6000]}]}
    tracemalloc.start()
    try:
        with pytest.raises(Corrupt):
            _read(converted({**raw, "containers": [], "changes": []}, _Document))
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
    finally:
        tracemalloc.stop()


def test_the_next_step_is_awaited_to_its_end_by_the_wall_clock() -> None:
    """And a second more: a timer may be early."""
    node = Node()
    for passed, due in ((0.0, 1.0), (0.5, 0.5), (1.0, STEP_S), (STEP_S - 1.0, 2.0)):
        node.wall.now = BEGAN_AT + passed
        assert node.day.due_s() == pytest.approx(due)


async def restarted(node: Node, directory: Path, *, later_s: float = 0.0) -> Node:
    await node.past.save()
    return await loaded(directory, at=node.wall.now + later_s)


async def loaded(directory: Path, at: float) -> Node:
    node = Node(directory, at=at)
    await node.past.load()
    return node


async def test_a_restart_goes_on_where_the_agent_ended(tmp_path: Path) -> None:
    """Gaps stay gaps, the time between is one, ended containers keep their names, changes their order."""
    node = Node(tmp_path)
    node.after(0.125, A, B)
    node.after(None)
    node.after(0.5, A)
    node.changes.health_changed(UUIDS[0], NodeEventReason.GPU_CORDONED, "fan")
    node.changes.health_changed(UUIDS[0], NodeEventReason.GPU_UNCORDONED, "done")
    before, noted = node.document(), node.changes.newest()
    again = await restarted(node, tmp_path)
    assert (again.document(), again.changes.newest()) == (before, noted)
    later = await restarted(again, tmp_path, later_s=4 * STEP_S)
    later.after(0.75)
    assert later.ratios()[-8:] == [0.125, None, 0.5, None, None, None, None, 0.75]
    assert [*later.document()["containers"]] == [f"{A.pod_uid}/main", f"{B.pod_uid}/main"]
    assert sorted(os.listdir(tmp_path)) == [FILE]  # and no copy


@pytest.mark.parametrize("later_s", [-2.5 * DAY_S, -3 * STEP_S, 30 * DAY_S])
async def test_after_a_reboot_with_another_time_nothing_is_misplaced(tmp_path: Path, later_s: float) -> None:
    """What is older than a day, or would be in the future, is dropped with the first point; the rest stays in its place."""
    node = Node(tmp_path)
    for number in range(10):
        node.after(number / 10)
    again = await restarted(node, tmp_path, later_s=later_s)
    again.after(0.95)
    kept = [number / 10 for number in range(7)] if later_s == -3 * STEP_S else []
    assert [value for value in again.ratios() if value is not None] == [*kept, 0.95]
    assert again.ratios()[-1] == 0.95


def _changed(change: Callable[[dict[str, Any]], None]) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        document = json.loads(path.read_bytes())
        del document["digest"]
        change(document)
        path.write_text(json.dumps(document))

    return write


def _points(raw: bytes) -> Callable[[Path], None]:
    packed = base64.b64encode(zlib.compress(raw)).decode()
    return _changed(lambda document: document["gpus"][0].update(points=packed))


@pytest.mark.parametrize(
    "spoil",
    [
        _changed(lambda document: document.update(version=2)),
        _changed(lambda document: document.update(slot=-1)),
        _changed(lambda document: document.update(slot=1 << 41)),
        _changed(lambda document: document["gpus"].extend(document["gpus"] * MAX_GPUS)),
        _changed(lambda document: document["gpus"][0].update(points="AAAA")),
        _changed(lambda document: document["gpus"][0].update(points="ä")),
        _changed(lambda document: document["changes"].append({"at": -1, "uuid": "", "what": "", "reason": ""})),
        _points(b"\0" * (8 * DAY_POINTS - 4)),
        *(_points(array("f", [one] * 2 * DAY_POINTS).tobytes()) for one in (math.inf, 1e16, -1.0)),
        _points(b"\0" * 100_000_000),
        lambda path: path.write_bytes(path.read_bytes().replace(b'"last": 5', b'"last": 4')),
        lambda path: path.write_bytes(path.read_bytes()[:-40]),
        lambda path: path.write_bytes(b" " * (MAX_BYTES + 1)),
        lambda path: path.chmod(0o666),
    ],
)
async def test_a_file_that_is_not_the_agents_own_format_costs_the_past_alone(
    tmp_path: Path, spoil: Callable[[Path], None]
) -> None:
    """A newer version's, a damaged one, a bomb, somebody else's: it is set aside, and the next one takes its place."""
    node = Node(tmp_path)
    node.after(0.5, A)
    await node.past.save()
    spoil(tmp_path / FILE)
    again = Node(tmp_path, at=node.wall.now)
    with capture_logs() as logs:
        await again.past.load()
    assert [(line["event"], line["log_level"]) for line in logs] == [("history_corrupt", "warning")]
    assert (again.document()["at"], again.document()["gpus"], again.changes.newest()) == (None, {}, {})
    assert os.listdir(tmp_path) == [f"{FILE}.corrupt"]
    again.after(0.25)
    assert (await restarted(again, tmp_path)).ratios()[-1] == 0.25


async def test_a_curve_that_claims_the_future_goes_with_its_day(tmp_path: Path) -> None:
    node = Node(tmp_path)
    node.after(0.5, A)
    await node.past.save()
    _changed(lambda document: document["containers"][0].update(last=1 << 40))(tmp_path / FILE)
    again = await loaded(tmp_path, node.wall.now)
    again.after(0.25)
    assert again.document()["containers"]
    again.wall.now += DAY_S
    again.after(0.25)
    assert not again.document()["containers"]


async def test_a_directory_that_cannot_be_written_is_reported_once(tmp_path: Path) -> None:
    """The curves go on without it, as they do where the setting is empty."""
    (tmp_path / "file").touch()
    node = Node(tmp_path / "file")
    node.after(0.5)
    with capture_logs() as logs:
        await node.past.load()
        for _ in range(3):
            await node.past.save()
    assert [line["event"] for line in logs] == ["history_not_read", "history_not_saved"]
    memory = Node()
    memory.after(0.5)
    await memory.past.load()
    await memory.past.save()
    assert node.ratios() == memory.ratios()


async def test_the_largest_file_can_be_read_again(tmp_path: Path) -> None:
    """As many curves as there can be, of noise, with the longest names and all changes: within the bound."""
    noise, node = random.Random(7), Node(tmp_path)
    keys = [A, *(key_of(number, "c" * 63) for number in range(1, MAX_CONTAINERS))]
    node.after(0.5, *keys, gpus=MAX_GPUS)
    saved = node.day.saved()
    for _, ratios, sizes in (*saved.gpus.values(), *saved.containers.values()):
        for place in range(DAY_POINTS):
            ratios[place], sizes[place] = noise.random(), noise.randrange(80 << 30)
    # One character is two escapes of JSON; a container of MIG instances may have more of them than there are GPUs.
    uuids = tuple(GpuUuid(f"MIG-{number:036}") for number in range(2 * MAX_GPUS))
    owner = replace(saved.owners[A], namespace="n" * 63, pod="p" * 253, gpus=uuids)
    full = DayHistory(DAY_S, DAY_POINTS, clock=node.wall)
    full.restore(replace(saved, owners=dict.fromkeys(keys, owner)))
    node.past.day = full
    for gpu in range(MAX_GPUS):
        for number in range(MAX_CHANGES):
            why = f"{number} " + "\U0001f525" * 999
            node.changes.health_changed(GpuUuid(f"GPU-{gpu}"), NodeEventReason.GPU_UNHEALTHY, why)
    with capture_logs() as logs:
        again = await restarted(node, tmp_path)
    assert (tmp_path / FILE).stat().st_size < MAX_BYTES
    assert not logs
    assert len(again.document()["containers"]) == MAX_CONTAINERS
    assert len(again.document()["gpus"]) == len(again.changes.newest()) == MAX_GPUS


async def test_the_service_adds_a_point_and_writes_it_after_each_step_and_at_the_end(tmp_path: Path) -> None:
    """It begins with what the agent before it wrote."""
    before = Node(tmp_path)
    before.after(0.25)
    await before.past.save()
    node = Node(tmp_path, at=before.wall.now + STEP_S + 0.99)
    node.add(0.5)
    async with running(node.past.run):
        await poll_until(lambda: node.day.version == 2, "the first point")
        assert node.ratios()[-2:] == [0.25, 0.5]
        await poll_until(lambda: _saved_slot(tmp_path) == int(node.wall.now // STEP_S) - 1, "the file")
        node.changes.health_changed(UUIDS[0], NodeEventReason.GPU_CORDONED, "at the end")
    last = await loaded(tmp_path, node.wall.now)
    assert [one.reason for one in last.changes.newest()[UUIDS[0]]] == ["at the end"]


class _FailsAtFirst:
    """A disk that does not answer `times` times."""

    def __init__(self, file: Any, times: int) -> None:
        self.file, self.times = file, times

    async def load(self, *parsers: Any) -> Any:
        self.times -= 1
        if self.times >= 0:
            raise Unavailable("no answer")
        return await self.file.load(*parsers)

    async def save(self, document: Callable[[], dict[str, Any]]) -> None:
        await self.file.save(document)


async def test_a_disk_that_is_slow_at_the_start_costs_nothing(tmp_path: Path) -> None:
    """What could not be read is read before the first point would replace it, and not replaced by an end before that."""
    before = Node(tmp_path)
    before.after(0.25)
    before.changes.event_came(xid(31), 2)
    await before.past.save()
    node = Node(tmp_path, at=before.wall.now + STEP_S / 2)
    node.past._file = _FailsAtFirst(node.past._file, 1)  # type: ignore[assignment]
    async with running(node.past.run):
        await poll_until(lambda: node.past._file.times == 0, "the first try")  # type: ignore[union-attr]
        node.changes.health_changed(UUIDS[0], NodeEventReason.GPU_CORDONED, "fan")
    again = Node(tmp_path, at=before.wall.now + STEP_S + 0.99)
    again.past._file = _FailsAtFirst(again.past._file, 1)  # type: ignore[assignment]
    again.add(0.5)
    async with running(again.past.run):
        await poll_until(lambda: again.day.version == 2, "the first point")
    assert again.ratios()[-2:] == [0.25, 0.5]
    assert [one.count for one in again.changes.newest()[UUIDS[0]]] == [2]


def _saved_slot(directory: Path) -> int:
    slot: int = json.loads((directory / FILE).read_bytes())["slot"]
    return slot


@pytest.mark.parametrize("has_read", [True, False])
async def test_a_reload_does_not_read_the_file_again(tmp_path: Path, has_read: bool) -> None:
    """What the generation before it has is newer, and would be doubled; also where that one could not read it."""
    node = Node(tmp_path)
    node.after(0.5)
    if not has_read:
        node.past._file = _FailsAtFirst(node.past._file, 1)  # type: ignore[assignment]
    await node.past.load()
    node.changes.event_came(xid(31), 2)
    await node.past.save()
    again = Node(tmp_path, at=node.wall.now)
    again.past.take_over(node.past)
    await again.past.load()
    assert again.ratios()[-1] == 0.5
    assert [one.count for one in again.changes.newest()[UUIDS[0]]] == [2]


# --- changes of GPUs ---


def xid(number: int, uuid: GpuUuid | None = UUIDS[0]) -> GpuEvent:
    return GpuEvent(kind=GpuEventKind.XID, uuid=uuid, xid=number)


def texts(changes: GpuChanges, uuid: GpuUuid = UUIDS[0]) -> list[tuple[str, str, int]]:
    return [(one.what, one.reason, one.count) for one in changes.newest()[uuid]]


def test_changes_are_kept_with_their_time_and_reason_newest_first() -> None:
    """The last of each GPU; a text from outside is cut."""
    clock = FakeClock(100.0)
    changes = GpuChanges(clock=clock)
    changes.event_came(xid(79), 1)
    changes.health_changed(UUIDS[0], NodeEventReason.GPU_UNHEALTHY, "Xid 79")
    clock.now += 60
    changes.health_changed(UUIDS[0], NodeEventReason.GPU_RECOVERED, "x" * 1000)
    assert [(one.at, one.what, one.xid) for one in changes.newest()[UUIDS[0]]] == [
        (160.0, "recovered", 0),
        (100.0, "unhealthy", 0),
        (100.0, "xid", 79),
    ]
    assert changes.newest()[UUIDS[0]][0].reason == "x" * (MAX_REASON_CHARS - 1) + "…"
    for number in range(2 * MAX_CHANGES):
        changes.health_changed(UUIDS[0], NodeEventReason.GPU_CORDONED, str(number))
    assert [one[1] for one in texts(changes)] == [
        str(number) for number in range(2 * MAX_CHANGES - 1, MAX_CHANGES - 1, -1)
    ]


def test_a_program_that_causes_xids_without_end_pushes_nothing_out() -> None:
    """One entry for each Xid, with the number of them and the time of the last."""
    changes = GpuChanges(clock=FakeClock(100.0))
    changes.health_changed(UUIDS[0], NodeEventReason.GPU_CORDONED, "fan")
    for _ in range(200):
        changes.event_came(xid(13), 3)
        changes.event_came(xid(31), 1)
    assert texts(changes) == [
        ("xid", "Xid 31 (GPU memory page fault)", 200),
        ("xid", "Xid 13 (graphics engine exception)", 600),
        ("cordoned", "fan", 1),
    ]


def test_instances_that_come_and_go_do_not_pile_up() -> None:
    changes = GpuChanges()
    for life in range(3 * MAX_GPUS):
        changes.health_changed(GpuUuid(f"MIG-{life}"), NodeEventReason.GPU_UNHEALTHY, "lost")
        changes.health_changed(UUIDS[0], NodeEventReason.GPU_CORDONED, str(life))
    assert len(changes.newest()) == MAX_GPUS and len(changes.newest()[UUIDS[0]]) == MAX_CHANGES


async def test_a_start_repeats_nothing_and_ends_what_is_over(tmp_path: Path) -> None:
    """A GPU that was unhealthy and still is has one entry; one that is healthy now has recovered meanwhile."""
    node = Node(tmp_path)
    for gpu in (0, 1):
        node.changes.health_changed(UUIDS[gpu], NodeEventReason.GPU_UNHEALTHY, "lost")
    await node.past.save()
    again = Node(tmp_path, at=node.wall.now)
    again.gpus = inventory(2, sick={0: "lost"})
    again.changes.health_changed(UUIDS[0], NodeEventReason.GPU_UNHEALTHY, "lost")
    await again.past.load()
    assert texts(again.changes) == [("unhealthy", "lost", 1)]
    assert [what for what, _, _ in texts(again.changes, UUIDS[1])] == ["recovered", "unhealthy"]
