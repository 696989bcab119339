"""The real kubectl against a sandbox on TLS, as a new user types it. Skipped where kubectl is not installed."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import ssl
import stat
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml

from gpushare_agent.sandbox.api.pod_subresources import AGENT_NAMESPACE, AgentServer
from gpushare_agent.sandbox.node import EmbeddedCluster, open_embedded_cluster
from tests.sandbox.support_sandbox import SHORT_TIMES, pod
from tests.support_deadline import DEADLINE_S
from tests.support_process import output_of

needs_openssl = pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is not installed")
needs_kubectl = pytest.mark.skipif(
    shutil.which("kubectl") is None or shutil.which("openssl") is None, reason="kubectl or openssl is not installed"
)
WAIT = f"--timeout={DEADLINE_S:g}s"
SAMPLES = Path(__file__).parents[2] / "manifests" / "samples"


class Kubectl:
    """A sandbox of one node without an agent, and kubectl with its kubeconfig."""

    def __init__(self, cluster: EmbeddedCluster) -> None:
        self.cluster = cluster
        self.api = cluster.api
        self._environment = {
            "KUBECONFIG": str(cluster.paths.kubeconfig), "HOME": str(cluster.paths.state), "PATH": os.environ["PATH"],
        }  # fmt: skip

    async def _run(self, words: tuple[str, ...], stdin: Any) -> tuple[int, str, str]:
        """Exit code, standard output, standard error. `stdin` is one object for `-f -`."""
        given = b"" if stdin is None else json.dumps(stdin).encode()
        code, out, err = await output_of(
            "kubectl", *words, env=self._environment, stdin=asyncio.subprocess.PIPE, given=given
        )
        return code, out.decode(), err.decode()

    async def ok(self, *words: str, stdin: Any = None) -> str:
        code, out, err = await self._run(words, stdin)
        assert code == 0, err
        return out

    async def refused(self, *words: str, stdin: Any = None) -> str:
        code, out, err = await self._run(words, stdin)
        assert code != 0, out
        return err


@asynccontextmanager
async def open_desk(state: Path) -> AsyncIterator[EmbeddedCluster]:
    async with open_embedded_cluster(state, node_names=["desk"], times=SHORT_TIMES) as cluster:
        await cluster.api.signal.wait_until(lambda: bool(cluster.api.store.all("nodes")), DEADLINE_S)
        yield cluster


@asynccontextmanager
async def open_kubectl(state: Path) -> AsyncIterator[Kubectl]:
    async with open_desk(state) as cluster:
        yield Kubectl(cluster)


async def test_without_openssl_a_sandbox_runs_on_plain_http(short_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the README asks for is enough to start it; the kubeconfig serves the agents."""
    monkeypatch.setenv("PATH", str(short_dir))
    async with open_desk(short_dir / "s") as cluster:
        (shown,) = yaml.safe_load(cluster.paths.kubeconfig.read_text())["clusters"]
        assert shown["cluster"] == {"server": cluster.api.url} and cluster.api.url.startswith("http://127.0.0.1:")


@needs_openssl
async def test_the_api_is_on_tls_with_a_certificate_of_its_own_and_for_its_token_alone(short_dir: Path) -> None:
    """Key and kubeconfig have mode 0600; without the token 401, without the certificate no connection."""
    async with open_desk(short_dir) as cluster:
        kubeconfig = yaml.safe_load(cluster.paths.kubeconfig.read_text())["clusters"][0]["cluster"]
        trusted = Path(kubeconfig["certificate-authority"])
        assert kubeconfig["server"] == cluster.api.url == f"https://127.0.0.1:{cluster.api.port}"
        for file in (cluster.paths.kubeconfig, trusted, trusted.with_suffix(".key")):
            assert stat.S_IMODE(file.stat().st_mode) == 0o600
        context = ssl.create_default_context(cafile=trusted)
        timeout = aiohttp.ClientTimeout(total=DEADLINE_S)
        async with aiohttp.ClientSession(timeout=timeout) as session:
            for host in ("127.0.0.1", "localhost"):
                url = f"https://{host}:{cluster.api.port}/api/v1/pods"
                async with session.get(url, ssl=context) as answer:
                    assert answer.status == 401
                async with session.get(url, ssl=context, headers=cluster.api.headers) as answer:
                    assert answer.status == 200
            with pytest.raises(aiohttp.ClientConnectorCertificateError):
                await session.get(cluster.api.url)


