"""Pod and container from `/proc/<pid>/cgroup`, in every shape that kubelets, runtimes and kernels write."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpushare_agent.agent.runtime.cgroup_paths import (
    MAX_TEXT_BYTES,
    PeerIdentity,
    parse_proc_cgroup,
)
from gpushare_agent.core.model.names import PodUid

UID = "0e7a3f2c-1b5d-4c3e-9f10-44aa55bb6c77"
UID_ = UID.replace("-", "_")
OTHER = "9d1f0a55-7c11-4bd0-8a6e-0123456789ab"
STATIC = "d3a1f0b9c8e7d6a5b4c3f2e1d0c9b8a7"
ID = "4be1dc9a05d3b0e9f0c7f1d2a6b8c4e5f60718293a4b5c6d7e8f90a1b2c3d4e5"
NODE = "f00dfeedf00dfeedf00dfeedf00dfeedf00dfeedf00dfeedf00dfeedf00dfeed"
CHILD = "1111111122222222333333334444444455555555666666667777777788888888"

_V1 = ("cpuset", "cpu,cpuacct", "memory", "pids", "devices", "freezer", "blkio", "name=systemd")


def v1(path: str, *, unified: str | None = None) -> str:
    """The lines of all v1 controllers, and on a hybrid host the v2 line."""
    lines = [f"{number}:{name}:{path}" for number, name in zip(range(len(_V1), 0, -1), _V1, strict=True)]
    return "\n".join(lines + ([f"0::{unified}"] if unified is not None else [])) + "\n"


def v2(path: str) -> str:
    return f"0::{path}\n"


SYSTEMD = "/kubepods.slice"
BURSTABLE = f"{SYSTEMD}/kubepods-burstable.slice/kubepods-burstable-pod{UID_}.slice"
BEST_EFFORT = f"{SYSTEMD}/kubepods-besteffort.slice/kubepods-besteffort-pod{UID_}.slice"
GUARANTEED = f"{SYSTEMD}/kubepods-pod{UID_}.slice"
KIND = "/kubelet.slice/kubelet-kubepods.slice/kubelet-kubepods-burstable.slice"
K3S_ROOTLESS = "/user.slice/user-1000.slice/user@1000.service/app.slice/k3s-rootless.service"

TEXTS = {
    "containerd, cgroupfs, v1, guaranteed": v1(f"/kubepods/pod{UID}/{ID}"),
    "containerd, cgroupfs, v1, burstable": v1(f"/kubepods/burstable/pod{UID}/{ID}"),
    "containerd, cgroupfs, v1, best effort": v1(f"/kubepods/besteffort/pod{UID}/{ID}"),
    "containerd, cgroupfs, v2, guaranteed": v2(f"/kubepods/pod{UID}/{ID}"),
    "containerd, cgroupfs, v2, burstable": v2(f"/kubepods/burstable/pod{UID}/{ID}"),
    "containerd, systemd, v1, burstable": v1(f"{BURSTABLE}/cri-containerd-{ID}.scope"),
    "containerd, systemd, v2, guaranteed": v2(f"{GUARANTEED}/cri-containerd-{ID}.scope"),
    "containerd, systemd, v2, burstable": v2(f"{BURSTABLE}/cri-containerd-{ID}.scope"),
    "containerd, systemd, v2, best effort": v2(f"{BEST_EFFORT}/cri-containerd-{ID}.scope"),
    "containerd, systemd, hybrid": v1(f"{BURSTABLE}/cri-containerd-{ID}.scope", unified="/"),
    "containerd, hybrid, v2 line of its service": v1(
        f"/kubepods/burstable/pod{UID}/{ID}", unified="/system.slice/containerd.service"
    ),
    "containerd writes itself, the kubelet for systemd, v1": v1(
        f"/system.slice/containerd.service/kubepods-burstable-pod{UID_}.slice:cri-containerd:{ID}"
    ),
    "containerd writes itself, the kubelet for systemd, v2": v2(f"/kubepods-pod{UID_}.slice:cri-containerd:{ID}"),
    "containerd, systemd, a service manager inside": v2(f"{BURSTABLE}/cri-containerd-{ID}.scope/init.scope"),
    "CRI-O, systemd, v1": v1(f"{BURSTABLE}/crio-{ID}.scope"),
    "CRI-O, systemd, v2": v2(f"{BURSTABLE}/crio-{ID}.scope"),
    "CRI-O, systemd, v2, cgroup of its own inside": v2(f"{BEST_EFFORT}/crio-{ID}.scope/container"),
    "CRI-O, cgroupfs, v1": v1(f"/kubepods/besteffort/pod{UID}/crio-{ID}"),
    "docker, cgroupfs, v1": v1(f"/kubepods/burstable/pod{UID}/{ID}", unified="/system.slice/docker.service"),
    "docker, systemd, v1": v1(f"{BEST_EFFORT}/docker-{ID}.scope"),
    "cri-dockerd, systemd, v2": v2(f"{BURSTABLE}/docker-{ID}.scope"),
    "cri-dockerd, systemd, hybrid": v1(f"{GUARANTEED}/docker-{ID}.scope", unified=f"{GUARANTEED}/docker-{ID}.scope"),
    "kind, systemd, v2": v2(f"{KIND}/kubelet-kubepods-burstable-pod{UID_}.slice/cri-containerd-{ID}.scope"),
    "kind, cgroupfs, v1, seen from the machine": v1(f"/docker/{NODE}/kubelet/kubepods/burstable/pod{UID}/{ID}"),
    "kind, systemd, v2, seen from the machine": v2(
        f"/system.slice/docker-{NODE}.scope{KIND}/kubelet-kubepods-burstable-pod{UID_}.slice/cri-containerd-{ID}.scope"
    ),
    "kind on podman, v2, seen from the machine": v2(
        f"/machine.slice/libpod-{NODE}.scope/container{KIND}/kubelet-kubepods-burstable-pod{UID_}.slice/"
        f"cri-containerd-{ID}.scope"
    ),
    "k3s, cgroupfs, v1": v1(f"/kubepods/besteffort/pod{UID}/{ID}", unified="/system.slice/k3s.service"),
    "k3s, systemd, v2": v2(f"{BURSTABLE}/cri-containerd-{ID}.scope"),
    "k3s, rootless, v2": v2(f"{K3S_ROOTLESS}/kubepods/burstable/pod{UID}/{ID}"),
    "k3d, v2, seen from the machine": v2(f"/docker/{NODE}/kubepods/besteffort/pod{UID}/{ID}"),
    "cgroup namespace of the reader's own": v2(f"/../../kubepods/burstable/pod{UID}/{ID}"),
    "cgroup namespace of the reader's own, near": v2(f"/../../pod{UID}/{ID}"),
    "cgroup namespace of the reader's own, systemd": v2(
        f"/../../kubepods-burstable.slice/kubepods-burstable-pod{UID_}.slice/cri-containerd-{ID}.scope"
    ),
    "removed meanwhile": v2(f"{BURSTABLE}/cri-containerd-{ID}.scope (deleted)"),
    "a controller nobody uses, at the root": v1(f"/kubepods/pod{UID}/{ID}") + "9:misc:/\n10:rdma:/\n",
    "a controller that stops at the pod": f"2:cpu,cpuacct:/kubepods/pod{UID}\n1:memory:/kubepods/pod{UID}/{ID}\n",
    "without a newline at the end": f"0::/kubepods/pod{UID}/{ID}",
}


@pytest.mark.parametrize("shape", TEXTS)
def test_every_shape_names_the_pod_and_the_container(shape: str) -> None:
    """Whatever the runtime, the driver, the version, the class and what lies above."""
    assert parse_proc_cgroup(TEXTS[shape]) == PeerIdentity(pod_uid=PodUid(UID), container_id=ID)


def test_a_static_pod_has_a_hash_for_its_uid() -> None:
    """Its UID has no dashes, under either driver."""
    expected = PeerIdentity(pod_uid=PodUid(STATIC), container_id=ID)
    assert parse_proc_cgroup(v1(f"/kubepods/burstable/pod{STATIC}/{ID}")) == expected
    systemd = f"/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod{STATIC}.slice/cri-containerd-{ID}.scope"
    assert parse_proc_cgroup(v2(systemd)) == expected


@pytest.mark.parametrize(
    "path",
    [
        f"{BURSTABLE}/crio-conmon-{ID}.scope",
        f"/kubepods/besteffort/pod{UID}/crio-conmon-{ID}",
        f"{BURSTABLE}/cri-containerd-{ID[:40]}.scope",
        BURSTABLE,
    ],
)
def test_a_process_of_the_pod_alone_has_no_container(path: str) -> None:
    """A monitor, a process in the pod's own directory, and a name that is no whole ID."""
    assert parse_proc_cgroup(v2(path)) == PeerIdentity(pod_uid=PodUid(UID), container_id=None)


