"""Pods that wait for the kubelet's next full sync are woken by an annotation, and no others."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from msgspec import Raw

from gpushare_agent.agent.dra import wake_pods
from gpushare_agent.agent.dra.wake_pods import ANNOTATION, FIRST_S, PodWaker
from gpushare_agent.core.model.errors import NotFound, Unavailable
from gpushare_agent.core.model.names import PodUid
from tests.cluster.support_kube import running
from tests.dra.support_claims import Driver, edit_policy, raw_claim, ref_of, result, using
from tests.support_core import pod


class Waked:
    """The waker over a driver whose pods are in its store, with a clock of the test's."""

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        self.now = 0.0
        self.woken: list[str] = []
        self.error: Exception | None = None
        self.waker = PodWaker(claims=driver.claims, clock=lambda: self.now)

    async def get_claim(self, namespace: str, name: str) -> Raw:
        if self.error is not None:
            raise self.error
        return await self.driver.api.get_claim(namespace, name)

    async def patch_pod_annotations(
        self, namespace: str, name: str, uid: PodUid, annotations: Mapping[str, str | None]
    ) -> dict[str, Any]:
        assert annotations.keys() == {ANNOTATION} and uid == f"uid-{name}"
        self.woken.append(name)
        return {}

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        for one in self.driver.store.pods():
            self.waker.pod_changed(None, one)
        async with running(lambda: self.waker.run(self)):
            yield

    async def passed(self, seconds: float) -> None:
        """The time has passed, and the waker has considered every pod that was due."""
        self.now += seconds
        for _ in range(50):
            await asyncio.sleep(0)


@pytest.fixture(autouse=True)
def _without_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wake_pods, "POLL_S", 0.0)
    monkeypatch.setattr(wake_pods, "PER_SECOND", float("inf"))


async def test_a_pod_whose_claim_is_not_prepared_is_woken_less_and_less_often(tmp_path: Path) -> None:
    waked = Waked(Driver(tmp_path, raw_claim(result())))
    async with waked.running():
        await waked.passed(FIRST_S - 0.5)
        assert waked.woken == []
        times = []
        while waked.now < 200:
            await waked.passed(0.5)
            times += [waked.now] * (len(waked.woken) - len(times))
    pauses = [later - earlier for earlier, later in pairwise(times)]
    assert pauses[:4] == [3.0, 6.0, 12.0, 24.0] and set(pauses[4:]) == {30.0}


async def test_a_claim_that_is_prepared_for_the_pod_is_not_even_read(tmp_path: Path) -> None:
    """In a burst pods wait long for their containers: a request for each at every turn would slow them."""
    waked = Waked(Driver(tmp_path, raw_claim(result())))
    await waked.driver.claims.prepare(ref_of())
    before = waked.driver.api.gets
    async with waked.running():
        await waked.passed(600)
    assert waked.woken == [] and waked.driver.api.gets == before


async def test_a_pod_that_shares_a_prepared_claim_is_woken(tmp_path: Path) -> None:
    """Whether it joins the claim or was among its users: the call was for one of them, before which the other may have
    failed, as before the driver is registered. The first user alone is in no doubt."""
    driver = Driver(tmp_path, raw_claim(result(), users=("p",)), raw_claim(result(), users=("q", "r"), number=2))
    driver.policy = edit_policy("none")
    for number in (1, 2):
        await driver.claims.prepare(ref_of(number))
    driver.pod("later", using("x", ("g", "")), claims={"g": "claim-1"})
    waked = Waked(driver)
    async with waked.running():
        await waked.passed(FIRST_S)
    assert sorted(waked.woken) == ["later", "q", "r"]


@pytest.mark.parametrize(
    ("claim", "now"),
    [
        ({"driver": "gpu.example.com"}, {}),
        ({"device": "gpu-9"}, {}),
        ({}, {"has_started": True}),
        ({}, {"is_deleting": True}),
    ],
)
async def test_who_is_not_woken(tmp_path: Path, claim: dict[str, Any], now: dict[str, Any]) -> None:
    """Claims of others and those that are refused for good wake nobody; a pod that has started or ends is not woken."""
    waked = Waked(Driver(tmp_path, raw_claim(result(**claim))))
    if claim:
        await waked.driver.claims.prepare(ref_of())
    known = waked.driver.store.get(PodUid("uid-p"))
    async with waked.running():
        waked.waker.pod_changed(known, pod("p", claims={"g": "claim-1"}, **now))
        await waked.passed(600)
    assert waked.woken == []


async def test_a_claim_that_cannot_be_read_is_read_again_and_one_that_is_gone_is_not(tmp_path: Path) -> None:
    waked = Waked(Driver(tmp_path, raw_claim(result())))
    async with waked.running():
        waked.error = Unavailable("the API server is away")
        await waked.passed(600)
        waked.error = None
        await waked.passed(600)
        assert waked.woken == ["p"]
        waked.error = NotFound("gone")
        await waked.passed(600)
        waked.error = None
        await waked.passed(600)
    assert waked.woken == ["p"]
