"""Claims of MIG instances: those that are there, and those that are made when the claim is prepared."""

from __future__ import annotations

import asyncio
import json
import threading
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from structlog.testing import capture_logs

from gpushare_agent.agent.dra.decisions.edits import PreparedClaim
from gpushare_agent.core.claims.claim import ClaimPolicy
from gpushare_agent.core.claims.devices import is_placement_name, placement_device_name
from gpushare_agent.core.model.errors import RefusalReason, Refused
from gpushare_agent.core.model.isolation import DeviceListStrategy
from gpushare_agent.core.model.mig import MigPlacement
from gpushare_agent.core.model.names import GpuUuid
from tests.dra.support_claims import (
    Driver,
    RawClaim,
    edit_policy,
    gpu_config,
    prepared,
    raw_claim,
    ref_of,
    result,
    uid_of,
)
from tests.extender.support_extender import eventually
from tests.fakes.clock import FakeClock
from tests.isolation.support_cdi import schema
from tests.support_core import mig_instance, used_cores
from tests.support_deadline import DEADLINE_S

NODES = (DeviceListStrategy.DEVICE_NODES, DeviceListStrategy.ENVVAR)
BUSY = Refused(RefusalReason.NOT_READY, "the driver is slow. The kubelet tries again.")


def place(start: int) -> str:
    parent = GpuUuid("GPU-8f3e2b1c-0000-4000-8000-000000000001")
    return placement_device_name(MigPlacement(parent, 19, start), "1g.10gb")


def at(start: int, request: str = "gpu", **changes: Any) -> RawClaim:
    """All of the instance there."""
    given = {"cores": 100, "memory": "9856Mi", **changes}
    return result(request, **given, device=place(start))


def driver_of(directory: Path, *claims: RawClaim, wait_s: float = 0.0) -> Driver:
    driver = Driver(directory, *claims, wait_s=wait_s)
    driver.policy = replace(edit_policy("none"), strategies=NODES)
    return driver


@pytest.fixture
def driver(tmp_path: Path) -> Driver:
    """With a claim of a place."""
    return driver_of(tmp_path, raw_claim(at(6)))


async def refused(driver: Driver, number: int = 1) -> Refused:
    made = await driver.claims.prepare(ref_of(number))
    assert isinstance(made, Refused), made
    return made


def spec(driver: Driver, number: int = 1) -> list[dict[str, Any]]:
    """The device nodes that the runtime gives, with their numbers."""
    path = driver.cdi / f"gpushare-agent-claim-{uid_of(number)}.json"
    document = json.loads(path.read_text())
    schema().validate(document)
    assert all("/" not in one["name"] for one in document["devices"])
    nodes: list[dict[str, Any]] = document["devices"][0]["containerEdits"]["deviceNodes"]
    return [one for one in nodes if "uvm" not in one["path"] and "ctl" not in one["path"]]


async def test_a_claim_of_a_place_gets_the_instance_that_is_made_there(driver: Driver) -> None:
    """Its nodes are not on the host yet: the spec says what they are."""
    made = await prepared(driver)
    assert made.places == {place(6): "MIG-1"} and driver.mig.held == {uid_of(1): {place(6)}}
    assert dict(made.results[0].edits.env)["NVIDIA_VISIBLE_DEVICES"] == "MIG-1"
    caps = [{"type": "c", "major": 511, "minor": minor} for minor in (101, 201)]
    paths = [f"/dev/nvidia-caps/nvidia-cap{minor}" for minor in (101, 201)]
    named = [{"path": path, "hostPath": path, "permissions": "rwm"} for path in ("/dev/nvidia0", *paths)]
    assert spec(driver) == [named[0], named[1] | caps[0], named[2] | caps[1]]
    assert used_cores(driver.cache) == {GpuUuid("MIG-1"): 100}
    await driver.claims.unprepare(ref_of())
    assert driver.mig.held == {} and not len(driver.cache)


