"""Leader election over a Lease on a real HTTP server: one leads at a time, by clocks that need not agree."""

from __future__ import annotations

import asyncio
import base64
import inspect
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from structlog.testing import capture_logs

from gpushare_agent.core.kube.client import ClusterApi
from gpushare_agent.core.model.errors import Conflict, NotFound, Unavailable
from gpushare_agent.extender.app import lease_owner
from gpushare_agent.extender.leader_election import LeaderElection, LeaseTerms, boot_time_s
from tests.cluster.support_kube import running
from tests.extender.support_extender import FakeCluster, eventually, fake_cluster
from tests.fakes.api_server import raw_status
from tests.fakes.clock import FakeClock

TERMS = LeaseTerms(namespace="ns", name="lease", duration_s=15.0, renew_deadline_s=10.0, retry_s=2.0)
QUICK = LeaseTerms(namespace="ns", name="lease", duration_s=0.6, renew_deadline_s=0.4, retry_s=0.02)


@asynccontextmanager
async def elections(
    count: int, terms: LeaseTerms = TERMS
) -> AsyncIterator[tuple[FakeCluster, FakeClock, list[LeaderElection]]]:
    """Replicas r0, r1… on one clock; a test takes their rounds."""
    clock = FakeClock(1000.0)
    async with fake_cluster() as cluster, cluster.opened_api() as api:
        made = (LeaderElection(api=api, identity=f"r{i}", terms=terms, clock=clock) for i in range(count))
        yield cluster, clock, list(made)


@asynccontextmanager
async def led(count: int) -> AsyncIterator[tuple[FakeCluster, FakeClock, list[LeaderElection]]]:
    """As `elections`, once the first leads."""
    async with elections(count) as (cluster, clock, replicas):
        await first_to_lead(replicas[0], clock)
        yield cluster, clock, replicas


async def first_to_lead(election: LeaderElection, clock: FakeClock) -> None:
    """There is no lease, and never was: it is made after a retry period."""
    await election.try_acquire_or_renew()
    clock.now += TERMS.retry_s
    await election.try_acquire_or_renew()
    assert election.leads()


def lease(cluster: FakeCluster) -> dict[str, Any]:
    spec: dict[str, Any] = cluster.objects["leases"]["ns/lease"]["spec"]
    return spec


async def test_the_first_takes_the_lease_and_the_second_waits() -> None:
    """The record is a coordination.k8s.io/v1 Lease with the fields that client-go writes."""
    async with led(2) as (cluster, _, (first, second)):
        await second.try_acquire_or_renew()
        assert (first.leads(), second.leads()) == (True, False)
        assert second.holder == "r0"
        written = cluster.objects["leases"]["ns/lease"]
        assert (written["apiVersion"], written["kind"]) == ("coordination.k8s.io/v1", "Lease")
        assert lease(cluster)["holderIdentity"] == "r0"
        assert lease(cluster)["leaseDurationSeconds"] == 15
        assert lease(cluster)["leaseTransitions"] == 0
        assert len(lease(cluster)["renewTime"]) == len("2026-03-01T08:00:00.000000Z")


async def test_the_lease_goes_with_the_account_of_its_manifests(short_dir: Path) -> None:
    """It is made with an owner that goes with them, where the pod's token names one in the lease's namespace."""
    token = short_dir / "token"
    claims = {"namespace": "ns", "serviceaccount": {"name": "extender", "uid": "u-1"}}
    payload = base64.urlsafe_b64encode(json.dumps({"kubernetes.io": claims}).encode()).decode().rstrip("=")
    token.write_text(f"e30.{payload}.x")
    owner = lease_owner("ns", token)
    assert lease_owner("other", token) is None and lease_owner("ns", short_dir / "none") is None
    for text in ("", "a.b", "e30.e30.x", "e30.W10.x", "e30.bnVsbA.x", "e30.\u00e9.x"):
        token.write_text(text)
        assert lease_owner("ns", token) is None
    async with elections(1, replace(TERMS, owner=owner)) as (cluster, clock, (only,)):
        await first_to_lead(only, clock)
        (written,) = cluster.objects["leases"]["ns/lease"]["metadata"]["ownerReferences"]
        named = {"apiVersion": "v1", "kind": "ServiceAccount", "name": "extender", "uid": "u-1"}
        assert {key: value for key, value in written.items() if value is not None} == named


