"""The in-container client as a user runs it, `gpushare-agent vdevice` and the module, against a real vDevice socket."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from gpushare_agent.agent.commands import vdevice as vdevice_client
from gpushare_agent.agent.isolation.vdevice.files import VDeviceFiles
from gpushare_agent.core.formats.vdevice import VDeviceConfig, encode_config
from gpushare_agent.core.model.allocations import ContainerKey
from gpushare_agent.core.model.errors import NotFound, Unavailable
from tests.isolation.support_vdevice import ID, KEY, POD, FakeNode, serving, share_config
from tests.settings.support_settings import ROOT, clean_environment, run_program
from tests.support_process import output_of, running_process

PROGRAM = [sys.executable, "-m", "gpushare_agent", "vdevice"]


@dataclass
class ListsTheCaller(FakeNode):
    """An agent that sees processes: after a registration the caller's PID is in pids.config."""

    extra: tuple[int, ...] = ()

    async def refresh(self, key: ContainerKey, container_id: str | None, caller: object = None) -> None:
        await super().refresh(key, container_id)
        if self.writes:
            self.files.write(key, pids=[*self.extra, self.asked[-1]])


async def run_client(*arguments: str, program: list[str] = PROGRAM) -> tuple[int, str, str]:
    code, out, err = await output_of(*program, *arguments, env=clean_environment(), cwd=ROOT)
    return code, out.decode(), err.decode()


def rows_of(out: str) -> dict[str, str]:
    return {line[:11].strip(): line[12:] for line in out.splitlines()}


def prepare(directory: Path, config: bytes | None = None, pids: list[int] | None = None) -> Path:
    """A vDevice directory without an agent."""
    files = VDeviceFiles(directory)
    files.prepare(KEY)
    files.write(KEY, config=config or share_config())
    files.write(KEY, pids=pids or [])
    return files.path(KEY)


async def test_the_client_registers_and_prints_what_it_reads_back(short_dir: Path) -> None:
    """By the names in vcuda.config as text, and with gpu-client's flags by ID as JSON from the copy for that ID."""
    node, files = FakeNode(), VDeviceFiles(short_dir)
    async with serving(short_dir, node) as path:
        files.write(KEY, config=share_config(limit=60))
        files.write(KEY, pids=[77, 12])
        files.copy_for_id(KEY, ID)
        code, out, err = await run_client("--addr", str(path))
        assert (code, err) == (0, "")
        expected = {"cores": "20 %", "core limit": "60 %", "memory": "2048 MiB", "limited": "yes", "pids": "12 77"}
        assert expected.items() <= rows_of(out).items()
        code, out, _ = await run_client(
            "--addr", str(path), "--bus-id", "", "--pod-uid", POD, "--cont-id", ID, "-o", "json"
        )
    assert (code, node.refreshed) == (0, [(KEY, None), (KEY, ID)])
    document = json.loads(out)
    del document["own_pid"], document["own_pid_listed"]
    assert document == {
        "bus_id": "",
        "container": "cuda",
        "driver": [535, 161],
        "enable": True,
        "hard_limit": False,
        "limit": 60,
        "memory_bytes": 2048 * 1024 * 1024,
        "pids": [12, 77],
        "pod_uid": POD,
        "registered": True,
        "utilization": 20,
    }


async def test_the_command_takes_its_address_from_the_variable(short_dir: Path) -> None:
    """GPUSHARE_VDEVICE names the socket or its directory; a flag is stronger."""
    async with serving(short_dir, node := FakeNode()) as path:
        prepare(short_dir, pids=[5])
        for address in (path, path.parent):
            ended = await run_program("vdevice", environ=clean_environment(GPUSHARE_VDEVICE=str(address)))
            assert (ended.code, rows_of(ended.out)["pids"]) == (0, "5"), ended.err
        environ = clean_environment(GPUSHARE_VDEVICE="/none/vcuda.sock")
        assert (await run_program("vdevice", "--addr", str(path), environ=environ)).code == 0
        ended = await run_program("vdevice", environ=environ)
    assert (ended.code, ended.out) == (1, "")
    assert ended.err.startswith("gpushare-agent: there is no directory /none: this is not a container with a share")
    assert "isolation none" in ended.err
    assert len(node.refreshed) == 3


async def test_the_caller_finds_its_own_pid(short_dir: Path) -> None:
    """Where it shares the agent's PID namespace, as a child of this test does."""
    node = ListsTheCaller(files=VDeviceFiles(short_dir), writes=True, extra=(1, 2))
    async with serving(short_dir, node) as path:
        prepare(short_dir)
        code, out, _ = await run_client("--addr", str(path), "-o", "json")
        document = json.loads(out)
        assert (code, document["own_pid_listed"]) == (0, True)
        assert document["own_pid"] == node.asked[-1]
        assert document["pids"] == sorted([1, 2, node.asked[-1]])
        _, out, _ = await run_client("--addr", str(path))
        assert rows_of(out)["own pid"] == f"{node.asked[-1]}, listed"
        node.writes = False
        _, out, _ = await run_client("--addr", str(path))
        assert rows_of(out)["own pid"].startswith(f"{node.asked[-1]}, NOT listed: it is not in this container's cgroup")
        _, out, _ = await run_client("--addr", str(path), "--no-register")
        assert "not listed: it is no process of this container" in rows_of(out)["own pid"]
        node.fails = Unavailable("the disk is away")
        code, out, _ = await run_client("--addr", str(path))
        assert (code, "not listed: it could not be registered" in rows_of(out)["own pid"]) == (3, True)


