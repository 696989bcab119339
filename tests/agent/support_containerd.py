"""A real containerd with runc, started for a test in a directory of its own, and pods made in it over CRI.

It needs root, the Debian packages in `PACKAGES` and cgroups that can be written; `why_not` says what is missing. The image
is made from a static busybox: no registry is asked. Pods use the host's network, so no CNI is needed. Everything started
here ends here: pods, shims, containerd, mounts, cgroups, files.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import io
import json
import os
import shutil
import signal
import struct
import subprocess
import tarfile
import tempfile
import time
import uuid
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpclib import GRPCError
from grpclib.client import Channel
from grpclib.const import Cardinality
from grpclib.exceptions import StreamTerminatedError

from gpushare_agent.core.kit.protobuf import bytes_field, integer_field, scan_fields
from gpushare_agent.core.model.names import PodUid
from tests.kit.support_grpc import RawCodec
from tests.support_deadline import DEADLINE_S

PACKAGES = ("containerd", "runc", "busybox-static")
"""Debian's names, for `apt-get install -y --no-install-recommends`."""

IMAGE = "localhost/gpushare-test/busybox:1"
CGROUP_ROOT = Path("/sys/fs/cgroup")

_PROGRAMS = ("containerd", "ctr", "runc", "busybox")
_SHIMS = Path("/run/containerd")
"""Shims keep their sockets and runc its state here, whatever containerd's own directories are."""
_RUNTIME = "/runtime.v1.RuntimeService"
_NETWORK_OF_NODE = 2
# restrict_oom_score_adj: root may lack CAP_SYS_RESOURCE where the tests run, and then runc cannot lower a score.
_CONFIG = """version = 2
root = "{directory}/root"
state = "{directory}/state"
disabled_plugins = ["io.containerd.internal.v1.opt", "io.containerd.snapshotter.v1.btrfs",
  "io.containerd.snapshotter.v1.zfs", "io.containerd.snapshotter.v1.aufs", "io.containerd.snapshotter.v1.devmapper"]
[grpc]
  address = "{directory}/c.sock"
[ttrpc]
  address = "{directory}/t.sock"
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "{image}"
  restrict_oom_score_adj = true
  [plugins."io.containerd.grpc.v1.cri".cni]
    conf_dir = "{directory}/cni"
  [plugins."io.containerd.grpc.v1.cri".containerd]
    snapshotter = "native"
    [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
      runtime_type = "io.containerd.runc.v2"
      [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
        SystemdCgroup = false
"""


def why_not() -> str | None:
    """Why this machine cannot run containers for a test, None if it can."""
    if os.geteuid() != 0:
        return "running containers needs root"
    if missing := [name for name in _PROGRAMS if shutil.which(name) is None]:
        return f"missing: {', '.join(missing)}; apt-get install -y {' '.join(PACKAGES)}"
    if _needs_interpreter(Path(shutil.which("busybox") or "").read_bytes()):
        return "busybox is not static; apt-get install -y busybox-static"
    hierarchies = _hierarchies()
    if not hierarchies:
        return f"no cgroups are mounted at {CGROUP_ROOT}"
    try:
        for hierarchy in hierarchies:
            probe = hierarchy / f"gpushare-probe-{os.getpid()}"
            probe.mkdir()
            probe.rmdir()
    except OSError as e:
        return f"cgroups cannot be made below {CGROUP_ROOT}: {e}"
    return None


