"""Where containers' cgroups are, which processes are in them, and whose a process is, over trees of files."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from gpushare_agent.agent.runtime.cgroup_paths import NOBODY, PeerIdentity
from gpushare_agent.agent.runtime.cgroups import (
    ANY_NAME_DEPTH,
    WALK_AFTER_S,
    CgroupDir,
    Cgroups,
    CgroupVersion,
    cgroup_version,
)
from gpushare_agent.core.model.errors import NotFound, Unavailable
from gpushare_agent.core.model.names import PodUid
from tests.runtime.support_cgroups import find_cgroup
from tests.support_process import no_free_descriptor

UID = PodUid("0e7a3f2c-1b5d-4c3e-9f10-44aa55bb6c77")
OTHER_UID = PodUid("9d1f0a55-7c11-4bd0-8a6e-0123456789ab")
SLICE = f"pod{UID.replace('-', '_')}.slice"
ID = "4b" * 32
OTHER_ID = "5c" * 32
NODE = "f0" * 32

BURSTABLE = f"kubepods.slice/kubepods-burstable.slice/kubepods-burstable-{SLICE}"
PATHS = [
    f"kubepods/pod{UID}/{ID}",
    f"kubepods/burstable/pod{UID}/{ID}",
    f"kubepods/besteffort/pod{UID}/crio-{ID}",
    f"kubepods.slice/kubepods-{SLICE}/cri-containerd-{ID}.scope",
    f"{BURSTABLE}/crio-{ID}.scope",
    f"{BURSTABLE}/docker-{ID}.scope",
    f"system.slice/containerd.service/kubepods-{SLICE}:cri-containerd:{ID}",
    f"docker/{NODE}/kubelet/kubepods/burstable/pod{UID}/{ID}",
    f"kubelet.slice/kubelet-kubepods.slice/kubelet-kubepods-{SLICE}/cri-containerd-{ID}.scope",
    f"user.slice/user-1000.slice/user@1000.service/app.slice/k3s.service/kubepods/burstable/pod{UID}/{ID}",
]


def make_cgroup(directory: Path, *pids: int) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "cgroup.procs").write_text("".join(f"{pid}\n" for pid in pids))
    return directory


def make_v2(root: Path) -> Path:
    make_cgroup(root)
    (root / "cgroup.controllers").write_text("cpu memory pids\n")
    return root


def make_v1(root: Path) -> Path:
    for name in ("blkio", "cpu,cpuacct", "memory", "pids", "systemd"):
        make_cgroup(root / name, 1)
    (root / "cpu").symlink_to("cpu,cpuacct")
    return root


def make_hybrid(root: Path) -> Path:
    make_cgroup(make_v1(root) / "unified", 1)
    return root


@pytest.mark.parametrize(
    ("make", "version"),
    [(make_v1, CgroupVersion.V1), (make_v2, CgroupVersion.V2), (make_hybrid, CgroupVersion.HYBRID)],
)
def test_the_version_is_seen_from_what_is_mounted(tmp_path: Path, make, version: CgroupVersion) -> None:  # type: ignore[no-untyped-def]
    """One hierarchy, one for each controller, or both."""
    assert cgroup_version(make(tmp_path)) is version


def test_without_any_hierarchy_the_version_is_unavailable_and_nothing_is_found(tmp_path: Path) -> None:
    """Also where a directory without cgroups was named."""
    (tmp_path / "memory").mkdir()
    for root, text in ((tmp_path / "none", "not there"), (tmp_path, "no cgroup hierarchy is mounted there")):
        with pytest.raises(Unavailable, match=text):
            cgroup_version(root)
        assert find_cgroup(Cgroups(root), ID, UID) is None


@pytest.mark.parametrize("path", PATHS)
def test_a_container_is_found_by_its_id_under_v2(tmp_path: Path, path: str) -> None:
    """Whatever the driver, runtime, class, prefix and nesting."""
    directory = make_cgroup(make_v2(tmp_path) / path, 30, 4)
    cgroups = Cgroups(tmp_path)
    found = find_cgroup(cgroups, ID, UID)
    assert found == CgroupDir(path=directory, container_id=ID, pod_uid=UID)
    assert cgroups.processes(found).pids == [4, 30]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("controller", ["pids", "systemd", "unified"])
def test_a_container_is_found_in_whichever_hierarchy_has_it(tmp_path: Path, path: str, controller: str) -> None:
    """Under v1 and hybrid mounts, where a runtime may use only some of the controllers."""
    directory = make_cgroup(make_hybrid(tmp_path) / controller / path, 7)
    found = find_cgroup(Cgroups(tmp_path), ID, UID)
    assert found is not None
    assert found.path == directory


def test_a_given_uid_must_agree_with_the_path(tmp_path: Path) -> None:
    """An ID below another pod's directory is not the asked container; without a UID the ID decides."""
    make_cgroup(make_v2(tmp_path) / PATHS[0])
    cgroups = Cgroups(tmp_path)
    assert find_cgroup(cgroups, ID, OTHER_UID) is None
    assert find_cgroup(cgroups, ID, None) is not None


