"""Leader election over a Lease on a real HTTP server: one leads at a time, by clocks that need not agree."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from gpushare_agent.services.leader_election import AlwaysLeads, LeaderElection, LeaseTerms
from tests.support_extender import FakeCluster, eventually, fake_cluster, opened_api

TERMS = LeaseTerms(namespace="ns", name="lease", duration_s=15.0, renew_deadline_s=10.0, retry_s=2.0)
QUICK = LeaseTerms(namespace="ns", name="lease", duration_s=0.6, renew_deadline_s=0.4, retry_s=0.02)


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@asynccontextmanager
async def elections(
    count: int, terms: LeaseTerms = TERMS
) -> AsyncIterator[tuple[FakeCluster, Clock, list[LeaderElection]]]:
    """Replicas r0, r1… on one clock; a test takes their rounds."""
    clock = Clock()
    async with fake_cluster() as cluster, opened_api(cluster) as api:
        yield (
            cluster,
            clock,
            [LeaderElection(api=api, identity=f"r{i}", terms=terms, clock=clock) for i in range(count)],
        )


def lease(cluster: FakeCluster) -> dict[str, Any]:
    spec: dict[str, Any] = cluster.objects["leases"]["ns/lease"]["spec"]
    return spec


async def test_the_first_takes_the_lease_and_the_second_waits() -> None:
    """The record is a coordination.k8s.io/v1 Lease with the fields that client-go writes."""
    async with elections(2) as (cluster, _, (first, second)):
        await first._round()
        await second._round()
        assert (first.leads(), second.leads()) == (True, False)
        assert second.holder == "r0"
        written = cluster.objects["leases"]["ns/lease"]
        assert (written["apiVersion"], written["kind"]) == ("coordination.k8s.io/v1", "Lease")
        assert lease(cluster)["holderIdentity"] == "r0"
        assert lease(cluster)["leaseDurationSeconds"] == 15
        assert lease(cluster)["leaseTransitions"] == 0
        assert len(lease(cluster)["renewTime"]) == len("2026-03-01T08:00:00.000000Z")


async def test_a_leader_stops_before_another_may_begin() -> None:
    """Without renewals it leads for the renew deadline, and the other takes over only after the lease's whole duration."""
    async with elections(2) as (cluster, clock, (first, second)):
        await first._round()
        await second._round()
        clock.now += 10.5
        await second._round()
        assert (first.leads(), second.leads()) == (False, False)
        clock.now += 5.0
        await second._round()
        assert (first.leads(), second.leads()) == (False, True)
        assert lease(cluster)["holderIdentity"] == "r1"
        assert lease(cluster)["leaseTransitions"] == 1


async def test_renewals_keep_the_lease() -> None:
    """A record that changes is a leader that lives, however long it goes on."""
    async with elections(2) as (_, clock, (first, second)):
        await first._round()
        for _ in range(20):
            clock.now += 4.0
            await first._round()
            await second._round()
            assert (first.leads(), second.leads()) == (True, False)


async def test_time_counts_from_before_the_request() -> None:
    """A renewal whose answer took long does not lengthen the time to lead."""
    async with elections(1) as (cluster, clock, (first,)):
        await first._round()
        began = clock.now

        async def slow(*args: Any) -> dict[str, Any]:
            answer = await replace(*args)
            clock.now += 9.0
            return answer

        replace = first._api.replace_lease
        first._api.replace_lease = slow  # type: ignore[method-assign]
        await first._round()
        clock.now = began + 10.5
        assert not first.leads()
        assert cluster.objects["leases"]


async def test_an_api_server_that_is_down_ends_leadership_at_the_deadline() -> None:
    """The leader goes on while it may, and not longer; back again, it leads in a new term."""
    async with fake_cluster() as cluster, opened_api(cluster) as api:
        election = LeaderElection(api=api, identity="r0", terms=QUICK)
        async with asyncio.TaskGroup() as group:
            task = group.create_task(election.run())
            async with asyncio.timeout(10):
                await election.wait_change(0, False)
                assert election.term == 1
                cluster.is_down = True
                await election.wait_change(1, True)
                assert (election.term, election.leads()) == (1, False)
                cluster.is_down = False
                await election.wait_change(1, False)
                assert (election.term, election.leads()) == (2, True)
            task.cancel()


async def test_two_that_run_have_one_leader_and_the_other_follows_a_release() -> None:
    """A leader that ends in order gives the lease back: the other need not wait for its end."""
    async with fake_cluster() as cluster, opened_api(cluster) as api:
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


async def test_of_two_that_take_an_ended_lease_one_gets_it() -> None:
    """The lease's version decides: the slower one gets a conflict and follows."""
    async with elections(3) as (_, clock, (first, second, third)):
        await first._round()
        await second._round()
        await third._round()
        clock.now += 16.0
        async with asyncio.TaskGroup() as group:
            rounds = [group.create_task(_try(one)) for one in (second, third)]
        assert sorted(round_.result() for round_ in rounds) == [False, True]
        assert sorted((second.leads(), third.leads())) == [False, True]


async def _try(election: LeaderElection) -> bool:
    from gpushare_agent.model.errors import Conflict

    try:
        await election._round()
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
            await first._round()
            clock.now += 3601.0
            await first._round()
            assert first.leads()
            assert cluster.objects["leases"]["ns/lease"]["metadata"]["labels"] == {"a": "b"}


async def test_one_replica_alone_always_leads() -> None:
    """Without an election there is nothing to wait for."""
    alone = AlwaysLeads()
    assert alone.leads()
    async with asyncio.timeout(10):
        await alone.wait_change(0, False)
