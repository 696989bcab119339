"""Prepared claims: booked once, recorded, ended by the record, and over a restart of the agent."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import threading
from functools import partial
from pathlib import Path
from typing import cast

import pytest
from msgspec import Raw
from msgspec.structs import replace

from gpushare_agent.agent.dra import claims
from gpushare_agent.agent.dra.decisions.edits import PreparedClaim
from gpushare_agent.agent.isolation.gpushare.edits import live_limits
from gpushare_agent.agent.isolation.gpushare.format import GpuLimits
from gpushare_agent.core.claims.claim import ClaimPolicy, read_claim
from gpushare_agent.core.claims.devices import device_name
from gpushare_agent.core.kit.directories import NEW_PREFIX
from gpushare_agent.core.kube.client import KubeApi
from gpushare_agent.core.model.errors import RefusalReason, Refused, Unavailable
from gpushare_agent.core.model.gpus import Health
from gpushare_agent.core.model.isolation import DeviceListStrategy
from gpushare_agent.core.model.names import GpuUuid, PodUid
from gpushare_agent.core.settings.sections import DriverVolumeSettings
from tests.cluster.support_kube import running
from tests.dra.support_claims import (
    Driver,
    RawClaim,
    admin,
    edit_policy,
    prepared,
    raw_claim,
    ref_of,
    result,
    uid_of,
    using,
    whole,
)
from tests.extender.support_extender import eventually
from tests.support_core import NAMES, inventory, isolation_config, mig_instance, used_blocks, used_cores
from tests.support_deadline import DEADLINE_S
from tests.support_json import undecoded
from tests.support_process import refused_opening


async def refused(driver: Driver, number: int = 1) -> str:
    made = await driver.claims.prepare(ref_of(number))
    assert isinstance(made, Refused), made
    return made.detail


@pytest.fixture
def driver(tmp_path: Path) -> Driver:
    return Driver(tmp_path, raw_claim(result()))


async def test_a_claim_is_booked_recorded_and_ended(driver: Driver) -> None:
    made = await prepared(driver)
    assert used_cores(driver.cache) == {GpuUuid("GPU-0"): 40} and used_blocks(driver.cache) == {GpuUuid("GPU-0"): 64}
    assert driver.prepared_keys == [made.results[0].key]
    assert driver.records() == [f"{uid_of(1)}.json"] and driver.specs() == [f"gpushare-agent-claim-{uid_of(1)}.json"]
    await driver.claims.unprepare(ref_of())
    assert not len(driver.cache) and not driver.records() and not driver.specs()


async def test_a_repeated_call_changes_nothing(driver: Driver) -> None:
    """The kubelet forgets on its restart that a claim is prepared: what runs must not be reset."""
    first = await prepared(driver)
    driver.prepared_keys.clear()
    driver.api.claims.clear()
    assert await prepared(driver) is first and driver.prepared_keys == [] and driver.api.gets == 1


async def test_concurrent_calls_for_one_claim_book_it_once(tmp_path: Path) -> None:
    driver = Driver(tmp_path, raw_claim(result(cores=60)))
    async with asyncio.TaskGroup() as group:
        calls = [group.create_task(driver.claims.prepare(ref_of())) for _ in range(3)]
    assert calls[0].result() is calls[1].result() is calls[2].result()
    assert used_cores(driver.cache) == {GpuUuid("GPU-0"): 60}


async def test_a_share_for_a_sandbox_is_refused_for_good(tmp_path: Path) -> None:
    """The handler of the pod's RuntimeClass is read before the decision; waiting changes nothing."""

    class Api:
        async def get_runtime_class(self, name: str, *, timeout_s: float) -> Raw:
            return undecoded({"handler": f"kata-{name}"})

    driver = Driver(tmp_path, raw_claim(result()), wait_s=DEADLINE_S)
    (owner,) = driver.store.pods()
    driver.store.upsert(replace(owner, runtime_class="qemu"))
    driver.claims.runtime_classes.attach(cast(KubeApi, Api()))
    driver.policy = replace(driver.policy, handlers=driver.claims.runtime_classes.handlers)
    refused = await driver.claims.prepare(ref_of())
    assert isinstance(refused, Refused) and "the handler kata-qemu" in refused.detail
    assert driver.claims.is_answered(uid_of(1)) and not len(driver.cache)


async def test_another_agent_takes_over_what_is_recorded(tmp_path: Path) -> None:
    """Also a spec that a reboot has removed; one without a record, of an agent that was killed before the answer, goes."""
    driver = Driver(tmp_path, raw_claim(result(cores=40)), raw_claim(whole(index=1), number=2))
    first, second = await prepared(driver), await prepared(driver, 2)
    for path in (tmp_path / "cdi").iterdir():
        path.unlink()
    stray = tmp_path / "cdi" / f"gpushare-agent-claim-{uid_of(9)}.json"
    stray.write_text("{}")
    (tmp_path / "cdi" / "nvidia.json").write_text("{}")
    await driver.restart()
    assert driver.claims.prepared == {first.ref.uid: first, second.ref.uid: second}
    assert used_cores(driver.cache) == {GpuUuid("GPU-0"): 40, GpuUuid("GPU-1"): 100}
    assert len(driver.specs()) == 3 and not stray.exists()
    await driver.claims.unprepare(ref_of())
    assert used_cores(driver.cache) == {GpuUuid("GPU-1"): 100}


