"""The cgroups of containers on this node: where they are, which processes are in them, and the owners of processes.

Works under cgroup v1, v2 and hybrid mounts, whatever the driver or nesting: the directories' names show it
(cgroup_paths.py). The plain methods block (a read below /sys/fs/cgroup or /proc can wait for the kernel's lock) and may
run in several threads at a time; `…_in_thread` are the same for the event loop, each bounded in time. The container
runtime is asked in cri.py.

A walk goes into no container of a pod: what a tenant makes below its own cgroup is never taken for a pod or a container.
Where the node is itself a container of another cluster's pod, and that cluster's cgroups are in sight, `root` must be the
node's directory (setting runtime.cgroup_root). Follows no symbolic link.

State owned: the directory that each container had when it was last found, which is checked at each use; the pods whose
directory was seen; and the forms of the pods' directories, by which a pod is looked for without a walk over all others.
"""

from __future__ import annotations

import errno
import os
import signal
import stat
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Concatenate, ParamSpec, TypeVar

from msgspec import Struct

from gpushare_agent.agent.runtime.cgroup_paths import (
    MAX_TEXT_BYTES,
    NOBODY,
    PeerIdentity,
    container_id_of,
    parse_proc_cgroup,
    pod_uid_of,
    split_joined,
)
from gpushare_agent.core.kit.daemon_thread import DaemonThread
from gpushare_agent.core.model.errors import NotFound, Unavailable
from gpushare_agent.core.model.names import PodUid
from gpushare_agent.core.model.usage import ProcessFacts

MAX_DEPTH = 12
ANY_NAME_DEPTH = 6
"""Prefixes above the pods (a node in a container, a user's session) are at most this deep; below it only directories that
the kubelet names are followed."""
MAX_DIRECTORIES = 20_000


class FoundDirectory(Struct, frozen=True, kw_only=True):
    """The directory of a pod (then `container_id` is None), of a container of one, or of a container without a pod."""

    path: str
    pod_uid: PodUid | None
    container_id: str | None


class CgroupDir(Struct, frozen=True, kw_only=True):
    """The cgroup of one container. `pod_uid` is None where the path names no pod."""

    path: Path
    container_id: str
    pod_uid: PodUid | None


class CgroupWalk:
    """One walk below `root`, which may have one hierarchy or several."""

    def __init__(self, root: Path) -> None:
        self._root = str(root)
        self.is_complete = True
        """False once a limit has cut the walk short."""

    def places(self) -> Iterator[FoundDirectory]:
        """Pods, and containers that stand in no pod's directory; nearest to the root first."""
        # Breadth first: pods are near the root, and a deep tree of a user's session cannot use up the limit before them.
        pending = deque([(self._root, 0)])
        seen = 0
        while pending:
            directory, depth = pending.popleft()
            for name in subdirectories(directory):
                seen += 1
                # A tenant who may make cgroups can make any number of them: the walk must end.
                if seen > MAX_DIRECTORIES:
                    self.is_complete = False
                    return
                path = f"{directory}/{name}"
                place = _classify(path, name)
                if place is not None:
                    yield place
                # Below a pod's directory everything is the tenant's, who may name directories like other pods'.
                is_of_pod = place is not None and place.pod_uid is not None
                if not is_of_pod and (depth < ANY_NAME_DEPTH or (depth < MAX_DEPTH and _may_contain_pods(name))):
                    pending.append((path, depth + 1))

    def containers(self) -> Iterator[CgroupDir]:
        """Containers, with the pod in whose directory they lie."""
        for place in self.places():
            found = [("", place.container_id)]
            # A pod's own directory, of whose containers the names alone are read: the walk goes no deeper.
            if place.container_id is None:
                found = [(name, container_id_of(name)) for name in subdirectories(place.path)]
            for name, container_id in found:
                if container_id is not None:
                    yield CgroupDir(path=Path(place.path, name), container_id=container_id, pod_uid=place.pod_uid)