async def test_a_leader_stops_before_another_may_begin() -> None:
    """Without renewals it leads for the renew deadline, and the other takes over only after the lease's whole duration."""
    async with led(2) as (cluster, clock, (first, second)):
        await second.try_acquire_or_renew()
        clock.now += 10.5
        await second.try_acquire_or_renew()
        assert (first.leads(), second.leads()) == (False, False)
        clock.now += 5.0
        await second.try_acquire_or_renew()
        assert (first.leads(), second.leads()) == (False, True)
        assert lease(cluster)["holderIdentity"] == "r1"
        assert lease(cluster)["leaseTransitions"] == 1


async def test_renewals_keep_the_lease() -> None:
    """A record that changes is a leader that lives, however long it goes on."""
    async with led(2) as (_, clock, (first, second)):
        for _ in range(20):
            clock.now += 4.0
            await first.try_acquire_or_renew()
            await second.try_acquire_or_renew()
            assert (first.leads(), second.leads()) == (True, False)


async def test_time_counts_from_before_the_request() -> None:
    """A renewal whose answer took long does not lengthen the time to lead."""
    async with led(1) as (cluster, clock, (first,)):
        began = clock.now

        async def slow(*args: Any) -> dict[str, Any]:
            answer = await replace(*args)
            clock.now += 9.0
            return answer

        replace = first.api.replace_lease
        first.api.replace_lease = slow  # type: ignore[method-assign]
        await first.try_acquire_or_renew()
        clock.now = began + 10.5
        assert not first.leads()
        assert cluster.objects["leases"]


async def test_an_api_server_that_is_down_ends_leadership_at_the_deadline() -> None:
    """The leader goes on while it may, and not longer; back again, it leads in a new term."""
    async with fake_cluster() as cluster, cluster.opened_api() as api:
        election = LeaderElection(api=api, identity="r0", terms=QUICK)
        async with running(election.run):
            await election.wait_change(0, False)
            assert election.term == 1
            cluster.is_down = True
            await election.wait_change(1, True)
            assert (election.term, election.leads()) == (1, False)
            cluster.is_down = False
            await election.wait_change(1, False)
            assert (election.term, election.leads()) == (2, True)


async def test_a_lease_that_cannot_be_read_is_logged_once() -> None:
    """It is asked for every two seconds, and an API server may be away for days."""
    async with fake_cluster() as cluster, cluster.opened_api() as api:
        cluster.script.answers["/apis/coordination.k8s.io/v1/namespaces/ns/leases/lease"] = 503, raw_status(503)
        election = LeaderElection(api=api, identity="r0", terms=QUICK)
        with capture_logs() as logs:
            async with running(election.run):
                await cluster.wait_for(lambda seen: len(seen) >= 5)
        assert [one["event"] for one in logs] == ["lease_not_read"]


async def test_two_that_run_have_one_leader_and_the_other_follows_a_release() -> None:
    """A leader that ends in order gives the lease back: the other need not wait for its end."""
    async with fake_cluster() as cluster, cluster.opened_api() as api:
        slow = LeaseTerms(namespace="ns", name="lease", duration_s=600.0, renew_deadline_s=500.0, retry_s=0.02)
        both = [LeaderElection(api=api, identity=f"r{i}", terms=slow) for i in range(2)]
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one.run()) for one in both]
            await eventually(lambda: any(one.leads() for one in both) and all(one.holder for one in both))
            leader = next(i for i, one in enumerate(both) if one.leads())
            other = both[1 - leader]
            assert not other.leads()
            tasks[leader].cancel()
            await asyncio.wait({tasks[leader]})
            await both[leader].release()
            await eventually(other.leads)
            assert not both[leader].leads()
            assert lease(cluster)["holderIdentity"] == f"r{1 - leader}"
            tasks[1 - leader].cancel()


