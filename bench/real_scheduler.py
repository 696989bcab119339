"""The real kube-scheduler on thousands of nodes, alone and with the extender: pods a second, and where the time goes.

etcd, kube-apiserver and kube-scheduler are programs of this machine. The nodes are objects that no kubelet serves, so a
pod's way ends with its bind. The scheduler with the extender has the configuration that is shipped for a second scheduler,
over TLS. A run has its pods made beforehand, and a scheduler (and an extender) of its own; all kinds of runs take turns.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import shutil
import statistics
import sys
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
from msgspec import yaml

from bench.cluster import SampleCluster, raw_pod
from bench.extender import REQUESTS, end_process, free_port
from bench.results import Row, resident_mib, row
from bench.scrapes import Counts, histogram_row, read_counts
from gpushare_agent.core.kube.client import open_kube_session
from gpushare_agent.core.kube.session import KubeSession, KubeTimeouts, Request
from gpushare_agent.core.model.errors import AgentError
from gpushare_agent.core.node_report.annotations import ALLOCATIONS_ANNOTATION

FILTER_P99_MS = 20.0
MEMORY_MIB = 300.0
LONE_MS = 500.0
_ROOT = Path(__file__).parents[1]
_SHIPPED = _ROOT / "manifests/extender/second-scheduler/scheduler.yaml"
_NAMESPACE = _USER = "bench"
_START_S, _RUN_S, _CALL_S = 120.0, 300.0, 60.0
_AT_ONCE = 16
_LONE_CORES, _LONE_PODS, _PAUSE_S = 400, 9, 1.0
_OPEN_PATHS = "/healthz,/readyz,/livez,/metrics"
_VERBS = ("filter", "prioritize", "bind")
_LIMITS: Mapping[str, Mapping[str, int]] = {
    "default client limit": {},
    "client limit lifted": {"qps": 5_000, "burst": 5_000},
}
"""Of the requests that kube-scheduler's own client sends: by default 50 a second, with which it binds 50 pods a second."""
_PLAIN, _OURS = _KINDS = "plain", "extender"


@dataclass(slots=True, kw_only=True)
class _Run:
    """One run: when each pod was bound, processor seconds by program between the first and the last bind."""

    bound_at: list[float] = field(default_factory=list)
    processor_s: dict[str, float] = field(default_factory=dict)
    extender: Counts = field(default_factory=dict)
    extender_mib: float = 0.0
    load: float = 0.0

    @property
    def pods_per_s(self) -> float:
        return (len(self.bound_at) - 1) / (self.bound_at[-1] - self.bound_at[0])

    @property
    def processor_ms(self) -> dict[str, float]:
        """For each pod, by program; together for all but this benchmark."""
        of_pod = {name: used * 1000 / len(self.bound_at) for name, used in self.processor_s.items()}
        return {"all programs": sum(of_pod.values()), **of_pod}