@pytest.mark.parametrize(
    "path", [f"/docker/{ID}", f"/system.slice/docker-{ID}.scope", f"/../{ID}", f"/../crio-{ID}.scope"]
)
def test_a_container_may_stand_without_a_pod(path: str) -> None:
    """One that no kubelet made, and a neighbour in the reader's own pod."""
    assert parse_proc_cgroup(v2(path)) == PeerIdentity(pod_uid=None, container_id=ID)


@pytest.mark.parametrize(
    "path",
    [
        f"/kubepods/burstable/pod{UID}/{ID}/kubepods/pod{OTHER}/{CHILD}",
        f"{BURSTABLE}/docker-{ID}.scope/kubepods.slice/kubepods-pod{OTHER.replace('-', '_')}.slice/docker-{CHILD}.scope",
        f"{BURSTABLE}/crio-{ID}.scope/{CHILD}",
        f"/x/kubepods-pod{UID_}.slice:cri-containerd:{ID}/pod{OTHER}/{CHILD}",
    ],
)
def test_what_a_container_makes_below_itself_says_nothing(path: str) -> None:
    """Cgroups named like another pod's, below the container's own, do not make it that pod."""
    assert parse_proc_cgroup(v2(path)) == PeerIdentity(pod_uid=PodUid(UID), container_id=ID)
    assert parse_proc_cgroup(v1(path)) == PeerIdentity(pod_uid=PodUid(UID), container_id=ID)