def subdirectories(path: str) -> list[str]:
    """The names of the directories in it, in any order; links are left out, and what cannot be read (it goes away at any
    time) has none. Raises Unavailable: nothing can be read now."""
    try:
        with os.scandir(path) as entries:
            return [e.name for e in entries if e.is_dir(follow_symlinks=False)]
    except OSError as e:
        _require_resources(e)
        return []


def _require_resources(error: OSError) -> None:
    """Raises Unavailable where the error says nothing of the directory: it may have a process."""
    if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM):
        raise Unavailable(f"{error.filename} cannot be read: {error.strerror}; it is tried again") from error


def _classify(path: str, name: str) -> FoundDirectory | None:
    if joined := split_joined(name):
        return FoundDirectory(path=path, pod_uid=joined[0], container_id=joined[1])
    uid, container_id = pod_uid_of(name), container_id_of(name)
    if uid is None and container_id is None:
        return None
    return FoundDirectory(path=path, pod_uid=uid, container_id=container_id)


def _may_contain_pods(name: str) -> bool:
    return "kubepods" in name or name in ("besteffort", "burstable")


K = TypeVar("K")
T = TypeVar("T")
P = ParamSpec("P")

MAX_DIRECTORIES_BELOW = 4_096
"""Below one container. A tenant that makes more cgroups in its own can hide processes from its own list only."""
MAX_PROCS_BYTES = 1024 * 1024
MAX_STATUS_BYTES = 1024 * 1024
"""A tenant may have 65,536 groups of ten digits, which come before its process's PIDs and memory."""
MAX_NAME_CHARS = 64

_FIRST_CONTROLLERS = ("pids", "memory", "cpu", "cpu,cpuacct", "devices")
"""Runtimes put every container into these; they are searched before others."""
_OPEN_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
_HALF_PAGE = 2048
_READ_BYTES = 64 * 1024
"""For one read: memory for a megabyte comes from the kernel each time, which costs five times the read itself."""
_LEAF_LINKS = 2
"""A directory without subdirectories has two links in the kernel's cgroup file system: no need to list it."""

WALK_AFTER_S, WALK_AGAIN_S = 5.0, 60.0
"""So long after it was first asked for all cgroups are searched for what no known form has, and then again and again."""
MAX_FORMS = 64
MAX_KNOWN = 8192
"""More than the containers of a node."""
_CLASSES = ("burstable", "besteffort")
_UID = "\0"

_TIMEOUTS_S = {"rounds": 5.0, "peers": 2.0, "pods": 2.0}

_HOSTS_PID_NAMESPACE = 0xEFFFFFFC
"""Its inode, as the kernel has it in include/linux/proc_ns.h."""
_GONE = (errno.ENOENT, errno.ENODEV, errno.ENOTDIR)


class CgroupVersion(StrEnum):
    V1 = "v1"
    V2 = "v2"
    HYBRID = "hybrid"
    """v1 controllers, with v2 next to them at `unified`."""


def cgroup_version(root: Path) -> CgroupVersion:
    """Raises Unavailable where `root` is no mounted cgroup hierarchy."""
    if (root / "cgroup.controllers").exists():
        return CgroupVersion.V2
    # cgroup.procs and not the bare directory: an empty directory is no mounted hierarchy.
    mounted = {name for name in subdirectories(str(root)) if (root / name / "cgroup.procs").exists()}
    if not mounted:
        raise Unavailable(f"{root}: " + ("no cgroup hierarchy is mounted there" if root.is_dir() else "not there"))
    return CgroupVersion.HYBRID if "unified" in mounted else CgroupVersion.V1


class CgroupProcesses:
    """The processes of a cgroup and all below it, as the kernel listed them."""

    def __init__(self, texts: Mapping[str, bytes]) -> None:
        self._texts = texts

    @property
    def pids(self) -> list[int]:
        """The host's, ascending."""
        found = {pid for text in self._texts.values() for pid in _parse_procs(text)}
        return sorted(found - {0})  # so the kernel writes a process of another PID namespace

    def has_changed(self) -> bool:
        """Whether one of the lists is another now. Blocks; a third of the cost of a new reading. A cgroup that was made
        below since then is seen by the processes that it took from its parent, and else by the next reading."""
        try:
            return any(_read_bounded(path, MAX_PROCS_BYTES) != text for path, text in self._texts.items())
        except OSError:
            return True


