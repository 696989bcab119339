"""The CRI client against runtimes at real sockets: well, absent, stalled, lying, and coming back."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from grpclib import GRPCError, Status

from gpushare_agent.agent.runtime.cri import RuntimeClient, runtime_endpoints
from gpushare_agent.core.kit.grpc_client import MAX_ANSWER_BYTES
from gpushare_agent.core.kit.sockets import bind_unix_socket
from gpushare_agent.core.model.allocations import ContainerKey
from gpushare_agent.core.model.errors import Corrupt, NotFound, Rejected, Unavailable
from gpushare_agent.core.model.names import PodUid
from gpushare_agent.core.wire.runtime import v1
from tests.kit.support_grpc import served_at
from tests.runtime.support_cri import open_runtime
from tests.support_deadline import DEADLINE_S
from tests.support_process import output_of

UID = PodUid("0e7a3f2c-1b5d-4c3e-9f10-44aa55bb6c77")
ID = "4b" * 32
SHORT_S = 1.0


def container(
    container_id: str = ID, *, name: str = "main", attempt: int = 0, state: int = 1, **labels: str
) -> v1.Container:
    defaults = {
        "io.kubernetes.pod.uid": UID,
        "io.kubernetes.pod.namespace": "default",
        "io.kubernetes.pod.name": "train",
        "io.kubernetes.container.name": name,
    }
    return v1.Container(
        id=container_id,
        metadata=v1.ContainerMetadata(name=name, attempt=attempt),
        state=v1.ContainerState(state),
        created_at=1_750_000_000_500_000_000,
        labels=defaults | labels,
    )


class FakeRuntime(v1.RuntimeServiceBase):
    """Answers as its fields say; an answer may be a message, bytes in its place, an error, or an event to wait for."""

    def __init__(self, name: str = "containerd") -> None:
        self.version_answer: Any = v1.VersionResponse(runtime_name=name, runtime_version="v2.1.0")
        self.list_answer: Any = v1.ListContainersResponse()
        self.status_answer: Any = GRPCError(Status.NOT_FOUND, "an error occurred when try to find container")
        self.asked: list[str] = []
        self.has_asked = asyncio.Event()

    async def version(self, message: v1.VersionRequest) -> Any:
        return await self._answer("Version", self.version_answer)

    async def list_containers(self, message: v1.ListContainersRequest) -> Any:
        return await self._answer("ListContainers", self.list_answer)

    async def container_status(self, message: v1.ContainerStatusRequest) -> Any:
        return await self._answer(f"ContainerStatus {message.container_id}", self.status_answer)

    async def _answer(self, call: str, answer: Any) -> Any:
        self.asked.append(call)
        self.has_asked.set()
        if isinstance(answer, Exception):
            raise answer
        if isinstance(answer, asyncio.Event):
            await answer.wait()
        return answer


@asynccontextmanager
async def serving(path: Path, runtime: FakeRuntime) -> AsyncIterator[FakeRuntime]:
    async with served_at(path, runtime, mode=0o660):
        yield runtime


@asynccontextmanager
async def talking(path: Path, talk: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Any]) -> AsyncIterator[None]:
    """A socket behind which no gRPC server is."""

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await talk(reader, writer)
            while await reader.read(65_536):  # until the client hangs up
                pass
        except ConnectionError:
            pass
        finally:
            writer.close()

    server = await asyncio.start_unix_server(connected, sock=bind_unix_socket(path, mode=0o660))
    try:
        yield
    finally:
        server.close()
        path.unlink(missing_ok=True)
        await asyncio.sleep(0)


@pytest.fixture
async def runtime(short_dir: Path) -> AsyncIterator[FakeRuntime]:
    async with serving(short_dir / "s", FakeRuntime()) as served:
        yield served


@pytest.fixture
async def client(short_dir: Path) -> AsyncIterator[RuntimeClient]:
    async with open_runtime(f"unix://{short_dir}/s", timeout_s=DEADLINE_S) as opened:
        yield opened


async def test_running_containers_of_pods_are_listed(runtime: FakeRuntime, client: RuntimeClient) -> None:
    """By what the kubelet's labels say; of two with one name the later one. What has ended, or is of no pod, is left out,
    whatever the runtime makes of the filter."""
    runtime.list_answer = v1.ListContainersResponse(
        containers=[
            container("5c" * 32, name="side", state=2),
            container(attempt=1),
            container("8f" * 32),
            container("6d" * 32, name="other", state=9),
            v1.Container(id="7e" * 32, labels={"other": "label"}, state=v1.ContainerState(1)),
        ]
    )
    assert await client.running() == {ContainerKey(UID, "main"): ID}


async def test_the_owner_of_an_id_is_what_the_labels_say(runtime: FakeRuntime, client: RuntimeClient) -> None:
    """Also of a container that has ended."""
    raw = container(state=2)
    runtime.status_answer = v1.ContainerStatusResponse(
        status=v1.ContainerStatus(id=ID, metadata=raw.metadata, state=raw.state, labels=raw.labels)
    )
    assert await client.owner_of(ID) == ContainerKey(UID, "main")
    assert runtime.asked == [f"ContainerStatus {ID}"]


@pytest.mark.parametrize(
    "answer",
    [
        GRPCError(Status.NOT_FOUND, "not found"),
        GRPCError(Status.UNKNOWN, "Error response from daemon: No such container: 4b4b"),
        v1.ContainerStatusResponse(status=v1.ContainerStatus(id=ID)),
        v1.ContainerStatusResponse(),
    ],
)
async def test_a_container_that_is_not_there_or_of_no_pod_is_not_found(
    runtime: FakeRuntime, client: RuntimeClient, answer: Any
) -> None:
    """In the words of each runtime."""
    runtime.status_answer = answer
    with pytest.raises(NotFound):
        await client.owner_of(ID)


async def test_the_first_known_runtime_that_answers_is_taken_and_kept(short_dir: Path) -> None:
    """One absent, one that is no runtime, one without CRI v1; and while it is away the next is not asked in its place."""
    known = [short_dir / name for name in ("absent", "junk", "old", "crio", "docker")]
    old = FakeRuntime()
    old.version_answer = GRPCError(Status.UNIMPLEMENTED, "unknown service runtime.v1.RuntimeService")

    async def talk_junk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"SSH-2.0-x\r\n" * 50)
        writer.close()

    async with (
        talking(known[1], talk_junk),
        serving(known[2], old),
        serving(known[4], FakeRuntime("docker")) as docker,
        open_runtime("", timeout_s=DEADLINE_S, known=known) as client,
    ):
        async with serving(known[3], FakeRuntime("cri-o")):
            answer = await client.version()
            assert (answer.name, answer.endpoint) == ("cri-o", str(known[3]))
        with pytest.raises(Unavailable):
            await client.running()
        async with serving(known[3], FakeRuntime("cri-o again")):
            assert (await client.version()).name == "cri-o again"
    assert docker.asked == []


async def test_a_known_runtime_that_stalls_does_not_take_the_time_of_the_next(short_dir: Path) -> None:
    """It accepts and says nothing; the next one is found within the one limit."""

    async def say_nothing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)

    known = [short_dir / "stalled", short_dir / "well"]
    async with (
        talking(known[0], say_nothing),
        serving(known[1], FakeRuntime()),
        open_runtime("", timeout_s=6.0, known=known) as client,
    ):
        assert (await client.version()).endpoint == str(known[1])


async def test_no_known_runtime_is_unavailable_until_one_comes(short_dir: Path) -> None:
    """The text names every place that was tried."""
    known = [short_dir / "a", short_dir / "b"]
    async with open_runtime("", timeout_s=DEADLINE_S, known=known) as client:
        with pytest.raises(Unavailable, match=f"{known[0]}, {known[1]}.*container-runtime-endpoint"):
            await client.running()
        async with serving(known[1], FakeRuntime()):
            assert await client.running() == {}


async def test_a_runtime_that_goes_and_comes_back_is_asked_anew(short_dir: Path) -> None:
    """Absent at first, then there, away, and there again: each call stands for itself."""
    path = short_dir / "s"
    async with open_runtime(str(path), timeout_s=DEADLINE_S) as client:
        for name in ("first", "second"):
            for _ in range(2):
                with pytest.raises(Unavailable):
                    await client.running()
            async with serving(path, FakeRuntime(name)):
                assert (await client.version()).name == name


async def test_a_call_that_stalls_ends_in_time_and_the_next_one_connects_anew(
    runtime: FakeRuntime, client: RuntimeClient
) -> None:
    """The runtime hangs in one call; after that it answers."""
    runtime.list_answer, client._timeout_s = asyncio.Event(), SHORT_S
    with pytest.raises(Unavailable, match=f"within {SHORT_S:g} s"):
        await client.running()
    runtime.list_answer, client._timeout_s = v1.ListContainersResponse(containers=[container()]), DEADLINE_S
    assert len(await client.running()) == 1


async def test_a_call_cut_off_by_the_runtimes_end_is_unavailable(short_dir: Path) -> None:
    """The connection breaks while the answer is awaited."""
    runtime = FakeRuntime()
    runtime.list_answer = asyncio.Event()
    async with open_runtime(str(short_dir / "s"), timeout_s=DEADLINE_S) as client:
        async with asyncio.TaskGroup() as tasks, serving(short_dir / "s", runtime):
            call = tasks.create_task(_fault_of(client.running()))
            await runtime.has_asked.wait()
        assert isinstance(call.result(), Unavailable)


async def _fault_of(call: Any) -> Exception | None:
    try:
        await call
    except Exception as e:
        return e
    return None


@pytest.mark.parametrize(
    "answer",
    [
        b"\x0a\xff\xff\xff\xff\x0f",  # a container cut off
        b"\x08\x01",  # containers as a number
        b"\x0a\x04\x0a\x02\xff\xfe",  # an ID that is not UTF-8
        bytes(MAX_ANSWER_BYTES + 1),
        bytes(v1.ListContainersResponse(containers=[container("../../etc")])),
        bytes(v1.ListContainersResponse(containers=[container(**{"io.kubernetes.pod.uid": "../x"})])),
        bytes(v1.ListContainersResponse(containers=[container(**{"io.kubernetes.pod.uid": ""})])),
    ],
)
async def test_an_answer_that_is_none_is_corrupt_and_the_next_is_read(
    runtime: FakeRuntime, client: RuntimeClient, answer: bytes
) -> None:
    """Cut off, of another form, too large, or with IDs that could become paths."""
    runtime.list_answer = answer
    with pytest.raises(Corrupt):
        await client.running()
    runtime.list_answer = v1.ListContainersResponse(containers=[container()])
    assert len(await client.running()) == 1


async def test_a_socket_without_grpc_behind_it_is_unavailable(short_dir: Path) -> None:
    """Text in the place of HTTP/2, and a connection that is closed at once."""

    async def talk_junk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n" * 20)

    async def hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        raise ConnectionResetError

    for talk in (talk_junk, hang_up):
        async with talking(short_dir / "s", talk), open_runtime(str(short_dir / "s"), timeout_s=SHORT_S) as client:
            with pytest.raises(Unavailable):
                await client.version()


async def test_a_runtime_without_cri_v1_is_rejected_with_the_cure(runtime: FakeRuntime, client: RuntimeClient) -> None:
    """docker's containerd has the plugin disabled."""
    runtime.list_answer = GRPCError(Status.UNIMPLEMENTED, "unknown service runtime.v1.RuntimeService")
    with pytest.raises(Rejected, match="cri plugin"):
        await client.running()