@pytest.mark.parametrize("name", ["", "..", "../../etc", ID[:12], f"{ID}\0", f"crio-{ID}", ID.upper()])
def test_what_is_no_container_id_is_never_looked_for(tmp_path: Path, name: str) -> None:
    """It reaches no path."""
    make_cgroup(make_v2(tmp_path) / PATHS[0])
    assert find_cgroup(Cgroups(tmp_path), name, None) is None


def test_a_container_that_starts_later_is_found_then(tmp_path: Path) -> None:
    """What was found before is kept, what was missing is walked for again, what is gone is forgotten."""
    make_v2(tmp_path)
    cgroups = Cgroups(tmp_path)
    assert find_cgroup(cgroups, ID, UID) is None
    first = make_cgroup(tmp_path / PATHS[0])
    assert find_cgroup(cgroups, ID, UID) is not None
    (first / "cgroup.procs").unlink()
    first.rmdir()
    assert find_cgroup(cgroups, ID, UID) is None
    moved = make_cgroup(tmp_path / PATHS[1])
    assert cgroups.find_many([(ID, UID), (OTHER_ID, None)]) == {ID: CgroupDir(path=moved, container_id=ID, pod_uid=UID)}


def test_what_a_tenant_makes_below_its_container_is_not_found(tmp_path: Path) -> None:
    """Directories named like another pod's container, inside a container's own cgroup or the pod's."""
    make_cgroup(make_v2(tmp_path) / f"kubepods/pod{OTHER_UID}/{OTHER_ID}/kubepods/pod{UID}/{ID}", 666)
    make_cgroup(tmp_path / f"kubepods/pod{OTHER_UID}/{OTHER_ID}/{ID}", 666)
    make_cgroup(tmp_path / f"kubepods-{SLICE}:cri-containerd:{OTHER_ID}/pod{UID}/{ID}", 666)
    assert find_cgroup(Cgroups(tmp_path), ID, UID) is None


def test_links_are_followed_nowhere(tmp_path: Path) -> None:
    """A link in the place of a container, of its list of processes, of a child, or put there after it was found."""
    root, elsewhere = make_v2(tmp_path / "cgroup"), make_cgroup(tmp_path / "elsewhere", 666)
    directory = make_cgroup(root / PATHS[0], 5)
    cgroups = Cgroups(root)
    found = find_cgroup(cgroups, ID, UID)
    assert found is not None
    (directory / "child").symlink_to(elsewhere)
    make_cgroup(directory / "real", 6)
    (directory / "procs-link").mkdir()
    (directory / "procs-link" / "cgroup.procs").symlink_to(elsewhere / "cgroup.procs")
    assert cgroups.processes(found).pids == [5, 6]
    directory.rename(tmp_path / "away")
    directory.symlink_to(elsewhere)
    with pytest.raises(NotFound):
        cgroups.processes(found)
    assert find_cgroup(cgroups, ID, UID) is None


def test_all_processes_below_are_counted_once_and_in_order(tmp_path: Path) -> None:
    """Child cgroups at any depth, doubles of v1, PID 0 of another namespace, more than one page."""
    directory = make_cgroup(make_v2(tmp_path) / PATHS[4], 900, 20, 20, 0)
    make_cgroup(directory / "container", *range(100_000, 120_000))
    make_cgroup(directory / "init.scope" / "a" / "b", 3)
    (directory / "empty").mkdir()
    (directory / "strange").mkdir()
    (directory / "strange" / "cgroup.procs").write_text("12\nwhat\n")
    cgroups = Cgroups(tmp_path)
    found = find_cgroup(cgroups, ID)
    assert found is not None
    assert cgroups.processes(found).pids == [3, 20, 900, *range(100_000, 120_000)]


