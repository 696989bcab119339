"""The embedded node answers CRI as a container runtime does, to this project's client and to another gRPC implementation."""

from __future__ import annotations

import asyncio
import stat
from pathlib import Path

import grpc
import pytest

from gpushare_agent.core.model.allocations import ContainerKey
from gpushare_agent.core.model.errors import NotFound, Unavailable
from gpushare_agent.core.wire.runtime import v1
from gpushare_agent.sandbox.runtime.cri_server import cri_socket
from tests.runtime.support_cri import all_containers, open_runtime, reported_pid
from tests.sandbox.support_containers import config, open_containers, wait_ended
from tests.sandbox.support_sandbox import container, open_test_node, pod
from tests.support_deadline import DEADLINE_S


async def test_the_agents_client_finds_every_container_and_its_process() -> None:
    """What runs, and whose an ID is. Attempt, state and PID are there for others."""
    async with open_test_node() as node, open_runtime(str(node.paths.runtime_socket)) as client:
        socket = node.paths.runtime_socket
        version = await client.version()
        assert (version.name, version.endpoint) == ("gpushare-sandbox", str(socket))
        assert await client.running() == {}
        raw = node.api.create_pod(pod("train", container("main"), container("side"), init=(container("setup"),)))
        await node.wait_phase("train", "Running")
        uid = raw["metadata"]["uid"]
        ours = {name: node.kubelet.runtime.find(uid, name) for name in ("main", "side")}
        ids = {ContainerKey(uid, name): one.id for name, one in ours.items() if one is not None}
        assert len(ids) == 2 and await client.running() == ids
        main = ours["main"]
        assert main is not None and await client.owner_of(main.id) == ContainerKey(uid, "main")
        found = {one.labels["io.kubernetes.container.name"]: one for one in (await all_containers(socket)).values()}
        states = v1.ContainerState
        assert {name: one.state for name, one in found.items()} == {
            "main": states.CONTAINER_RUNNING, "side": states.CONTAINER_RUNNING, "setup": states.CONTAINER_EXITED,
        }  # fmt: skip
        assert found["main"].labels["io.kubernetes.pod.namespace"] == "default"
        assert found["main"].labels["io.kubernetes.pod.name"] == "train"
        assert found["main"].metadata == v1.ContainerMetadata(name="main", attempt=0)
        assert await reported_pid(socket, main.id) == main.pid
        assert await reported_pid(socket, found["setup"].id) is None
        with pytest.raises(NotFound):
            await client.owner_of("ab" * 32)


async def test_the_ids_are_those_of_the_pods_status() -> None:
    """`containerd://<id>`; a restarted container has a new one and the next attempt."""
    async with open_test_node() as node:
        await node.start_pods(pod("train"))

        async def found() -> v1.Container:
            [one] = (await all_containers(node.paths.runtime_socket)).values()
            return one

        def shown() -> tuple[str, int]:
            status = node.container_status("train")
            return status["containerID"], status["restartCount"]

        first = await found()
        assert shown() == (f"containerd://{first.id}", 0)
        node.kill_container("train")
        await node.kubelet.wait_for(lambda: shown()[1] == 1, what="the restart")
        second = await found()
        assert second.metadata is not None and second.metadata.attempt == 1
        assert shown() == (f"containerd://{second.id}", 1) and second.id != first.id


async def test_the_runtime_can_be_away_while_the_containers_run(short_dir: Path) -> None:
    """Its socket has gone and comes back; nobody else may use it."""
    async with open_containers() as runtime:
        server = cri_socket(runtime, short_dir / "c.sock")
        async with open_runtime(str(server.path)) as client:
            await server.serve()
            assert stat.S_IMODE(server.path.stat().st_mode) == 0o600
            started = runtime.start(config())
            assert list((await client.running()).values()) == [started.id]
            await server.stop()
            assert not server.path.exists()
            with pytest.raises(Unavailable):
                await client.running()
            await server.serve()
            assert await reported_pid(server.path, started.id) == started.pid
            await server.stop()


async def test_another_implementation_may_ask_with_filters(short_dir: Path) -> None:
    """grpcio, as crictl asks: by state, by label, by ID; an unknown question is UNIMPLEMENTED."""
    async with open_containers() as runtime:
        server = cri_socket(runtime, short_dir / "c.sock")
        await server.serve()
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
