"""The owner of a process: from the text of `/proc/<pid>/cgroup` to a pod's UID and a container's ID.

Not for reading files or searching hierarchies: runtime/cgroups.py does that, with the same names of directories. No
state. Format: docs/reference/formats.md section 4, and cgroups(7) for the lines `<hierarchy>:<controllers>:<path>`.

What counts in a path, from its beginning on:

- The first pod directory decides, and the directory right below it names the container: a container may make cgroups
  below its own and name them as it likes, but cannot change what is above.
- A container that the reader itself is below (`own_text`) is skipped: there it is the node (a cluster in a pod) and
  no peer. An agent on such a node that is in no pod itself cannot be distinguished from an agent of the outer cluster.
- `..` and then a container without a pod is a neighbour in the reader's own pod: so the kernel writes it for a reader with a
  cgroup namespace of its own.
- Another container without a pod counts only where no line names a pod: the node's own stands above its pods in every path
  (kind, k3d).

The lines of cgroup v1 name one path for each controller. Those that name nobody (the root, a hierarchy that the runtime
does not use, the v2 line of a hybrid host) are skipped; the others must agree. Where two name different pods or
containers none is believed: no runtime makes such a process, and whoever could move it so could choose which line is
believed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from msgspec import Struct

from gpushare_agent.core.model.names import PodUid

MAX_TEXT_BYTES = 64 * 1024
"""A real text has at most 14 lines of at most 4 KiB. A longer one is not read in part: the rest might contradict."""

_HEX = "[0-9a-f]"
_CONTAINER_ID = rf"{_HEX}{{64}}"
_UUID = rf"{_HEX}{{8}}(?:S{_HEX}{{4}}){{3}}S{_HEX}{{12}}"
_STATIC_UID = rf"{_HEX}{{32}}"
"""A static pod's UID is a hash without dashes."""

_POD_CGROUPFS = re.compile(rf"pod({_UUID.replace('S', '-')}|{_STATIC_UID})")
_POD_SYSTEMD = re.compile(rf"(?:[A-Za-z0-9_.@\\-]*-)?pod({_UUID.replace('S', '_')}|{_STATIC_UID})\.slice")
_CONTAINER = re.compile(rf"(?:([a-z][a-z0-9]*(?:-[a-z0-9]+)*)-)?({_CONTAINER_ID})(?:\.scope)?")
"""`<ID>`, `crio-<ID>`, `cri-containerd-<ID>.scope`, `docker-<ID>.scope`, `libpod-<ID>.scope`."""
_MONITOR = "conmon"
"""`crio-conmon-<ID>.scope` is of the container's monitor, a process of the node and not of the container."""


class PeerIdentity(Struct, frozen=True, kw_only=True):
    """Who a process is, as far as its cgroups show.

    A pod without a container is a process of the pod's own (a monitor); a container without a pod is one of the reader's
    own pod, seen from inside, or one that no kubelet made.
    """

    pod_uid: PodUid | None
    container_id: str | None


NOBODY = PeerIdentity(pod_uid=None, container_id=None)
"""A process that was read and is in no container."""


class _Found(Struct, frozen=True):
    identity: PeerIdentity
    is_weak: bool = False
    """Counts only where no other line names anything."""


def parse_proc_cgroup(text: str, *, own_text: str = "") -> PeerIdentity | None:
    """The process that has this text as its `/proc/<pid>/cgroup`; None where it is in no container, or the lines disagree.

    `own_text` is the reader's own, from the same /proc. Whatever the text is, nothing is raised.
    """
    # Cut text might lack the line that contradicts.
    if len(text) > MAX_TEXT_BYTES:
        return None
    # By controller: hierarchies of v1 may have the reader in different places.
    own = dict(_paths(own_text)) if len(own_text) <= MAX_TEXT_BYTES else {}
    found = [f for name, path in _paths(text) if (f := _identify(path, own.get(name, ""))) is not None]
    # A container without a pod may be the node itself (kind, k3d), which stands above every pod.
    strong = [f.identity for f in found if not f.is_weak]
    return _agreed(strong or [f.identity for f in found])