def test_a_round_tells_the_gone_from_the_empty(tmp_path: Path) -> None:
    """One container's end does not spoil the others' round."""
    make_cgroup(make_v2(tmp_path) / f"kubepods/pod{UID}/{ID}", 8)
    make_cgroup(tmp_path / f"kubepods/pod{UID}/{OTHER_ID}")
    cgroups = Cgroups(tmp_path)
    known = cgroups.find_many([(ID, UID), (OTHER_ID, UID)])
    gone = CgroupDir(path=tmp_path / "gone", container_id=NODE, pod_uid=UID)
    found = cgroups.processes_round([*known.values(), gone])
    assert {id_: one.pids if one is not None else None for id_, one in found.items()} == {
        ID: [8],
        OTHER_ID: [],
        NODE: None,
    }


def test_deep_trees_without_pods_are_left(tmp_path: Path) -> None:
    """Below a few levels only directories that the kubelet names are followed."""
    deep = make_v2(tmp_path).joinpath(*["x"] * (ANY_NAME_DEPTH + 2))
    make_cgroup(deep / f"pod{UID}" / ID)
    assert find_cgroup(Cgroups(tmp_path), ID) is None


@pytest.mark.parametrize(
    ("path", "setting", "disagrees"),
    [(PATHS[0], "cgroupfs", False), (PATHS[0], "systemd", True), (PATHS[4], "systemd", False),
     (PATHS[4], "cgroupfs", True), (PATHS[6], "cgroupfs", True), (PATHS[4], "", False), ("system.slice", "systemd", False)],
)  # fmt: skip
def test_a_wrong_driver_setting_is_reported(tmp_path: Path, path: str, setting: str, disagrees: bool) -> None:
    """The kubelet's names of pods decide; without a pod or a setting there is nothing to say."""
    make_cgroup(make_v2(tmp_path) / path)
    reported = Cgroups(tmp_path).check_driver(setting)
    assert (reported is not None) is disagrees
    if reported is not None:
        assert setting in reported


def make_proc(proc: Path, **texts: str) -> Path:
    for pid, text in {"1": "0::/init.scope\n", **texts}.items():
        (proc / pid.strip("p")).mkdir(parents=True)
        (proc / pid.strip("p") / "cgroup").write_text(text)
    return proc


def test_a_peer_is_known_by_its_pid(tmp_path: Path) -> None:
    """From /proc/<pid>/cgroup, passing over the container that the reader, too, is below."""
    node = f"/kubepods/pod{OTHER_UID}/{NODE}/kubepods"
    own = f"0::{node}/besteffort/pod{OTHER_UID}/{OTHER_ID}\n"
    proc = make_proc(tmp_path, p42=f"0::/../../kubepods/pod{UID}/{ID}\n", p43=f"0::{node}/pod{UID}/{ID}\n", self=own)
    cgroups = Cgroups(tmp_path / "none", proc)
    assert cgroups.identify(42) == cgroups.identify(43) == PeerIdentity(pod_uid=UID, container_id=ID)


def test_a_peer_that_is_gone_or_in_no_container_is_nobody(tmp_path: Path) -> None:
    """Never unknown: a service, cgroups that contradict, a text too long, bytes that are no text, an ended process."""
    inside = f"0::/kubepods/pod{UID}/{ID}\n"
    proc = make_proc(
        tmp_path,
        p43="0::/system.slice/sshd.service\n",
        p44=f"2:pids:/kubepods/pod{UID}/{ID}\n1:memory:/kubepods/pod{UID}/{OTHER_ID}\n",
        p45=inside + "0::/\n" * 20_000,
        p46="",
    )
    (proc / "46" / "cgroup").write_bytes(b"\xff\xfe\0" * 100)
    cgroups = Cgroups(tmp_path / "none", proc)
    assert [cgroups.identify(pid) for pid in (43, 44, 45, 46, 47)] == [NOBODY] * 5


