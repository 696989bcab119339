"""`gpushare-agent check`: what is in place is ok, what is not is an error with its cure, and nothing is disturbed."""

from __future__ import annotations

import base64
import errno
import json
import os
import shutil
import socket
from pathlib import Path
from types import SimpleNamespace

import pytest
from msgspec.structs import replace

from gpushare_agent.agent.commands.check import check_node, device_paths
from gpushare_agent.agent.isolation.vdevice import check as vdevice_check
from gpushare_agent.agent.kubelet.records import FILE_NAME
from gpushare_agent.agent.runtime import node_probes
from gpushare_agent.core.model.errors import Unavailable, file_remedy
from gpushare_agent.core.model.finding import Level
from gpushare_agent.core.settings.settings import load_settings
from gpushare_agent.core.wire.v1beta1 import ContainerAllocateResponse, Mount
from tests.cli.support_check import NODE, Node, complete_node, node_api, not_ok, only
from tests.cli.support_cli import call
from tests.fakes.api_server import raw_status
from tests.isolation.support_library import fake_library
from tests.settings.support_settings import clean_environment, listening, run_program
from tests.support_core import inventory

UID = "0f2a8c1e-6f0b-4c0e-9d1e-3f4b5a6c7d8e"


@pytest.fixture(autouse=True)
def may_open_many_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever limit the tests themselves run under."""
    monkeypatch.setattr(vdevice_check, "read_open_files_limit", lambda: (1024, 65_536))


async def test_a_complete_node_is_ready(short_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every line is ok and the exit code 0. No probe file stays, what is not there is not made, and the pod resources socket
    is connected to but never asked: a List while an Allocate is open makes the kubelet give a device twice."""
    async with complete_node(short_dir) as node:
        flags = node.flags()
        before = sorted(path.relative_to(short_dir) for path in short_dir.rglob("*"))
        assert await call("check", *flags) == 0
        assert sorted(path.relative_to(short_dir) for path in short_dir.rglob("*")) == before
        assert node.pod_resources.connections == 1
        assert bytes(node.pod_resources.received) == bytes(node.kubelet.received) == b""
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "This node is ready: errors 0, warnings 0."
    assert all(line.startswith("ok ") for line in lines[:-1])
    for what in (
        *("driver", "kubelet socket", "pod resources", "container runtime", "cgroups", "host processes", "directory"),
        *("virtual manager", "driver directory", "open files", "api server"),
    ):
        assert any(f" {what} " in line for line in lines), what


async def test_a_bare_directory_is_all_errors_each_with_a_cure(short_dir: Path) -> None:
    """Nothing is there: each probe reports its own, and none hides another."""
    async with complete_node(short_dir) as node:
        flags = node.flags()
    for name in ("device-plugins", "pod-resources"):
        (short_dir / name).rmdir()
    (short_dir / "cgroup" / "cgroup.controllers").unlink()
    findings = await check_node(load_settings(flags, {}).settings)
    errors = {finding.what for finding in findings if finding.level is Level.ERROR}
    expected = {"kubelet socket", "pod resources", "cgroups", "directory", "api server"}
    assert errors == expected
    assert all(finding.cure for finding in not_ok(findings))
    assert all(not finding.cure for finding in findings if finding.level is Level.OK)


async def test_a_dead_socket_file_is_reported_from_a_missing_one_and_from_a_plain_file(short_dir: Path) -> None:
    """The three have different cures."""
    plain, dead = short_dir / "plain", short_dir / "dead"
    plain.touch()
    async with listening(dead):
        os.link(dead, short_dir / "kept")
    for path, words in (
        (plain, "not a socket"),
        (short_dir / "kept", "nobody listens"),
        (short_dir / "no", "not there"),
    ):
        with pytest.raises(Unavailable, match=words):
            await node_probes.connect_to_socket(path)
    with pytest.raises(Unavailable, match="107 bytes"):
        await node_probes.connect_to_socket(short_dir / ("x" * 120))