async def test_a_place_that_is_not_shareable_is_given_whole(tmp_path: Path) -> None:
    """The scheduler writes no capacity then."""
    of_place = at(6)
    del of_place["consumedCapacity"]
    driver = driver_of(tmp_path, raw_claim(of_place))
    made = await prepared(driver)
    assert made.places == {place(6): "MIG-1"} and made.charged[0].is_whole
    assert used_cores(driver.cache) == {GpuUuid("MIG-1"): 100}


async def test_a_request_with_alternatives_makes_no_name_with_a_slash(tmp_path: Path) -> None:
    driver = driver_of(tmp_path, raw_claim(at(6, "gpu/small")))
    made = await prepared(driver)
    assert made.results[0].cdi_name == f"{place(6)}.gpu.small.{uid_of(1)}" and spec(driver)


async def test_decisions_name_the_instance(driver: Driver) -> None:
    await prepared(driver)
    [record] = driver.decisions.newest(9)
    assert record.labels == ("0:6",) and "GPU 0:6 (1g.10gb) for claim claim-1" in record.explanation


async def test_an_agent_that_starts_knows_the_places(driver: Driver) -> None:
    await prepared(driver)
    driver.mig.held, holds = {}, driver.mig.holds
    await driver.restart()
    assert driver.mig.held == {uid_of(1): {place(6)}} and driver.mig.holds == holds


async def test_the_call_ends_with_a_reason_before_the_kubelets_patience_does(tmp_path: Path) -> None:
    """Its instance is waited for no longer than the call has: a call that is cut off says nothing of the driver."""
    driver = driver_of(tmp_path, raw_claim(at(6)), wait_s=40.0)
    clock = FakeClock()
    driver.claims.clock = clock
    driver.mig.refusal = BUSY
    async with asyncio.TaskGroup() as group:
        call = group.create_task(driver.claims.prepare(ref_of()))
        await eventually(lambda: driver.mig.holds == 1)
        clock.now += 38.0
        driver.claims.changed()
        await eventually(lambda: driver.mig.holds == 2)
        clock.now += 2.0
        driver.claims.changed()
    assert call.result() == BUSY and driver.mig.waits[:2] == [40.0, 2.0]


async def test_a_claim_that_waits_keeps_its_place_and_one_that_never_gets_it_does_not(driver: Driver) -> None:
    """The kubelet tries again after a minute; what is refused for good is not held until the pod is deleted."""
    driver.mig.refusal = BUSY
    assert (await refused(driver)) == BUSY and driver.mig.held == {uid_of(1): {place(6)}}
    await driver.claims.unprepare(ref_of())
    assert driver.mig.held == {}
    driver.mig.refusal = None
    driver.policy = replace(edit_policy("none"), isolation="nobody-knows")
    del driver.api.claims["claim-1"]
    assert (await refused(driver)).reason is RefusalReason.INVALID_REQUEST and driver.mig.held == {}


async def test_after_a_reboot_a_claim_gets_another_instance(driver: Driver) -> None:
    """Its record, its spec and the ledger have the new one, and the host is prepared for it."""
    first = await prepared(driver)
    driver.mig.lose()
    driver.store.is_synced = True
    await driver.restart()
    assert driver.specs() == [], "a container that restarts would get what is not there"
    assert driver.warnings == [], "it is made again"
    driver.prepared_keys.clear()
    again = await prepared(driver)
    assert again.places == {place(6): "MIG-2"} and again.results[0].key == first.results[0].key
    assert [one.get("minor") for one in spec(driver)] == [None, 102, 202]
    assert used_cores(driver.cache) == {GpuUuid("MIG-2"): 100} and driver.prepared_keys == [again.results[0].key]
    await driver.restart()
    assert driver.claims.prepared[uid_of(1)].places == {place(6): "MIG-2"}
    await driver.claims.unprepare(ref_of())
    assert driver.mig.held == {} and not len(driver.cache)


