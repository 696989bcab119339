"""The extender as a program: two replicas and a lease, TLS with client certificates, gpu-admission's configuration file."""

from __future__ import annotations

import asyncio
import json
import signal
import ssl
import sys
from asyncio.subprocess import Process
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest

from gpushare_agent.core.model.errors import StartupError
from gpushare_agent.core.settings.sections import ExtenderSettings
from gpushare_agent.core.settings.settings import load_settings
from gpushare_agent.extender import app
from gpushare_agent.extender.app import with_admission_config
from gpushare_agent.extender.bind import BIND_TIMEOUT_S
from gpushare_agent.extender.leader_election import LeaderElection, boot_time_s
from tests.cluster.support_kube import write_kubeconfig
from tests.extender.support_extender import (
    FakeCluster,
    eventually,
    fake_cluster,
    foreign_lease,
    raw_node,
    raw_pod,
    running_extender,
)
from tests.fakes.api_server import DATA
from tests.support_deadline import DEADLINE_S

ELECTION = {"LEASE_DURATION_S": 120.0, "RENEW_DEADLINE_S": 60.0, "RETRY_PERIOD_S": 0.05}
"""A leader that lives leads on, however long a busy machine stops it."""
RUN_WITH_ELECTION = f"""
import runpy
from gpushare_agent.extender import app
vars(app).update({ELECTION})
runpy.run_module("gpushare_agent", run_name="__main__")
"""


@asynccontextmanager
async def process_of_extender(
    directory: Path, cluster: FakeCluster, *, program: Sequence[str] = ("-m", "gpushare_agent")
) -> AsyncIterator[tuple[Process, str]]:
    """The command, once it decides, and its URL."""
    kubeconfig = write_kubeconfig(directory, cluster.url, {"token": "x"})
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *(*program, "extender", f"--kubeconfig={kubeconfig}", "--extender.port=0"),
        stderr=asyncio.subprocess.PIPE,
    )
    assert process.stderr is not None
    try:
        port = 0
        async with asyncio.timeout(60):
            while b'"deciding"' not in (line := await process.stderr.readline()):
                assert line
                port = json.loads(line).get("port", port)
        yield process, f"http://127.0.0.1:{port}"
    finally:
        if process.returncode is None:
            process.kill()
        async with asyncio.timeout(DEADLINE_S):
            await process.stderr.read()
            await process.wait()


def lease_holder(cluster: FakeCluster) -> str:
    holder: str = cluster.objects["leases"]["kube-system/gpushare-agent-extender"]["spec"]["holderIdentity"]
    return holder