@pytest.mark.parametrize(
    ("version", "level"),
    [
        ("v1.30.0", Level.OK),
        ("v1.36.2+k3s1", Level.OK),
        ("v1.29.14", Level.ERROR),
        ("v1.9.0", Level.ERROR),
        ("", Level.WARNING),
    ],
)
async def test_kubelets_before_1_30_are_errors(short_dir: Path, version: str, level: Level) -> None:
    """Versions are compared as numbers."""
    async with complete_node(short_dir, node_api(version)) as node:
        findings = await check_node(node.settings())
    (found,) = [finding for finding in findings if finding.what == "kubelet version"]
    assert found.level is level


async def test_a_missing_right_is_named(short_dir: Path) -> None:
    """Without a needed right it is an error; without the right to clean up, a warning while cleaning is on."""
    forbidden = ("watch pods", "delete pods")
    async with complete_node(short_dir, node_api(forbidden=forbidden)) as node:
        error, warning = not_ok(await check_node(node.settings()))
        assert (error.level, error.what) == (Level.ERROR, "permissions")
        assert "watch pods" in error.detail
        assert (warning.level, warning.what) == (Level.WARNING, "permissions")
        (only,) = not_ok(await check_node(node.settings("--allocation.cleanup-rejected-pods=false")))
        assert only == error


DENIAL = (
    "pods \"agent\" is forbidden: ValidatingAdmissionPolicy 'gpushare-agent-annotations' denied request: leave it out"
)


@pytest.mark.parametrize("status", [200, 403, 404])
async def test_an_admission_policy_that_refuses_the_agent_is_found(short_dir: Path, status: int) -> None:
    """By a patch that is only tried: of the own pod where it is listed. A pod that has ended says nothing."""
    pods = [
        {"metadata": {"name": name, "namespace": "gpu-team", "uid": name}} for name in ("other", socket.gethostname())
    ]
    tried = f"/api/v1/namespaces/gpu-team/pods/{socket.gethostname()}"
    async with complete_node(short_dir) as node:
        node.api.script.answers["/api/v1/pods"] = {"metadata": {"resourceVersion": "1"}, "items": pods}
        node.api.script.answers[tried] = (status, raw_status(status, DENIAL))
        findings = [one for one in await check_node(node.settings()) if one.what == "pod annotations"]
        (seen,) = [one for one in node.api.seen if one.path == tried]
    assert (seen.method, seen.query["dryRun"]) == ("PATCH", "All")
    assert [one.level for one in findings] == {200: [Level.OK], 403: [Level.ERROR], 404: []}[status]
    if status == 403:
        assert "gpushare-agent-annotations" in findings[0].detail
        assert "annotations.gpushare-agent" in findings[0].cure


@pytest.mark.parametrize(
    ("status", "text", "level"),
    [
        (201, "", Level.WARNING),
        (403, "ValidatingAdmissionPolicy 'gpushare-agent-slices' denied request", Level.OK),
        (403, "cannot create resource resourceslices", Level.WARNING),
        (404, "not found", None),
    ],
)
async def test_a_policy_for_slices_that_knows_nobody_is_found(
    short_dir: Path, status: int, text: str, level: Level | None
) -> None:
    """By a slice of another node, which is only tried and must be refused."""
    path = "/apis/resource.k8s.io/v1/resourceslices"
    async with complete_node(short_dir) as node:
        node.api.script.answers[path] = (status, raw_status(status, text))
        flags = ("--dra.gpus=all", "--isolation=none")
        findings = [one for one in await check_node(node.settings(*flags)) if one.what == "ResourceSlices"]
        (seen,) = [one for one in node.api.seen if one.path == path]
        assert seen.query["dryRun"] == "All"
        assert seen.body["spec"]["nodeName"] != NODE
        assert [one.level for one in findings] == ([level] if level else [])
        node.api.seen.clear()
        await check_node(node.settings("--isolation=none"))
        assert path not in [one.path for one in node.api.seen]


