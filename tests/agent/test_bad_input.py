"""What users, kubelets, tenants and disks can do wrong: a clear error each time, and nothing lost by it."""

from __future__ import annotations

import asyncio
import resource
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from grpclib import GRPCError, Status
from grpclib.client import UnaryStreamMethod
from grpclib.const import Cardinality, Handler

from gpushare_agent.core.kit.grpc_client import UnixChannel
from gpushare_agent.core.kit.protobuf import bytes_field, decode_allocate, string_list
from gpushare_agent.core.model.names import PREDICATE_GPU_INDEX_PREFIX, PREDICATE_NODE_ANNOTATION
from tests.agent.support_agent import open_agent, open_child, poll_until
from tests.kit.support_grpc import called, served_at
from tests.sandbox.support_sandbox import CORE, MEMORY, NodeUnderTest, SmallPlugin, container, open_test_node, pod
from tests.settings.support_settings import clean_environment, run_program
from tests.support_process import running_process

SERVICE = "/v1beta1.DevicePlugin"
METHODS = ("GetDevicePluginOptions", "GetPreferredAllocation", "Allocate", "PreStartContainer")


# --- requests that make no sense ---


@pytest.mark.parametrize(
    ("cores", "blocks", "says"),
    [
        (150, 10, "150"),
        (250, 0, "250"),
        (30, 0, MEMORY),
        (0, 10, CORE),
        (30, 97, "97 memory blocks"),
        (100, 97, "97 memory blocks"),
    ],
    ids=["150", "250", "cores-alone", "memory-alone", "too-much-memory", "too-much-memory-for-a-whole-gpu"],
)
async def test_a_request_that_cannot_be_granted_is_refused_with_what_is_valid(
    cores: int, blocks: int, says: str
) -> None:
    """The status and an Event of the pod say what was asked; nothing is held, and the next pod runs."""
    async with open_test_node() as node, open_agent(node) as agent:
        message = await node.settle_pod(pod("wrong", container(cores=cores, blocks=blocks)))
        assert node.api.pod("default", "wrong")["status"]["phase"] == "Failed"
        assert "default/wrong" in message and says in message

        def is_told() -> bool:
            events = node.events_of("wrong")
            return any(says in text for reason, text in events if reason != "UnexpectedAdmissionError")

        await node.wait_until(is_told, "the agent's Event")
        assert agent.holders_of() == 0
        await node.start_pods(pod("right", container(cores=30, blocks=10)))
        await node.wait_ledger_equal(agent)


async def test_a_pod_that_asks_for_zero_cores_is_a_plain_pod() -> None:
    """The kubelet asks nobody about a zero."""
    async with open_test_node() as node, open_agent(node) as agent:
        await node.start_pods(pod("zero", container(cores=0, blocks=0)))
        assert not node.calls_of("zero") and agent.holders_of() == 0


HOSTILE = (
    "garbage", "-1", "1e9", "99999999999999999999", "0x1", "0;1", "0,0", ",", " ", "0" * 5000, "7,", "٣", "64", "\u0000",
)  # fmt: skip


async def test_a_predicate_annotation_that_makes_no_sense_is_ignored() -> None:
    """Any tenant can write it: the pod is placed as if it were not there."""
    async with open_test_node() as node, open_agent(node) as agent:
        for number, text in enumerate(HOSTILE):
            annotations = {f"{PREDICATE_GPU_INDEX_PREFIX}0": text}
            await node.start_pods(pod(f"tenant-{number}", container(cores=5, blocks=2), annotations=annotations))
            assert node.gpus_of(f"tenant-{number}") == {agent.uuid_of(0)}, text


async def test_a_predicate_annotation_counts_on_its_node_only_and_where_it_fits() -> None:
    """Feasible on this node: honoured. For another node, or on a GPU that is full: not."""
    async with open_test_node() as node, open_agent(node) as agent:
        for name, where, cores, expected in (
            ("elsewhere", "another-node", 30, 0),
            ("mine", node.name, 80, 3),
            ("full", node.name, 65, 0),
        ):
            annotations = {PREDICATE_NODE_ANNOTATION: where, f"{PREDICATE_GPU_INDEX_PREFIX}0": "3"}
            await node.start_pods(pod(name, container(cores=cores, blocks=10), annotations=annotations))
            assert node.gpus_of(name) == {agent.uuid_of(expected)}, name
        await node.wait_sound(agent)


# --- a kubelet that does not do what it is advised ---