async def test_off_the_first_namespace_the_agents_own_one_decides(
    short_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a node that is a container, the listener's peer credentials show that the namespace is shared."""
    monkeypatch.setattr(vdevice_client, "is_host_pid_namespace", lambda: False)
    async with serving(short_dir, FakeNode()) as path:
        assert await asyncio.to_thread(vdevice_client.own_host_pid, path) == os.getpid()
        monkeypatch.setattr(vdevice_client, "pid_namespace_of", lambda process: 1 if process == "self" else 2)
        assert await asyncio.to_thread(vdevice_client.own_host_pid, path) is None
    assert vdevice_client.own_host_pid(path) is None


async def test_in_a_pid_namespace_of_its_own_the_pid_is_not_guessed(short_dir: Path) -> None:
    """Inner numbers say nothing about the host's, even where one of them is in the list by chance."""
    unshare = [shutil.which("unshare") or "", "--pid", "--fork", "--mount-proc"]
    if not unshare[0] or subprocess.run([*unshare, "true"], check=False, capture_output=True).returncode:
        pytest.skip("this machine gives no PID namespace (unshare --pid --fork --mount-proc)")
    node = ListsTheCaller(files=VDeviceFiles(short_dir), writes=True, extra=tuple(range(1, 10)))
    async with serving(short_dir, node) as path:
        prepare(short_dir)
        code, out, err = await run_client("--addr", str(path), "-o", "json", program=[*unshare, *PROGRAM])
        assert (code, err) == (0, "")
        document = json.loads(out)
        assert (document["own_pid"], document["own_pid_listed"]) == (None, None)
        assert document["pids"] == [*range(1, 10), node.asked[-1]]
        _, out, _ = await run_client("--addr", str(path), program=[*unshare, *PROGRAM])
    assert rows_of(out)["own pid"].startswith("not to be known: this process is in a PID namespace of its own")


async def test_without_an_agent_the_files_are_shown_all_the_same(short_dir: Path) -> None:
    """Exit code 3 and a note: a restarting agent takes no limit away. A busy one is the same."""
    directory = prepare(short_dir, pids=[5])
    code, out, err = await run_client("--addr", str(directory))
    assert (code, rows_of(out)["pids"]) == (3, "5")
    assert f"registering through {directory}/vcuda.sock failed: there is no such socket" in err
    assert "stay in force" in err
    async with serving(short_dir, node := FakeNode()) as path:
        (short_dir / "kept").hardlink_to(path)
        node.fails = Unavailable("the disk is away")
        code, out, err = await run_client("--addr", str(path), "-o", "json")
        assert (code, json.loads(out)["registered"]) == (3, False)
        assert "UNAVAILABLE: the disk is away; try again" in err
    (short_dir / "kept").rename(path)
    code, _, err = await run_client("--addr", str(path))
    assert (code, f"registering through {path} failed: no process listens there" in err) == (3, True)


@pytest.mark.parametrize("name", ["vcuda.config", "pids.config"])
def test_what_is_no_file_is_an_error_and_blocks_nobody(tmp_path: Path, name: str) -> None:
    """A pipe without a writer, and a link."""
    (tmp_path / "vcuda.config").write_bytes(share_config(KEY))
    (tmp_path / "pids.config").write_bytes(b"")
    for make in (os.mkfifo, lambda path: path.symlink_to("/dev/zero")):
        (tmp_path / name).unlink()
        make(tmp_path / name)
        with pytest.raises(NotFound, match=f"reading .*{name} failed"):
            vdevice_client.read_vdevice(tmp_path)


async def test_no_registration_reads_only(short_dir: Path) -> None:
    """Nothing is asked of the agent, and the gRPC library is not even loaded."""
    async with serving(short_dir, node := FakeNode()) as path:
        prepare(short_dir, pids=[5])
        code, out, err = await run_client("--addr", str(path), "--no-register", "-o", "json")
        assert (code, err, json.loads(out)["registered"]) == (0, "", False)
        assert (node.asked, node.codes) == ([], [])
        program = (
            f"from gpushare_agent.commands import main; main(['vdevice', '--no-register', '--addr', {str(path)!r}])"
        )
        program += "; import sys; print([m for m in ('grpclib', 'betterproto2') if m in sys.modules])"
        code, out, _ = await run_client("-c", program, program=[sys.executable])
    assert (code, out.splitlines()[-1]) == (0, "[]")


WHOLE = VDeviceConfig(
    pod_uid=POD,
    container="cuda",
    limit=0,
    memory_bytes=24 << 30,
    utilization=200,
    hard_limit=True,
    driver=(535, 161),
    enable=False,
)


@pytest.mark.parametrize(
    ("config", "row", "text"),
    [
        (encode_config(WHOLE), "limited", "no: whole GPUs, the library passes every call on unchanged"),
        (share_config(limit=20), "core limit", "20 %, no more than its cores"),
    ],
)
async def test_what_would_look_like_a_fault_is_explained(short_dir: Path, config: bytes, row: str, text: str) -> None:
    """`limited no`, and a limit that seems to be stricter than the cores."""
    code, out, _ = await run_client("--addr", str(prepare(short_dir, config)), "--no-register")
    assert (code, rows_of(out)[row]) == (0, text)


async def test_the_client_says_why_it_could_not_register(short_dir: Path) -> None:
    """Refused, nothing to read: exit code 1 and a line; a wrong command line: 2."""
    node = FakeNode()
    async with serving(short_dir, node) as path:
        code, out, err = await run_client("--addr", str(path), "--pod-uid", POD, "--cont-name", "other")
        assert (code, out) == (1, "")
        assert err.startswith("gpushare-agent: the agent refused to register: PERMISSION_DENIED: ")
        code, _, err = await run_client("--addr", str(path))
        assert code == 1
        assert f"reading {path.parent}/vcuda.config failed" in err
    code, _, err = await run_client("--addr", str(path), "--pod-uid", POD, "--cont-name", "cuda")
    assert code == 1
    assert f"registering through {path} failed" in err
    for wrong in (["--cont-id", "xyz"], ["--watch", "0"], ["--watch=x"], ["--unknown"]):
        assert (await run_client(*wrong))[0] == 2
    assert VDeviceFiles(short_dir).pod_names() == (POD,)
    assert [path.name for path in (short_dir / POD).iterdir()] == ["cuda"]


async def test_an_address_that_names_no_socket_is_a_wrong_command_line(short_dir: Path) -> None:
    """A URL, nothing, a plain file, and the pod's directory, of which the containers are named. Exit code 2."""
    directory = prepare(short_dir)
    for wrong, words in (
        ("tcp://127.0.0.1:1", "'tcp://127.0.0.1:1' is no path; it names the vDevice socket or its directory"),
        ("", "'' is no path"),
        (str(directory / "vcuda.config"), "is a plain file; --addr names the vDevice socket"),
        (
            str(directory.parent),
            f"{directory.parent} is a pod's directory; name one of its containers: {KEY.container}",
        ),
    ):
        code, out, err = await run_client("--no-register", "--addr", wrong)
        assert (code, out) == (2, "")
        assert words in err
    ended = await run_program("vdevice", environ=clean_environment(GPUSHARE_VDEVICE="tcp://x"))
    assert (ended.code, "'tcp://x' is no path" in ended.err) == (2, True)


@contextlib.asynccontextmanager
async def watching(*arguments: str) -> AsyncIterator[asyncio.subprocess.Process]:
    async with running_process(
        *(*PROGRAM, "--no-register", "-w", "0.1", *arguments),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=clean_environment(),
        cwd=ROOT,
    ) as process:
        yield process
        process.send_signal(signal.SIGINT)
        assert (await process.communicate(), process.returncode) == ((b"", b""), 130)


async def line_of(stream: asyncio.StreamReader | None) -> str:
    assert stream is not None
    line = (await stream.readline()).decode()
    assert line, "it has ended"
    return line.strip()


async def test_a_watch_prints_what_changed(short_dir: Path) -> None:
    """PIDs that came and went, a new limit, files that went and came back; and ends quietly by an interrupt."""
    directory, files = prepare(short_dir, pids=[5, 7]), VDeviceFiles(short_dir)
    async with watching("--addr", str(directory)) as process:
        while not (await line_of(process.stdout)).startswith("own pid"):
            pass
        files.write(KEY, pids=[7, 9, 11])
        assert (await line_of(process.stdout)).endswith("pids: +9 +11 -5 (3 now)")
        files.write(KEY, config=share_config(limit=60))
        assert (await line_of(process.stdout)).endswith(" core limit: none -> 60 %")
        assert (await line_of(process.stdout)).endswith(" hard limit: yes -> no")
        (directory / "vcuda.config").rename(directory / "aside")
        assert f"reading {directory}/vcuda.config failed" in await line_of(process.stderr)
        (directory / "aside").rename(directory / "vcuda.config")
        assert (await line_of(process.stdout)).endswith("readable again, nothing changed")


async def test_a_watch_in_json_is_a_document_a_line(short_dir: Path) -> None:
    """The first as without a watch, then one for each change."""
    directory, files = prepare(short_dir, pids=[5]), VDeviceFiles(short_dir)
    async with watching("--addr", str(directory), "-o", "json") as process:
        assert json.loads(await line_of(process.stdout))["pids"] == [5]
        files.write(KEY, pids=[5, 6])
        assert json.loads(await line_of(process.stdout))["pids"] == [5, 6]
