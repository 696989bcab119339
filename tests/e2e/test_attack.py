"""What a tenant can do to the agent from his pods, their annotations and his account, and that it ends there."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime

import pytest

from tests.e2e.cluster import Cluster, KubectlError, Object, manifest
from tests.e2e.installation import SYSTEM, Installation

pytestmark = pytest.mark.e2e


@pytest.fixture(autouse=True)
def _same_process(cluster: Cluster, installed: Installation) -> Iterator[None]:
    """The agent of the beginning is there at the end; an earlier test may have killed one."""
    agent = installed.agent()
    before = restarts(cluster, agent)
    yield
    assert restarts(cluster, agent) == before


FLOOD = r"""
import socket, struct

def frame(kind, flags, stream, content=b""):
    return struct.pack(">I", len(content))[1:] + struct.pack(">BBI", kind, flags, stream) + content

def field(name, value):
    return b"\0" + bytes([len(name)]) + name + bytes([len(value)]) + value

opening = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(4, 0, 0)
block = field(b":method", b"POST") + field(b":scheme", b"http") + field(b":path", b"/vcuda.VCUDAService/RegisterVDevice")
resets = b"".join(frame(1, 4, n, block) + frame(3, 0, n, b"\0\0\0\x08") for n in range(1, 600, 2))
contents = [opening + frame(0xEE, 0, 0) * 2000, opening + resets]
contents += [opening + frame(1, 5, 1, one) for one in (b"\xff" * 9, block + field(b"x", b"\xff\xfe"))] * 30 + [b"GET /"] * 30
contents += [b""] * 100
for content in contents:
    with socket.socket(socket.AF_UNIX) as peer:
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", 120, 0))  # settimeout() would raise
        peer.connect("/etc/vcuda/vcuda.sock")
        try:
            peer.sendall(content)
        except OSError:
            pass
print("done")
"""


def test_floods_of_a_vdevice_socket_neither_keep_others_out_nor_fill_the_log(
    cluster: Cluster, installed: Installation, namespace: str
) -> None:
    """Unknown frames, calls begun and reset, headers that cannot be decoded, what is no HTTP/2, connections without content:
    meanwhile another container registers, and the agent goes on as the same process."""
    for name in ("attacker", "neighbour"):
        cluster.start(namespace, cluster.pod_of(name, cluster.container(1, 1, image=installed.image)))
    if "vcuda.sock" not in inside(cluster, namespace, "attacker", "sh", "-c", "ls /etc/vcuda || true"):
        pytest.skip("the isolation of the run's overlay is not vcuda: there is no vDevice socket")
    agent, began_at = installed.agent(), datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")

    def registers() -> bool:
        try:
            return "own pid" in inside(cluster, namespace, "neighbour", "gpushare-agent", "vdevice")
        except KubectlError:  # exit code 3: it is to be tried again
            return False

    with ThreadPoolExecutor(1) as pool:
        flood = pool.submit(inside, cluster, namespace, "attacker", "python", "-", stdin=FLOOD)
        cluster.wait_for("the neighbour registers", registers)
        assert flood.result() == "done\n"
    text = cluster.run("logs", agent, "-n", SYSTEM, "-c", "agent", f"--since-time={began_at}")
    of_servers = [
        line for line in text.splitlines() if "gpushare_agent.core.kit" in line or "isolation.vdevice" in line
    ]
    assert len(of_servers) < 20


def inside(cluster: Cluster, namespace: str, pod: str, *command: str, stdin: str | None = None) -> str:
    return cluster.run("exec", "-i", pod, "-n", namespace, "--", *command, stdin=stdin, timeout_s=300)


def restarts(cluster: Cluster, agent: str) -> int:
    (status,) = cluster.pods(SYSTEM)[agent]["status"]["containerStatuses"]
    return int(status["restartCount"])


REQUESTS = r"""
import json, socket, sys

HOST = b" HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
MANY = b"".join(b"A%d: b\r\n" % n for n in range(1000))
REQUESTS = {
    "HEAD": (b"HEAD /api/v1/node" + HOST + b"\r\n", 200),
    "OPTIONS": (b"OPTIONS /api/v1/node" + HOST + b"\r\n", 405),
    "PUT": (b"PUT /api/v1/node" + HOST + b"Content-Length: 2\r\n\r\nab", 405),
    "DELETE": (b"DELETE /metrics" + HOST + b"\r\n", 405),
    "a compressed body": (b"POST /metrics" + HOST + b"Content-Encoding: gzip\r\nContent-Length: 2\r\n\r\nab", 415),
    "a body in chunks": (b"POST /metrics" + HOST + b"Transfer-Encoding: chunked\r\n\r\n0\r\nX: y\r\n\r\n", 411),
    "two lengths": (b"POST /metrics" + HOST + b"Content-Length: 1\r\nContent-Length: 2\r\n\r\n", 400),
    "a thousand headers": (b"GET /metrics" + HOST + MANY + b"\r\n", 400),
    "a long path": (b"GET /" + b"a" * 7000 + HOST + b"\r\n", 404),
    "a path upwards": (b"GET /../../etc/passwd" + HOST + b"\r\n", 404),
    "a path upwards in percents": (b"GET /%2e%2e/%2e%2e/etc/passwd" + HOST + b"\r\n", 404),
    "a range": (b"GET /healthz" + HOST + b"Range: bytes=0-0\r\n\r\n", 200),
    "an upgrade": (b"GET /healthz HTTP/1.1\r\nHost: x\r\nUpgrade: h2c\r\nConnection: Upgrade, close\r\n\r\n", 200),
    "a preface of HTTP/2": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400),
    "a handshake of TLS": (b"\x16\x03\x01\x02\0" + bytes(64) + b"\r\n\r\n", 400),
}