@pytest.mark.parametrize(
    "endpoint", ["tcp://127.0.0.1:1234", "containerd.sock", "unix:run/x.sock", "npipe:////./pipe/x"]
)
def test_an_endpoint_that_is_no_socket_is_rejected(endpoint: str) -> None:
    """Before anything is connected."""
    with pytest.raises(Rejected, match="unix:///run"):
        runtime_endpoints(endpoint, ())


async def test_calls_at_the_same_time_share_a_connection(short_dir: Path) -> None:
    """The endpoint is chosen once."""
    async with (
        serving(short_dir / "s", FakeRuntime()) as runtime,
        open_runtime("", timeout_s=DEADLINE_S, known=[short_dir / "s", short_dir / "t"]) as client,
    ):
        async with asyncio.TaskGroup() as tasks:
            calls = [tasks.create_task(client.running()) for _ in range(5)]
        assert [call.result() for call in calls] == [{}] * 5
    assert runtime.asked.count("Version") == 1


WITHOUT_DESCRIPTORS = """
import asyncio, os, resource, sys
from pathlib import Path
from gpushare_agent.agent.runtime.cri import RuntimeClient
from gpushare_agent.core.model.errors import Unavailable

async def main():
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    client = RuntimeClient([Path(sys.argv[1])], timeout_s=5)
    for soft in (len(os.listdir("/proc/self/fd")) - 1, limits[0]):
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, limits[1]))
        for call in (client.version, client.running, lambda: client.owner_of("4b" * 32)):
            try:
                await call()
            except Unavailable as error:
                print("cannot be loaded" in str(error))

asyncio.run(main())
"""


async def test_a_first_call_without_a_free_descriptor_is_unavailable_and_the_next_one_is_made(short_dir: Path) -> None:
    """Its messages are imported then: after the start of an agent, at its first share."""
    code, out, err = await output_of(sys.executable, "-c", WITHOUT_DESCRIPTORS, str(short_dir / "none"))
    assert (code, out.decode().split()) == (0, ["True"] * 3 + ["False"] * 3), err