class IgnoresAdvice:
    """Stands between the kubelet and our plugin, and changes the IDs of each Allocate."""

    def __init__(self, target: Path, change: Callable[[list[str]], list[str]]) -> None:
        self._target = target
        self._change = change

    def __mapping__(self) -> dict[str, Handler]:
        unary = {
            f"{SERVICE}/{name}": Handler(self._passed(name), Cardinality.UNARY_UNARY, bytes, bytes) for name in METHODS
        }
        return unary | {f"{SERVICE}/ListAndWatch": Handler(self._list, Cardinality.UNARY_STREAM, bytes, bytes)}

    def _passed(self, name: str) -> Any:
        async def handle(stream: Any) -> None:
            request = await stream.recv_message() or b""
            if name == "Allocate":
                (ids,) = decode_allocate(request)
                request = bytes_field(1, string_list(1, self._change(list(ids))))
            await stream.send_message(await called(self._target, f"{SERVICE}/{name}", request))

        return handle

    async def _list(self, stream: Any) -> None:
        await stream.recv_message()
        async with (
            UnixChannel(self._target) as channel,
            UnaryStreamMethod(channel, f"{SERVICE}/ListAndWatch", bytes, bytes).open() as ours,
        ):
            await ours.send_message(b"", end=True)
            async for message in ours:
                await stream.send_message(message)


@asynccontextmanager
async def _ignoring_advice(node: NodeUnderTest, change: Callable[[list[str]], list[str]]) -> AsyncIterator[None]:
    """The vcore plugin as the kubelet knows it is not ours any more."""
    service = IgnoresAdvice(node.plugin_socket("vcore"), change)
    async with served_at(node.paths.device_plugin_path / "between.sock", service) as path:
        await node.register(SmallPlugin(CORE, {}), path.name)
        await node.wait_registered()
        yield


def _gpu(ids: list[str]) -> str:
    return ids[0].rpartition("-")[0]


CHANGES: dict[str, tuple[Callable[[list[str]], list[str]], str]] = {
    "unknown-gpu": (lambda ids: [f"0badcafe-{n}" for n in range(len(ids))], "names no GPU"),
    "unknown-number": (lambda ids: [*ids[1:], f"{_gpu(ids)}-100"], "names no GPU"),
    "no-id-at-all": (lambda ids: [*ids[1:], "what\nis this"], "names no GPU"),
    "two-gpus": (lambda ids: [*ids[1:], "401624a8-99"], "on 2"),
    "too-few": (lambda ids: ids[1:], "29 units of tencent.com/vcuda-core"),
    "twice": (lambda ids: [*ids[1:], ids[1]], "30 units of tencent.com/vcuda-core"),
    "taken": (lambda ids: [f"{_gpu(ids)}-{n}" for n in range(30)], "still has"),
}


@pytest.mark.parametrize("case", CHANGES)
async def test_ids_that_are_not_what_was_planned_are_refused(case: str) -> None:
    """Whatever the kubelet allocates is checked against GPUs, request and books; the text says what is wrong."""
    change, says = CHANGES[case]
    async with open_test_node() as node, open_agent(node) as agent:
        holder = {f"{PREDICATE_GPU_INDEX_PREFIX}0": "2"}
        await node.start_pods(pod("holder", container(cores=30, blocks=10), annotations=holder))
        before = agent.held()
        assert agent.uuid_of(0) == "GPU-401624a8-3bbf-5047-8f24-740787bab347"
        async with _ignoring_advice(node, change):
            message = await node.settle_pod(pod("wrong", container(cores=30, blocks=10)))
            assert "code = " in message and says in message, message
            await node.wait_until(lambda: agent.held() == before, "nothing but the holder's share held")


# --- messages that are none ---


async def _call(node: NodeUnderTest, socket: str, method: str, request: bytes) -> GRPCError | bytes:
    try:
        return await called(node.plugin_socket(socket), f"{SERVICE}/{method}", request)
    except GRPCError as error:
        return error