async def test_what_was_cut_off_while_an_instance_is_replaced_is_done_by_the_next_call(driver: Driver) -> None:
    """The host's files name the instance: with those of the one before a container would be limited by nothing."""
    [key] = [one.key for one in (await prepared(driver)).results]
    driver.mig.lose()
    driver.refusal = Refused(RefusalReason.NOT_READY, "the disk is full")
    assert (await refused(driver)).detail == "the disk is full"
    with capture_logs() as logs:
        for _ in range(3):
            await driver.claims.refresh()
    assert [one["event"] for one in logs].count("claim_spec_not_written") == 1
    assert used_cores(driver.cache) == {GpuUuid("MIG-1"): 100}
    await driver.restart()  # as after a kill before the host was prepared
    driver.refusal = None
    driver.prepared_keys.clear()
    assert (await prepared(driver)).places == {place(6): "MIG-2"} and driver.prepared_keys == [key]
    assert used_cores(driver.cache) == {GpuUuid("MIG-2"): 100}


async def test_cut_off_while_the_other_instance_is_recorded_a_claim_has_it(driver: Driver) -> None:
    """The thread writes the record all the same, and the next agent goes by it."""
    await prepared(driver)
    driver.mig.lose()
    save, begun, may_end = driver.files.save, threading.Event(), threading.Event()

    def slow(claim: PreparedClaim) -> None:
        begun.set()
        may_end.wait(DEADLINE_S)
        save(claim)

    driver.files.save = slow  # type: ignore[method-assign]
    async with asyncio.TaskGroup() as group:
        call = group.create_task(driver.claims.prepare(ref_of()))
        await eventually(begun.is_set)
        call.cancel()
    may_end.set()
    driver.files.save = save  # type: ignore[method-assign]
    assert driver.claims.prepared[uid_of(1)].places == {place(6): "MIG-2"}
    assert used_cores(driver.cache) == {GpuUuid("MIG-2"): 100}
    await prepared(driver)
    assert driver.files.load() == [driver.claims.prepared[uid_of(1)]]


async def test_admin_access_takes_no_place_from_others(tmp_path: Path) -> None:
    """The scheduler does not count it, and gives its place, or one that overlaps it, to somebody else."""
    watching = at(6, adminAccess=True)
    driver = driver_of(tmp_path, raw_claim(watching), raw_claim(at(6), number=2))
    why = await refused(driver)
    assert why.reason is RefusalReason.NOT_READY and "admin access makes no instance there" in why.detail
    assert driver.mig.held == {} and driver.mig.holds == 0
    await prepared(driver, 2)
    made = await prepared(driver)
    assert (made.places, made.results[0].gpu) == ({}, "MIG-1") and driver.mig.held.keys() == {uid_of(2)}
    driver.mig.lose()
    await driver.claims.refresh()
    await driver.claims.refresh()
    assert driver.claims.prepared[uid_of(1)].results[0].gpu == "MIG-2" and len(driver.specs()) == 2


async def test_an_instance_that_is_made_again_is_not_given_twice(tmp_path: Path) -> None:
    """The first pod was deleted by force, and the scheduler has given its place to the second claim."""
    driver = driver_of(tmp_path, raw_claim(at(6)), raw_claim(at(6, cores=40, memory="4Gi"), number=2))
    await prepared(driver)
    driver.mig.lose()
    await prepared(driver, 2)
    await driver.claims.refresh()
    assert used_cores(driver.cache) == {GpuUuid("MIG-1"): 100, GpuUuid("MIG-2"): 40}
    assert driver.specs() == [f"gpushare-agent-claim-{uid_of(2)}.json"]
    assert "still used by claim default/claim-2" in (await refused(driver)).detail
    await driver.claims.unprepare(ref_of(2))
    assert (await prepared(driver)).places == {place(6): "MIG-2"} and used_cores(driver.cache) == {
        GpuUuid("MIG-2"): 100
    }