async def test_the_permissions_line_tells_whether_pods_may_be_deleted(short_dir: Path) -> None:
    """The right that reaches furthest is never left unsaid: used, given without need, or not given."""

    async def permissions(node: Node, *flags: str) -> str:
        return next(f.detail for f in await check_node(node.settings(*flags)) if f.what == "permissions")

    off = "--allocation.cleanup-rejected-pods=false"
    async with complete_node(short_dir) as node:
        assert "delete pods (rejected ones" in await permissions(node)
        assert "delete pods too, which is not needed" in await permissions(node, off)
    (short_dir / "bare").mkdir()
    async with complete_node(short_dir / "bare", node_api(forbidden=("delete pods",))) as node:
        assert "delete" not in await permissions(node, off)


@pytest.mark.parametrize(
    ("flags", "level", "what", "detail", "cure"),
    [
        (["--node-name=other"], Level.ERROR, "api server", "other", "--node-name"),
        (["--topology=/none"], Level.ERROR, "driver", "/none", ""),
        # With this setting the agent starts without GPUs.
        (["--topology=/none", "--fail-on-init-error=false"], Level.WARNING, "driver", "/none", ""),
        (["--extra-config=/none.json"], Level.ERROR, "file", "/none.json", "--extra-config"),
        # Without it shares would not be kept.
        (["--volume-config=/none.conf"], Level.ERROR, "driver directory", "/none.conf", "cannot be left out"),
        (["--volume-config=/none.conf", "--isolation=none"], Level.ERROR, "file", "/none.conf", ""),
    ],
)
async def test_a_setting_that_does_not_suit_the_node_is_reported_once(
    short_dir: Path, flags: list[str], level: Level, what: str, detail: str, cure: str
) -> None:
    async with complete_node(short_dir) as node:
        (found,) = not_ok(await check_node(node.settings(*flags)))
    assert (found.level, found.what) == (level, what)
    assert detail in found.detail and cure in found.cure


async def test_unlike_mig_instances_under_strategy_single_are_an_error(short_dir: Path) -> None:
    """No pod is given one; with strategy mixed nothing is wrong."""
    faults = short_dir / "faults.json"
    faults.write_text('{"mig": {"0": ["1g.10gb", "3g.40gb"]}}')
    async with complete_node(short_dir) as node:
        flags = ("--nvidia.enabled", f"--simulated.faults={faults}", "--nvidia.gpus=0")
        (found,) = not_ok(await check_node(node.settings(*flags, "--nvidia.mig-strategy=single")))
        assert (found.what, found.level) == ("mig", Level.ERROR)
        assert "instances of 1g.10gb (0:0), instances of 3g.40gb (0:1)" in found.detail and "mixed" in found.cure
        assert not not_ok(await check_node(node.settings(*flags, "--nvidia.mig-strategy=mixed")))


async def test_gpus_in_mig_mode_are_reported(short_dir: Path) -> None:
    """With their instances, whether these are made on demand, and who forbids it; and a GPU that should be one of them, and
    a name of none."""
    faults = short_dir / "faults.json"
    faults.write_text('{"mig": {"0": ["1g.10gb", "1g.10gb"], "1": []}, "mig_faults": {"1": {"refused": "no right"}}}')
    async with complete_node(short_dir) as node:
        flags = (f"--simulated.faults={faults}", f"--state-directory={short_dir / 'state'}", "--mig.on-demand=0,1,2,19")
        found = await check_node(node.settings(*flags))
        mig = [(one.level, one.detail, one.cure) for one in found if one.what == "mig"]
        uuids = [text.partition("(")[2].partition(")")[0] for _, text, _ in mig]
        assert [one[:2] for one in mig] == [
            (Level.OK, f"number 0 ({uuids[0]}) has instances on demand; now 2 of 1g.10gb"),
            (Level.OK, f"number 1 ({uuids[1]}) has instances on demand; now none"),
            (Level.WARNING, "number 1: no right"),
            (Level.WARNING, "number 2 is one of mig.on_demand, and MIG mode is not on"),
            (Level.WARNING, "mig.on_demand names 19, and this node has no such GPU"),
        ]
        assert " -mig 1`" in mig[3][2]
        # Nothing is wrong with a GPU that only nobody offers: the kernel's log has no word of it.
        withheld = next(one for one in await check_node(node.settings(flags[0])) if one.what == "gpu")
        assert withheld.cure.startswith("see docs/explanation/mig.md")