class Programs:
    """The cluster's processes, and how to ask them. `state` has their files."""

    def __init__(self, programs: Path, state: Path) -> None:
        self._programs = programs
        self._state = state
        self._running: dict[str, asyncio.subprocess.Process] = {}
        self.kubeconfig = state / "kubeconfig"

    async def start(self, name: str, *command: str) -> None:
        with (self._state / f"{name}.log").open("ab") as log:
            self._running[name] = await asyncio.create_subprocess_exec(
                *command, cwd=_ROOT, stdin=asyncio.subprocess.DEVNULL, stdout=log, stderr=log
            )

    async def stop(self, *names: str) -> None:
        for name in names or tuple(reversed(self._running)):
            if (process := self._running.pop(name, None)) is not None:
                await end_process(process)

    async def wait(self, name: str, url: str) -> None:
        """Until `url` is answered 200. Raises RuntimeError."""
        began = time.perf_counter()
        while time.perf_counter() - began < _START_S and self._running[name].returncode is None:
            try:
                await fetch(url)
            except (aiohttp.ClientError, TimeoutError):
                await asyncio.sleep(0.05)
            else:
                return
        tail = "\n".join((self._state / f"{name}.log").read_text(errors="replace").splitlines()[-15:])
        raise RuntimeError(f"{name} is not ready; its log:\n{tail}")

    def path(self, name: str) -> str:
        """Raises RuntimeError."""
        here = self._programs / name
        found = str(here) if here.exists() else shutil.which(name)
        if found is None:
            raise RuntimeError(f"there is no {name} in {self._programs}, nor in PATH")
        return found

    def processor_s(self) -> dict[str, float]:
        """Used so far, by program."""
        return {name: _processor_s(process.pid) for name, process in self._running.items()}

    def resident_mib(self, name: str) -> float:
        return resident_mib(self._running[name].pid)

    async def start_cluster(self, *options: str) -> None:
        """`options` are more of the API server's."""
        state = self._state
        etcd, peer, api = free_port(), free_port(), free_port()
        endpoint = f"http://127.0.0.1:{etcd}"
        await self.start(
            "etcd", self.path("etcd"), "--data-dir", str(state / "etcd"), "--unsafe-no-fsync",
            "--listen-client-urls", endpoint, "--advertise-client-urls", endpoint,
            "--listen-peer-urls", f"http://127.0.0.1:{peer}", "--initial-advertise-peer-urls", f"http://127.0.0.1:{peer}",
            "--initial-cluster", f"default=http://127.0.0.1:{peer}",
        )  # fmt: skip
        await self.wait("etcd", f"{endpoint}/health")
        (state / "tokens").write_text(f"{_USER},bench,1,system:masters\n")
        await _openssl("genrsa", "-out", str(state / "accounts.key"), "2048")
        await self.start(
            "kube-apiserver", self.path("kube-apiserver"), f"--etcd-servers={endpoint}", f"--secure-port={api}",
            "--bind-address=127.0.0.1", f"--cert-dir={state / 'apiserver'}", f"--token-auth-file={state / 'tokens'}",
            "--authorization-mode=RBAC", "--service-account-issuer=https://bench",
            f"--service-account-key-file={state / 'accounts.key'}",
            f"--service-account-signing-key-file={state / 'accounts.key'}",
            # No controller makes accounts, and none removes the taint of nodes that are not ready.
            "--disable-admission-plugins=ServiceAccount,TaintNodesByCondition", "--endpoint-reconciler-type=none", *options,
        )  # fmt: skip
        await self.wait("kube-apiserver", f"https://127.0.0.1:{api}/readyz")
        cluster = {"server": f"https://127.0.0.1:{api}", "insecure-skip-tls-verify": True}
        document = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "bench",
            "contexts": [{"name": "bench", "context": {"cluster": "bench", "user": "bench"}}],
            "clusters": [{"name": "bench", "cluster": cluster}],
            "users": [{"name": "bench", "user": {"token": _USER}}],
        }
        self.kubeconfig.write_text(json.dumps(document))
        key, certificate = str(state / "tls.key"), str(state / "tls.crt")
        # One certificate for the extender, its client and their authority: to both it is the root itself.
        await _openssl(
            *("req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "30"),
            *("-subj", "/CN=bench", "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", key, "-out", certificate),
        )

    async def start_scheduler(self, configuration: Mapping[str, Any]) -> None:
        port, path = free_port(), self._state / "scheduler.yaml"
        path.write_text(json.dumps(configuration))
        await self.start(
            "kube-scheduler", self.path("kube-scheduler"), f"--config={path}", f"--secure-port={port}",
            "--bind-address=127.0.0.1", f"--cert-dir={self._state / 'scheduler'}",
            f"--authentication-kubeconfig={self.kubeconfig}", f"--authorization-kubeconfig={self.kubeconfig}",
            f"--authorization-always-allow-paths={_OPEN_PATHS}",
        )  # fmt: skip

    async def start_extender(self, options: Sequence[str]) -> int:
        """Its port, once it is ready."""
        port, key, certificate = free_port(), str(self._state / "tls.key"), str(self._state / "tls.crt")
        await self.start(
            "extender", *(sys.executable, "-m", "gpushare_agent", "extender", "--kubeconfig", str(self.kubeconfig)),
            "--extender.addr", "127.0.0.1", "--extender.port", str(port), "--extender.leader-elect=false",
            "--extender.tls-cert", certificate, "--extender.tls-key", key, "--extender.client-ca", certificate, *options,
        )  # fmt: skip
        await self.wait("extender", f"https://127.0.0.1:{port}/readyz")
        return port

    def configuration(self, port: int | None, limit: Mapping[str, int]) -> dict[str, Any]:
        """What is shipped, with this machine's addresses and files; without a port without the extender, which is
        kube-scheduler's defaults."""
        shipped = _shipped()
        shipped["clientConnection"] = {**limit, "kubeconfig": str(self.kubeconfig)}
        shipped["leaderElection"] = {"leaderElect": False}
        if port is None:
            del shipped["extenders"]
            return shipped
        extender = shipped["extenders"][0]
        extender["urlPrefix"] = f"https://127.0.0.1:{port}/scheduler"
        key, certificate = str(self._state / "tls.key"), str(self._state / "tls.crt")
        extender["tlsConfig"] = {"caFile": certificate, "certFile": certificate, "keyFile": key}
        return shipped


def _shipped() -> dict[str, Any]:
    return yaml.decode(_SHIPPED.read_bytes(), type=dict[str, Any])


def _scheduler_name(configuration: Mapping[str, Any]) -> str:
    return str(configuration["profiles"][0]["schedulerName"])


class _Objects:
    """Nodes and pods through the API server."""

    def __init__(self, session: KubeSession) -> None:
        self._session = session
        self._free = asyncio.Semaphore(_AT_ONCE)

    async def make_nodes(self, cluster: SampleCluster) -> None:
        """One of them is free: the only one with _LONE_CORES."""
        await self._send("POST", "/api/v1/namespaces", {"metadata": {"name": _NAMESPACE}})
        async with asyncio.TaskGroup() as group:
            for number in range(cluster.nodes):
                node = cluster.raw_node(number)
                if number == cluster.nodes // 2:
                    del node["metadata"]["annotations"][ALLOCATIONS_ANNOTATION]
                group.create_task(self._make_node(node))

    async def _make_node(self, node: dict[str, Any]) -> None:
        metadata = {key: value for key, value in node["metadata"].items() if key in ("name", "annotations")}
        metadata["labels"] = {"kubernetes.io/hostname": metadata["name"]}
        capacity = {**node["status"]["capacity"], "cpu": "128", "memory": "1Ti", "pods": "250"}
        ready = [{"type": "Ready", "status": "True", "reason": "KubeletReady"}]
        status = {"capacity": capacity, "allocatable": capacity, "conditions": ready}
        async with self._free:
            await self._send("POST", "/api/v1/nodes", {"metadata": metadata, "status": status})

    async def make_pods(self, count: int) -> None:
        async with asyncio.TaskGroup() as group:
            for number, (cores, blocks) in zip(range(count), itertools.cycle(REQUESTS), strict=False):
                group.create_task(self._make_pod(raw_pod(f"pod-{number:05}", cores, blocks)))

    async def make_lone_pod(self) -> None:
        """All nodes have enough by kube-scheduler's sums; by GPUs one has."""
        await self._make_pod(raw_pod("lone", _LONE_CORES, 0))

    async def _make_pod(self, pod: dict[str, Any]) -> None:
        metadata = {key: value for key, value in pod["metadata"].items() if key in ("name", "namespace", "labels")}
        spec = {**pod["spec"], "schedulerName": _scheduler_name(_shipped())}
        async with self._free:
            await self._send("POST", f"/api/v1/namespaces/{_NAMESPACE}/pods", {"metadata": metadata, "spec": spec})

    async def remove_pods(self) -> None:
        path = f"/api/v1/namespaces/{_NAMESPACE}/pods"
        await self._send("DELETE", path, {"gracePeriodSeconds": 0})

    async def binds(self) -> AsyncIterator[float]:
        """When each pod was bound. A selector makes the bind the first that the watch tells of a pod."""
        query = (("watch", "true"), ("fieldSelector", "spec.nodeName!="), ("timeoutSeconds", "3600"))
        request = Request(what="watch the pods", method="GET", path="/api/v1/pods", query=query)
        async with self._session.stream(request) as response:
            async for line in response.content:
                if b'"ADDED"' in line[:20]:
                    yield time.perf_counter()

    async def _send(self, method: str, path: str, body: Mapping[str, Any]) -> None:
        request = Request(what=f"{method} {path}", method=method, path=path, body=body)
        await self._session.fetch_object(request, timeout_s=_CALL_S, limit_bytes=1 << 28)


async def scheduler_rows(
    programs: Path, state: Path, *, nodes: int, pods: int, rounds: int, options: Sequence[str] = ()
) -> list[Row]:
    """`programs` has kube-apiserver and kube-scheduler, and etcd where PATH has none; `options` are for the extender. Raises
    RuntimeError where something of it does not start, TimeoutError where a pod is not bound."""
    if state.exists():
        shutil.rmtree(state)
    state.mkdir()
    running = Programs(programs, state)
    try:
        await running.start_cluster()
        async with open_kube_session(running.kubeconfig, KubeTimeouts(), "the benchmark's own") as session:
            objects = _Objects(session)
            await objects.make_nodes(SampleCluster(nodes=nodes))
            lone_s = await _lone_waits(running, objects, options)
            runs: dict[tuple[str, str], list[_Run]] = {}
            for _ in range(rounds):
                for limit, kind in itertools.product(_LIMITS, _KINDS):
                    run = await _one_run(running, objects, pods, kind, _LIMITS[limit], options)
                    runs.setdefault((limit, kind), []).append(run)
    except AgentError as error:
        raise RuntimeError(str(error)) from error
    finally:
        await running.stop()
    return [
        *itertools.chain.from_iterable(
            _rows(f"{nodes:,} nodes, {limit}", runs[limit, _PLAIN], runs[limit, _OURS], goal=goal)
            for (limit, _), goal in zip(_LIMITS.items(), (1.0, 0.8), strict=True)
        ),
        row(
            f"{nodes:,} nodes: a pod that fits one of them alone waits",
            [wait * 1000 for wait in lone_s],
            target_p99=LONE_MS,
        ),
    ]


async def _lone_waits(running: Programs, objects: _Objects, options: Sequence[str]) -> list[float]:
    """Seconds from the creation to the bind, of one pod after the other."""
    port = await running.start_extender(options)
    await running.start_scheduler(running.configuration(port, {}))
    waits = []
    for _ in range(_LONE_PODS):
        began = time.perf_counter()
        await objects.make_lone_pod()
        try:
            async with asyncio.timeout(_RUN_S):
                waits.append(await anext(objects.binds()) - began)
        except TimeoutError as error:
            raise RuntimeError(f"the pod that fits one node alone is not bound after {_RUN_S:g} s") from error
        await objects.remove_pods()
        # The end of a pod is an event that retries others.
        await asyncio.sleep(_PAUSE_S)
    await running.stop("kube-scheduler", "extender")
    # The first one waits for the scheduler's start, too.
    return waits[1:]


async def _one_run(
    running: Programs,
    objects: _Objects,
    pods: int,
    kind: str,
    limit: Mapping[str, int],
    options: Sequence[str],
) -> _Run:
    run = _Run(load=os.getloadavg()[0])
    await objects.make_pods(pods)
    port = await running.start_extender(options) if kind != _PLAIN else None
    configuration = running.configuration(port, limit)
    await running.start_scheduler(configuration)
    before: dict[str, float] = {}
    try:
        async with asyncio.timeout(_RUN_S):
            async for at in objects.binds():
                before = before or running.processor_s()
                run.bound_at.append(at)
                if len(run.bound_at) == pods:
                    break
    except TimeoutError as error:
        raise RuntimeError(f"only {len(run.bound_at)} of {pods} pods are bound after {_RUN_S:g} s") from error
    after = running.processor_s()
    run.processor_s = {name: used - before[name] for name, used in after.items() if name in before}
    if port is not None:
        run.extender = read_counts(await fetch(f"https://127.0.0.1:{port}/metrics"))
        run.extender_mib = running.resident_mib("extender")
    await running.stop("kube-scheduler", "extender")
    await objects.remove_pods()
    return run


def _rows(label: str, plain: Sequence[_Run], ours: Sequence[_Run], *, goal: float) -> list[Row]:
    """The ratio to the plain scheduler first; its `goal`."""
    ratios = [mine.pods_per_s / other.pods_per_s for mine, other in zip(ours, plain, strict=True)]
    low = "" if statistics.median(ratios) >= goal else f"less than {goal:g}"
    shown = ", ".join(
        f"{mine.pods_per_s:.0f} and {other.pods_per_s:.0f} (load {mine.load:.1f})"
        for mine, other in zip(ours, plain, strict=True)
    )
    rows = [
        row(f"{label}: pods a second, of plain", ratios, unit="", failed=low, note=f"in turn with and without {shown}"),
        *(
            row(f"  {label}, {kind}: pods a second", [run.pods_per_s for run in runs], unit="/s")
            for kind, runs in ((_PLAIN, plain), (_OURS, ours))
        ),
    ]
    rows += [
        row(f"  {label}, {kind}: processor time of a pod, {program}", [run.processor_ms[program] for run in runs])
        for kind, runs in ((_PLAIN, plain), (_OURS, ours))
        for program in runs[0].processor_ms
    ]
    name = "gpushare_extender_request_duration_seconds"
    counts = [run.extender for run in ours]
    for verb in _VERBS:
        target = FILTER_P99_MS if verb == "filter" else None
        rows += histogram_row(f"  {label}: {verb}", name, (("verb", verb),), counts, target_p99=target)
    rows.append(
        row(f"  {label}: resident memory", [run.extender_mib for run in ours], unit="MiB", target_median=MEMORY_MIB)
    )
    return rows


async def fetch(url: str) -> str:
    """Raises aiohttp.ClientError, also for a status that is an error."""
    timeout = aiohttp.ClientTimeout(total=10)
    async with (
        aiohttp.ClientSession(timeout=timeout, raise_for_status=True) as http,
        http.get(url, ssl=False) as answer,
    ):
        return await answer.text()


async def _openssl(*arguments: str) -> None:
    process = await asyncio.create_subprocess_exec(
        "openssl", *arguments, stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL
    )
    if await process.wait():
        raise RuntimeError(f"openssl {arguments[0]} failed")


def _processor_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