def _in_thread(
    blocking: Callable[Concatenate[Cgroups, P], T], what: str, thread: str = "rounds"
) -> Callable[Concatenate[Cgroups, P], Awaitable[T]]:
    """The same for the event loop: raises Unavailable, too, where the file system does not answer in time."""

    def call(self: Cgroups, /, *args: P.args, **kwargs: P.kwargs) -> Awaitable[T]:
        return self.threads[thread].call(partial(blocking, self, *args, **kwargs), what, _TIMEOUTS_S[thread])

    return call


def _forms_of(place: CgroupDir) -> Iterator[str]:
    """The path of the pod's directory with `_UID` for the pod's UID, and those of pods of other QoS classes next to it, of
    which there may be none yet; nothing where the container is in no directory of its pod.

    Guaranteed pods are in the directory of all pods: `kubepods/pod<UID>`, or `kubepods.slice/kubepods-pod<UID>.slice`; the
    others in one of their class: `kubepods/burstable/pod<UID>`, or
    `kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod<UID>.slice`.
    """
    if place.pod_uid is None:
        return
    parent, _, name = str(place.path.parent).rpartition("/")
    before, is_pods, after = name.partition(_written(place.pod_uid, name))
    if not is_pods:
        return
    yield f"{parent}/{before}{_UID}{after}"
    stem = before.removesuffix("pod")
    for one in _CLASSES:
        if stem.endswith(f"-{one}-") or parent.endswith(f"/{one}"):
            stem, parent = stem.removesuffix(f"{one}-"), parent.rpartition("/")[0]
    yield f"{parent}/{stem}pod{_UID}{after}"
    for one in _CLASSES:
        # By systemd's rule a slice has the names of all above it in its own.
        below = f"{stem}{one}.slice/{stem}{one}-pod" if stem else f"{one}/pod"
        yield f"{parent}/{below}{_UID}{after}"


def _written(uid: str, directory: str) -> str:
    return uid.replace("-", "_") if directory.endswith(".slice") else uid