async def test_another_who_divides_the_gpus_is_named(short_dir: Path) -> None:
    """Only where instances are made on demand."""
    async with complete_node(short_dir, node_api(labels={"nvidia.com/mig.config": "all-1g.10gb"})) as node:
        flags = (f"--state-directory={short_dir / 'state'}", "--mig.on-demand=all")
        found = [one for one in await check_node(node.settings(*flags)) if one.what == "mig"]
        assert {one.detail.partition(" (")[0] for one in found} == {
            "NVIDIA's mig-manager divides the node's GPUs",
            "mig.on_demand is all, and no GPU is in MIG mode",
        }
        assert not [one for one in await check_node(node.settings()) if one.what == "mig"]


async def test_a_long_device_plugin_path_is_reported(short_dir: Path) -> None:
    """A socket's path has at most 107 bytes."""
    long = short_dir / ("x" * 100)
    long.mkdir()
    async with complete_node(short_dir) as node:
        findings = not_ok(await check_node(node.settings(f"--device-plugin-path={long}")))
    assert "socket path" in {finding.what for finding in findings}


def test_a_directory_that_takes_no_file_is_reported(short_dir: Path) -> None:
    """A file, what is below one, and what cannot be written to. That is found by writing, not by reading its mode: root may
    do anything but this."""
    file = short_dir / "file"
    file.touch()
    for path, words in (
        (file, "is no directory"),
        (file / "below", "is no directory"),
        (Path("/sys/kernel"), "cannot write"),
    ):
        with pytest.raises(Unavailable, match=words):
            node_probes.require_writable(path)


@pytest.mark.parametrize(
    ("number", "cure"),
    [
        (errno.ENOSPC, "free space or inodes on its file system"),
        (errno.EDQUOT, "free space or inodes on its file system"),
        (errno.EROFS, "its file system is mounted read-only"),
        (errno.EACCES, "run the agent as root"),
    ],
)
def test_a_fault_of_the_file_system_has_its_own_remedy(number: int, cure: str) -> None:
    """Whoever has put the error into its own words: no setting makes room on a disk."""
    try:
        try:
            raise Unavailable("cannot write") from OSError(number, "x")
        except Unavailable as e:
            raise Unavailable("setting x") from e
    except Unavailable as e:
        assert file_remedy(e, "run the agent as root").startswith(cure)


async def test_a_full_disk_is_not_said_to_be_a_wrong_mount(short_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the sockets' directory, of the containers', and of the library's."""
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=0))
    async with complete_node(short_dir) as node:
        for isolation, what in (("vcuda", "directory"), ("vcuda", "virtual manager"), ("gpushare", "gpushare")):
            found = {one.what: one for one in not_ok(await check_node(node.settings(f"--isolation={isolation}")))}
            assert found[what].cure.startswith("free space or inodes on its file system"), found[what]


async def test_a_library_that_lies_wrong_is_not_said_to_be_missing(short_dir: Path) -> None:
    """On a file system without programs, behind a file, or not writable: another directory, of those that the pod has."""
    (short_dir / "file").touch()
    (short_dir / "state").mkdir()
    given = "--isolation=gpushare", f"--libgpushare.library={fake_library(short_dir / 'libgpushare.so')}"
    places = [f"{short_dir}/file/own"]
    if os.statvfs("/proc").f_flag & os.ST_NOEXEC:
        places.append("/proc/own")
    async with complete_node(short_dir) as node:
        for place in places:
            flags = *given, f"--libgpushare.directory={place}", f"--state-directory={short_dir}/state"
            (found,) = [one for one in not_ok(await check_node(node.settings(*flags))) if one.what == "gpushare"]
            assert found.level is Level.ERROR and "hostDirectory" in found.cure and "take the image" not in found.cure
            assert f"below {short_dir}/state" in found.cure
        settings = node.settings("--isolation=gpushare", f"--libgpushare.library={short_dir}/file")
        (found,) = [one for one in not_ok(await check_node(settings)) if one.what == "gpushare"]
        assert "take the image" in found.cure and "hostDirectory" not in found.cure