def test_a_neighbour_cannot_pass_for_another_pod_either() -> None:
    """A pod below a container of the reader's own pod is that container's doing."""
    assert parse_proc_cgroup(v2(f"/../{ID}/pod{OTHER}/{CHILD}")) == PeerIdentity(pod_uid=None, container_id=ID)


def test_on_a_node_inside_a_pod_the_node_is_passed_over() -> None:
    """A cluster in a pod: what reader and peer are both in is the node, not the peer."""
    node = f"/kubepods/burstable/pod{OTHER}/{NODE}/kubelet/kubepods"
    own = v1(f"{node}/pod{STATIC}/{CHILD}")
    peer = v1(f"{node}/burstable/pod{UID}/{ID}")
    assert parse_proc_cgroup(peer, own_text=own) == PeerIdentity(pod_uid=PodUid(UID), container_id=ID)
    assert parse_proc_cgroup(peer) == PeerIdentity(pod_uid=PodUid(OTHER), container_id=NODE)


def test_the_readers_own_text_hides_neither_its_pod_nor_itself() -> None:
    """A neighbour in the reader's pod keeps its pod, and a process of the reader's own container is that container's."""
    own = v2(f"/kubepods/burstable/pod{UID}/{CHILD}")
    neighbour = v2(f"/kubepods/burstable/pod{UID}/{ID}")
    assert parse_proc_cgroup(neighbour, own_text=own) == PeerIdentity(pod_uid=PodUid(UID), container_id=ID)
    assert parse_proc_cgroup(own, own_text=own) == PeerIdentity(pod_uid=PodUid(UID), container_id=CHILD)


@pytest.mark.parametrize(
    "text",
    [
        f"2:memory:/kubepods/pod{UID}/{ID}\n1:pids:/kubepods/pod{OTHER}/{ID}\n",
        f"2:memory:/kubepods/pod{UID}/{ID}\n1:pids:/kubepods/pod{UID}/{CHILD}\n",
        f"1:pids:/kubepods/pod{UID}/{ID}\n0::/kubepods/pod{OTHER}/{CHILD}\n",
        f"2:memory:/kubepods/pod{UID}\n1:pids:/kubepods/pod{OTHER}/{CHILD}\n",
        f"2:memory:/docker/{ID}\n1:pids:/docker/{CHILD}\n",
    ],
)
def test_controllers_that_contradict_are_not_believed(text: str) -> None:
    """Neither of the two."""
    assert parse_proc_cgroup(text) is None


@pytest.mark.parametrize(
    "text",
    [
        "", "\n\n", "0::/", "0::/system.slice/kubelet.service", "garbage", f"/kubepods/pod{UID}/{ID}", "0::", "::",
        f"0::kubepods/pod{UID}/{ID}", f"0:/kubepods/pod{UID}/{ID}", "0::/kubepods/podruntime/runtime",
        f"0::/kubepods/pod{UID.upper()}/x", f"0::/kubepods/pod{UID}x/{ID[:20]}", "0::/../..", "\0:\0:/\0",
        f"0::/kubepods/pod{UID}/{ID}\n" + "0::/\n" * (MAX_TEXT_BYTES // 5),
    ],
)  # fmt: skip
def test_what_names_nobody_is_nobody(text: str) -> None:
    """Services, the root, lines of another form, and a text too long to be one."""
    assert parse_proc_cgroup(text) is None


_PIECES = st.sampled_from(
    [
        f"pod{UID}",
        f"kubepods-pod{UID_}.slice",
        ID,
        f"crio-{ID}.scope",
        "..",
        "/",
        ":",
        "0::/",
        "\n",
        "kubepods",
        " (deleted)",
        "",
    ]
)


@given(st.one_of(st.text(), st.lists(_PIECES | st.text(max_size=5)).map("".join)), st.lists(_PIECES).map("".join))
def test_no_text_raises(text: str, own_text: str) -> None:
    """Any text gives an identity or None, and an identity is made of whole IDs."""
    found = parse_proc_cgroup(text, own_text=own_text)
    if found is not None:
        assert found.pod_uid in (None, UID)
        assert found.container_id in (None, ID)
        assert (found.pod_uid, found.container_id) != (None, None)
