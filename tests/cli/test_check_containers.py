"""`gpushare-agent check`: what the shares of containers need: runtime, cgroups, PIDs, directories, libraries."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from gpushare_agent.agent.commands.check import check_node
from gpushare_agent.agent.isolation.vcuda import check as vcuda_check
from gpushare_agent.agent.isolation.vdevice import check as vdevice_check
from gpushare_agent.agent.runtime import node_probes
from gpushare_agent.core.model.finding import Finding, Level
from gpushare_agent.core.settings.settings import load_settings
from tests.cli.support_check import complete_node, not_ok, only
from tests.isolation.support_driver import FakeHost
from tests.settings.support_settings import listening, run_program


@pytest.fixture(autouse=True)
def may_open_many_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever limit the tests themselves run under."""
    monkeypatch.setattr(vdevice_check, "read_open_files_limit", lambda: (1024, 65_536))


async def test_the_runtime_is_asked_for_its_name(short_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The set one, or the first known one that answers."""
    async with complete_node(short_dir) as node:
        monkeypatch.setattr(node_probes, "RUNTIME_SOCKETS", (short_dir / "none.sock", node.runtime))
        for flags in ([], ["--container-runtime-endpoint="]):
            found = await only("container runtime", node, *flags)
            assert (found.level, found.detail) == (Level.OK, f"containerd v2.1.0 answers at {node.runtime}")


async def test_a_runtime_socket_that_is_not_mounted_is_no_warning(
    short_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """IDs come from the pods' statuses then; one that was named, or is there and silent, is a mistake worth a warning."""
    monkeypatch.setattr(node_probes, "RUNTIME_SOCKETS", (short_dir / "none.sock",))
    async with complete_node(short_dir) as node:
        found = await only("container runtime", node, "--container-runtime-endpoint=")
        assert found.level is Level.OK
        assert "pods' statuses" in found.detail
        found = await only("container runtime", node, f"--container-runtime-endpoint={short_dir}/none.sock")
        assert (found.level, "none.sock" in found.detail) == (Level.WARNING, True)
        monkeypatch.setattr(node_probes, "RUNTIME_SOCKETS", (short_dir / "silent.sock",))
        silent = ["--container-runtime-endpoint=", "--runtime-request-timeout=100ms"]
        async with listening(short_dir / "silent.sock"):
            found = await only("container runtime", node, *silent)
        assert (found.level, "silent.sock" in found.detail) == (Level.WARNING, True)
        found = await only("container runtime", node, "--isolation=none")
        assert (found.level, "does not use it" in found.detail) == (Level.OK, True)


@pytest.mark.parametrize("sees_all", [True, False])
@pytest.mark.parametrize("isolation", ["vcuda", "none"])
@pytest.mark.parametrize("version", ["v1", "v2"])
async def test_without_the_hosts_pids_there_are_warnings(
    short_dir: Path, monkeypatch: pytest.MonkeyPatch, sees_all: bool, isolation: str, version: str
) -> None:
    """For vcuda always; under v1 cgroup.procs leaves out the processes of other PID namespaces in any case."""

    async def sees(node_socket: Path) -> bool:
        return sees_all

    monkeypatch.setattr(node_probes, "sees_processes_of_node", sees)
    async with complete_node(short_dir) as node:
        if version == "v1":
            (short_dir / "cgroup" / "cgroup.controllers").unlink()
            (short_dir / "cgroup" / "memory").mkdir()
            (short_dir / "cgroup" / "memory" / "cgroup.procs").touch()
        found = not_ok(await check_node(node.settings(f"--isolation={isolation}")))
    expected = ["cgroups"] * (version == "v1") + ["host processes"] * (isolation == "vcuda")
    assert [f.what for f in found] == ([] if sees_all else expected)
    assert all(f.level is Level.WARNING and "hostPID: true" in f.cure for f in found)


async def test_the_nodes_pids_are_seen_where_the_kubelet_has_one(
    short_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a node that is a container no PID namespace is the machine's: the kernel's word on the kubelet's socket counts."""
    monkeypatch.setattr(node_probes, "is_host_pid_namespace", lambda: False)
    async with listening(short_dir / "kubelet.sock") as kubelet:
        assert await node_probes.sees_processes_of_node(kubelet.path)
        assert bytes(kubelet.received) == b""
    assert not await node_probes.sees_processes_of_node(kubelet.path)


@pytest.mark.parametrize(
    ("self_link", "words"),
    [(None, "there, but no /proc"), ("77777777", "another PID namespace"), ("/nowhere", "another PID namespace")],
)
async def test_a_proc_root_of_another_namespace_is_reported(short_dir: Path, self_link: str | None, words: str) -> None:
    """The PIDs of peers are read there: they must be the same numbers."""
    proc = short_dir / "proc"
    proc.mkdir()
    if self_link is not None:
        (proc / "self").symlink_to(self_link)
    async with complete_node(short_dir) as node:
        found = await only("host processes", node, f"--runtime.proc-root={proc}")
        assert (found.level, words in found.detail) == (Level.WARNING, True), found
        assert (await only("host processes", node, "--runtime.proc-root=/proc")).level is Level.OK
        missing = await only("host processes", node, f"--runtime.proc-root={short_dir}/none")
        assert f"{short_dir}/none: not there" in missing.detail


async def test_a_cgroup_driver_that_the_pods_contradict_is_a_warning(short_dir: Path) -> None:
    """Nothing breaks by it, and the cure is to leave it out."""
    async with complete_node(short_dir) as node:
        assert "cgroup driver" not in {finding.what for finding in await check_node(node.settings())}
        uid = "0f9c4f0e-5a0b-4b8e-9d38-0d4a3f7b6c11"
        (short_dir / "cgroup" / "kubepods" / f"pod{uid}" / ("ab" * 32)).mkdir(parents=True)
        assert (await only("cgroup driver", node, "--cgroup-driver=cgroupfs")).level is Level.OK
        found = await only("cgroup driver", node, "--cgroup-driver=systemd")
    assert (found.level, "cgroupfs" in found.detail) == (Level.WARNING, True)
    assert "leave runtime.cgroup_driver out" in found.cure


async def test_the_virtual_managers_directory_must_be_writable_for_vcuda(short_dir: Path) -> None:
    """It is made in the nearest parent there is; where that takes no file, no share can be given."""
    (short_dir / "file").touch()
    path = f"--virtual-manager-path={short_dir}/file/vm"
    async with complete_node(short_dir) as node:
        found = await only("virtual manager", node)
        assert (found.level, f"will be made in {short_dir}" in found.detail) == (Level.OK, True)
        found = await only("virtual manager", node, path)
        assert (found.level, "no share can be given" in found.detail) == (Level.ERROR, True)
        assert not not_ok(await check_node(node.settings(path, "--isolation=none")))


def write_volumes(directory: Path, *names: str) -> str:
    """A volume.conf with these volumes; gives the flag that names it."""
    components = {"binaries": ["nvidia-smi"], "libraries": ["libcuda.so"]}
    volumes = [{"name": name, "base": str(directory / "vdriver"), "components": components} for name in names]
    (directory / "volume.conf").write_text(json.dumps({"volume": volumes}))
    return f"--volume-config={directory / 'volume.conf'}"


def install(directory: Path, name: str, libcuda: str) -> None:
    """A volume as it lies on the disk, with `libcuda` behind the name that programs load."""
    lib64 = directory / "vdriver" / name / "lib64"
    lib64.mkdir(parents=True, exist_ok=True)
    for file in ("libcuda.so.535.104.05", "libcuda-control.so"):
        (lib64 / file).touch()
    (lib64 / "libcuda.so.1").unlink(missing_ok=True)
    (lib64 / "libcuda.so.1").symlink_to(libcuda)
    (lib64.parent / "bin").mkdir(exist_ok=True)
    (lib64.parent / "bin" / "gpu-client").touch()


async def driver_directory(short_dir: Path, *flags: str) -> list[Finding]:
    settings = load_settings(["--driver=nvml", f"--driver-volume.root={short_dir}", *flags], {}).settings
    return await vcuda_check.check_driver_directory(settings)


async def test_shares_without_the_control_library_are_reported_as_refused(short_dir: Path) -> None:
    """Nothing would limit them: no file, no volume, or the driver's own libcuda in its place."""
    install(short_dir, "nvidia", libcuda="libcuda.so.535.104.05")
    install(short_dir, "origin", libcuda="libcuda.so.535.104.05")
    for flags in ([], [write_volumes(short_dir, "nvidia")], [write_volumes(short_dir, "origin")]):
        (found,) = not_ok(await driver_directory(short_dir, *flags))
        assert (found.level, "shares are refused" in found.detail) == (Level.WARNING, True)
        assert "gpushare-agent driver-volume" in found.cure


async def test_an_installed_driver_directory_is_ok_with_its_version(short_dir: Path) -> None:
    """The control library for shares, the driver's own for whole GPUs."""
    install(short_dir, "nvidia", libcuda="libcuda-control.so")
    install(short_dir, "origin", libcuda="libcuda.so.535.104.05")
    shared, whole = await driver_directory(short_dir, write_volumes(short_dir, "nvidia", "origin"))
    assert (shared.level, whole.level) == (Level.OK, Level.OK)
    assert shared.detail.endswith("driver 535.104.05, behind libcuda-control.so")
    assert whole.detail.endswith("driver 535.104.05")
    # A volume of an earlier version of this agent: every CUDA program in a share would end.
    (short_dir / "vdriver/nvidia/bin/gpu-client").unlink()
    (found,) = await driver_directory(short_dir, write_volumes(short_dir, "nvidia"))
    assert (found.level, "bin/gpu-client is missing" in found.detail) == (Level.WARNING, True)
    assert "gpushare-agent driver-volume" in found.cure


async def test_what_driver_volume_installs_is_found_ok(short_dir: Path) -> None:
    """The command's own work, of real shared objects; before it, the finding names the command."""
    host = FakeHost(short_dir)
    host.write_config()
    host.ldconfig()
    flags = host.arguments()[1:]
    before = await driver_directory(short_dir, *flags)
    assert [(found.level, found.detail.endswith("no libcuda there")) for found in before] == [(Level.WARNING, True)] * 2
    ended = await run_program(*host.arguments())
    assert ended.code == 0, ended.err
    after = await driver_directory(short_dir, *flags)
    assert [(found.level, "driver 535.104.05" in found.detail) for found in after] == [(Level.OK, True)] * 2


async def test_a_driver_directory_that_is_not_installed_tells_whether_it_can_be(short_dir: Path) -> None:
    """And a volume.conf that cannot be read is an error: the agent does not start with it."""
    found, missing = await driver_directory(short_dir, write_volumes(short_dir, "origin"))
    assert (found.level, missing.level) == (Level.WARNING, Level.WARNING)
    assert "not installed" in found.detail
    assert "nor can it be made from here: volume origin: no 64-bit library" in found.detail
    (short_dir / "volume.conf").write_text("{")
    (found,) = await driver_directory(short_dir, f"--volume-config={short_dir / 'volume.conf'}")
    assert found.level is Level.ERROR
    assert "it cannot be left out: without it shares are refused" in found.cure
    for flags in ([], [write_volumes(short_dir, "nvidia")]):
        (found,) = await driver_directory(short_dir, "--driver=simulated", *flags)
        assert (found.level, "simulated GPUs" in found.detail) == (Level.OK, True)


@pytest.mark.parametrize(("hard", "level"), [(4096, Level.WARNING), (6500, Level.OK), (sys.maxsize, Level.OK)])
async def test_too_few_open_files_are_reported(
    short_dir: Path, monkeypatch: pytest.MonkeyPatch, hard: int, level: Level
) -> None:
    """A hundred containers may hold 64 connections each; without vDevice sockets there are none."""
    monkeypatch.setattr(vdevice_check, "read_open_files_limit", lambda: (1024, hard))
    async with complete_node(short_dir) as node:
        found = await only("open files", node)
        assert not not_ok(await check_node(node.settings("--isolation=none")))
    assert (found.level, "9223372036854775807" in found.detail) == (level, False)