def test_a_peer_that_cannot_be_seen_is_unknown(tmp_path: Path) -> None:
    """PID 0 stands for a process of another PID namespace; without /proc, or behind a link, nothing can be read."""
    proc = make_proc(tmp_path / "proc", p42=f"0::/kubepods/pod{UID}/{ID}\n")
    (proc / "44").mkdir()
    (proc / "44" / "cgroup").symlink_to(proc / "42" / "cgroup")
    assert [Cgroups(tmp_path, proc).identify(pid) for pid in (0, -1, 44)] == [None] * 3
    assert Cgroups(tmp_path, tmp_path / "none").identify(42) is None


async def test_the_same_is_there_for_the_event_loop(tmp_path: Path) -> None:
    """The awaitable methods answer as the plain ones do."""
    make_cgroup(make_v2(tmp_path) / PATHS[0], 8)
    cgroups = Cgroups(tmp_path, tmp_path)
    found = (await cgroups.find_many_in_thread([(ID, UID)]))[ID]
    own, pods, read = await cgroups.find_and_read_in_thread([(ID, UID)], {UID})
    assert (own, pods) == ({ID: found}, {UID: [found]})
    assert read[ID] is not None and read[ID].pids == [8]
    assert await cgroups.identify_in_thread(8) is None
    assert await cgroups.check_driver_in_thread("cgroupfs") is None


def test_this_process_is_seen_in_the_real_proc() -> None:
    """The kernel's own files are read as they are, and a PID that cannot exist is nobody's."""
    assert Cgroups().identify(os.getpid()) is not None
    assert Cgroups().identify(2**31 - 1) == NOBODY


@pytest.mark.parametrize("make", [make_v1, make_v2, make_hybrid])
def test_a_pods_containers_are_found_without_their_ids(tmp_path: Path, make: Callable[[Path], Path]) -> None:
    """All of the wanted pods, whatever the driver; of no other, and neither monitors nor what a container made below."""
    root = make(tmp_path)
    base = root if make is make_v2 else root / "pids"
    made = {
        make_cgroup(base / f"kubepods/burstable/pod{UID}/{ID}", 1),
        make_cgroup(base / f"kubepods.slice/kubepods-{SLICE}/cri-containerd-{OTHER_ID}.scope", 2),
    }
    make_cgroup(base / f"kubepods.slice/kubepods-{SLICE}/crio-conmon-{NODE}.scope", 3)
    make_cgroup(base / f"kubepods/burstable/pod{UID}/{ID}/{NODE}", 4)
    make_cgroup(base / f"kubepods/burstable/pod{OTHER_UID}/{NODE}", 5)
    found = Cgroups(root).find_pods({UID})
    assert {place.path for place in found[UID]} == made and found.keys() == {UID}
    assert Cgroups(root).find_pods({PodUid("0" * 32)}) == {}


class _Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_pod_is_looked_for_where_the_kubelet_puts_such_and_everywhere_only_after_a_while(tmp_path: Path) -> None:
    """Of any QoS class at once. Under a parent that no pod had so far its cgroup is found in the walk that is due then."""
    clock, other = _Clock(), f"kubepods/burstable/pod{OTHER_UID}/{OTHER_ID}"
    make_cgroup(make_v2(tmp_path) / other)
    cgroups = Cgroups(tmp_path)
    cgroups.clock = clock
    assert cgroups.find_pods({OTHER_UID}).keys() == {OTHER_UID}
    assert cgroups.find_pods({UID}) == {} == cgroups.find_many([(ID, UID)])
    for path in (f"kubepods/pod{UID}/{ID}", f"kubepods/besteffort/pod{UID}/{ID}"):
        place = make_cgroup(tmp_path / path)
        assert [one.path for one in cgroups.find_pods({UID})[UID]] == [place]
        assert cgroups.find_many([(ID, UID)])[ID].path == place
        shutil.rmtree(place.parent)
        assert cgroups.find_pods({UID}) == {} == cgroups.find_many([(ID, UID)])
    place = make_cgroup(tmp_path / f"elsewhere/pod{UID}/{ID}")
    assert cgroups.find_pods({UID}) == {} == cgroups.find_many([(ID, UID)])
    clock.now = WALK_AFTER_S
    assert cgroups.find_many([(ID, UID)])[ID].path == place
    assert [one.path for one in cgroups.find_pods({UID})[UID]] == [place]