@needs_kubectl
async def test_get_and_describe_show_what_they_show_of_a_cluster(short_dir: Path) -> None:
    """Tables with the real columns, wide and of all namespaces, by label and field, as YAML; descriptions with events."""
    async with open_kubectl(short_dir) as kubectl:
        raw = pod("web")
        raw["metadata"]["labels"] = {"app": "web"}
        assert await kubectl.ok("apply", "-f", "-", stdin=raw) == "pod/web created\n"
        await kubectl.ok("wait", "pod/web", "--for=condition=Ready", WAIT)
        header, line = (await kubectl.ok("get", "pods", "-A", "-o", "wide")).splitlines()
        assert header.split()[:7] == ["NAMESPACE", "NAME", "READY", "STATUS", "RESTARTS", "AGE", "IP"]
        assert line.split()[:5] == ["default", "web", "1/1", "Running", "0"]
        assert "desk   Ready" in await kubectl.ok("get", "nodes", "-o", "wide")
        assert yaml.safe_load(await kubectl.ok("get", "pod", "web", "-o", "yaml"))["spec"]["nodeName"] == "desk"
        for words in (("-l", "app in (web)"), ("--field-selector", "spec.nodeName=desk")):
            assert await kubectl.ok("get", "pods", "-o", "name", *words) == "pod/web\n"
        kubectl.api.record_event(kubectl.api.pod("default", "web"), reason="Seen", message="by a test", source="test")
        assert "by a test" in await kubectl.ok("get", "events")
        told = (await kubectl.ok("describe", "pod", "web")).partition("Events:")[2].splitlines()[3:]
        reasons = ["Scheduled", "Pulled", "Created", "Started", "CommandNotRun", "Seen"]
        assert [line.split()[1] for line in told] == reasons
        described = await kubectl.ok("describe", "node", "desk")
        assert "Kubelet Version:" in described and "web" in described
        assert "0001" not in described  # the year of a time that is missing
        await kubectl.ok("delete", "pod", "web")  # waits until it has gone
        assert kubectl.api.pods() == []


@needs_kubectl
async def test_a_misspelt_field_is_refused_and_nothing_is_created(short_dir: Path) -> None:
    """The pod would run without its GPU."""
    async with open_kubectl(short_dir) as kubectl:
        wrong = pod("a", {"name": "main", "resorces": {"limits": {"x/y": 1}}})
        for verb in ("apply", "create"):
            assert 'unknown field "spec.containers[0].resorces"' in await kubectl.refused(verb, "-f", "-", stdin=wrong)
        assert kubectl.api.pods() == []


@needs_kubectl
async def test_the_samples_are_applied_unchanged_and_again(short_dir: Path) -> None:
    """Those of manifests/samples, claims included, but not those for other programs' controllers; a pod whose request is
    changed is refused with what to do."""
    async with open_kubectl(short_dir) as kubectl:
        for _ in range(2):
            await kubectl.ok("apply", "-f", str(SAMPLES), "-f", str(SAMPLES / "claims"))
        assert {raw["metadata"]["name"] for raw in kubectl.api.pods()} >= {"share", "notebook-a", "whole-pair", "claim"}
        share = yaml.safe_load((SAMPLES / "share.yaml").read_text())
        share["spec"]["containers"][0]["resources"]["limits"]["tencent.com/vcuda-core"] = 41
        assert "delete the pod and create it again" in await kubectl.refused("apply", "-f", "-", stdin=share)


def workload(kind: str, version: str, name: str, command: str, **spec: Any) -> dict[str, Any]:
    """A Deployment or Job of one container of this machine, when `command` runs there."""
    container = {"name": "main", "image": "sandbox/host", "command": ["sh", "-c", command]}
    template = {"metadata": {"labels": {"app": name}}, "spec": {"containers": [container]}}
    policy = {"restartPolicy": "Never"} if kind == "Job" else {}
    template["spec"].update(policy)
    return {
        "apiVersion": version, "kind": kind, "metadata": {"name": name},
        "spec": {"template": template, **({} if kind == "Job" else {"selector": {"matchLabels": {"app": name}}}), **spec},
    }  # fmt: skip