def connected():
    return socket.create_connection((sys.argv[1], 5678), timeout=120)

def status(request):
    with connected() as peer:
        peer.sendall(request)
        return int(peer.makefile("rb").readline().split()[1])

answers = {name: (status(request), expected) for name, (request, expected) in REQUESTS.items()}
held = []
for content in (b"", b"GET / HTTP/1.1\r\nHost: ", b"GET /api/v1/node" + HOST + b"\r\n"):
    for _ in range(150):
        peer = connected()
        peer.sendall(content)
        held.append(peer)
answers["a probe beside 450 connections"] = (status(b"GET /healthz" + HOST + b"\r\n"), 200)
print(json.dumps(answers))
"""


def test_port_5678_answers_each_request_by_its_headers_and_a_probe_beside_connections_that_are_held(
    cluster: Cluster, installed: Installation, namespace: str
) -> None:
    """From a tenant's pod, which may read it: methods, bodies, lines and paths that it should not send; then idle ones and
    half requests, more than the port has places for."""
    cluster.start(namespace, cluster.pod_of("client", cluster.container(image=installed.image)))
    address = cluster.pods(SYSTEM)[installed.agent()]["status"]["podIP"]
    answers = json.loads(inside(cluster, namespace, "client", "python", "-", address, stdin=REQUESTS))
    assert {name: got for name, (got, _) in answers.items()} == {name: wanted for name, (_, wanted) in answers.items()}


@pytest.mark.parametrize(
    "value", ["x" * 250_000, "\u0001\u007f\u202e\n", "../../etc"], ids=["long", "controls", "path"]
)
def test_annotations_that_are_no_values_change_nothing(
    cluster: Cluster, installed: Installation, namespace: str, value: str
) -> None:
    """Pods with them get their share, or are refused with the annotation's name; the next pod is served."""
    names = [
        "tencent.com/vcuda-core-limit",
        "tencent.com/gpu-isolation",
        "gpushare-agent/resize",
        "tencent.com/gpu-assigned",
    ]
    pods = [cluster.pod(f"odd-{n}", 1, 1) for n in range(len(names))]
    for pod, name in zip(pods, names, strict=True):
        pod["metadata"]["annotations"] = {name: value}
        # raw: kubectl takes it for YAML, which has no control characters
        cluster.run("create", "--raw", f"/api/v1/namespaces/{namespace}/pods", "-f", "-", stdin=json.dumps(pod))
    cluster.start(namespace, cluster.pod("plain", 1, 1))

    def ended() -> dict[str, Object] | None:
        found = cluster.pods(namespace)
        return found if all(one["status"]["phase"] in ("Running", "Failed") for one in found.values()) else None

    found = cluster.wait_for("each pod runs or has failed", ended)
    failed = {
        name: pod["status"].get("message", "") for name, pod in found.items() if pod["status"]["phase"] == "Failed"
    }
    assert set(failed) == {"odd-1"}
    assert "tencent.com/gpu-isolation" in failed["odd-1"]
    assert len(failed["odd-1"]) < 1000


def test_names_as_long_as_kubernetes_has_them_get_their_share(
    cluster: Cluster, installed: Installation, namespace: str
) -> None:
    """A container of 63 characters in a pod of as many as the kubelet can make a directory for, beside 20 others."""
    limit = 255 - len(f"{namespace}__") - 36  # /var/log/pods/<namespace>_<pod>_<uid>
    name = ".".join(["a" * 63, "b" * 63, "c" * 63])[: min(limit, 253)].rstrip(".")
    first = cluster.container(1, 1, name="d" * 63)
    others = [cluster.container(1, 1, name=f"c{n}") for n in range(20)]
    cluster.start(namespace, cluster.pod_of(name, first, *others, hostname="short"))
    ledger = installed.wait_ledger(namespace, 21)
    assert f"{namespace}/{name}/{'d' * 63}" in ledger
    cluster.wait_for(
        "an annotation for each container",
        lambda: "tencent.com/predicate-gpu-idx-20" in cluster.pods(namespace)[name]["metadata"].get("annotations", {}),
    )


DENIED = [
    ("get", "configmaps"), ("list", "secrets"), ("get", "leases.coordination.k8s.io"), ("create", "pods/exec"),
    ("create", "pods/portforward"), ("patch", "pods"), ("delete", "pods"), ("create", "serviceaccounts/token"),
    ("patch", "daemonsets.apps"),
]  # fmt: skip
"""In the agents' namespace."""


def test_a_tenant_who_may_edit_his_namespace_reaches_nothing_of_the_agents(
    cluster: Cluster, installed: Installation, namespace: str
) -> None:
    """Kubernetes' role `edit` there alone: by the API server's own answers. His pods' service account has less."""
    group, account = "rbac.authorization.k8s.io", f"{namespace}:default"
    role = {"apiGroup": group, "kind": "ClusterRole", "name": "edit"}
    subject = {"kind": "ServiceAccount", "name": "default", "namespace": namespace}
    binding = manifest(f"{group}/v1", "RoleBinding", "tenant", roleRef=role, subjects=[subject])
    cluster.apply(binding, namespace=namespace)
    cluster.wait_for("the role is in force", lambda: cluster.may(account, "patch", "pods", namespace))
    assert not [one for one in DENIED if cluster.may(account, *one, SYSTEM)]
    cluster_wide = [("patch", "nodes"), ("list", "nodes"), ("get", "nodes/proxy")]
    assert not [one for one in cluster_wide if cluster.may(account, *one)]