def test_under_systemd_too_the_other_classes_are_known_from_one(tmp_path: Path) -> None:
    other, own = OTHER_UID.replace("-", "_"), UID.replace("-", "_")
    make_cgroup(make_v2(tmp_path) / f"kubepods.slice/kubepods-pod{other}.slice/cri-containerd-{OTHER_ID}.scope")
    cgroups = Cgroups(tmp_path)
    cgroups.clock = _Clock()
    assert cgroups.find_pods({OTHER_UID}).keys() == {OTHER_UID}
    for name in ("kubepods-burstable", "kubepods-besteffort"):
        place = make_cgroup(tmp_path / f"kubepods.slice/{name}.slice/{name}-pod{own}.slice/crio-{ID}.scope")
        assert [one.path for one in cgroups.find_pods({UID})[UID]] == [place]
        shutil.rmtree(place.parent)


def test_a_pod_whose_directory_is_gone_has_no_process_until_it_is_there_again(tmp_path: Path) -> None:
    """A pod that was never seen is looked for everywhere: its share is not freed by a guess."""
    make_cgroup(make_v2(tmp_path) / f"kubepods/burstable/pod{UID}/{ID}", 7)
    make_cgroup(tmp_path / f"elsewhere/pod{OTHER_UID}/{OTHER_ID}", 8)
    cgroups = Cgroups(tmp_path)
    assert cgroups.has_processes(OTHER_UID) is True
    assert cgroups.find_pods({UID}).keys() == {UID}
    assert cgroups.has_processes(UID) is True
    shutil.rmtree(tmp_path / f"kubepods/burstable/pod{UID}")
    assert cgroups.has_processes(UID) is False
    make_cgroup(tmp_path / f"kubepods/pod{UID}/{ID}", 9)
    assert cgroups.has_processes(UID) is True


async def test_what_cannot_be_known_of_a_pods_processes_is_none(tmp_path: Path) -> None:
    """No hierarchy at all, or a UID that is none: never a path."""
    for root, uid in ((tmp_path / "none", UID), (tmp_path, PodUid("../../etc")), (tmp_path, PodUid(""))):
        assert await Cgroups(root).has_processes_in_thread(uid) is None


async def test_a_stalled_file_system_is_unavailable(tmp_path: Path) -> None:
    """A pipe in the place of cgroup.procs stands for it: not known now is not the same as no process."""
    pipe = tmp_path / f"kubepods/pod{UID}" / "cgroup.procs"
    pipe.parent.mkdir(parents=True)
    os.mkfifo(pipe)
    cgroups = Cgroups(tmp_path)
    for reason in ("got no answer within 2 s", "an earlier call still hangs"):
        with pytest.raises(Unavailable, match=reason):
            await cgroups.has_processes_in_thread(UID)
    os.close(os.open(pipe, os.O_WRONLY))


def test_a_container_outside_its_pods_directory_is_counted_after_it_was_found(tmp_path: Path) -> None:
    """As a runtime makes it that writes cgroups itself: the pod's own directory, if any, is empty. Also where the runtime
    was reconfigured meanwhile."""
    outside = f"system.slice/kubepods-burstable-{SLICE}:cri-containerd:{ID}"
    procs = make_cgroup(make_v2(tmp_path) / outside, 7) / "cgroup.procs"
    cgroups = Cgroups(tmp_path)
    assert cgroups.find_many([(ID, UID)]).keys() == {ID}
    assert cgroups.has_processes(UID) is True
    make_cgroup(tmp_path / f"{BURSTABLE}/crio-{OTHER_ID}.scope")
    assert cgroups.find_many([(OTHER_ID, UID)]).keys() == {OTHER_ID}
    assert cgroups.has_processes(UID) is True
    procs.write_text("")
    assert cgroups.has_processes(UID) is False


@pytest.mark.parametrize("is_seen", [False, True])
def test_without_a_free_descriptor_it_is_not_known_whether_a_process_is_there(tmp_path: Path, is_seen: bool) -> None:
    """A share of a pod that still runs would be freed."""
    make_cgroup(make_v2(tmp_path) / f"kubepods/pod{UID}/{ID}", 7)
    cgroups = Cgroups(tmp_path)
    if is_seen:
        assert cgroups.find_pods({UID}).keys() == {UID}
    with no_free_descriptor(), pytest.raises(Unavailable, match="Too many open files"):
        cgroups.has_processes(UID)
    assert cgroups.has_processes(UID) is True