@pytest.mark.parametrize("content", ["", "{", "[]", '{"version": 1}', "[" * 100_000])
async def test_an_unreadable_record_stops_no_other(tmp_path: Path, content: str) -> None:
    driver = Driver(tmp_path, raw_claim(result()), raw_claim(result(index=1), number=2))
    await prepared(driver), await prepared(driver, 2)
    (tmp_path / "records" / f"{uid_of(1)}.json").write_text(content)
    (tmp_path / "records.last" / f"{uid_of(1)}.json").write_text(content)
    (tmp_path / "records" / "notes.txt").write_text("a person's")
    await driver.restart()
    assert driver.claims.prepared.keys() == {uid_of(2)}


async def test_the_copy_of_an_unreadable_record_counts(driver: Driver, tmp_path: Path) -> None:
    """Its GPU would else be free for others while its pod runs. An agent without copies may have written the record."""
    first = await prepared(driver)
    (tmp_path / "records.last" / f"{uid_of(1)}.json").unlink()
    other = (tmp_path / "records" / f"{uid_of(1)}.json").read_text().replace("GPU-0", "GPU-1")
    for damage in (None, "[", '{"version": 1, "claim": 7}', other):
        if damage is not None:
            (tmp_path / "records" / f"{uid_of(1)}.json").write_text(damage)
        await driver.restart()
        assert driver.claims.prepared == {first.ref.uid: first}
    await driver.claims.unprepare(ref_of())
    assert driver.records() == [] and not any((tmp_path / "records.last").iterdir())