async def test_shares_with_files_in_an_earlier_directory_are_a_warning(short_dir: Path) -> None:
    """By the answer that the kubelet keeps for their next start."""
    async with complete_node(short_dir) as node:
        settings = node.settings()
        for directory, is_left in ((settings.virtual_manager.path, False), (Path("/mnt/other/vm"), True)):
            mount = Mount(container_path="/etc/vcuda", host_path=str(directory / UID / "main"))
            write_checkpoint(settings.kubelet.device_plugin_path / FILE_NAME, ContainerAllocateResponse(mounts=[mount]))
            found = [one for one in await check_node(settings) if one.what == "virtual manager"]
            left = [one for one in found if one.level is Level.WARNING]
            assert len(left) == is_left
        assert f"main of pod {UID}" in left[0].detail and "/mnt/other/vm" in left[0].detail
        assert "drain the node" in left[0].cure


def write_checkpoint(path: Path, answer: ContainerAllocateResponse) -> None:
    devices = {"ResourceName": "a.test/b", "DeviceIDs": {"0": ["x"]}}
    response = base64.b64encode(bytes(answer)).decode()
    entry = {"PodUID": UID, "ContainerName": "main", "AllocResp": response, **devices}
    path.write_text(json.dumps({"Data": {"PodDeviceEntries": [entry]}}))


def test_device_nodes_must_be_character_devices(short_dir: Path) -> None:
    """A regular file of that name is what a wrong mount leaves behind."""
    node_probes.require_device_node(Path("/dev/null"))
    file = short_dir / "nvidia0"
    file.touch()
    with pytest.raises(Unavailable, match="not a character device"):
        node_probes.require_device_node(file)
    with pytest.raises(Unavailable, match="not there"):
        node_probes.require_device_node(short_dir / "nvidia1")


async def test_the_program_prints_json_and_exits_1_on_an_error(short_dir: Path) -> None:
    """The whole program, on a node whose kubelet is gone."""
    async with complete_node(short_dir) as node:
        flags = node.flags(f"--device-plugin-path={short_dir}/gone")
        ended = await run_program("check", "-o", "json", *flags, environ=clean_environment())
    assert ended.code == 1, ended.err
    document = json.loads(ended.out)
    assert document["node"] == NODE
    assert document["errors"] == sum(finding["level"] == "error" for finding in document["findings"]) == 2
    assert {f["what"] for f in document["findings"] if f["level"] == "error"} == {"kubelet socket", "directory"}


async def test_static_pods_are_read_where_the_setting_is_on(short_dir: Path) -> None:
    """The right is looked for first; with it, what keeps the list from being read is named."""
    flag = "--kubelet.api-address=127.0.0.1"
    (short_dir / "without").mkdir()
    async with complete_node(short_dir / "without", node_api(forbidden=("get nodes/pods",))) as node:
        found = await only("static pods", node, flag)
    assert found.level is Level.WARNING and "not allowed: get nodes/pods" in found.detail
    (short_dir / "with").mkdir()
    async with complete_node(short_dir / "with") as node:
        found = await only("static pods", node, flag, f"--kubelet.api-ca={short_dir / 'nowhere.crt'}")
        assert not [one for one in await check_node(node.settings()) if one.what == "static pods"]
    assert found.level is Level.WARNING and "nowhere.crt" in found.detail


def test_a_gpu_that_was_lost_before_the_start_has_no_device_node_to_look_for() -> None:
    """Its minor number is -1: the driver reported its UUID alone."""
    gpus = [replace(gpu, minor=minor) for gpu, minor in zip(inventory(2).gpus, (0, -1), strict=True)]
    assert [path.name for path in device_paths(gpus)] == ["nvidiactl", "nvidia-uvm", "nvidia0"]