class Cgroups:
    """`root` is where the host's hierarchies are mounted, `proc` its /proc."""

    def __init__(self, root: Path = Path("/sys/fs/cgroup"), proc: Path = Path("/proc")) -> None:
        self.root = root
        self._proc = proc
        self._own_text = ""
        self.clock = time.monotonic
        self._known: dict[str, CgroupDir] = {}
        self._seen: dict[PodUid, bool] = {}
        """Whether every container of the pod was in a directory of a known form."""
        self._forms: dict[str, None] = {}
        self._walk_at: dict[str, float] = {}
        self._walk_lock = threading.Lock()
        # A slow walk of all containers must not delay the answer to one peer of a socket, nor a pod's end.
        self.threads = {
            "rounds": DaemonThread("cgroups", advice=f"Check {root}; it is read again."),
            "peers": DaemonThread("peers", advice=f"Check {proc}; register again."),
            "pods": DaemonThread("pod-cgroups", advice=f"Check {root}; it is read again."),
        }

    def find_many(self, requested: Iterable[tuple[str, PodUid | None]]) -> Mapping[str, CgroupDir]:
        """The cgroups that exist, by container ID; where a UID comes with it, the path must name that pod or none.

        A container that was not known is looked for in its pod's directory, and else in one walk at most in each hierarchy,
        however many are requested.
        """
        # What is no ID of a container would be compared with names of directories: it comes from the runtime.
        uids = {container_id: uid for container_id, uid in requested if container_id_of(container_id) == container_id}
        with self._walk_lock:
            self._bound()
            # What is known is believed only while its directory is there: an ID is never given again, but a container ends.
            for gone in [i for i in uids if i in self._known and not _is_directory(str(self._known[i].path))]:
                del self._known[gone]
            missing = {i: uid for i, uid in uids.items() if i not in self._known}
            for uid in {uid for uid in missing.values() if uid is not None}:
                self._look_at(uid)
            if self._is_walk_due(missing, self._known):
                self._walk(lambda found: found.keys() >= missing.keys())
            known = {i: self._known[i] for i in uids if i in self._known}
        # Of another pod is not found: an ID that names a container of another pod is a mistake of the runtime, or an
        # attack.
        return {i: place for i, place in known.items() if uids[i] in (None, place.pod_uid or uids[i])}

    def find_pods(self, uids: Collection[PodUid]) -> Mapping[PodUid, list[CgroupDir]]:
        """The containers' cgroups of these pods, the pod's own sandbox among them, in the first hierarchy that has any."""
        with self._walk_lock:
            self._bound()
            found = {uid: self._look_at(uid) for uid in uids}
            if self._is_walk_due(found, [uid for uid, places in found.items() if places]):
                walked = self._walk(lambda known: {one.pod_uid for one in known.values()} >= found.keys()).values()
                found = {uid: [one for one in walked if one.pod_uid == uid] for uid in uids}
        return {uid: places for uid, places in found.items() if places}

    def has_processes(self, uid: PodUid) -> bool | None:
        """Whether a process is in one of the pod's cgroups, None where that cannot be known. Blocks. Raises
        Unavailable: ask again."""
        # No directory can have such a UID in its name: nothing is known of its processes.
        if pod_uid_of(f"pod{uid}") != uid or not self.root.is_dir():
            return None
        with self._walk_lock:
            paths, is_all = self._pod_paths(uid), self._seen.get(uid, False)
        if any(map(_has_process, paths)):
            return True
        # A directory that was there and is gone has no process: a pod keeps the path that it began with.
        if is_all:
            return False
        walk = CgroupWalk(self.root)
        if any(place.pod_uid == uid and _has_process(place.path) for place in walk.places()):
            return True
        # A directory that could not be read may be the one with the process.
        return False if walk.is_complete else None

    def find_pod_directories(self, uids: Collection[PodUid]) -> Mapping[PodUid, Path]:
        """The pods' own directories, of those that have one, in the first hierarchy that has any."""
        for hierarchy in self._hierarchies():
            found = {
                place.pod_uid: Path(place.path)
                for place in CgroupWalk(hierarchy).places()
                if place.pod_uid in uids and place.pod_uid is not None and place.container_id is None
            }
            if found:
                return found
        return {}

    def processes(self, directory: CgroupDir) -> CgroupProcesses:
        """The processes of the container's cgroup and all below. Raises NotFound (it is gone), Unavailable."""
        return CgroupProcesses(_read_tree(str(directory.path)))

    def processes_round(self, directories: Iterable[CgroupDir]) -> Mapping[str, CgroupProcesses | None]:
        """The processes of many containers, by container ID; None where they cannot be known: find it again."""
        found: dict[str, CgroupProcesses | None] = {}
        for directory in directories:
            try:
                found[directory.container_id] = self.processes(directory)
            except (NotFound, Unavailable):
                found[directory.container_id] = None
        return found

    def find_and_read(
        self, requested: Iterable[tuple[str, PodUid | None]], uids: Collection[PodUid]
    ) -> tuple[Mapping[str, CgroupDir], Mapping[PodUid, list[CgroupDir]], Mapping[str, CgroupProcesses | None]]:
        """`find_many`, `find_pods`, and `processes_round` of what they find."""
        own, pods = self.find_many(requested), self.find_pods(uids)
        every = {one.container_id: one for places in pods.values() for one in places} | dict(own)
        return own, pods, self.processes_round(every.values())

    def identify(self, pid: int) -> PeerIdentity | None:
        """The owner of a process; None where that cannot be known: PID 0 (another PID namespace), /proc not readable.

        `NOBODY` where it is in no container, its cgroups contradict, or it is gone: a peer that has handed its connection
        on and ended must not count as one that cannot be seen. A PID names whoever has it now: hold the connection open.
        """
        # SO_PEERCRED has 0 for a process of a PID namespace that is not below this one's.
        if pid <= 0:
            return None
        try:
            text = read_proc_text(self._proc / str(pid) / "cgroup")
        except (FileNotFoundError, NotADirectoryError, ProcessLookupError):
            # An ended process and a /proc that is not mounted look alike: only the first is an answer.
            is_proc_there = (self._proc / "self").is_symlink() or (self._proc / "1").is_dir()
            return NOBODY if is_proc_there else None
        except OSError:
            return None
        # Read late and once: where it could not be read the next call tries again.
        self._own_text = self._own_text or read_own_text(self._proc)
        return parse_proc_cgroup(text, own_text=self._own_text) or NOBODY

    def namespace_pids(self, pids: Iterable[int]) -> Mapping[int, tuple[int, ...]]:
        """The PIDs of each process in the PID namespaces below the host's, by its host PID, from the outermost on; none
        for a process in the host's. Left out are processes that have ended, and that end: they have no memory any more, and
        the driver still counts what they had of a GPU. Source: `NSpid` and `VmSize` of /proc/<pid>/status."""
        found = {}
        for pid in pids:
            with suppress(OSError):
                status = _read_bounded(f"{self._proc}/{pid}/status", MAX_STATUS_BYTES)
                if b"\nVmSize:" in status:
                    found[pid] = parse_namespace_pids(status)
        return found

    def started(self, pids: Iterable[int]) -> Mapping[int, int]:
        """The start of each process, in ticks since the boot: another process of that PID has another time. Those that
        have ended are left out."""
        found = {}
        for pid in pids:
            with suppress(OSError, ValueError, IndexError):
                found[pid] = _read_start(self._proc, pid)
        return found

    def end(self, pid: int, started: int, pods: Collection[PodUid]) -> bool:
        """Kills the process of one of these pods that started then; False where the PID is not that one's any more. Raises
        Unavailable, where this process may not do that, or cannot know whose the PID is."""
        refused = f"process {pid} cannot be ended: "
        # NVML's PIDs are the host's. In another namespace, as of a node that is a container, they are somebody else's.
        if Path("/proc/self/ns/pid").stat().st_ino != _HOSTS_PID_NAMESPACE:
            raise Unavailable(f"{refused}the agent is not in the host's PID namespace")
        try:
            with os.fdopen(os.pidfd_open(pid), "rb", buffering=0) as process:
                # Asked with the descriptor open: whatever the PID names from here on, the signal reaches the process of now.
                owner = self.identify(pid)
                if self.started([pid]).get(pid) != started or owner is None or owner.pod_uid not in pods:
                    return False
                signal.pidfd_send_signal(process.fileno(), signal.SIGKILL)
        except ProcessLookupError:
            return False
        except OSError as e:
            raise Unavailable(f"{refused}{e.strerror} (component end-unlimited has the right)") from e
        return True

    def check_driver(self, setting: str) -> str | None:
        """The text for the user if the setting disagrees with the pods that are there; None if not, or with no pods
        yet."""
        if not setting:
            return None
        seen = sorted({_driver_of(place) for place in CgroupWalk(self.root).places() if place.pod_uid is not None})
        if not seen or setting in seen:
            return None
        return (
            f"cgroup-driver is set to {setting}, but the pods below {self.root} have names of {seen[0]}:"
            " containers are found by their IDs all the same; remove or correct the setting"
        )

    def version(self) -> CgroupVersion:
        """Raises Unavailable."""
        return cgroup_version(self.root)

    def changed(self, known: Mapping[K, Sequence[CgroupProcesses]]) -> list[K]:
        """The keys of which a cgroup's processes are others than those."""
        return [key for key, read in known.items() if any(one.has_changed() for one in read)]

    find_many_in_thread = _in_thread(find_many, "searching cgroups")
    find_and_read_in_thread = _in_thread(find_and_read, "reading the containers' cgroups")
    find_pod_directories_in_thread = _in_thread(find_pod_directories, "searching pods' cgroups")
    version_in_thread = _in_thread(version, "reading the cgroups")
    changed_in_thread = _in_thread(changed, "reading the containers' cgroups")
    namespace_pids_in_thread = _in_thread(namespace_pids, "reading the status of processes")
    end_in_thread = _in_thread(end, "ending a process")
    check_driver_in_thread = _in_thread(check_driver, "reading the pods' cgroups")
    started_in_thread = _in_thread(started, "reading the starts of processes", "peers")
    identify_in_thread = _in_thread(identify, "reading the cgroup of a process", "peers")
    has_processes_in_thread = _in_thread(has_processes, "reading the processes of a pod", "pods")

    def _bound(self) -> None:
        for known in (self._known, self._seen, self._walk_at):
            if len(known) > MAX_KNOWN:
                known.clear()  # what somebody asks for is looked for again

    def _pod_paths(self, uid: PodUid) -> list[str]:
        """The pod's directories, of the forms that are known."""
        return [path for form in self._forms if _is_directory(path := form.replace(_UID, _written(uid, form)))]

    def _look_at(self, uid: PodUid) -> list[CgroupDir]:
        """The pod's containers, in the directories of the forms that are known."""
        found: dict[str, CgroupDir] = {}
        for path in self._pod_paths(uid) if pod_uid_of(f"pod{uid}") == uid else ():
            for name in subdirectories(path):
                if (container_id := container_id_of(name)) is not None:
                    # The first hierarchy's place stays: the later ones show the same container again.
                    place = CgroupDir(path=Path(path, name), container_id=container_id, pod_uid=uid)
                    self._known[container_id] = found.setdefault(container_id, place)
                    self._seen.setdefault(uid, True)
        return list(found.values())

    def _is_walk_due(self, requested: Iterable[str], found: Container[str]) -> bool:
        """Whether to look everywhere for what was not found. What no known form has is not there as a rule: its cgroup is
        not made yet, or it has ended."""
        now, is_due = self.clock(), False
        for one in requested:
            if one in found:
                self._walk_at.pop(one, None)
            elif not self._forms or now >= self._walk_at.setdefault(one, now + WALK_AFTER_S):
                is_due = True
                self._walk_at[one] = now + WALK_AGAIN_S
        return is_due

    def _walk(self, is_complete: Callable[[Mapping[str, CgroupDir]], bool]) -> Mapping[str, CgroupDir]:
        """Learns where every container is, and which forms the pods' directories have; goes on to the next hierarchy until
        what was found is complete."""
        found: dict[str, CgroupDir] = {}
        for hierarchy in self._hierarchies():
            for place in CgroupWalk(hierarchy).containers():
                found.setdefault(place.container_id, place)
                forms = list(_forms_of(place))
                if len(self._forms) < MAX_FORMS:
                    self._forms |= dict.fromkeys(forms)
                # A container in no directory of its pod, as some runtimes make it, is found by a walk alone.
                if place.pod_uid is not None:
                    is_formed = forms[:1] != [] and forms[0] in self._forms
                    self._seen[place.pod_uid] = is_formed and self._seen.get(place.pod_uid, True)
            # One hierarchy has them all as a rule; a hybrid host may have containers in v2's alone.
            if is_complete(found):
                break
        self._known |= found
        return found

    def _hierarchies(self) -> list[Path]:
        try:
            if cgroup_version(self.root) is CgroupVersion.V2:
                return [self.root]
        except Unavailable:
            return []
        names = set(subdirectories(str(self.root)))
        first = [name for name in _FIRST_CONTROLLERS if name in names]
        # Their trees have the same containers, if any, and no controller that the agent reads.
        last = [name for name in ("systemd", "unified") if name in names]
        return [self.root / name for name in (*first, *sorted(names - {*first, *last}), *last)]