async def test_no_claim_is_forgotten_whose_record_cannot_be_read_now(
    driver: Driver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its GPU would be free while its pod runs, and its files would be removed; a spec that cannot be removed stops none."""
    first = await prepared(driver)
    (tmp_path / "cdi" / f"gpushare-agent-claim-{uid_of(9)}.json").mkdir()
    with (
        refused_opening(monkeypatch, lambda path: path.suffix == ".json"),
        pytest.raises(Unavailable) as refused,
    ):
        await driver.restart()
    assert f"({tmp_path / 'records' / uid_of(1)}.json). The agent's open files are used up" in str(refused.value)
    await driver.claims.restore()
    assert driver.claims.prepared == {first.ref.uid: first} and len(driver.specs()) == 2


async def test_a_record_of_a_newer_agent_is_read(driver: Driver, tmp_path: Path) -> None:
    first = await prepared(driver)
    path = tmp_path / "records" / f"{uid_of(1)}.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"version": 2, "boot": "x"}))
    await driver.restart()
    assert driver.claims.prepared == {first.ref.uid: first} and '"boot"' in path.read_text()


async def test_admin_access_is_charged_to_nobody(tmp_path: Path) -> None:
    """Before others, next to them, and over a restart; nothing is prepared on the host, and no isolation must be there."""
    whole_gpu, share = raw_claim(whole("w", 0), number=2), raw_claim(result("s", 1, cores=100), admin("a", 1), number=3)
    driver = Driver(tmp_path, raw_claim(admin("a", 0), admin("b", 1)), whole_gpu, share)
    driver.unavailable = "the library is missing"
    await prepared(driver)
    assert not len(driver.cache) and driver.prepared_keys == []
    driver.unavailable = ""
    await prepared(driver, 2)
    last = await prepared(driver, 3)
    used = {GpuUuid("GPU-0"): 100, GpuUuid("GPU-1"): 100}
    assert used_cores(driver.cache) == used and driver.prepared_keys[-1] == last.results[0].key
    before = driver.claims.prepared
    await driver.restart()
    assert driver.claims.prepared == before and used_cores(driver.cache) == used and len(driver.cache) == 2
    await driver.claims.unprepare(ref_of())
    assert driver.claims.prepared.keys() == {uid_of(2), uid_of(3)} and used_cores(driver.cache) == used


async def test_compute_that_follows_the_memory_is_booked_for_nobody(tmp_path: Path) -> None:
    """The scheduler counts no cores of it, and gives all of them to others: the limit is no reservation."""
    driver = Driver(
        tmp_path, raw_claim(result(cores=0, memory="12Gi")), raw_claim(result(cores=100, memory="12Gi"), number=2)
    )
    made = await prepared(driver)
    (edits,) = (dict(one.edits.env) for one in made.results)
    assert edits["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] == "50" and used_cores(driver.cache) == {}
    await prepared(driver, 2)
    assert used_cores(driver.cache) == {GpuUuid("GPU-0"): 100} and used_blocks(driver.cache) == {GpuUuid("GPU-0"): 96}


async def test_a_share_that_a_force_deleted_pod_still_uses_is_waited_for(tmp_path: Path) -> None:
    """The scheduler gave it away already. Within the wait it is free: the pod need not wait for the next try."""
    driver = Driver(tmp_path, raw_claim(result(cores=80)), raw_claim(result(cores=60), number=2), wait_s=30)
    await prepared(driver)
    async with asyncio.TaskGroup() as group:
        waiting = group.create_task(prepared(driver, 2))
        await eventually(lambda: driver.api.gets >= 2)
        assert not waiting.done()
        await driver.claims.unprepare(ref_of())
    assert used_cores(driver.cache) == {GpuUuid("GPU-0"): 60}


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (result(cores=41), result(cores=60)),
        (result(cores=1, memory="20Gi"), result(cores=1, memory="5Gi")),
        (whole(), result(cores=0, memory="256Mi")),
        (result(cores=0, memory="256Mi"), whole()),
    ],
)
async def test_no_gpu_is_given_away_twice(tmp_path: Path, first: dict[str, object], second: dict[str, object]) -> None:
    driver = Driver(tmp_path, raw_claim(first), raw_claim(second, number=2))
    await prepared(driver)
    detail = await refused(driver, 2)
    assert "GPU 0 cannot serve" in detail and "still used by claim default/claim-1" in detail
    assert driver.claims.prepared.keys() == {uid_of(1)}


async def test_what_the_host_or_the_disk_refuses_is_not_booked(
    driver: Driver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver.refusal = Refused(reason=RefusalReason.NOT_READY, detail="the disk is full")
    assert await refused(driver) == "the disk is full" and not len(driver.cache)
    driver.refusal = None
    with refused_opening(monkeypatch, lambda path: path.name.startswith(NEW_PREFIX)):
        why = await refused(driver)
    assert f"({tmp_path}/cdi/gpushare-agent-claim-{uid_of(1)}.json). The agent's open files" in why, "no temporary name"
    (tmp_path / "records").write_text("no directory")
    assert "recording claim claim-1 failed: " in await refused(driver) and not len(driver.cache)


async def test_what_the_host_lacks_is_waited_for_with_pauses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each try charges its part and takes that back, which others wait for. A claim from before a boot waits too."""
    driver = Driver(tmp_path, raw_claim(result()), raw_claim(result(index=1), number=2), wait_s=DEADLINE_S)
    driver.refusal = Refused(reason=RefusalReason.NOT_READY, detail="the library is not there yet")
    monkeypatch.setattr(claims, "POLL_S", DEADLINE_S)
    async with running(partial(driver.claims.prepare, ref_of(1)), partial(driver.claims.prepare, ref_of(2))):
        await eventually(lambda: len(driver.prepared_keys) >= 2)
        for _ in range(1000):
            await asyncio.sleep(0)
        assert len(driver.prepared_keys) == driver.api.gets == 2
    monkeypatch.setattr(claims, "POLL_S", 0.0)
    for boot_id in ("this boot", "the next boot"):
        await driver.restart()
        driver.claims.boot_id = boot_id
        driver.refusal = Refused(reason=RefusalReason.NOT_READY, detail="the library is not there yet")
        driver.prepared_keys.clear()
        async with asyncio.TaskGroup() as group:
            group.create_task(prepared(driver))
            await eventually(lambda: len(driver.prepared_keys) >= 2)
            driver.refusal = None
        assert driver.claims.prepared[uid_of(1)].boot_id == boot_id


async def test_refusals_say_what_is_wrong(tmp_path: Path) -> None:
    driver = Driver(tmp_path, raw_claim(result(index=5)), raw_claim(result(), number=2))
    assert "GPU GPU-5, which the claim has, is not shown" in await refused(driver, 1)
    driver.claimable.clear()
    assert "dra.gpus" in await refused(driver, 2)
    driver.claimable.add(GpuUuid("GPU-0"))
    driver.unavailable = "the daemon is down"
    assert "isolation mps: the daemon is down" in await refused(driver, 2)
    assert "gone from the API server" in await refused(driver, 3)
    driver.api.claims["claim-2"]["metadata"]["uid"] = uid_of(8)
    assert "another claim has its name" in await refused(driver, 2)


async def test_a_call_that_is_cut_off_leaves_nothing_booked(driver: Driver) -> None:
    async with asyncio.TaskGroup() as group:
        task = group.create_task(driver.claims.prepare(ref_of()))
        driver.api.before = lambda: task.cancel() and None
    assert task.cancelled() and not len(driver.cache) and not driver.claims.prepared


async def test_a_call_that_is_cut_off_while_its_record_is_written_leaves_no_file(driver: Driver) -> None:
    """The thread that writes is not cut off; the kubelet unprepares what it could not prepare."""
    started, go_on = threading.Event(), threading.Event()
    save = driver.files.save

    def slow(claim: PreparedClaim) -> None:
        started.set()
        go_on.wait()
        save(claim)

    driver.files.save = slow  # type: ignore[method-assign]
    async with asyncio.TaskGroup() as group:
        task = group.create_task(driver.claims.prepare(ref_of()))
        await asyncio.to_thread(started.wait)
        task.cancel()
    go_on.set()
    await driver.claims.unprepare(ref_of())
    assert task.cancelled() and not len(driver.cache) and not driver.records() and not driver.specs()


async def test_a_spec_that_cannot_be_written_stops_no_restart(driver: Driver, tmp_path: Path) -> None:
    await prepared(driver)
    shutil.rmtree(tmp_path / "cdi")
    (tmp_path / "cdi").write_text("no directory")
    await driver.restart()
    assert driver.claims.prepared.keys() == {uid_of(1)} and used_cores(driver.cache) == {GpuUuid("GPU-0"): 40}


async def test_a_claim_that_no_call_will_change_is_answered(tmp_path: Path) -> None:
    """The pod waker wakes the others only. The kubelet unprepares a claim that was refused, too."""
    driver = Driver(tmp_path, raw_claim(result(cores=80)), raw_claim(result(cores=60), number=2))
    claims = driver.claims
    assert not claims.is_answered(uid_of(1))
    await prepared(driver)
    await refused(driver, 2)
    await refused(driver, 3)
    assert claims.is_answered(uid_of(1)) and claims.is_answered(uid_of(3)) and not claims.is_answered(uid_of(2))
    await claims.unprepare(ref_of(3))
    assert not claims.is_answered(uid_of(3))


async def test_outcomes_are_counted_and_explained_once(tmp_path: Path) -> None:
    driver = Driver(tmp_path, raw_claim(result(cores=80)), raw_claim(result(cores=60), number=2, users=("q",)))
    driver.pod("p", using("x", ("g", "")), claims={"g": "claim-1"})
    driver.pod("q", using("x", ("mine", "")), claims={"mine": "claim-2"})
    await prepared(driver)
    for _ in range(3):
        await refused(driver, 2)
    await prepared(driver)
    assert driver.counted == [
        ("resourceclaims.resource.k8s.io", "allocated", ""),
        ("resourceclaims.resource.k8s.io", "refused", "NotReady"),
    ]
    second, first = driver.decisions.newest(9)
    assert (first.pod, first.container, first.gpus, first.policy) == ("p", "claim:g", (0,), "scheduler")
    assert first.explanation == "the scheduler chose GPU 0 for claim claim-1" and first.asked is not None
    assert (first.asked.cores, first.asked.memory_bytes) == (80, 16 << 30)
    assert (second.pod, second.container, second.gpus, second.reason) == ("q", "claim:mine", (), "NotReady")
    assert "40 cores and 8 GiB short, with 20 cores" in second.explanation


def test_a_claim_is_named_as_in_its_pod() -> None:
    """A template's claims end at random, and a StatefulSet's metrics would never have the same name twice."""
    raw = raw_claim(result())
    names = {}
    for given in ({}, {"pod-claim-name": "g"}, {"pod-claim-name": "/"}, {"extended-resource-claim": "true"}):
        raw["metadata"]["annotations"] = {f"resource.kubernetes.io/{name}": value for name, value in given.items()}
        names[str(given)] = read_claim(undecoded(raw), pool="node").shown_as
    assert [*names.values()] == ["claim-1", "g", "claim-1", "extended-resources"]


async def test_a_call_that_is_cut_off_while_it_records_stays_booked(tmp_path: Path) -> None:
    """The record is written all the same, and the next agent would book the claim next to whoever got its share."""
    driver = Driver(tmp_path, raw_claim(result(cores=60)), raw_claim(result(cores=60), number=2))
    async with asyncio.TaskGroup() as group:
        task = group.create_task(driver.claims.prepare(ref_of()))
        while not (tmp_path / "cdi").exists():  # written before the record; each turn of the loop looks
            await asyncio.sleep(0)
        task.cancel()
    assert task.cancelled() and used_cores(driver.cache) == {GpuUuid("GPU-0"): 60}
    assert "20 cores and 8 GiB short, with 40 cores" in await refused(driver, 2)
    assert (await prepared(driver)).ref == ref_of() and driver.records() == [f"{uid_of(1)}.json"]
    await driver.claims.unprepare(ref_of())
    assert not len(driver.cache) and not driver.records()


async def test_two_claims_of_one_container_are_compared_by_the_requests_that_it_names(tmp_path: Path) -> None:
    """The runtime takes the last value of a variable: of a whole GPU next to a share the first would be lost."""
    a_b, c = raw_claim(whole("a", 0), whole("b", 1)), raw_claim(result("c", 2), number=2)
    names = {"one": "claim-1", "two": "claim-2"}
    for uses, is_refused in (
        ([using("x", ("one", "a"), ("two", "c")), using("y", ("one", "b"))], True),
        ([using("x", ("one", "a")), using("y", ("one", "b")), using("z", ("two", "c"))], False),
    ):
        driver = Driver(tmp_path / str(is_refused), a_b, c, gpus=3)
        driver.pod("p", *uses, claims=names)
        await prepared(driver)
        made = await driver.claims.prepare(ref_of(2))
        assert isinstance(made, Refused) is is_refused, made
        if isinstance(made, Refused):
            assert "container x of pod p uses the claim claim-1 too" in made.detail


async def test_whole_gpus_of_two_claims_in_one_container_are_all_in_its_list(tmp_path: Path) -> None:
    """Each claim's specification has the list of both, so that it does not matter which one the runtime applies last. Where
    one of the claims has another user, or may have one later, nobody else's GPU is in that one's list."""
    claims = raw_claim(whole("a", 1), owner="p"), raw_claim(whole("b", 0), number=2, owner="p")
    names = {"one": "claim-1", "two": "claim-2"}
    both, other = using("x", ("one", ""), ("two", "b")), using("y", ("one", ""))
    shared = raw_claim(whole("a", 1)), claims[1]
    for of_pod, containers, expected in (
        (claims, (both,), "GPU-0,GPU-1"),
        (claims, (both, other), ""),
        (shared, (both,), ""),
    ):
        driver = Driver(tmp_path / str((len(containers), of_pod is shared)), *of_pod)
        driver.pod("p", *containers, claims=names)
        made = [await driver.claims.prepare(ref_of(number)) for number in (1, 2)]
        if not expected:
            assert isinstance(made[1], Refused) and "container x of pod p uses the claim claim-1 too" in made[1].detail
            continue
        visible = [value for one in made if isinstance(one, PreparedClaim) for _, value in one.results[0].edits.env]
        assert visible == [expected] * 2
        assert [[one.gpu for one in claim.results] for claim in driver.claims.prepared.values()] == [
            ["GPU-1"],
            ["GPU-0"],
        ]


async def test_whole_gpus_of_claims_that_no_template_makes_add_up_by_cdi(tmp_path: Path) -> None:
    """By NVIDIA_VISIBLE_DEVICES they cannot: the kubelet prepares a claim once for all its pods. The refusal says so."""
    claims = raw_claim(whole("a", 1), users=("p", "q")), raw_claim(whole("b", 0), number=2)
    for strategies, words in (
        ((DeviceListStrategy.ENVVAR,), "device_list_strategy cdi-cri"),
        ((DeviceListStrategy.CDI_CRI,), ""),
    ):
        driver = Driver(tmp_path / strategies[0], *claims)
        driver.policy = replace(edit_policy(), strategies=strategies)
        driver.pod_with_both()
        first = await prepared(driver)
        # The driver's directory is the same for all, so it is nothing that another claim could lose.
        driver.policy = replace(
            driver.policy,
            config=isolation_config(
                whole_driver=Path("/vdriver/origin"), driver_volume=DriverVolumeSettings(mount=True)
            ),
        )
        if words:
            assert words in await refused(driver, 2)
        else:
            named = [one.results[0].cdi_devices[1:] for one in (first, await prepared(driver, 2))]
            assert named == [("nvidia.com/gpu=GPU-1",), ("nvidia.com/gpu=GPU-0",)]


@pytest.mark.parametrize(("isolation", "by_uuid"), [("mps", False), ("gpushare", True)])
async def test_a_share_keeps_its_limit_beside_a_whole_gpu_of_another_claim(
    tmp_path: Path, isolation: str, by_uuid: bool
) -> None:
    """By CDI the lists add up. But a variable limits the container's first GPU, which then is the other claim's."""
    for first, second in ((1, 2), (2, 1)):
        driver = Driver(tmp_path / str(first), raw_claim(result("a", 1)), raw_claim(whole("b", 0), number=2))
        driver.policy = replace(edit_policy(isolation), strategies=(DeviceListStrategy.CDI_CRI,))
        driver.pod_with_both()
        await prepared(driver, first)
        if by_uuid:
            await prepared(driver, second)
        else:
            assert f"uses the claim claim-{first} too" in (why := await refused(driver, second))
            assert "device_list_strategy" not in why


@pytest.mark.parametrize("shares_in_mig", [True, False])
async def test_shares_of_a_mig_instance_are_charged_and_limited(tmp_path: Path, *, shares_in_mig: bool) -> None:
    """By its own cores and memory, under an isolation that keeps them, also where the node's does not."""
    instance = replace(mig_instance(0, 9, 0), memory_mib=9728)
    device = device_name(instance.uuid)
    sizes = {1: (30, "2Gi"), 2: (60, "7Gi"), 3: (20, "256Mi")}
    shares = [
        raw_claim(result(cores=cores, memory=memory, device=device), number=number)
        for number, (cores, memory) in sizes.items()
    ]
    driver = Driver(tmp_path, *shares)
    driver.gpus, driver.claimable = replace(inventory(1), gpus=(instance,)), {instance.uuid}
    driver.claims = driver.new_claims()
    driver.claims.node = replace(driver.node, names=replace(NAMES, shares_in_mig=shares_in_mig))
    driver.policy = edit_policy("gpushare")
    for number in (1, 2):
        await prepared(driver, number)
    assert used_cores(driver.cache) == {instance.uuid: 90} and used_blocks(driver.cache) == {instance.uuid: 36}
    limits = [
        live_limits([one], None, driver.gpus.by_uuid(), NAMES)
        for one in sorted(driver.cache, key=lambda one: one.key.pod_uid)
    ]
    assert limits == [
        (GpuLimits(uuid=instance.uuid, memory_bytes=2 << 30, cores=3000),),
        (GpuLimits(uuid=instance.uuid, memory_bytes=7 << 30, cores=6000),),
    ]
    assert "10" in await refused(driver, 3)
    driver.policy = edit_policy("mps")
    assert "an MPS control daemon of its own" in await refused(driver, 3)


async def test_a_claim_beside_it_that_cannot_be_read_holds_up_only_while_it_may_come(tmp_path: Path) -> None:
    """Another driver's claim, or one that is gone, has no GPU for the list; without an answer nobody knows."""
    driver = Driver(tmp_path, raw_claim(whole()), raw_claim(result(driver="nics.example.com", device="e0"), number=2))
    driver.pod(
        "p", using("x", ("g", ""), ("n", ""), ("gone", "")), claims={"g": "claim-1", "n": "claim-2", "gone": "no"}
    )
    answer = driver.api.get_claim

    async def get(namespace: str, name: str) -> Raw:
        if name == "claim-2":
            raise Unavailable("the API server did not answer")
        return await answer(namespace, name)

    driver.api.get_claim = get  # type: ignore[method-assign]
    assert "did not answer" in await refused(driver)
    driver.api.get_claim = answer  # type: ignore[method-assign]
    await prepared(driver)


async def test_a_claim_without_a_size_uses_its_gpu_and_takes_nothing_of_it(tmp_path: Path) -> None:
    """The setting dra.consumable_shares: any number of them, next to a share, and over a restart of the agent."""
    nothing = {"cores": "0", "memory": "0", "shares": "1"}
    driver = Driver(
        tmp_path,
        raw_claim(result(consumedCapacity=nothing)),
        raw_claim(result(consumedCapacity=nothing), number=2),
        raw_claim(result(cores=100, memory="23Gi"), number=3),
    )
    assert "no share of it" in await refused(driver), "without the setting"
    for _ in range(2):
        driver.claims.claim_policy = ClaimPolicy(has_unlimited=True)
        for number in (1, 2, 3):
            made = await prepared(driver, number)
            assert not made.results[0].is_whole
        charge = driver.cache.charges()[GpuUuid("GPU-0")]
        assert (charge.cores, charge.blocks, charge.wholes) == (100, 92, 0)
        assert len(driver.cache.ledger(driver.gpus).allocations) == 3
        assert driver.claims.prepared[uid_of(1)].results[0].isolation == "none"
        await driver.restart()


async def test_a_limit_beside_no_limit_on_one_gpu_is_refused(tmp_path: Path) -> None:
    """In one container nothing would tell them apart; next to one on another GPU it is limited as ever."""
    nothing = {"cores": "0", "memory": "0", "shares": "1"}
    for index, is_refused in ((0, True), (1, False)):
        free = {**result("b", index), "consumedCapacity": nothing}
        driver = Driver(tmp_path / str(index), raw_claim(result("a", 0, cores=20), free), has_unlimited=True)
        if is_refused:
            assert "by a request with a limit and by one without" in await refused(driver)
        else:
            assert [one.is_whole for one in (await prepared(driver)).results] == [False, False]


async def test_a_whole_gpu_beside_one_without_a_size_asks_for_one_isolation(tmp_path: Path) -> None:
    """Nobody asked for any: what has no limit is none's by itself."""
    free = {**result("b", 1), "consumedCapacity": {"cores": "0", "memory": "0", "shares": "1"}}
    driver = Driver(tmp_path, raw_claim(whole("a", 0), free), has_unlimited=True)
    assert len((await prepared(driver)).results) == 2


async def test_nvidias_memory_is_no_request(tmp_path: Path) -> None:
    """A claim may name it with its domain; as nothing its limit would be lost."""
    named = {"cores": "0", "memory": "0", "gpu.nvidia.com/memory": "10Gi"}
    driver = Driver(tmp_path, raw_claim(result(consumedCapacity=named)), has_unlimited=True, nvidia_names=True)
    assert "write memory in capacity.requests" in await refused(driver)


async def test_a_pod_that_never_comes_holds_up_no_other(tmp_path: Path) -> None:
    driver = Driver(tmp_path, raw_claim(result(), users=("p", "q")))
    driver.policy = edit_policy("none")
    driver.store.remove(PodUid("uid-q"))
    await prepared(driver)
    driver = Driver(tmp_path / "other", raw_claim(result()))
    driver.store.replace_all([])
    assert "does not know the claim's pod yet" in await refused(driver)


async def test_pods_that_use_the_claim_decide_its_views(tmp_path: Path) -> None:
    """The kubelet may know a pod, or that it has the claim, before the agent does: then the call waits."""
    driver = Driver(tmp_path, raw_claim(result("a", 0), result("b", 1)), wait_s=30)
    driver.store.replace_all([])
    containers = using("x", ("g", "a")), using("y", ("g", "b"))
    async with asyncio.TaskGroup() as group:
        waiting = group.create_task(prepared(driver))
        await eventually(lambda: driver.api.gets == 1)
        driver.pod("p", *containers, claims={})
        await asyncio.sleep(0)
        assert not waiting.done()
        driver.pod("p", *containers, claims={"g": "claim-1"})
    made = waiting.result()
    assert sorted(dict(one.edits.env)["NVIDIA_VISIBLE_DEVICES"] for one in made.results) == ["GPU-0", "GPU-1"]


# --- the driver counts its GPUs otherwise ---


def boot(driver: Driver, *numbers: tuple[str, int]) -> None:
    """The driver shows GPUs with these UUIDs and minors, in this order; an agent starts."""
    one = driver.gpus.gpus[0]
    gpus = tuple(
        replace(one, index=index, minor=minor, uuid=GpuUuid(uuid)) for index, (uuid, minor) in enumerate(numbers)
    )
    driver.gpus = replace(driver.gpus, gpus=gpus)
    driver.claimable.update(gpu.uuid for gpu in gpus)
    driver.claims = driver.new_claims()


def spec(driver: Driver, number: int = 1) -> tuple[list[str], dict[str, str]]:
    """The GPUs' nodes and the variables of the first result, as the runtime reads them."""
    text = json.loads((driver.cdi / f"gpushare-agent-claim-{uid_of(number)}.json").read_text())
    edits = text["devices"][0]["containerEdits"]
    nodes = [one["path"] for one in edits["deviceNodes"] if one["path"][-1].isdigit()]
    return nodes, dict(one.split("=", 1) for one in edits["env"])


async def test_a_recorded_claim_has_the_numbers_that_its_gpu_has_now(tmp_path: Path) -> None:
    """A boot gave the minors to other GPUs, or another order; a spec of the boot before is there, or was removed."""
    for number, order in enumerate(
        ([("GPU-0", 1), ("GPU-1", 0)], [("GPU-1", 0), ("GPU-0", 1)], [("GPU-0", 1), ("GPU-9", 0)], [("GPU-0", 7)])
    ):
        driver = Driver(tmp_path / str(number), raw_claim(result()), raw_claim(result(index=1), number=2))
        first = await prepared(driver)
        await prepared(driver, 2)
        if number % 2:
            shutil.rmtree(driver.cdi)
        boot(driver, *order)
        await driver.claims.restore()
        assert spec(driver)[0] == [f"/dev/nvidia{dict(order)['GPU-0']}"]
        driver.api.claims.clear()
        again = await prepared(driver)
        assert [one.cdi_devices for one in again.results] == [one.cdi_devices for one in first.results]
        # Written, not only known: another agent finds it.
        await driver.restart()
        assert driver.claims.prepared[uid_of(1)] == again
        assert used_cores(driver.cache)[GpuUuid("GPU-0")] == 40


async def test_after_a_boot_the_host_is_prepared_again_before_the_containers_start(driver: Driver) -> None:
    """Files of the boot before would be read by its clock. The kubelet calls for containers that start; a call that is
    repeated, and another start of the agent, find them running."""
    [key] = [one.key for one in (await prepared(driver)).results]
    for boot_id, prepares in (("the next boot", 1), ("the next boot", 0), ("another one", 1)):
        driver.prepared_keys.clear()
        await driver.restart()
        driver.claims.boot_id = boot_id
        assert driver.prepared_keys == []
        driver.refusal = Refused(RefusalReason.NOT_READY, "the disk is full") if prepares else None
        if prepares:
            assert await refused(driver) == "the disk is full"
        driver.refusal = None
        driver.prepared_keys.clear()
        await prepared(driver), await prepared(driver)
        assert driver.prepared_keys == [key] * prepares
        assert used_cores(driver.cache) == {GpuUuid("GPU-0"): 40}


@pytest.mark.parametrize(("isolation", "device"), [("vcuda", result()), ("vcuda", whole()), ("none", result())])
async def test_after_a_boot_a_share_is_not_prepared_without_its_isolation(
    tmp_path: Path, isolation: str, device: RawClaim
) -> None:
    """The node has another one since: nobody would make its files, and those of the boot before limit by another clock. What
    runs goes on with them; what is not limited needs none."""
    driver = Driver(tmp_path, raw_claim(device))
    driver.policy = edit_policy(isolation)
    await prepared(driver)
    driver.policy = edit_policy("mps")
    await prepared(driver)
    driver.claims.boot_id = "the next boot"
    if (isolation, device) == ("vcuda", result()):
        why = await refused(driver)
        assert (
            why.startswith("isolation vcuda, which limits") and "setting isolations_allowed), or delete the pod" in why
        )
        driver.policy = edit_policy("mps", "vcuda")
    assert (await prepared(driver)).boot_id == "the next boot"


@pytest.mark.parametrize("is_older", [False, True])
async def test_a_record_without_a_boot_is_of_this_one_unless_it_is_older(driver: Driver, is_older: bool) -> None:
    """Of an agent before that was noted: the containers that run with its files keep them."""
    made = await prepared(driver)
    driver.files.save(replace(made, boot_id=""))
    if is_older:
        os.utime(driver.directory / "records" / f"{uid_of(1)}.json", (0, 0))
    await driver.restart()
    driver.prepared_keys.clear()
    await prepared(driver), await prepared(driver)
    assert driver.prepared_keys == [made.results[0].key] * is_older


async def test_limits_follow_their_gpus_into_another_order(tmp_path: Path) -> None:
    """Variables limit GPUs by their place among the container's."""
    driver = Driver(tmp_path, raw_claim(result("a", 0, memory="4Gi"), result("b", 1, memory="8Gi")))
    await prepared(driver)
    before = spec(driver)[1]
    boot(driver, ("GPU-1", 0), ("GPU-0", 1))
    await driver.claims.restore()
    after = spec(driver)[1]
    assert (before["NVIDIA_VISIBLE_DEVICES"], after["NVIDIA_VISIBLE_DEVICES"]) == ("GPU-0,GPU-1", "GPU-1,GPU-0")
    limits = [one["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"] for one in (before, after)]
    assert limits == ["0=4096M,1=8192M", "0=8192M,1=4096M"]


async def test_gpus_of_another_claim_stay_in_the_list_of_a_claim_made_again(tmp_path: Path) -> None:
    claims = raw_claim(whole("a", 0), owner="p"), raw_claim(whole("b", 1), number=2, owner="p")
    driver = Driver(tmp_path, *claims)
    driver.pod_with_both()
    await prepared(driver), await prepared(driver, 2)
    boot(driver, ("GPU-1", 4), ("GPU-0", 5))
    await driver.claims.restore()
    nodes, variables = spec(driver)
    assert nodes == ["/dev/nvidia4", "/dev/nvidia5"] and variables["NVIDIA_VISIBLE_DEVICES"] == "GPU-1,GPU-0"


async def test_a_claim_whose_gpu_is_gone_gets_no_other_and_ends(tmp_path: Path) -> None:
    """Replaced or dropped out, so that others have its index and its minor. Its spec is removed: a container that restarts
    without a call would read it. Two claims may be of one GPU."""
    for number, order in enumerate(([("GPU-9", 0), ("GPU-1", 1)], [("GPU-1", 0)])):
        driver = Driver(tmp_path / str(number), *(raw_claim(result(memory="8Gi"), number=one) for one in (1, 2)))
        await prepared(driver), await prepared(driver, 2)
        boot(driver, *order)
        await driver.claims.restore()
        assert not driver.specs() and len(driver.records()) == 2
        for _ in range(2):
            why = await refused(driver)
            assert why.startswith("GPU GPU-0, which the claim has, is not shown") and "delete the pod" in why
        assert driver.decisions.newest(9)[0].explanation == why and len(driver.decisions.newest(9)) == 3
        await driver.claims.unprepare(ref_of())
        assert driver.records() == [f"{uid_of(2)}.json"]
        boot(driver, ("GPU-1", 0), ("GPU-0", 3))
        await driver.claims.restore()
        await prepared(driver, 2)
        assert spec(driver, 2)[0] == ["/dev/nvidia3"]


async def test_specs_follow_the_gpus_while_the_agent_runs(tmp_path: Path) -> None:
    """The driver was loaded again; the kubelet does not call for a container that restarts."""
    driver = Driver(tmp_path, raw_claim(result()), wait_s=30)
    await prepared(driver)
    [gpu, other] = driver.gpus.gpus
    lost = replace(gpu, minor=-1, health=Health.UNHEALTHY, unhealthy_reason="lost")
    for gpus, nodes in (
        ([replace(gpu, minor=1), replace(other, minor=0)], ["/dev/nvidia1"]),
        ([lost, replace(other, minor=0)], None),
        ([replace(gpu, minor=1), replace(other, minor=0)], ["/dev/nvidia1"]),
        ([gpu, other], ["/dev/nvidia0"]),
    ):
        driver.node.inventory.current = replace(driver.gpus, gpus=tuple(gpus))
        await driver.claims.refresh()
        assert (spec(driver)[0] if driver.specs() else None) == nodes
        if nodes is None:
            assert "not shown by the driver of this node now: lost." in await refused(driver)


async def test_a_prepared_claim_waits_for_the_driver(driver: Driver) -> None:
    """Before the driver has listed its GPUs nobody knows whether the record is still right; the spec stays as it is."""
    first = await prepared(driver)
    driver.claims = driver.new_claims()
    driver.node.inventory.is_read = False
    await driver.claims.restore()
    assert "has not listed the GPUs yet" in await refused(driver) and driver.specs()
    driver.node.inventory.is_read = True
    assert await prepared(driver) == first
    # A GPU that cannot be read may be the claim's: the next poll may name it.
    driver.node.inventory.current = replace(driver.gpus, gpus=driver.gpus.gpus[1:], unreadable=((0, "lost"),))
    made = await driver.claims.prepare(ref_of())
    assert isinstance(made, Refused) and made.reason is RefusalReason.NOT_READY and "GPU GPU-0" in made.detail


async def test_a_prepared_claim_keeps_its_answer_under_other_settings(driver: Driver) -> None:
    first = await prepared(driver)
    driver.policy = replace(edit_policy("none"), strategies=(DeviceListStrategy.CDI_CRI,))
    await driver.restart()
    assert await prepared(driver) == first