class Containerd:
    """The daemon; it may be stopped and started again while its containers run on."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.socket = directory / "c.sock"
        self.cgroup_prefix = f"gpushare-test-{uuid.uuid4().hex[:8]}"
        self._process: subprocess.Popen[bytes] | None = None
        (directory / "config.toml").write_text(_CONFIG.format(directory=directory, image=IMAGE))

    def start(self) -> None:
        """Returns when it answers. Raises AssertionError with the end of its log if it does not."""
        with (self.directory / "log").open("ab") as log:
            self._process = subprocess.Popen(
                ["containerd", "--config", str(self.directory / "config.toml")],
                stdout=log, stderr=log, stdin=subprocess.DEVNULL,
            )  # fmt: skip
        deadline = time.monotonic() + DEADLINE_S
        while self._ctr("version").returncode != 0:
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise AssertionError(f"containerd does not answer:\n{self.log_tail()}")
            time.sleep(0.1)

    def stop(self) -> None:
        if self._process is None:
            return
        self._process.terminate()
        try:
            self._process.wait(DEADLINE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process = None

    def import_image(self) -> None:
        archive = self.directory / "image.tar"
        archive.write_bytes(_image_archive(Path(shutil.which("busybox") or "").read_bytes()))
        done = self._ctr("-n", "k8s.io", "images", "import", "--snapshotter", "native", str(archive))
        assert done.returncode == 0, done.stderr.decode()

    def log_tail(self) -> str:
        return (self.directory / "log").read_text(errors="replace")[-3000:]

    def remove_all(self) -> None:
        """What a failed test has left: shims of this daemon, mounts below its directory, its cgroups."""
        tasks = self.directory / "state/io.containerd.runtime.v2.task/k8s.io"
        addresses = [path.read_text() for path in tasks.glob("*/address")]
        names = [path.name for path in tasks.glob("*")]
        for pid in _pids_with_argument(str(self.socket)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for hierarchy in _hierarchies():
            _remove_cgroup(hierarchy / self.cgroup_prefix)
        mounts = [line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()]
        for mount in sorted((m for m in mounts if m.startswith(f"{self.directory}/")), reverse=True):
            subprocess.run(["umount", "-l", mount], check=False)
        for address in addresses:
            Path(address.removeprefix("unix://")).unlink(missing_ok=True)
        for name in names:
            shutil.rmtree(_SHIMS / "runc/k8s.io" / name, ignore_errors=True)

    def _ctr(self, *arguments: str) -> subprocess.CompletedProcess[bytes]:
        return subprocess.run(
            ["ctr", "--address", str(self.socket), *arguments], capture_output=True, check=False, timeout=DEADLINE_S
        )


@contextmanager
def running_containerd() -> Iterator[Containerd]:
    """Ask `why_not` first."""
    directory = Path(tempfile.mkdtemp(prefix="gsc", dir="/tmp"))
    containerd = Containerd(directory)
    had_shims = _SHIMS.exists()
    try:
        containerd.start()
        containerd.import_image()
        yield containerd
    finally:
        containerd.stop()
        containerd.remove_all()
        shutil.rmtree(directory)
        if not had_shims:
            for name in ("runc/k8s.io", "runc", "s", ""):
                with contextlib.suppress(OSError):  # somebody else's is in it
                    (_SHIMS / name).rmdir()


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningContainer:
    """A started container. `cri` asks the runtime more about it."""

    id: str
    pod_uid: PodUid
    pod_name: str
    container_name: str
    cri: Cri

    async def execute(self, *command: str) -> bytes:
        """Runs a program in the container and returns what it wrote; it must succeed."""
        answer = await self.cri.call("ExecSync", {1: self.id, 2: list(command), 3: int(DEADLINE_S)})
        assert not answer.get(3), f"{command} failed: {answer}"
        return answer.get(1, b"")

    async def wait_processes(self, count: int) -> None:
        """Waits until that many are in its cgroup. Nothing tells of a fork, so it is looked at again and again."""
        async with asyncio.timeout(DEADLINE_S):
            while self._count_processes() < count:
                await asyncio.sleep(0.02)

    def _count_processes(self) -> int:
        paths = list(
            _hierarchies()[0].glob(f"gpushare-test-*/kubepods/burstable/pod{self.pod_uid}/{self.id}/cgroup.procs")
        )
        return sum(len(path.read_text().split()) for path in paths)

    async def stop(self) -> None:
        await self.cri.call("StopContainer", {1: self.id, 2: 0})


@asynccontextmanager
async def running_container(
    containerd: Containerd,
    command: Sequence[str],
    *,
    mounts: Sequence[tuple[str, str]] = (),
    environment: Mapping[str, str] | None = None,
    pod_uid: PodUid | None = None,
) -> AsyncIterator[RunningContainer]:
    """A pod with one container, as a kubelet makes it, burstable; `mounts` are (host path, container path), read-only."""
    uid = pod_uid or PodUid(str(uuid.uuid4()))
    pod_name, name = f"pod-{uid[:8]}", "main"
    labels = {
        "io.kubernetes.pod.uid": uid,
        "io.kubernetes.pod.namespace": "default",
        "io.kubernetes.pod.name": pod_name,
    }
    node_network = {1: {1: _NETWORK_OF_NODE}}
    sandbox = {
        1: {1: pod_name, 2: uid, 3: "default"},
        6: _pairs(labels),
        8: {1: f"/{containerd.cgroup_prefix}/kubepods/burstable/pod{uid}", 2: node_network},
    }
    container = {
        1: {1: name},
        2: {1: IMAGE},
        3: list(command),
        6: _pairs(environment or {}),
        7: [{1: inside, 2: outside, 3: 1} for outside, inside in mounts],
        9: _pairs(labels | {"io.kubernetes.container.name": name}),
        15: {2: {3: {1: _NETWORK_OF_NODE}}},
    }
    async with open_cri(containerd.socket) as cri:
        await cri.wait_ready()
        sandbox_id = (await cri.call("RunPodSandbox", {1: sandbox}))[1].decode()
        try:
            made = await cri.call("CreateContainer", {1: sandbox_id, 2: container, 3: sandbox})
            container_id = made[1].decode()
            await cri.call("StartContainer", {1: container_id})
            yield RunningContainer(id=container_id, pod_uid=uid, pod_name=pod_name, container_name=name, cri=cri)
        finally:
            await cri.call("StopPodSandbox", {1: sandbox_id})
            await cri.call("RemovePodSandbox", {1: sandbox_id})


class Cri:
    """CRI calls with messages as dictionaries of field numbers: what the agent itself never sends has no class here."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel

    async def call(self, method: str, message: Mapping[int, Any], *, service: str = _RUNTIME) -> dict[int, bytes]:
        """The answer's fields; numbers come as bytes of their decimal digits."""
        async with asyncio.timeout(DEADLINE_S):
            stream = self._channel.request(f"{service}/{method}", Cardinality.UNARY_UNARY, bytes, bytes)
            async with stream:
                await stream.send_message(_encode(message), end=True)
                answer = await stream.recv_message() or b""
        fields = {}
        for key, value, start, stop in scan_fields(answer, 0, len(answer)):
            fields[key >> 3] = answer[start:stop] if key & 7 == 2 else str(value).encode() if value else b""
        return fields

    async def wait_ready(self) -> None:
        """Waits until containerd's CRI part, which starts later than the rest, serves and knows the imported image."""
        async with asyncio.timeout(DEADLINE_S):
            while not await self._has_image():
                await asyncio.sleep(0.05)

    async def _has_image(self) -> bool:
        try:
            return 1 in await self.call("ImageStatus", {1: {1: IMAGE}}, service="/runtime.v1.ImageService")
        except StreamTerminatedError:  # the connection to the containerd before
            return False
        except GRPCError as e:
            if "not initialized" in (e.message or ""):
                return False
            raise


