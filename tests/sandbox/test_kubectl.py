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

from gpushare_agent.sandbox.cluster import EmbeddedCluster, open_embedded_cluster
from tests.support_deadline import DEADLINE_S
from tests.support_sandbox import SHORT_TIMES, pod

needs_kubectl = pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed")
SAMPLES = Path(__file__).parents[2] / "manifests" / "samples"


class Kubectl:
    """A sandbox of one node without an agent, and kubectl with its kubeconfig."""

    def __init__(self, cluster: EmbeddedCluster) -> None:
        self.cluster = cluster
        self.api = cluster.api
        self._environment = {
            "KUBECONFIG": str(cluster.paths.kubeconfig), "HOME": str(cluster.paths.state), "PATH": os.environ["PATH"],
        }  # fmt: skip

    async def run(self, *words: str, stdin: Any = None) -> tuple[int, str, str]:
        """Exit code, standard output, standard error. `stdin` is one object for `-f -`."""
        process = await asyncio.create_subprocess_exec(
            "kubectl", *words, env=self._environment, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        try:
            async with asyncio.timeout(DEADLINE_S):
                out, err = await process.communicate(b"" if stdin is None else json.dumps(stdin).encode())
        except BaseException:
            process.kill()
            await process.wait()
            raise
        assert process.returncode is not None
        return process.returncode, out.decode(), err.decode()

    async def ok(self, *words: str, stdin: Any = None) -> str:
        code, out, err = await self.run(*words, stdin=stdin)
        assert code == 0, err
        return out

    async def refused(self, *words: str, stdin: Any = None) -> str:
        code, out, err = await self.run(*words, stdin=stdin)
        assert code != 0, out
        return err


@asynccontextmanager
async def open_kubectl(state: Path) -> AsyncIterator[Kubectl]:
    async with open_embedded_cluster(state, node_names=["desk"], times=SHORT_TIMES) as cluster:
        await cluster.api.signal.wait_until(lambda: bool(cluster.api.store.all("nodes")), DEADLINE_S)
        yield Kubectl(cluster)


async def test_the_api_is_on_tls_with_a_certificate_of_its_own_and_for_its_token_alone(short_dir: Path) -> None:
    """Key and kubeconfig have mode 0600; without the token 401, without the certificate no connection."""
    async with open_embedded_cluster(short_dir, node_names=["desk"], times=SHORT_TIMES) as cluster:
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
        await kubectl.ok("wait", "pod/web", "--for=condition=Ready", f"--timeout={DEADLINE_S:g}s")
        header, line = (await kubectl.ok("get", "pods", "-A", "-o", "wide")).splitlines()
        assert header.split()[:7] == ["NAMESPACE", "NAME", "READY", "STATUS", "RESTARTS", "AGE", "IP"]
        assert line.split()[:5] == ["default", "web", "1/1", "Running", "0"]
        assert "desk   Ready" in await kubectl.ok("get", "nodes", "-o", "wide")
        assert yaml.safe_load(await kubectl.ok("get", "pod", "web", "-o", "yaml"))["spec"]["nodeName"] == "desk"
        for words in (("-l", "app in (web)"), ("--field-selector", "spec.nodeName=desk")):
            assert await kubectl.ok("get", "pods", "-o", "name", *words) == "pod/web\n"
        kubectl.api.record_event(kubectl.api.pod("default", "web"), reason="Seen", message="by a test", source="test")
        assert "by a test" in await kubectl.ok("get", "events")
        assert "by a test" in await kubectl.ok("describe", "pod", "web")
        described = await kubectl.ok("describe", "node", "desk")
        assert "Kubelet Version:" in described and "web" in described
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
    """Those of manifests/samples, claims included; a pod whose request is changed is refused with what to do."""
    async with open_kubectl(short_dir) as kubectl:
        for _ in range(2):
            await kubectl.ok("apply", "-R", "-f", str(SAMPLES))
        assert {raw["metadata"]["name"] for raw in kubectl.api.pods()} >= {"share", "notebook-a", "whole-pair", "claim"}
        share = yaml.safe_load((SAMPLES / "share.yaml").read_text())
        share["spec"]["containers"][0]["resources"]["limits"]["tencent.com/vcuda-core"] = 41
        assert "delete the pod and create it again" in await kubectl.refused("apply", "-f", "-", stdin=share)