@needs_kubectl
async def test_a_deployment_is_rolled_out_scaled_changed_and_rolled_back(short_dir: Path) -> None:
    """With the words of every day; its pods have names, labels and owners as on a cluster."""
    async with open_kubectl(short_dir) as kubectl:
        web = workload("Deployment", "apps/v1", "web", "sleep 1000", replicas=2)
        web["spec"]["template"]["spec"]["containers"][0] = {"name": "main", "image": "one"}
        await kubectl.ok("apply", "-f", "-", stdin=web)
        await kubectl.ok("rollout", "status", "deployment/web", WAIT)
        await kubectl.ok("scale", "deployment/web", "--replicas=3")
        await kubectl.ok("rollout", "status", "deployment/web", WAIT)
        assert "web    3/3     3            3" in await kubectl.ok("get", "deployments")
        await kubectl.ok("set", "image", "deployment/web", "main=two")
        await kubectl.ok("rollout", "status", "deployment/web", WAIT)
        images = ("get", "pods", "-l", "app=web", "-o", "jsonpath={.items[*].spec.containers[*].image}")
        assert set((await kubectl.ok(*images)).split()) >= {"two"}
        await kubectl.ok("rollout", "undo", "deployment/web")
        await kubectl.ok("rollout", "status", "deployment/web", WAIT)
        assert len(kubectl.api.store.all("replicasets")) == 2
        await kubectl.ok("delete", "deployment", "web")
        await kubectl.api.signal.wait_until(lambda: not kubectl.api.pods(), DEADLINE_S)


@needs_kubectl
async def test_a_job_runs_and_its_output_is_read(short_dir: Path) -> None:
    """logs of the ended pod, its tail, and of one that runs, followed to its end."""
    async with open_kubectl(short_dir) as kubectl:
        await kubectl.ok("apply", "-f", "-", stdin=workload("Job", "batch/v1", "train", "echo one; echo two"))
        await kubectl.ok("wait", "job/train", "--for=condition=complete", WAIT)
        assert await kubectl.ok("logs", "job/train") == "one\ntwo\n"
        assert await kubectl.ok("logs", "job/train", "--tail=1") == "two\n"
        gate = short_dir / "gate"
        command = f"echo begun; while [ ! -e {gate} ]; do sleep 0.05; done; echo ended"
        await kubectl.ok("apply", "-f", "-", stdin=workload("Job", "batch/v1", "slow", command))
        await kubectl.ok("wait", "pod", "-l", "app=slow", "--for=condition=Ready", WAIT)
        async with asyncio.TaskGroup() as group:
            followed = group.create_task(kubectl.ok("logs", "-f", "job/slow"))
            gate.write_text("")
        assert followed.result() == "begun\nended\n"


@needs_kubectl
async def test_a_cordoned_node_takes_no_pod_until_it_is_uncordoned(short_dir: Path) -> None:
    """With kube-scheduler's reason in the pod's events."""
    async with open_kubectl(short_dir) as kubectl:
        await kubectl.ok("cordon", "desk")
        assert "Ready,SchedulingDisabled" in await kubectl.ok("get", "nodes")
        await kubectl.ok("apply", "-f", "-", stdin=pod("a"))
        await kubectl.api.signal.wait_until(lambda: bool(kubectl.api.events()), DEADLINE_S)
        assert "1 node(s) were unschedulable" in await kubectl.ok("describe", "pod", "a")
        await kubectl.ok("uncordon", "desk")
        await kubectl.ok("wait", "pod/a", "--for=condition=Ready", WAIT)


@needs_kubectl
async def test_a_node_is_drained(short_dir: Path) -> None:
    """By evictions, and by deletions where they are wanted: its pods go, and no new one comes before it is uncordoned."""
    async with open_kubectl(short_dir) as kubectl:
        for way in ((), ("--disable-eviction",)):
            await kubectl.ok("apply", "-f", "-", stdin=pod("a"))
            await kubectl.ok("wait", "pod/a", "--for=condition=Ready", WAIT)
            out = await kubectl.ok("drain", "desk", "--force", WAIT, *way)
            assert ("pod/a deleted" if way else "pod/a evicted") in out and "node/desk drained" in out
            assert kubectl.api.pods() == []
            assert "Ready,SchedulingDisabled" in await kubectl.ok("get", "nodes")
            await kubectl.ok("uncordon", "desk")


