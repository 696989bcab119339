"""What isolations do on a node, as the agent joins it: the services of a live resize."""

from __future__ import annotations

import errno
import threading
from collections.abc import Collection, Sequence

import pytest
from msgspec.structs import replace

from gpushare_agent.agent.isolation import ISOLATIONS
from gpushare_agent.agent.isolation.choice import Standing
from gpushare_agent.agent.isolation.isolations import Isolations
from gpushare_agent.agent.isolation.kept import WHOLE_GPU
from gpushare_agent.agent.isolation.part import IsolationPart, NodeProbe, pods_with_files
from gpushare_agent.agent.isolation.request import Follows
from gpushare_agent.core.model.allocations import Allocation, ContainerKey
from gpushare_agent.core.model.errors import RefusalReason, Refused
from gpushare_agent.core.model.names import ISOLATION_ANNOTATION, PodUid
from gpushare_agent.core.settings.settings import load_settings
from tests.isolation.support_host import add_share, host_of
from tests.support_core import allocation, container, ids, pod
from tests.support_node import node_of

BOTH = "gpushare+driver"


class Answers(IsolationPart):
    def __init__(self, text: str, asked: list[str], *, is_memory_fixed: bool = False) -> None:
        self.text, self.asked, self.is_memory_fixed = text, asked, is_memory_fixed

    async def enforce(self, allocation: Allocation) -> str:
        self.asked.append(self.text)
        return self.text


def isolations(isolation: str = "", **parts: IsolationPart) -> Isolations:
    """Of a node with one pod."""
    flags = ["--driver=simulated", f"--isolation={BOTH}", "--isolations-allowed=none"]
    node = node_of(settings=load_settings(flags, {}).settings)
    add_share(node, SHARE.key.pod_uid, **({ISOLATION_ANNOTATION: isolation} if isolation else {}))
    return Isolations(host=host_of(node), kernel_module=None, parts=parts, watches={}, vdevices=None, cdi_watch=None)


SHARE = allocation(pod("share", container(cores=30)), "main", ids(0, range(30)), [])


async def test_a_combination_enforces_its_parts_until_one_has_a_problem() -> None:
    """The text is that part's; the ones after it are asked at the next time."""
    asked: list[str] = []
    found = isolations(gpushare=Answers("", asked), driver=Answers("its cgroup is not known", asked))
    assert await found.enforce(SHARE) == "its cgroup is not known"
    assert asked == ["", "its cgroup is not known"]


@pytest.mark.parametrize("parts", [{}, {"none": IsolationPart()}])
async def test_a_part_that_needs_nothing_enforces_nothing(parts: dict[str, IsolationPart]) -> None:
    """Isolation none, and mps, whose limits are fixed when a process starts."""
    assert await isolations("none", **parts).enforce(SHARE) == ""


async def test_an_isolation_that_the_node_does_not_allow_enforces_nothing_and_says_so() -> None:
    """The pod's annotation names it."""
    found = isolations("vcuda")
    assert "not in use on this node" in await found.enforce(SHARE)
    assert found.isolation_of(SHARE) is None


def test_memory_that_one_part_fixes_is_fixed_for_the_combination() -> None:
    """Where NVIDIA's toolkit sets the driver's limit; compute follows as before."""
    found = isolations(driver=Answers("", [], is_memory_fixed=True)).isolation_of(SHARE)
    assert found is not None and found.memory_follows is Follows.NOBODY
    assert found.cores_follow is ISOLATIONS[BOTH].cores_follow


@pytest.mark.parametrize("uid", ["uid-share", "uid-other"])
async def test_a_pod_of_an_isolation_that_is_not_in_use_any_more_is_prepared_for_it(uid: str) -> None:
    """After a reboot its container would start with files of the boot before. A new pod is not; the answer counts."""
    refused = Refused(reason=RefusalReason.NOT_READY, detail="the disk is full")
    part = Prepares(refused)
    found = replace(isolations(), former=[(part, frozenset({SHARE.key.pod_uid}))])
    key = ContainerKey(PodUid(uid), "main")
    assert await found.prepare([key]) == (refused if key == SHARE.key else None)
    assert part.keys == ([key] if key == SHARE.key else [])


@pytest.mark.parametrize("isolation", ["", "none"])
@pytest.mark.parametrize("uid", ["uid-share", "uid-other"])
async def test_a_share_of_an_isolation_that_is_not_in_use_any_more_is_enforced_by_it(uid: str, isolation: str) -> None:
    """Its program has the library of before. Who keeps it is not known, unless its pod names it."""
    former = Answers("its limit stays", [])
    found = replace(isolations(isolation), former=[(former, frozenset({PodUid(uid)}))])
    is_former = uid == SHARE.key.pod_uid
    assert await found.enforce(SHARE) == ("its limit stays" if is_former else "")
    name = None if is_former and not isolation else isolation or BOTH
    assert found.isolation_name(SHARE) == name
    assert found.kept(SHARE) == (ISOLATIONS[name].keeps if name is not None else None)
    whole = replace(SHARE, is_whole=True)
    assert found.kept(whole) == WHOLE_GPU and await found.enforce(whole) == ""


async def test_pods_with_files_are_listed_in_a_thread_and_a_failure_costs_its_isolation_alone() -> None:
    """A disk that hangs must not hold the loop."""

    def fail() -> Sequence[PodUid]:
        raise OSError(errno.EIO, "the disk is broken")

    def listed() -> Sequence[PodUid]:
        return [] if threading.current_thread() is threading.main_thread() else [SHARE.key.pod_uid]

    probe = NodeProbe(check=IsolationPart().check, standing=Standing(place=1, because="it is there"))
    pods = {"broken": fail, "good": listed, "empty": list, "none": None}
    found = await pods_with_files({name: replace(probe, pods=one) for name, one in pods.items()})
    assert found == {"good": {SHARE.key.pod_uid}}


class Prepares(IsolationPart):
    def __init__(self, refused: Refused) -> None:
        self.refused, self.keys = refused, list[ContainerKey]()

    async def prepare(self, keys: Collection[ContainerKey]) -> Refused | None:
        self.keys += keys
        return self.refused if keys else None
