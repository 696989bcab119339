"""Claims that only the agent knows of any more."""

from __future__ import annotations

from pathlib import Path

from gpushare_agent.agent.dra.stale_claims import StaleClaims
from gpushare_agent.core.model.names import PodUid
from tests.dra.support_claims import Driver, raw_claim, ref_of, result, uid_of, using


class Running:
    """The pods with processes."""

    def __init__(self, *uids: str) -> None:
        self.uids = set(uids)
        self.is_shown = True

    async def has_processes_in_thread(self, uid: PodUid) -> bool | None:
        return uid in self.uids if self.is_shown else None


async def node(directory: Path) -> tuple[Driver, StaleClaims, Running]:
    """A claim that was prepared for the pod p."""
    driver, running = Driver(directory, raw_claim(result())), Running()
    await driver.claims.prepare(ref_of())
    driver.store.replace_all([])
    return driver, StaleClaims(driver.claims, running), running


async def test_a_claim_that_is_gone_is_ended_at_the_second_poll(tmp_path: Path) -> None:
    """Of another agent's process, too: the record has the pods."""
    driver, _, running = await node(tmp_path)
    await driver.restart()
    stale = StaleClaims(driver.claims, running)
    driver.api.claims.clear()
    await stale.poll(driver.api)
    assert driver.claims.prepared.keys() == {uid_of(1)}
    await stale.poll(driver.api)
    assert not driver.claims.prepared and not len(driver.cache) and not driver.records() and not driver.specs()


async def test_a_claim_of_the_same_name_is_another(tmp_path: Path) -> None:
    driver, stale, _ = await node(tmp_path)
    driver.api.claims["claim-1"] = raw_claim(result(), number=1)
    driver.api.claims["claim-1"]["metadata"]["uid"] = uid_of(9)
    await stale.poll(driver.api)
    await stale.poll(driver.api)
    assert not driver.claims.prepared


async def test_a_claim_that_is_used_stays(tmp_path: Path) -> None:
    """It exists; a pod of the node names it; a process of its pod runs, though the pod was deleted by force, also
    of one that came after the claim was prepared; the host does not show processes."""
    driver, stale, running = await node(tmp_path)
    claim = driver.api.claims.pop("claim-1")
    await stale.poll(driver.api)
    driver.api.claims["claim-1"] = claim
    await stale.poll(driver.api)
    driver.api.claims.clear()
    driver.pod("late", using("x", ("g", "")), claims={"g": "claim-1"})
    await stale.poll(driver.api)
    driver.store.remove(PodUid("uid-late"))
    for one in ("uid-p", "uid-late"):
        running.uids = {one}
        await stale.poll(driver.api)
        await stale.poll(driver.api)
        assert driver.claims.prepared.keys() == {uid_of(1)}
    running.uids.clear()
    running.is_shown = False
    await stale.poll(driver.api)
    await stale.poll(driver.api)
    assert driver.claims.prepared.keys() == {uid_of(1)}
    running.is_shown = True
    await stale.poll(driver.api)
    await stale.poll(driver.api)
    assert not driver.claims.prepared


async def test_a_claim_that_was_never_prepared_holds_its_place_no_longer(tmp_path: Path) -> None:
    """A kubelet that has lost its state never unprepares what it asked for in vain."""
    driver, running = Driver(tmp_path, raw_claim(result())), Running()
    driver.unavailable = "not ready"
    await driver.claims.prepare(ref_of())
    driver.mig.held[uid_of(1)] = {"a place"}
    stale = StaleClaims(driver.claims, running)
    driver.api.claims.clear()
    await stale.poll(driver.api)
    await stale.poll(driver.api)
    assert driver.claims.asked and driver.mig.held, "its pod is still there"
    driver.store.replace_all([])
    await stale.poll(driver.api)
    assert driver.mig.held
    await stale.poll(driver.api)
    assert not driver.claims.asked and not driver.mig.held
