"""The embedded node answers CRI as a container runtime does, to this project's client and to another gRPC implementation."""

from __future__ import annotations

import asyncio
import stat
from pathlib import Path

import grpc
import pytest

from gpushare_agent.agent.runtime.cri import RuntimeState, open_runtime
from gpushare_agent.core.model.errors import NotFound, Unavailable
from gpushare_agent.core.wire.runtime import v1
from gpushare_agent.sandbox.runtime.cri_server import CriServer
from tests.sandbox.support_containers import config, open_containers, wait_ended
from tests.sandbox.support_sandbox import container, kill_container, open_test_node, pod, start_pods, wait_phase
from tests.support_deadline import DEADLINE_S


async def test_the_agents_client_finds_every_container_and_its_process() -> None:
    """Names, attempt, state and PID, for what runs and for what has ended."""
    async with open_test_node() as node, open_runtime(str(node.paths.runtime_socket), timeout_s=DEADLINE_S) as client:
        version = await client.version()
        assert (version.name, version.endpoint) == ("gpushare-sandbox", str(node.paths.runtime_socket))
        assert await client.containers() == []
        raw = node.api.create_pod(pod("train", container("main"), container("side"), init=(container("setup"),)))
        await wait_phase(node, "train", "Running")
        found = {c.container_name: c for c in await client.containers()}
        assert {name: c.state for name, c in found.items()} == {
            "main": RuntimeState.RUNNING, "side": RuntimeState.RUNNING, "setup": RuntimeState.EXITED,
        }  # fmt: skip
        main = found["main"]
        assert (main.pod_namespace, main.pod_name, main.attempt) == ("default", "train", 0)
        assert main.pod_uid == raw["metadata"]["uid"]
        ours = node.kubelet.runtime.find(main.pod_uid, "main")
        assert ours is not None and ours.id == main.id
        assert (await client.status(main.id)).pid == ours.pid
        assert (await client.status(found["setup"].id)).pid is None
        with pytest.raises(NotFound):
            await client.status("ab" * 32)


async def test_the_ids_are_those_of_the_pods_status() -> None:
    """`containerd://<id>`; a restarted container has a new one and the next attempt."""
    async with open_test_node() as node, open_runtime(str(node.paths.runtime_socket), timeout_s=DEADLINE_S) as client:
        await start_pods(node, pod("train"))

        def shown() -> tuple[str, int]:
            status = node.api.pod("default", "train")["status"]["containerStatuses"][0]
            assert "running" in status["state"] or status["restartCount"] == 0
            return status["containerID"], status["restartCount"]

        [first] = await client.containers()
        assert shown() == (f"containerd://{first.id}", 0)
        kill_container(node, "default", "train", "main")
        await node.kubelet.wait_for(lambda: shown()[1] == 1, what="the restart")
        [second] = await client.containers()
        assert (second.attempt, shown()) == (1, (f"containerd://{second.id}", 1)) and second.id != first.id


async def test_the_runtime_can_be_away_while_the_containers_run(short_dir: Path) -> None:
    """Its socket has gone and comes back; nobody else may use it."""
    async with open_containers() as runtime:
        server = CriServer(runtime, short_dir / "c.sock")
        async with open_runtime(str(server.path), timeout_s=DEADLINE_S) as client:
            await server.start()
            assert stat.S_IMODE(server.path.stat().st_mode) == 0o600
            started = runtime.start(config())
            assert [c.id for c in await client.containers()] == [started.id]
            await server.stop()
            assert not server.path.exists()
            with pytest.raises(Unavailable):
                await client.containers()
            await server.start()
            assert (await client.status(started.id)).pid == started.pid
            await server.stop()


async def test_another_implementation_may_ask_with_filters(short_dir: Path) -> None:
    """grpcio, as crictl asks: by state, by label, by ID; an unknown question is UNIMPLEMENTED."""
    async with open_containers() as runtime:
        server = CriServer(runtime, short_dir / "c.sock")
        await server.start()
        running = runtime.start(config(name="main"))
        ended = runtime.start(config(name="done", run_s=0.0))
        await wait_ended(runtime, ended)

        def ask() -> None:
            with grpc.insecure_channel(f"unix:{server.path}") as channel:

                def ids(wanted: v1.ContainerFilter | None) -> list[str]:
                    answer = call("ListContainers", v1.ListContainersRequest(filter=wanted))
                    return [c.id for c in v1.ListContainersResponse.parse(answer).containers]

                def call(method: str, message: v1.ListContainersRequest | v1.ContainerStatusRequest) -> bytes:
                    return channel.unary_unary(f"/runtime.v1.RuntimeService/{method}")(
                        bytes(message), timeout=DEADLINE_S
                    )

                state = v1.ContainerStateValue(state=v1.ContainerState.CONTAINER_RUNNING)
                assert ids(None) == [ended.id, running.id]
                assert ids(v1.ContainerFilter(state=state)) == [running.id]
                assert ids(v1.ContainerFilter(id=ended.id)) == [ended.id]
                assert ids(v1.ContainerFilter(label_selector={"io.kubernetes.container.name": "main"})) == [running.id]
                assert ids(v1.ContainerFilter(label_selector={"io.kubernetes.container.name": "x"})) == []
                status = v1.ContainerStatusResponse.parse(
                    call("ContainerStatus", v1.ContainerStatusRequest(container_id=ended.id))
                )
                assert status.status is not None and status.info == {}
                assert status.status.exit_code == 0 and status.status.finished_at > status.status.started_at > 0
                with pytest.raises(grpc.RpcError) as refused:
                    call("ListPodSandbox", v1.ListContainersRequest())
                assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED
                with pytest.raises(grpc.RpcError) as unknown:
                    call("ContainerStatus", v1.ContainerStatusRequest(container_id="x"))
                assert unknown.value.code() is grpc.StatusCode.NOT_FOUND

        await asyncio.to_thread(ask)
        await server.stop()