@asynccontextmanager
async def open_cri(socket: Path) -> AsyncIterator[Cri]:
    async with Channel(path=str(socket), codec=RawCodec()) as channel:
        yield Cri(channel)


def _encode(message: Mapping[int, Any]) -> bytes:
    """Protobuf: text, whole numbers, messages, and lists of them."""
    encoded = b""
    for number, value in message.items():
        for one in value if isinstance(value, list) else [value]:
            if isinstance(one, int):
                encoded += integer_field(number, one)
            else:
                encoded += bytes_field(number, one.encode() if isinstance(one, str) else _encode(one))
    return encoded


def _pairs(values: Mapping[str, str]) -> list[dict[int, str]]:
    return [{1: key, 2: value} for key, value in values.items()]


def _image_archive(busybox: bytes) -> bytes:
    """A docker archive with one layer: busybox, its commonest names, and directories that containers expect."""
    entries = [(name, tarfile.DIRTYPE, b"", "") for name in ("bin", "dev", "etc", "proc", "sys", "tmp", "etc/vcuda")]
    entries += [("bin/busybox", tarfile.REGTYPE, busybox, "")]
    entries += [
        (f"bin/{name}", tarfile.SYMTYPE, b"", "busybox") for name in ("sh", "sleep", "cat", "true", "kill", "nc")
    ]
    layer = _tar(entries)
    config = {
        "architecture": {"x86_64": "amd64", "aarch64": "arm64"}.get(os.uname().machine, os.uname().machine),
        "os": "linux",
        "config": {"Entrypoint": ["/bin/sleep", "86400"], "Env": ["PATH=/bin"]},
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{hashlib.sha256(layer).hexdigest()}"]},
    }
    manifest = [{"Config": "config.json", "RepoTags": [IMAGE], "Layers": ["layer.tar"]}]
    files = {"config.json": json.dumps(config), "manifest.json": json.dumps(manifest)}
    texts = [(name, tarfile.REGTYPE, text.encode(), "") for name, text in files.items()]
    return _tar([*texts, ("layer.tar", tarfile.REGTYPE, layer, "")])


def _tar(entries: Sequence[tuple[str, bytes, bytes, str]]) -> bytes:
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w") as archive:
        for name, kind, content, target in entries:
            info = tarfile.TarInfo(name)
            info.type, info.size, info.linkname, info.mode = kind, len(content), target, 0o755
            archive.addfile(info, io.BytesIO(content))
    return made.getvalue()


def _needs_interpreter(program: bytes) -> bool:
    """Whether a 64-bit ELF file names a dynamic loader (program header 3)."""
    offset, size, count = struct.unpack_from("<Q", program, 32)[0], *struct.unpack_from("<HH", program, 54)
    return any(struct.unpack_from("<I", program, offset + size * i)[0] == 3 for i in range(count))


def _hierarchies() -> list[Path]:
    """Where cgroups can be made: the root of v2, or of each v1 controller and of v2 next to them."""
    if (CGROUP_ROOT / "cgroup.controllers").exists():
        return [CGROUP_ROOT]
    return sorted(path for path in CGROUP_ROOT.glob("*") if path.is_dir() and not path.is_symlink())


def _remove_cgroup(path: Path) -> None:
    """Children first; a cgroup may be busy for a moment after its last process was killed."""
    if not path.exists():
        return
    for child in path.iterdir():
        if child.is_dir():
            _remove_cgroup(child)
    deadline = time.monotonic() + DEADLINE_S
    while True:
        try:
            path.rmdir()
            return
        except FileNotFoundError:
            return
        except OSError:
            for pid in (path / "cgroup.procs").read_text().split():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)


def _pids_with_argument(argument: str) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                if argument.encode() in (entry / "cmdline").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
    return found