async def test_an_instance_that_was_removed_by_hand_is_made_again_without_a_call(tmp_path: Path) -> None:
    """A container that restarts in its pod gets no Prepare."""
    driver = driver_of(tmp_path, raw_claim(at(6)), raw_claim(result(), number=2))
    await prepared(driver), await prepared(driver, 2)
    driver.mig.lose()
    driver.mig.refusal = BUSY
    await driver.claims.refresh()
    assert driver.specs() == [f"gpushare-agent-claim-{uid_of(2)}.json"]
    driver.mig.refusal = None
    await driver.claims.refresh()
    assert driver.claims.prepared[uid_of(1)].places == {place(6): "MIG-2"} and spec(driver)[1]["minor"] == 102
    holds = driver.mig.holds
    await driver.claims.refresh()
    assert driver.mig.holds == holds, "what is there is not asked for"


async def test_a_claim_that_has_ended_holds_nothing(driver: Driver) -> None:
    """Ended while its instance is made again."""
    await prepared(driver)
    driver.mig.lose()
    async with asyncio.TaskGroup() as group:
        group.create_task(driver.claims.unprepare(ref_of()))
        group.create_task(driver.claims.refresh())
    assert driver.mig.held == {} and driver.specs() == [] and not len(driver.cache)


async def test_specs_follow_the_numbers_of_an_instances_nodes(driver: Driver) -> None:
    """The same instance after the driver's modules were loaded again."""
    await prepared(driver)
    for changes in ({"gi_cap": 7}, {"ci_cap": 8}, {"caps_major": 600}):
        gpu = driver.mig.gpus[place(6)]
        assert gpu.mig is not None
        driver.mig.gpus[place(6)] = other = replace(gpu, mig=replace(gpu.mig, **changes))
        current = driver.node.inventory.current
        gpus = tuple(other if one.uuid == other.uuid else one for one in current.gpus)
        driver.node.inventory.current = replace(current, gpus=gpus)
        await driver.claims.refresh()
    assert [(one.get("major"), one.get("minor")) for one in spec(driver)] == [(None, None), (600, 7), (600, 8)]


async def test_a_container_sees_the_instances_of_all_its_claims(tmp_path: Path) -> None:
    """The kubelet asks for two claims at once, and each waits for the other's instance. After a reboot they are prepared
    again in whatever order, and over another start of the agent in between."""
    claims = [raw_claim(at(start), number=number, owner="p") for start, number in ((6, 1), (5, 2))]
    driver = driver_of(tmp_path, *claims, wait_s=DEADLINE_S)
    driver.pod_with_both()

    async def seen(number: int) -> list[str]:
        made = await prepared(driver, number)
        return sorted(dict(made.results[0].edits.env)["NVIDIA_VISIBLE_DEVICES"].split(","))

    async with asyncio.TaskGroup() as group:
        calls = [group.create_task(seen(number)) for number in (1, 2)]
    assert [call.result() for call in calls] == [["MIG-1", "MIG-2"]] * 2
    driver.mig.lose()
    await driver.restart()
    driver.claims.prepare_wait_s = 0.0
    assert f"the MIG instance at {place(6)} is gone, and not made again yet" in (await refused(driver, 2)).detail
    await driver.restart()
    assert [await seen(number) for number in (1, 2, 1)] == [["MIG-3", "MIG-4"]] * 3


async def test_names_by_cdi_are_there_before_the_answer(driver: Driver) -> None:
    """The runtime knows no device of an instance before the agent's own spec names it."""

    class Watch:
        named: tuple[str, ...] = ()

        async def check(self) -> None:
            self.named = tuple(gpu.uuid for gpu in driver.node.gpus().gpus)

    driver.policy = replace(driver.policy, strategies=(DeviceListStrategy.CDI_CRI,))
    driver.cdi_watch = Watch()
    made = await prepared(driver)
    assert made.results[0].cdi_devices[1:] == ("nvidia.com/gpu=MIG-1",) and "MIG-1" in driver.cdi_watch.named


def with_instance(driver: Driver) -> None:
    """MIG-8f3e… that somebody else made."""
    instance = replace(mig_instance(9, 0, 1), uuid=GpuUuid("MIG-8f3e2b1c-0000-4000-8000-000000000009"))
    driver.node.inventory.current = replace(driver.gpus, gpus=(*driver.gpus.gpus, instance))
    driver.claimable.add(instance.uuid)