def _driver_of(place: FoundDirectory) -> str:
    """A pod's directory is named by the kubelet, joined ones too (`<pod>.slice:<runtime>:<ID>`)."""
    return "systemd" if ".slice" in place.path.rpartition("/")[2] else "cgroupfs"


def _is_directory(path: str) -> bool:
    try:
        return stat.S_ISDIR(os.lstat(path).st_mode)
    except OSError:
        return False


def _has_process(path: str) -> bool:
    for directory, _, files in os.walk(path, onerror=_require_resources):
        if "cgroup.procs" in files:
            try:
                with Path(directory, "cgroup.procs").open("rb") as procs:
                    # The file's size is 0 always: reading is the only way to know whether it lists a process.
                    if procs.read(1):
                        return True
            except OSError as e:
                _require_resources(e)
    return False


def _read_tree(top: str) -> dict[str, bytes]:
    texts: dict[str, bytes] = {}
    pending = [top]
    seen = 0
    # A container may make cgroups below its own; beyond the bound it hides processes from itself only.
    while pending and seen <= MAX_DIRECTORIES_BELOW:
        directory = pending.pop()
        seen += 1
        try:
            # lstat: a link instead of a cgroup must not lead the agent to another one's processes.
            status = os.lstat(directory)
            if not stat.S_ISDIR(status.st_mode):
                raise NotADirectoryError(errno.ENOTDIR, "not a directory", directory)
            if status.st_nlink != _LEAF_LINKS:
                pending.extend(f"{directory}/{name}" for name in subdirectories(directory))
            path = f"{directory}/cgroup.procs"
            texts[path] = _read_bounded(path, MAX_PROCS_BYTES)
        except OSError as e:
            # Below the top it went away meanwhile, or its processes are listed above it (a threaded cgroup).
            if directory == top:
                raise _renamed(e, top) from e
    return texts