async def test_a_lease_is_released_though_a_renewal_was_cut_off() -> None:
    """The API server has written it, and the leader, which ends, has not read the answer."""
    async with led(2) as (cluster, _, (first, second)):
        cluster.change("leases", "ns/lease", lambda raw: raw["spec"].update(renewTime="later"))
        await first.release()
        await second.try_acquire_or_renew()
        assert (first.leads(), second.leads()) == (False, True)
        cluster.change("leases", "ns/lease", lambda raw: raw["spec"].update(renewTime="later"))
        cluster.change("leases", "ns/lease", lambda raw: raw["spec"].update(holderIdentity="another"))
        await second.release()
        assert lease(cluster)["holderIdentity"] == "another"


async def test_of_two_that_take_an_ended_lease_one_gets_it() -> None:
    """The lease's version decides: the slower one gets a conflict and follows."""
    clock = FakeClock(1000.0)
    async with fake_cluster() as cluster, cluster.opened_api() as api:
        leases = BothRead(api)
        first, second, third = (
            LeaderElection(api=leases, identity=f"r{i}", terms=TERMS, clock=clock)  # type: ignore[arg-type]
            for i in range(3)
        )
        await first_to_lead(first, clock)
        await second.try_acquire_or_renew()
        await third.try_acquire_or_renew()
        clock.now += 16.0
        leases.readers = asyncio.Barrier(2)
        async with asyncio.TaskGroup() as group:
            rounds = [group.create_task(_try(one)) for one in (second, third)]
        assert sorted(round_.result() for round_ in rounds) == [False, True]
        assert sorted((second.leads(), third.leads())) == [False, True]
        assert [second.leads(), third.leads()] == [round_.result() for round_ in rounds]


class BothRead:
    """The API server's leases. Once `readers` is set, the next two reads are answered when both have been made: one that
    reads after the other has written would follow without a conflict."""

    def __init__(self, api: ClusterApi) -> None:
        self._api = api
        self.readers: asyncio.Barrier | None = None
        self.create_lease = api.create_lease
        self.replace_lease = api.replace_lease

    async def get_lease(self, namespace: str, name: str) -> dict[str, Any]:
        raw = await self._api.get_lease(namespace, name)
        if self.readers is not None:
            await self.readers.wait()
            self.readers = None
        return raw


async def _try(election: LeaderElection) -> bool:
    try:
        await election.try_acquire_or_renew()
    except Conflict:
        return False
    return True


async def test_a_lease_that_somebody_filled_with_nonsense_ends_at_last() -> None:
    """A holder, a duration and counts of any kind: it is waited for, no longer than an hour, and then taken."""
    nonsense: list[dict[str, Any]] = [
        {"holderIdentity": 7, "leaseDurationSeconds": "x"},
        {"holderIdentity": "x", "leaseDurationSeconds": 10**12, "leaseTransitions": None},
        {},
    ]
    for spec in nonsense:
        async with elections(1) as (cluster, clock, (first,)):
            cluster.put(
                "leases", {"metadata": {"name": "lease", "namespace": "ns", "labels": {"a": "b"}}, "spec": spec}
            )
            await first.try_acquire_or_renew()
            clock.now += 3601.0
            await first.try_acquire_or_renew()
            assert first.leads()
            assert cluster.objects["leases"]["ns/lease"]["metadata"]["labels"] == {"a": "b"}


async def test_a_lease_that_is_deleted_makes_no_second_leader() -> None:
    """Whoever sees it missing leads no more and waits a lease's duration, though the leader may not have seen it: it is past
    its deadline by then."""
    async with led(2) as (cluster, clock, (first, second)):
        await second.try_acquire_or_renew()
        cluster.remove("leases", "ns/lease")
        ends_at = clock.now + TERMS.duration_s
        while clock.now < ends_at:
            await second.try_acquire_or_renew()
            assert not second.leads()
            clock.now += TERMS.retry_s
        assert not first.leads()
        await second.try_acquire_or_renew()
        assert second.leads()
        await first.try_acquire_or_renew()
        assert (first.leads(), first.holder) == (False, "r1")


async def test_a_leader_whose_lease_is_missing_stops_at_once() -> None:
    """When it renews; it does not make it again before a lease's duration is over."""
    async with led(1) as (cluster, clock, (first,)):
        cluster.remove("leases", "ns/lease")
        with pytest.raises(NotFound):
            await first.try_acquire_or_renew()
        assert (first.leads(), first.holder) == (False, "")
        clock.now += TERMS.duration_s - 1.0
        await first.try_acquire_or_renew()
        assert not cluster.objects["leases"]
        clock.now += 1.0
        await first.try_acquire_or_renew()
        assert first.leads()