@needs_kubectl
async def test_objects_are_created_without_a_file(short_dir: Path) -> None:
    """What kubectl sends in protobuf; rights are asked, and everything is allowed."""
    async with open_kubectl(short_dir) as kubectl:
        for words, made in (
            ("create namespace team", "namespace/team created"),
            ("create quota most --hard=pods=3", "resourcequota/most created"),
            ("create deployment web --image=nginx --replicas=1", "deployment.apps/web created"),
            ("autoscale deployment web --max=3 --cpu-percent=70", "horizontalpodautoscaler.autoscaling/web autoscaled"),
            ("create job train --image=busybox -- true", "job.batch/train created"),
            ("auth can-i create pods", "yes"),
        ):
            assert await kubectl.ok(*words.split()) == made + "\n"
        assert "kubernetes.io/metadata.name=team" in await kubectl.ok("get", "ns", "team", "--show-labels")
        assert "web" in await kubectl.ok("get", "hpa") and "most" in await kubectl.ok("get", "quota")
        assert "[*]" in await kubectl.ok("auth", "can-i", "--list")
        await kubectl.ok("rollout", "status", "deployment/web", WAIT)
        assert "could not find the requested resource" in await kubectl.refused("create", "serviceaccount", "x")


@needs_kubectl
async def test_logs_of_a_container_without_any_say_why(short_dir: Path) -> None:
    """It waits, or its pod was refused."""
    async with open_kubectl(short_dir) as kubectl:
        await kubectl.ok("cordon", "desk")
        await kubectl.ok("apply", "-f", "-", stdin=pod("a"))
        assert 'container "main" in pod "a" is waiting to start' in await kubectl.refused("logs", "a")
        refused = {"phase": "Failed", "reason": "UnexpectedAdmissionError", "message": "150 cores"}
        kubectl.api.set_pod_status("default", "a", refused)
        said = await kubectl.refused("logs", "a")
        assert "never started: the pod is Failed: UnexpectedAdmissionError: 150 cores" in said


@needs_kubectl
async def test_what_the_sandbox_does_not_have_is_said_in_a_sentence(short_dir: Path) -> None:
    """exec, attach and port-forward name the sandbox's own command; so do logs of a run before the last."""
    async with open_kubectl(short_dir) as kubectl:
        await kubectl.ok("apply", "-f", "-", stdin=pod("a"))
        await kubectl.ok("wait", "pod/a", "--for=condition=Ready", WAIT)
        for words, cure in (
            (("exec", "a", "--", "ls"), "gpushare-agent sandbox exec a -- COMMAND"),
            (("attach", "a"), "gpushare-agent sandbox exec a -- COMMAND"),
            (("port-forward", "a", "8080:80"), "the same port of localhost"),
        ):
            said = await kubectl.refused(*words)
            assert f"the sandbox has no {words[0]}" in said and cure in said
        kubectl.api.add_agent("desk", AgentServer(url="http://127.0.0.1:1", log=short_dir / "agent.log"))
        agent = ("-n", AGENT_NAMESPACE, "gpushare-agent-desk")
        said = await kubectl.refused("exec", *agent, "--", "gpushare-agent", "top")
        assert "type the command here as it stands behind `--`" in said and "COMMAND" not in said
        assert "may not be deleted" in await kubectl.refused("delete", "namespace", "default")
        assert "one log of a container" in await kubectl.refused("logs", "a", "--previous")
        assert "doesn't have a resource type" in await kubectl.refused("get", "endpoints")
        misspelt = pod("b") | {"kind": "Pdo"}
        assert 'no matches for kind "Pdo" in version "v1"' in await kubectl.refused("apply", "-f", "-", stdin=misspelt)
        assert "not found in OpenAPI schema" in await kubectl.refused("explain", "pod")


@needs_kubectl
async def test_server_side_apply_takes_away_what_is_no_longer_applied(short_dir: Path) -> None:
    """Of this manager alone: what others have put there stays."""
    async with open_kubectl(short_dir) as kubectl:
        raw = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "c"}, "data": {"a": "1", "b": "2"}}
        for _ in range(2):
            await kubectl.ok("apply", "--server-side", "-f", "-", stdin=raw)
        await kubectl.ok("patch", "configmap", "c", "-p", '{"data":{"other":"3"}}')
        await kubectl.ok("apply", "--server-side", "-f", "-", stdin={**raw, "data": {"a": "9"}})
        assert kubectl.api.store.get("configmaps", ("default", "c"))["data"] == {"a": "9", "other": "3"}