def _renamed(error: OSError, top: str) -> Exception:
    # ENODEV is what the kernel says of a cgroup.procs whose cgroup was removed while it was open.
    if error.errno in _GONE:
        return NotFound(f"the cgroup {top} is gone: its container has ended")
    return Unavailable(f"the processes of the cgroup {top} cannot be read: {error.strerror}; it is tried again")


def _parse_procs(text: bytes) -> Iterable[int]:
    try:
        # A text that was cut at the bound may end in half a number.
        return [int(number) for number in text.split()]
    except ValueError:
        return ()


def read_proc_text(path: Path) -> str:
    """A text of /proc, up to the bound that runtime/cgroup_paths.py takes. Raises OSError."""
    return _read_bounded(str(path), MAX_TEXT_BYTES + 1).decode("utf-8", "replace")


def read_own_text(proc: Path) -> str:
    """The reader's own text, empty where it cannot be read. It does not change: keep it."""
    try:
        return read_proc_text(proc / "self" / "cgroup")
    except OSError:
        return ""


def parse_namespace_pids(status: bytes) -> tuple[int, ...]:
    """`NSpid:` names the PID in each namespace from the reader's to the process's own. The kernel escapes line ends in the
    process's name, so that no process can write such a line."""
    for line in status.split(b"\n"):
        if line.startswith(b"NSpid:"):
            return tuple(int(number) for number in line.split()[2:] if number.isdigit())
    return ()