async def test_a_leader_that_reads_another_ones_name_stops_at_once() -> None:
    """Its renewal fails by the version; what it reads then is another's, so it does not wait for its deadline."""
    async with led(1) as (cluster, _, (first,)):
        cluster.change("leases", "ns/lease", lambda raw: raw["spec"].update(holderIdentity="thief"))
        with pytest.raises(Conflict):
            await first.try_acquire_or_renew()
        assert (first.leads(), first.holder) == (False, "thief")


async def test_a_lease_that_somebody_labelled_stays_its_holders() -> None:
    """The version is another, the holder is not: it is renewed in the same round, and the label stays."""
    async with led(1) as (cluster, clock, (first,)):
        cluster.change("leases", "ns/lease", lambda raw: raw["metadata"].update(labels={"a": "b"}))
        clock.now += 9.0
        await first.try_acquire_or_renew()
        clock.now += 9.0
        assert first.leads()
        assert cluster.objects["leases"]["ns/lease"]["metadata"]["labels"] == {"a": "b"}


async def test_a_conflict_that_cannot_be_looked_into_ends_leadership() -> None:
    """Another may have taken the lease: nobody decides on a guess."""
    async with led(1) as (cluster, _, (first,)):
        cluster.change("leases", "ns/lease", lambda raw: raw["metadata"].update(labels={"a": "b"}))

        async def away(namespace: str, name: str) -> dict[str, Any]:
            raise Unavailable("as scripted")

        first.api.get_lease = away  # type: ignore[method-assign]
        with pytest.raises(Unavailable):
            await first.try_acquire_or_renew()
        assert not first.leads()


async def test_a_holder_that_was_emptied_by_hand_is_waited_for() -> None:
    """A release sets the lease's duration to a second as well; else its leader may go on until its deadline."""
    async with led(2) as (cluster, clock, (first, second)):
        cluster.change("leases", "ns/lease", lambda raw: raw["spec"].update(holderIdentity=""))
        await second.try_acquire_or_renew()
        assert (first.leads(), second.leads()) == (True, False)
        clock.now += TERMS.duration_s + 1.0
        await second.try_acquire_or_renew()
        assert (first.leads(), second.leads()) == (False, True)


async def test_a_replica_that_was_stopped_leads_no_more_and_begins_a_new_term() -> None:
    """Its clock went on meanwhile; it reads the clock first, and then wakes those who wait."""
    async with led(1) as (_, clock, (first,)):
        first.report_transition()
        clock.now += 60.0
        assert not first.leads()
        first.report_transition()
        await first.try_acquire_or_renew()
        first.report_transition()
        assert (first.leads(), first.term) == (True, 2)


def test_the_clock_counts_while_the_host_is_suspended() -> None:
    """By default it is the boot time: the monotonic clock would let a leader go on after the host woke up."""
    before = time.clock_gettime(time.CLOCK_BOOTTIME)
    now = boot_time_s()
    assert before <= now <= time.clock_gettime(time.CLOCK_BOOTTIME)
    default = inspect.signature(LeaderElection).parameters["clock"].default
    assert default is boot_time_s


async def test_two_that_run_never_lead_at_once_though_the_lease_is_deleted() -> None:
    """Again and again, while both take their rounds: one of them leads in the end."""
    async with fake_cluster() as cluster, cluster.opened_api() as api:
        both = [LeaderElection(api=api, identity=f"r{i}", terms=QUICK) for i in range(2)]

        def leaders() -> int:
            count = sum(one.leads() for one in both)
            assert count <= 1
            return count

        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one.run()) for one in both]
            for _ in range(3):
                await eventually(lambda: leaders() == 1 and all(one.holder for one in both))
                cluster.remove("leases", "ns/lease")
                await eventually(lambda: leaders() == 0)
            await eventually(lambda: leaders() == 1 and all(one.holder for one in both))
            for task in tasks:
                task.cancel()