async def test_the_other_replica_takes_over_what_a_killed_one_had_bound(
    short_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One leads and the other answers 503; when the first is killed the second lists before it answers, and gives nothing
    twice."""
    pods = [raw_pod("a", (60, 8)), raw_pod("b", (60, 8))]
    for name, value in ELECTION.items():
        monkeypatch.setattr(app, name, value)
    async with (
        fake_cluster(raw_node("n1", gpus=1), pods=pods) as cluster,
        process_of_extender(short_dir, cluster, program=("-c", RUN_WITH_ELECTION)) as (process, url),
        running_extender(cluster, is_ready=False, leader_elect=True) as second,
    ):
        await eventually(lambda: second.parts.election.holder == lease_holder(cluster) != "")
        assert (await second.post("/scheduler/filter", {}))[0] == 503
        args = {"PodName": "a", "PodNamespace": "default", "PodUID": "uid-a", "Node": "n1"}
        async with aiohttp.ClientSession() as session, session.post(f"{url}/scheduler/bind", json=args) as answer:
            assert await answer.json() == {"Error": ""}
        cluster.mute(True)  # the second may learn of it from its own list alone
        process.kill()
        await process.wait()
        # The last renewal, which may still lie in the socket, must be read before the clock goes on, else it counts as a new
        # one. The leader writes without reading, so every GET is the second's: the third comes after the second was read.
        cluster.requests.clear()
        await cluster.wait(lambda: sum(m == "GET" and "leases" in path for m, path in cluster.requests) > 2)
        assert isinstance(second.parts.election, LeaderElection)
        second.parts.election.clock = lambda: boot_time_s() + ELECTION["LEASE_DURATION_S"]
        await eventually(lambda: second.parts.leadership.listed_in == second.parts.election.term > 0)
        assert "cores" in await second.bind(pods[1], "n1")


async def test_the_command_serves_until_sigterm_and_gives_the_lease_back(short_dir: Path) -> None:
    """`gpushare-agent extender` leads, answers, and on SIGTERM ends with 0; the lease has no holder then."""
    async with fake_cluster(raw_node("n1")) as cluster:
        async with process_of_extender(short_dir, cluster) as (process, url):
            assert lease_holder(cluster)
            async with aiohttp.ClientSession() as session, session.get(f"{url}/readyz") as answer:
                assert answer.status == 200
            process.send_signal(signal.SIGTERM)
            assert await process.wait() == 0
        assert lease_holder(cluster) == ""


async def test_a_follower_answers_503_and_is_ready_all_the_same() -> None:
    """A replica without the lease does not decide; its picture is warm, so it is ready to take over."""
    async with fake_cluster(raw_node("n1"), pods=[raw_pod("a", (30, 4))]) as cluster:
        cluster.put("leases", foreign_lease())
        async with running_extender(cluster, is_ready=False, leader_elect=True) as asker:
            await eventually(lambda: all(informer.has_listed for informer in asker.parts.informers))
            await cluster.wait(lambda: any("leases" in path for _, path in cluster.requests))
            await eventually(lambda: asker.parts.election.holder == "somebody")
            for path in ("/scheduler/filter", "/scheduler/bind", "/scheduler/priorities", "/scheduler/preemption"):
                status, text = await asker.post(path, {})
                assert (status, "somebody" in text) == (503, True)
            assert (await asker.get("/readyz"))[0] == (await asker.get("/healthz"))[0] == 200
            assert asker.parts.state.node_ledger("n1") is not None


async def test_a_replica_is_ready_once_it_has_listed_the_cluster() -> None:
    """Whether it leads or not; /readyz says what is not listed and why, and a process without its lists is alive."""
    async with fake_cluster(raw_node("n1")) as cluster:
        cluster.is_down = True
        async with running_extender(cluster, is_ready=False, leader_elect=True) as asker:
            await eventually(lambda: all(informer.lost for informer in asker.parts.informers))
            status, text = await asker.get("/readyz")
            kinds = [line.partition(" are not listed yet: cannot list ")[0] for line in text.splitlines()]
            assert (status, kinds) == (503, ["configmap", "nodes", "pods"])
            assert (await asker.get("/healthz"))[0] == 200
            cluster.is_down = False
            await eventually(lambda: all(informer.has_listed for informer in asker.parts.informers))
            assert (await asker.get("/readyz")) == (200, "ok\n")


async def test_a_replica_that_is_alone_is_ready_when_it_decides() -> None:
    """There is nothing to take over, and nobody else to ask."""
    async with fake_cluster(raw_node("n1")) as cluster, running_extender(cluster) as asker:
        assert (await asker.get("/readyz")) == (200, "ok\n")
        asker.parts.leadership.listed_in = 0
        status, text = await asker.get("/readyz")
        assert (status, "listing the cluster" in text) == (503, True)


async def test_who_is_refused_by_a_follower_connects_anew() -> None:
    """The answer 503 ends the connection, also for a long request, or kube-scheduler would ask a former leader for ever; an
    answer of the leader does not."""
    async with fake_cluster(raw_node("n1")) as cluster, running_extender(cluster) as asker:
        for is_leading, size in ((True, 2), (False, 2), (False, 4 << 20)):
            asker.parts.leadership.listed_in = asker.parts.election.term if is_leading else 0
            reader, writer = await asyncio.open_connection("127.0.0.1", asker.parts.web.bound_port)
            head = f"POST /scheduler/filter HTTP/1.1\r\nHost: x\r\nContent-Length: {size}\r\n\r\n"
            writer.write(head.encode() + b"{}".ljust(size))
            await writer.drain()
            status = (await reader.readline()).split()[1]
            headers = (await reader.readuntil(b"\r\n\r\n")).lower()
            assert (status == b"200", b"connection: close" in headers) == (is_leading, not is_leading)
            if not is_leading:
                await reader.read()  # to the end: the server has closed it
            writer.close()
            await writer.wait_closed()


TLS = {"tls_cert": DATA / "kube-ca.pem", "tls_key": DATA / "kube-server.key", "client_ca": DATA / "kube-ca.pem"}


def session_of_client(*, has_certificate: bool) -> aiohttp.ClientSession:
    """Over TLS, to a server with the settings TLS."""
    context = ssl.create_default_context(cafile=str(DATA / "kube-ca.pem"))
    context.check_hostname = False
    if has_certificate:
        context.load_cert_chain(DATA / "kube-ca.pem", DATA / "kube-server.key")
    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=context))


async def test_with_client_authorities_only_their_clients_may_ask() -> None:
    """A verb and the state need a certificate; a probe does not."""
    pod = raw_pod("a", (30, 4))
    async with fake_cluster(raw_node("n1"), pods=[pod]) as cluster, running_extender(cluster, **TLS) as asker:
        url = f"https://127.0.0.1:{asker.parts.web.bound_port}"
        for has_certificate, expected in ((True, 200), (False, 403)):
            async with session_of_client(has_certificate=has_certificate) as session:
                body = {"Pod": pod, "NodeNames": ["n1"]}
                async with session.post(f"{url}/scheduler/filter", json=body) as answer:
                    assert answer.status == expected
                async with session.get(f"{url}/debug/state") as answer:
                    assert answer.status == expected
                async with session.get(f"{url}/readyz") as answer:
                    assert answer.status == 200


def test_gpu_admissions_configuration_is_read(short_dir: Path) -> None:
    """Its file replaces our settings of the same meaning; its SkipBindTime is accepted."""
    path = short_dir / "gpu-quota-admission.config"
    path.write_text(
        '{"QuotaConfigMapName": "q", "QuotaConfigMapNamespace": "ns", "GPUModelLabel": "a/model", "SkipBindTime": 300}'
    )
    chosen = with_admission_config(ExtenderSettings(config=path, quota_name="other"))
    assert (chosen.quota_name, chosen.quota_namespace, chosen.model_label) == ("q", "ns", "a/model")
    assert chosen.pool_label == "gaia.tencent.com/gpu-pool"


def test_gpu_admissions_configuration_is_found_at_its_usual_place(short_dir: Path) -> None:
    """Without a setting, as its image names it; a setting comes before it."""
    usual, chosen = short_dir / "gpu-admission.config", short_dir / "chosen"
    assert with_admission_config(ExtenderSettings(), (usual,)) == ExtenderSettings()
    usual.write_text('{"QuotaConfigMapName": "usual"}')
    chosen.write_text('{"QuotaConfigMapName": "chosen"}')
    assert with_admission_config(ExtenderSettings(), (short_dir / "absent", usual)).quota_name == "usual"
    assert with_admission_config(ExtenderSettings(config=chosen), (usual,)).quota_name == "chosen"


async def test_gpu_admissions_address_of_its_image_is_served_without_tls() -> None:
    """Its image's own command has every address: whoever reaches the port is answered, as there."""
    flags = load_settings(["--address=0.0.0.0:3456"], {}).settings.extender
    assert (flags.addr, flags.port, flags.tls_cert) == ("0.0.0.0", 3456, None)
    async with fake_cluster(raw_node("n1")) as cluster, running_extender(cluster, addr=flags.addr) as asker:
        url = f"http://127.0.0.2:{asker.parts.web.bound_port}/scheduler/predicates"
        args = {"Pod": raw_pod("a", (30, 4)), "Nodes": None, "NodeNames": ["n1"]}
        async with aiohttp.ClientSession() as session, session.post(url, json=args) as answer:
            assert (await answer.json())["NodeNames"] == ["n1"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "no JSON"),
        ("[]", "no JSON object"),
        ('{"Quota": "x"}', "no field of it"),
        ('{"GPUModelLabel": 7}', "GPUModelLabel is no text"),
        ('{"GPUModelLabel": "not a label!"}', "model_label"),
        (" " * 70000, "larger than"),
    ],
)
def test_a_wrong_configuration_is_named(short_dir: Path, text: str, words: str) -> None:
    """With the file and the mistake."""
    path = short_dir / "c"
    path.write_text(text)
    with pytest.raises(StartupError, match=words) as caught:
        with_admission_config(ExtenderSettings(config=path))
    assert str(path) in str(caught.value)
    path.unlink()
    with pytest.raises(StartupError, match="No such file"):
        with_admission_config(ExtenderSettings(config=path))


@pytest.mark.parametrize(
    "wrong",
    [
        {"tls_cert": "/c"},
        {"client_ca": "/c"},
        {"claims_webhook": "open"},
        {"claims_webhook": "certificate", "tls_cert": "/c", "tls_key": "/c"},
        {"quota_name": "Not A Name"},
        {"model_label": "a b"},
        {"reserve": "never"},
    ],
)
def test_settings_that_do_not_fit_together_are_refused(wrong: dict[str, object]) -> None:
    """At the start, with the names of the settings."""
    with pytest.raises(ValueError, match=r"extender|Extender"):
        ExtenderSettings.model_validate(wrong)


def test_no_request_outlives_the_lease() -> None:
    """A request that a leader began at its deadline ends before another can lead, and a bind has time for two."""
    assert app.RETRY_PERIOD_S < app.RENEW_DEADLINE_S < app.LEASE_DURATION_S
    assert app.REQUEST_TIMEOUT_S <= app.LEASE_DURATION_S - app.RENEW_DEADLINE_S
    assert 2 * app.REQUEST_TIMEOUT_S <= BIND_TIMEOUT_S
