"""The kubelet's version must be known before a List is sent inside an admission."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest
from msgspec import Raw
from structlog.testing import capture_logs

from gpushare_agent.agent.kubelet.pod_resources import KubeletFacts
from gpushare_agent.core.model.errors import StartupError, Unavailable
from tests.cluster.support_kube import NotedBackoff, running
from tests.support_deadline import DEADLINE_S, poll_until
from tests.support_json import undecoded


class Nodes:
    """Answers with the versions given, an exception is raised; the last one stays."""

    def __init__(self, *versions: object) -> None:
        self._versions = list(versions)
        self.asked = 0

    async def get_node(self, name: str) -> Raw:
        self.asked += 1
        version = self._versions.pop(0) if len(self._versions) > 1 else self._versions[0]
        if isinstance(version, Exception):
            raise version
        return undecoded({"status": {"nodeInfo": {"kubeletVersion": version}}})


def facts(path: Path, asked: list[int] | None = None, **clocks: Callable[[], float]) -> KubeletFacts:
    backoff = NotedBackoff(asked=[] if asked is None else asked)
    return KubeletFacts(node_name="n", kubelet_socket=path / "kubelet.sock", backoff=backoff, **clocks)


@pytest.mark.parametrize("version", ["v1.30.0", "v1.36.2+k3s1", "v2.0.0", "odd", ""])
async def test_modern_kubelets_may_be_asked(tmp_path: Path, version: str) -> None:
    """Also one whose version cannot be read."""
    found = facts(tmp_path)
    async with running(lambda: found.run(Nodes(version))):
        await found.wait_known(timeout_s=DEADLINE_S)


async def test_an_old_kubelet_ends_the_agent_with_the_reason(tmp_path: Path) -> None:
    """Asking it inside an admission can crash it."""
    with pytest.raises(StartupError, match=r"v1\.29\.14.*older than 1\.30.*Upgrade the kubelet"):
        await facts(tmp_path).run(Nodes("v1.29.14"))


async def test_an_api_server_that_is_away_is_asked_again(tmp_path: Path) -> None:
    """Admissions meanwhile wait within their bound, and their error names what they waited for. An error is logged once, and
    the pauses grow with the failures in a row."""
    with pytest.raises(Unavailable, match="version is not known yet"):
        await facts(tmp_path).wait_known(timeout_s=0.01)
    found, away = facts(tmp_path, waits := []), Unavailable("connection refused")
    nodes = Nodes(away, away, "v1.34.1", away, "v1.35.0")
    with capture_logs() as logs:
        async with running(lambda: found.run(nodes)):
            await poll_until(lambda: found.version == "v1.34.1", "the version")
            found.kubelet_restarted()
            await poll_until(lambda: found.version == "v1.35.0", "the new version")
    assert nodes.asked == 5 and waits == [1, 2, 1]
    assert [line["event"] for line in logs].count("kubelet_version_unknown") == 1


async def test_an_admission_has_the_version_read_at_once(tmp_path: Path) -> None:
    """The kubelet has the pod from an API server that came back in a pause, which is longer than admissions wait."""
    found, waits = facts(tmp_path), list[int]()

    class Pauses(NotedBackoff, frozen=True):
        def delay_s(self, failures: int) -> float:
            return super().delay_s(failures) + (failures - 1) * 10 * DEADLINE_S

    found.backoff = Pauses(asked=waits)
    away = Unavailable("connection refused")
    async with running(lambda: found.run(Nodes(away, away, away, "v1.34.1"))):
        await poll_until(lambda: len(waits) == 2, "the long pause")
        await found.wait_known(timeout_s=DEADLINE_S)
    assert waits == [1, 2, 1]


async def test_a_restarted_kubelets_version_is_read_again(tmp_path: Path) -> None:
    """It may have been upgraded, or downgraded."""
    found = facts(tmp_path)
    with pytest.RaisesGroup(pytest.RaisesExc(StartupError, match=r"1\.28")):
        async with asyncio.TaskGroup() as group:
            group.create_task(found.run(Nodes("v1.34.1", "v1.28.0")))
            await found.wait_known(timeout_s=DEADLINE_S)
            found.kubelet_restarted()


def test_the_kubelets_age_is_that_of_its_socket(tmp_path: Path) -> None:
    """None while there is none."""
    found = facts(tmp_path)
    assert found.age_s() is None
    (tmp_path / "kubelet.sock").touch()
    age_s = found.age_s()
    assert age_s is not None and 0 <= age_s < 3600


@pytest.mark.parametrize("set_by_s", [-3600.0, 3600.0])
def test_a_clock_that_is_set_makes_the_kubelet_neither_younger_nor_older(tmp_path: Path, set_by_s: float) -> None:
    """Nothing is released while it has just started: that must not take an hour, nor be over at once."""
    (tmp_path / "kubelet.sock").touch()
    made_at = (tmp_path / "kubelet.sock").stat().st_ctime
    passed_s, offset_s = 0.0, 0.0
    clocks = {"clock": lambda: passed_s, "wall_clock": lambda: made_at + passed_s + offset_s}
    found, reloaded = facts(tmp_path, **clocks), facts(tmp_path, **clocks)
    assert found.age_s() == pytest.approx(0.0, abs=1e-3)
    passed_s, offset_s = 5.0, set_by_s
    reloaded.take_over(found)
    assert found.age_s() == reloaded.age_s() == pytest.approx(5.0, abs=1e-3)
    late = facts(tmp_path, **clocks)  # a first look, after the clock was set
    assert late.age_s() == pytest.approx(max(0.0, 5.0 + set_by_s), abs=1e-3)
    passed_s = 12.0
    assert late.age_s() == pytest.approx(7.0 + max(0.0, 5.0 + set_by_s), abs=1e-3)