def pod_uid_of(directory: str) -> PodUid | None:
    """The pod whose cgroup has this name, None where it is none of a pod."""
    if match := _POD_CGROUPFS.fullmatch(directory):
        return PodUid(match[1])
    if match := _POD_SYSTEMD.fullmatch(directory):
        return PodUid(match[1].replace("_", "-"))
    return None


def container_id_of(directory: str) -> str | None:
    """The container whose cgroup has this name, None where it is none of a container."""
    match = _CONTAINER.fullmatch(directory)
    # CRI-O's conmon has the container's ID in its cgroup's name, and is a process of the node.
    if match is None or _MONITOR in (match[1] or "").split("-"):
        return None
    return match[2]


def split_joined(directory: str) -> tuple[PodUid, str] | None:
    """Pod and container of `<pod>.slice:<runtime>:<ID>`, None where it is no such name.

    That is what a runtime that writes cgroups itself makes of a kubelet's path for systemd.
    """
    parts = directory.split(":")
    if len(parts) != 3:
        return None
    uid, container_id = pod_uid_of(parts[0]), container_id_of(parts[2])
    return (uid, container_id) if uid is not None and container_id is not None else None


def _paths(text: str) -> Iterator[tuple[str, str]]:
    for line in text.split("\n"):
        parts = line.split(":", 2)
        # Three parts at most: a path may have colons, as `<pod>.slice:cri-containerd:<ID>` has.
        if len(parts) == 3 and parts[0].isdigit() and parts[2].startswith("/"):
            yield parts[1], parts[2].removesuffix(" (deleted)")


def _identify(path: str, own_path: str) -> _Found | None:
    directories = [d for d in path.split("/") if d]
    # On a node that is a container, all paths begin with that container: it is no peer.
    shared = _count_shared(directories, [d for d in own_path.split("/") if d])
    plain: _Found | None = None
    for position, directory in enumerate(directories[shared:], shared):
        # The first pod from the left decides: only what is above a tenant's own cgroup is out of its reach.
        if joined := split_joined(directory):
            return _Found(PeerIdentity(pod_uid=joined[0], container_id=joined[1]))
        if (uid := pod_uid_of(directory)) is not None:
            # Right below the pod: deeper names are the container's own choice.
            below = directories[position + 1] if position + 1 < len(directories) else ""
            return _Found(PeerIdentity(pod_uid=uid, container_id=container_id_of(below)))
        if plain is None and (container_id := container_id_of(directory)) is not None:
            # The kernel writes `..` for a reader with a cgroup namespace whose root is next to the path.
            is_neighbour = position > 0 and directories[position - 1] == ".."
            plain = _Found(PeerIdentity(pod_uid=None, container_id=container_id), is_weak=not is_neighbour)
            if is_neighbour:
                return plain
    return plain


def _count_shared(directories: list[str], own: list[str]) -> int:
    """How many directories at the beginning the reader is in too, up to the last container among them.

    Only what ends in a container is the reader's node. The pod in which both the reader and the peer are is not, and no
    more is the reader's own container, where a peer is in it: both must stay in what is parsed.
    """
    common = 0
    while common < min(len(directories), len(own)) and directories[common] == own[common]:
        common += 1
    # A container with a pod below it, in the reader's own path, is a node in a container.
    for end in range(common, 0, -1):
        if _is_container(own[end - 1]) and any(map(_is_pod, own[end:])):
            return end
    return 0


def _is_container(directory: str) -> bool:
    return container_id_of(directory) is not None or split_joined(directory) is not None


def _is_pod(directory: str) -> bool:
    return pod_uid_of(directory) is not None or split_joined(directory) is not None


def _agreed(identities: list[PeerIdentity]) -> PeerIdentity | None:
    """What all of them name, None where two contradict or none names anything.

    A line that names the pod alone agrees with one that names a container of that pod.
    """
    named = set(identities)
    # systemd's own hierarchy often ends at the pod's slice, while others go down to the container.
    of_containers = {i.pod_uid for i in named if i.container_id is not None}
    named -= {i for i in named if i.container_id is None and i.pod_uid in of_containers}
    return named.pop() if len(named) == 1 else None