STATIC = "mig-8f3e2b1c-0000-4000-8000-000000000009"


@pytest.mark.parametrize("is_listed", [False, True])
async def test_a_static_instance_that_is_gone_is_nobody_elses(tmp_path: Path, is_listed: bool) -> None:
    """It says what to do: an instance that is made again is another one. While a claim has it, it is listed, with nodes that
    may be those of a new one."""
    driver = driver_of(tmp_path, raw_claim(at(6) | {"device": STATIC}), raw_claim(at(6) | {"device": STATIC}, number=2))
    with_instance(driver)
    assert (await prepared(driver)).results[0].gpu.startswith("MIG-8f3e") and driver.mig.held == {}
    listed = driver.node.gpus()
    lost = [replace(gpu, mig=replace(gpu.mig, is_gone=True)) for gpu in listed.gpus if gpu.mig is not None]
    driver.node.inventory.current = replace(listed, gpus=(*driver.gpus.gpus, *(lost if is_listed else ())))
    for is_synced in (False, True, True):  # the pod is warned once, as soon as it is known
        driver.store.is_synced = is_synced
        await driver.claims.refresh()
        assert driver.specs() == [] and len(driver.warnings) == is_synced
        assert (driver.claims._due_s() is None) is is_synced
    [(name, event, text)] = driver.warnings
    assert (name, event) == ("p", "ClaimWithoutGPU") and "made again is another one" in text
    for number in (1, 2):
        why = await refused(driver, number)
        assert why.reason is RefusalReason.UNKNOWN_DEVICE and "MIG instance MIG-8f3e" in why.detail
        assert "made again is another one" in why.detail and "delete the pod" in why.detail
    assert driver.specs() == []


@pytest.mark.parametrize("device", [STATIC, place(6)])
async def test_nvidias_configuration_of_an_instance_is_read(tmp_path: Path, device: str) -> None:
    sliced = gpu_config("TimeSlicing", kind="MigDeviceConfig", requests=["gpu"])
    mps = gpu_config("MPS", kind="MigDeviceConfig")
    claims = [raw_claim(at(6) | {"device": device}, number=n, config=[one]) for n, one in ((1, sliced), (2, mps))]
    driver = driver_of(tmp_path, *claims)
    driver.claims.claim_policy = ClaimPolicy(nvidia_names=True)
    driver.policy = replace(edit_policy("none", "mps"), strategies=NODES)
    with_instance(driver)
    assert (await prepared(driver)).results[0].isolation == "none"
    await driver.claims.unprepare(ref_of())
    why = await refused(driver, 2)
    assert why.reason is RefusalReason.INVALID_REQUEST and "under isolation mps" in why.detail and driver.mig.held == {}


async def test_a_configuration_is_for_devices_of_its_kind(tmp_path: Path) -> None:
    """One for all requests concerns those of its kind; one that names another's is a mistake."""
    both = [at(6, "instance"), result("whole", 0, cores=100, memory="24Gi")]
    general = [gpu_config("TimeSlicing", kind="MigDeviceConfig"), gpu_config("TimeSlicing")]
    wrong = gpu_config("TimeSlicing", kind="MigDeviceConfig", requests=["whole"])
    driver = driver_of(tmp_path, raw_claim(*both, config=general), raw_claim(*both, number=2, config=[wrong]))
    driver.claims.claim_policy = ClaimPolicy(nvidia_names=True)
    await prepared(driver)
    assert "MigDeviceConfig names the request whole, which has a GPU" in (await refused(driver, 2)).detail


def test_a_place_is_known_by_its_name() -> None:
    assert is_placement_name(place(0)) and is_placement_name("gpu-x-mig-2g48gbmeal-64-6")
    assert not any(map(is_placement_name, ("gpu-8f3e2b1c-0000-4000-8000-000000000001", STATIC, "gpu-0")))