@pytest.mark.parametrize("method", ["GetPreferredAllocation", "Allocate", "PreStartContainer"])
@pytest.mark.parametrize("socket", ["vcore", "vmemory"])
async def test_messages_that_are_none_are_answered_with_an_error(socket: str, method: str) -> None:
    """Too large, cut off, no UTF-8, no message at all: an error each, and the next pod is served."""
    async with open_test_node() as node, open_agent(node) as agent:
        too_large = await _call(node, socket, method, string_list(1, ["x" * 1000] * 5300))
        assert isinstance(too_large, GRPCError) and too_large.status is Status.RESOURCE_EXHAUSTED, too_large
        for malformed in (
            b"\x0a\xff\xff\xff\xff\x0f",
            b"\x0a\x05\x0a",
            b"\xff\xff\xff",
            bytes_field(1, b"\x0a\x02\xff\xfe"),
        ):
            answer = await _call(node, socket, method, malformed)
            assert isinstance(answer, GRPCError), (malformed, answer)
            assert "Traceback" not in (answer.message or "")
        if method != "GetPreferredAllocation":  # which advises only
            stranger = await _call(node, socket, method, bytes_field(1, string_list(1, [f"{agent.uuid_of(0)}::0"])))
            assert isinstance(stranger, GRPCError) or method == "PreStartContainer"
        await node.start_pods(pod("after", container(cores=30, blocks=10)))
        await node.wait_ledger_equal(agent)


# --- files and disks ---


WHOLE = (Path(__file__).parent.parent / "data" / "topology" / "v100-x8-cube-mesh.txt").read_text()


@pytest.mark.parametrize(
    ("text", "words"),
    [("".join(line for line in WHOLE.splitlines(keepends=True) if not line.startswith("GPU3")), "GPU3"), (None, "")],
    ids=["a missing row", "no file"],
)
async def test_a_topology_file_that_cannot_be_read_ends_the_agent_with_the_file_named(
    short_dir: Path, text: str | None, words: str
) -> None:
    """An exit code and one line; no GPU is guessed."""
    path = short_dir / "topo.txt"
    if text is not None:
        path.write_text(text)
    ended = await run_program("run", "--driver=simulated", f"--topology={path}", f"--device-plugin-path={short_dir}")
    assert ended.code in (1, 2) and str(path) in ended.err and words in ended.err, ended.err
    assert "Traceback" not in ended.err


@asynccontextmanager
async def _child_on_a_full_disk(node: NodeUnderTest, *flags: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """No file can grow, and every line of log fails with "no space left on device"."""

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))

    with Path("/dev/full").open("wb") as full:
        async with running_process(
            *(sys.executable, "-m", "gpushare_agent", "run", *node.arguments(*flags)),
            env=clean_environment(), stdin=asyncio.subprocess.DEVNULL, stdout=full, stderr=full, preexec_fn=limit,
        ) as child:  # fmt: skip
            await node.wait_registered()
            yield child


async def test_on_a_full_disk_the_agent_goes_on() -> None:
    """Without vDevice files it writes nothing but sockets and its log, and a log that cannot be written stops nobody."""
    async with open_test_node() as node, _child_on_a_full_disk(node, "--isolation=none") as child:
        node.api.create_pod(pod("share", container(cores=30, blocks=10)))
        node.api.create_pod(pod("wrong", container(cores=150, blocks=10)))
        await node.wait_running("share")
        assert "150" in await node.wait_settled("wrong")
        await node.kubelet.restart()
        await node.wait_registered()
        node.api.create_pod(pod("next", container(cores=70, blocks=10)))
        await node.wait_running("share", "next")
        node.assert_nothing_shared()
        child.terminate()
        assert await child.wait() == 0


async def test_on_a_full_disk_a_share_does_not_start_without_its_limits() -> None:
    """PreStartContainer says why, and the kubelet goes on trying; the admission itself stands."""
    async with open_test_node() as node, _child_on_a_full_disk(node, "--isolation=vcuda"):
        node.api.create_pod(pod("share", container(cores=30, blocks=10)))

        def is_refused() -> bool:
            return any("vDevice directory" in c.error for c in node.calls_of("share", "PreStartContainer"))

        await node.wait_until(is_refused, "the start refused")
        assert not node.calls_of("share")[0].error


async def test_a_device_plugin_path_that_is_a_file_is_named_and_waited_for() -> None:
    """The agent stays up, says what is wrong and serves as soon as there is a directory."""
    async with open_test_node() as node:
        wrong = node.paths.state / "wrong"
        wrong.write_text("precious")
        async with open_child(node, f"--kubelet.device-plugin-path={wrong}", wait=False) as child:
            await poll_until(lambda: node.log_lines("device_plugin_not_registered"), "the complaint")
            assert child.returncode is None
            assert str(wrong) in node.log_lines("device_plugin_not_registered")[0]["error"]
            assert wrong.read_text() == "precious"
            wrong.unlink()
            wrong.symlink_to(node.paths.device_plugin_path)
            await node.wait_registered()
            node.api.create_pod(pod("after", container(cores=30, blocks=10)))
            assert await node.wait_phase("after", "Running")