def _parse_name(status: bytes) -> str | None:
    """`Name:` is the program's name of 15 bytes at most, or what the process calls itself: never arguments."""
    first = status.partition(b"\n")[0]
    if not first.startswith(b"Name:"):
        return None
    text = first.removeprefix(b"Name:").decode("utf-8", "replace").strip()
    return "".join(filter(str.isprintable, text))[:MAX_NAME_CHARS] or None


def _read_start(proc: Path, pid: int) -> int:
    """Field 22 of /proc/<pid>/stat, in ticks since the boot. Raises OSError, ValueError, IndexError."""
    content = _read_bounded(f"{proc}/{pid}/stat", MAX_STATUS_BYTES)
    # The process's name is in brackets, and may have any in it.
    return int(content[content.rindex(b")") + 1 :].split()[19])


def _read_bounded(path: str, limit: int) -> bytes:
    """The file's bytes up to the limit. The kernel gives such files out in pages, so one read is not all, but for a text
    that is shorter than half a page."""
    file = os.open(path, _OPEN_FLAGS)
    try:
        content = os.read(file, min(limit, _READ_BYTES))
        while _HALF_PAGE <= len(content) < limit and (more := os.read(file, min(limit - len(content), _READ_BYTES))):
            content += more
        return content
    finally:
        os.close(file)


