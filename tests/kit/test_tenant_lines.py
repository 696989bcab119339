"""kit/logs.py: whatever tenants do, the log has fewer than a hundred lines a minute of it, and some of each."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import structlog
from structlog.testing import capture_logs

import gpushare_agent
from gpushare_agent.agent.isolation.vdevice.files import VDeviceFiles
from gpushare_agent.core.kit.logs import BURST, REPORT_S, TenantLines
from gpushare_agent.core.kube.events import PodEvents
from gpushare_agent.core.model.allocations import ContainerKey
from gpushare_agent.core.model.names import PodUid
from gpushare_agent.core.model.tenant_lines import TENANT_EVENTS
from tests.cluster.support_kube import NODE, pod
from tests.fakes.clock import FakeClock

log = structlog.get_logger(__name__)
MOST_A_MINUTE = 100
Cause = Callable[[int], object]


@pytest.fixture
def processes(tmp_path: Path) -> Cause:
    """More than 1,024 processes of a container, others each time, in a directory of the manager."""
    files, key = VDeviceFiles(tmp_path), ContainerKey(PodUid("11111111-2222-4333-8444-555555555555"), "main")
    files.prepare(key)
    return lambda number: files.write(key, pids=range(number + 1, number + 1030))


@pytest.fixture
def annotations() -> Cause:
    """Of 40 pods, which change all the time."""
    events = PodEvents(NODE)
    return lambda number: events.warned(pod(f"p{number % 40}"), "ShareResizeRefused", f"it is '{number}'")


@pytest.fixture
def peers() -> Cause:
    """A caller at a container's socket that forks: another process each time."""
    bound = log.bind(pod_uid="loud", container="main")
    return lambda number: bound.warning("vdevice_registration_refused", pid=number)


@pytest.fixture
def pods() -> Cause:
    """New ones of a controller, ten a second, each admitted and freed; and those that are identified only by a list."""

    def admit(number: int) -> None:
        log.info("allocate", namespace="loud", pod=f"p-{number}", pod_uid=f"uid-{number}")
        log.info("share_freed", namespace="loud", pod=f"p-{number}")
        log.info("vdevice_directory_removed", pod_uid=f"uid-{number}")
        log.warning("pod_not_identified", candidates=[f"p-{number}"])

    return admit


@pytest.fixture
def errors_of_gpus() -> Cause:
    """Xids that a program causes."""
    return lambda number: log.warning("gpu_event", what="Xid 31", uuid="GPU-0", count=number)


FLOODS = ("processes", "annotations", "peers", "pods", "errors_of_gpus")


@pytest.fixture
def causes(request: pytest.FixtureRequest) -> list[Cause]:
    return [request.getfixturevalue(name) for name in request.param]


def flood(causes: list[Cause], clock: FakeClock, *, minutes: int) -> Iterator[int]:
    """Ten times a second each; the number of each."""
    for number in range(minutes * 600):
        clock.now += 0.1
        for cause in causes:
            cause(number)
        yield number


@pytest.mark.parametrize("causes", [*([name] for name in FLOODS), FLOODS], indirect=True, ids=[*FLOODS, "all"])
def test_a_minute_of_a_flood_has_fewer_than_a_hundred_lines(causes: list[Cause]) -> None:
    """Any minute, reports included; each line is written or counted in a report."""
    clock = FakeClock()
    lines = TenantLines(clock)
    made: Counter[str] = Counter()
    written_at: list[float] = []

    def count(_logger: Any, _method: str, line: Any) -> Any:
        made[line["event"]] += 1
        return line

    def note(_logger: Any, _method: str, line: Any) -> Any:
        written_at.append(clock())
        return line

    with capture_logs([count, lines, note]) as logs:
        for _ in flood(causes, clock, minutes=4):
            lines.report()
        lines.report(is_end=True)
    in_a_minute = [sum(at <= other < at + 60 for other in written_at) for at in written_at]
    assert BURST // 3 <= max(in_a_minute) < MOST_A_MINUTE
    reports = [entry for entry in logs if entry["event"] == "log_lines_left_out"]
    left_out = Counter()
    for report in reports:
        assert report["lines"] == sum(report["events"].values())
        left_out.update(report["events"])
    assert 3 <= len(reports) <= 5
    assert left_out + Counter(entry["event"] for entry in logs) == made


@pytest.mark.parametrize("causes", [*([name] for name in FLOODS), FLOODS], indirect=True, ids=[*FLOODS, "all"])
def test_another_tenants_line_is_written_during_a_flood(causes: list[Cause]) -> None:
    """At any moment of it, by its namespace; an event that is not the flood's also by the pod's UID."""
    clock = FakeClock()
    names = itertools.count()
    with capture_logs([TenantLines(clock)]) as logs:
        for number in flood(causes, clock, minutes=3):
            if number % 200 == 199:
                log.warning("pod_warned", pod=f"other-{next(names)}/a")
                log.warning("vdevice_not_written", pod_uid=f"other-{next(names)}")
    others = [entry for entry in logs if "other-" in entry.get("pod", "") or "other-" in entry.get("pod_uid", "")]
    assert len(others) == next(names)


def test_a_line_that_names_a_uid_alone_counts_for_its_namespace() -> None:
    """Known from its pod's Allocate, also one that was left out: a namespace with many pods takes no other's lines of the
    same event."""
    clock = FakeClock()
    with capture_logs([TenantLines(clock)]) as logs:
        for number in range(10 * BURST):
            log.info("allocate", namespace="loud", pod=f"p-{number}", pod_uid=f"uid-{number}")
            log.warning("vdevice_not_written", pod_uid=f"uid-{number}")
            clock.now += 0.01
        log.info("allocate", namespace="quiet", pod="p", pod_uid="quiet-uid")
        log.warning("vdevice_not_written", pod_uid="quiet-uid")
    assert [one["event"] for one in logs if one["pod_uid"] == "quiet-uid"] == ["allocate", "vdevice_not_written"]


def test_what_no_tenant_causes_and_what_somebody_debugs_has_no_limit() -> None:
    """Lines of the node, and those below info."""
    with capture_logs([TenantLines(FakeClock())]) as logs:
        for number in range(3 * BURST):
            log.error("health_state_not_saved", error=str(number))
            log.debug("pod_annotated", pod="default/a")
    assert len(logs) == 6 * BURST


def test_a_report_comes_after_a_minute_and_at_the_end() -> None:
    """Once, with each event's number."""
    clock = FakeClock()
    lines = TenantLines(clock)
    with capture_logs([lines]) as logs:
        lines.report(is_end=True)
        for _ in range(2 * BURST):
            log.warning("pod_warned", pod="default/a")
        written = len(logs)
        clock.now += REPORT_S - 1
        lines.report()
        assert len(logs) == written < BURST
        clock.now += 1
        for _ in range(2):
            lines.report()
        assert [entry["events"] for entry in logs[written:]] == [{"pod_warned": 2 * BURST - written}]


def test_each_listed_event_is_one_of_the_agents() -> None:
    """In its source."""
    root = Path(gpushare_agent.__file__).parent
    text = "".join(path.read_text() for path in root.rglob("*.py") if path.name != "tenant_lines.py")
    assert [event for event in sorted(TENANT_EVENTS) if f'"{event}"' not in text] == []