READ_TIMEOUT_S = 2.0
MAX_PROCESSES = 8_192
"""Read in one round: 16 GPUs with 48 MPS clients each are a tenth of it. Further ones belong to no container."""


class ProcessOwners:
    """The owners of many processes at once, for the sampling of usage; of one peer of a socket: `Cgroups.identify`.

    The file is read each time: it costs as much as reading the start time that would show whether a cached answer is
    still this process's (8 µs each, measured), and it is right after a PID was given to another process or a process was
    moved. What costs more, parsing the text, is done once for each text: the processes of a container share it.

    State owned: the texts of the last read with what they mean, and the owners that it found, for a process that has ended
    while the driver still counts its memory. `proc` is the host's /proc: PIDs of another PID namespace are not in
    it, and belong to no container.
    """

    def __init__(self, proc: Path = Path("/proc")) -> None:
        self._proc = proc
        self._own_text = ""
        self._meanings: dict[bytes, PeerIdentity] = {}
        self._owners: dict[int, PeerIdentity] = {}
        self._thread = DaemonThread("process-owners", advice=f"Check {proc}; it is read again.")
        # A reader of names does not delay a round.
        self._names = DaemonThread("process-names", advice=f"Check {proc}; ask again.")

    async def describe(self, pids: Collection[int], before_s: float) -> Mapping[int, ProcessFacts]:
        """What the kernel says of those that began before this moment of CLOCK_BOOTTIME: each of them has had its PID since
        then. Raises Unavailable, as `identify`."""
        what = f"reading the names of {len(pids)} processes"
        return await self._names.call(partial(self.read_names, tuple(pids), before_s), what, READ_TIMEOUT_S)

    def read_names(self, pids: Collection[int], before_s: float) -> Mapping[int, ProcessFacts]:
        """Does what `describe` does, blocking."""
        found, tick_s = {}, 1 / os.sysconf("SC_CLK_TCK")
        for pid in sorted(pids)[:MAX_PROCESSES]:
            with suppress(OSError, ValueError, IndexError):
                status = _read_bounded(f"{self._proc}/{pid}/status", MAX_STATUS_BYTES)
                # After the status: a process that took the PID in between is seen to be new. The start is rounded down.
                if (_read_start(self._proc, pid) + 1) * tick_s > before_s:
                    continue
                inner = parse_namespace_pids(status)
                found[pid] = ProcessFacts(pid_in_container=inner[-1] if inner else None, command=_parse_name(status))
        return found

    async def identify(self, pids: Collection[int]) -> Mapping[int, PeerIdentity]:
        """The owners of all of `pids`, in one call of a thread. Raises Unavailable where /proc does not answer in time."""
        if not pids:  # an idle node starts no thread
            self._owners = {}
            return {}
        return await self._thread.call(
            partial(self.read, tuple(pids)), f"reading the cgroups of {len(pids)} processes", READ_TIMEOUT_S
        )

    def read(self, pids: Collection[int]) -> Mapping[int, PeerIdentity]:
        """Does what `identify` does, blocking; from one thread at a time."""
        # Replaced, not updated: owners of processes that nobody asks for any more must not pile up.
        before, self._owners = self._owners, {}
        old_meanings, self._meanings = self._meanings, {}
        self._own_text = self._own_text or read_own_text(self._proc)
        for pid in sorted(pids)[:MAX_PROCESSES]:
            try:
                content = _read_bounded(f"{self._proc}/{pid}/cgroup", MAX_TEXT_BYTES + 1)
            except OSError:
                # Ended, while the driver still counts its memory: it is its last owner's.
                self._owners[pid] = before.get(pid, NOBODY)
                continue
            # One text for all processes of a container: parsing costs more than reading.
            meaning = self._meanings.get(content) or old_meanings.get(content)
            if meaning is None:
                text = content.decode("utf-8", "replace")
                meaning = parse_proc_cgroup(text, own_text=self._own_text) or NOBODY
            self._meanings[content] = self._owners[pid] = meaning
        return {pid: self._owners.get(pid, NOBODY) for pid in pids}
