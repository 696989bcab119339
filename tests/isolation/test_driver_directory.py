"""Versions of a driver volume: made next to what is in force, switched by one rename, removed only when nobody has them."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from gpushare_agent.agent.commands.driver_volume import read_mounted_directories
from gpushare_agent.agent.delivery.host_libraries import DriverLibraries, read_control
from gpushare_agent.agent.delivery.volume_directory import DriverDirectory, Installed
from gpushare_agent.agent.delivery.volume_plan import VolumeName, VolumePlan, plan_volume
from gpushare_agent.core.model.errors import StartupError, Unavailable
from tests.isolation.support_driver import CONTROL, NATIVE, REAL, FakeHost, require_cc, tree_of
from tests.settings.support_settings import clean_environment
from tests.support_deadline import DEADLINE_S


@pytest.fixture
def host(short_dir: Path) -> FakeHost:
    return FakeHost(short_dir)


def plan_of(host: FakeHost, name: str = "nvidia") -> VolumePlan:
    volume = host.volume(name)
    found = DriverLibraries(host.root).find(volume)
    plan = plan_volume(volume, found, os.uname().machine, read_control(host.control, host.client))
    assert isinstance(plan, VolumePlan), plan
    return plan


def quiet(what: str, done: int, total: int) -> None:
    assert what in ("reading", "copying")
    assert 0 <= done <= total


def install(host: FakeHost, name: str = "nvidia") -> Installed:
    return DriverDirectory(host.base).install(plan_of(host, name), quiet)


def versions(host: FakeHost) -> list[str]:
    return sorted(path.name for path in (host.base / ".versions").iterdir() if not path.name.startswith(".lock"))


def test_a_volume_has_links_and_copies_of_the_hosts_files(host: FakeHost) -> None:
    """Links are relative, directories and files open to everyone."""
    old_umask = os.umask(0o077)
    try:
        installed = install(host)
    finally:
        os.umask(old_umask)
    assert installed.changed
    volume = host.base / "nvidia"
    assert str(volume.readlink()) == f".versions/{installed.version.name}"
    assert installed.version.name.startswith("nvidia-535.104.5-")
    assert (volume / "lib64/libcuda.so.535.104.05").read_bytes() == host.library("libcuda").read_bytes()
    assert (volume / "lib64/libcuda-control.so").read_bytes() == host.control.read_bytes()
    assert (volume / "lib64/libcuda.so.1").readlink() == Path("libcuda-control.so")
    assert (volume / "bin/nvidia-smi").stat().st_mode & 0o7777 == 0o755
    assert sorted(path.name for path in volume.iterdir()) == ["bin", "lib", "lib64"]
    for directory in (host.base, host.base / ".versions", volume, volume / "bin", volume / "lib", volume / "lib64"):
        assert directory.stat().st_mode & 0o777 == 0o755


def test_a_program_in_each_volume_loads_what_it_should(host: FakeHost) -> None:
    """A real program with LD_LIBRARY_PATH at lib64: control library for shares, the driver's own for whole GPUs."""
    program = host.root.parent / "ask"
    subprocess.run([require_cc(), "-o", str(program), str(NATIVE / "ask_libraries.c"), "-ldl"], check=True)
    names = [
        *("libcuda.so", "libcuda.so.1", "libnvidia-ml.so.1"),
        "libcuda.so.535.104.05",
        "libnvidia-ptxjitcompiler.so.1",
    ]

    def ask(volume: str) -> list[str]:
        environ = {"LD_LIBRARY_PATH": str(host.base / volume / "lib64")}
        ended = subprocess.run(
            [program, *names], env=environ, capture_output=True, text=True, timeout=DEADLINE_S, check=True
        )
        return [line.rpartition(" ")[2] for line in ended.stdout.splitlines()]

    install(host, "nvidia")
    install(host, "origin")
    assert ask("nvidia") == [str(which) for which in (CONTROL, CONTROL, CONTROL, REAL, REAL)]
    assert ask("origin") == [str(REAL)] * 5


def test_the_same_again_changes_nothing(host: FakeHost) -> None:
    """Idempotent: the same version stays in force, and nothing is written."""
    first = install(host)
    before = {path: path.lstat().st_ctime_ns for path in (host.base / ".versions").rglob("*") if path.name != ".lock"}
    again = install(host)
    assert (again.version, again.changed) == (first.version, False)
    after = {path: path.lstat().st_ctime_ns for path in (host.base / ".versions").rglob("*") if path.name != ".lock"}
    assert after == before
    assert DriverDirectory(host.base).is_in_force(plan_of(host), quiet)


def test_reading_and_pruning_alone_make_no_directory(host: FakeHost) -> None:
    assert not DriverDirectory(host.base).is_in_force(plan_of(host), quiet)
    assert DriverDirectory(host.base).prune(VolumeName.SHARED, lambda version: False) == ((), ())
    assert not host.base.exists()


def test_a_file_that_is_overwritten_in_place_changes_no_version(host: FakeHost) -> None:
    """As by an installer: containers have the version mounted."""
    version = install(host).version
    before = tree_of(version)
    host.library("libcuda").write_bytes(b"another")
    assert tree_of(version) == before


def test_set_uid_and_closed_files_are_without_it_and_open(host: FakeHost) -> None:
    """A container never gets a set-uid program from here, and can read all that it gets."""
    host.add_program("nvidia-smi", mode=0o4755)
    host.library("libcuda").chmod(0o700)
    install(host)
    assert (host.base / "nvidia/bin/nvidia-smi").stat().st_mode & 0o7777 == 0o755
    assert (host.base / "nvidia/lib64/libcuda.so.535.104.05").stat().st_mode & 0o7777 == 0o755
    assert host.root.joinpath("usr/bin/nvidia-smi").stat().st_mode & 0o7777 == 0o4755


def update_driver(host: FakeHost, version: str = "550.54.14", which: int = 7) -> None:
    """As a package does: new files, links replaced, the old files removed. The control library is replaced too."""
    for stem in ("libcuda", "libnvidia-ml", "libnvidia-ptxjitcompiler"):
        host.library(stem).unlink()
        host.add_library(stem, version, which=which)
    fresh = host.control.with_suffix(".new")
    fresh.write_bytes(host.control.read_bytes() + b"newer")
    fresh.rename(host.control)


class Child:
    """A program that answers each line with one."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process

    def read(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def ask(self, line: object = "") -> str:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{line}\n")
        self.process.stdin.flush()
        return self.read()


@contextmanager
def running(*command: str) -> Iterator[Child]:
    """Ends with the block."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    child = subprocess.Popen(command, env=clean_environment(), text=True, **pipes)
    try:
        yield Child(child)
    finally:
        child.kill()
        child.communicate()


MOUNT_SCRIPT = """
mkdir "$2/mounted" && mount --bind "$1/nvidia" "$2/mounted" && mount -o remount,bind,ro "$2/mounted" || exit 77
echo mounted; read line; ls "$2/mounted/lib64"; read line
"""


def test_a_bind_mount_keeps_the_version_and_keeps_it_from_being_pruned(host: FakeHost) -> None:
    """A real mount of <base>/nvidia in a mount namespace of its own, as a container runtime makes it."""
    old = install(host)
    if shutil.which("unshare") is None:
        pytest.skip("no unshare on this machine")
    with running("unshare", "-m", "sh", "-c", MOUNT_SCRIPT, "sh", str(host.base), str(host.root.parent)) as child:
        if child.read() != "mounted":
            pytest.skip(f"no mounts can be made here: {child.process.communicate()[1].strip()}")
        update_driver(host)
        install(host)
        mounted = read_mounted_directories()
        assert mounted.has(f".versions/{old.version.name}")
        directory = DriverDirectory(host.base)
        _, kept = directory.prune(VolumeName.SHARED, lambda version: mounted.has(f".versions/{version}"))
        assert kept == (old.version.name,)
        out, _ = child.process.communicate("\n\n", timeout=DEADLINE_S)
        assert "libcuda.so.535.104.05" in out.split()
        assert "libcuda.so.550.54.14" not in out.split()
    mounted = read_mounted_directories()
    removed, kept = directory.prune(VolumeName.SHARED, lambda version: mounted.has(f".versions/{version}"))
    assert (removed, kept) == ((old.version.name,), ())


def test_old_versions_go_only_on_request_and_never_the_one_in_force(host: FakeHost) -> None:
    """Installing keeps them as they are; prune removes those that nobody uses, of this volume alone."""
    origin = install(host, "origin")
    first = install(host)
    before = tree_of(first.version)
    update_driver(host)
    second = install(host)
    assert tree_of(first.version) == before and (host.base / "nvidia").resolve() == second.version
    assert versions(host) == sorted([origin.version.name, first.version.name, second.version.name])
    directory = DriverDirectory(host.base)
    assert directory.prune(VolumeName.SHARED, lambda version: True) == ((), (first.version.name,))
    assert directory.prune(VolumeName.SHARED, lambda version: False) == ((first.version.name,), ())
    assert directory.prune(VolumeName.SHARED, lambda version: False) == ((), ())
    assert versions(host) == sorted([origin.version.name, second.version.name])
    assert tree_of(host.base / "nvidia")


def test_mounts_are_recognised_in_mountinfo(short_dir: Path) -> None:
    """The directory itself and what is below it; names that only begin so are others; unreadable processes count."""
    for pid, root in (
        ("1", "/"),
        ("20", "/gpu/.versions/nvidia-1-aa"),
        ("30", "/.versions/nvidia-2-bb/lib64//deleted"),
    ):
        (short_dir / pid).mkdir()
        (short_dir / pid / "mountinfo").write_text(
            f"36 35 98:0 {root} /usr/local/nvidia ro - ext4 /dev/sda ro\nshort\n"
        )
    (short_dir / "40").mkdir()
    (short_dir / "self").mkdir()
    mounted = read_mounted_directories(short_dir)
    assert mounted.has(".versions/nvidia-1-aa")
    assert mounted.has(".versions/nvidia-2-bb")
    assert not mounted.has(".versions/nvidia-1-a")
    assert not mounted.has(".versions/nvidia-1")
    assert mounted.unreadable_processes == 0


def test_a_directory_of_gpu_manager_is_replaced_in_one_step_and_kept(host: FakeHost) -> None:
    """gpu-manager fills a real directory at the place of our link; running containers may have it mounted."""
    old = host.base / "nvidia/lib64"
    old.mkdir(parents=True)
    (old / "libcuda.so.1").write_text("gpu-manager's")
    descriptor = os.open(host.base / "nvidia", os.O_RDONLY | os.O_DIRECTORY)
    try:
        installed = install(host)
        inside = os.open("lib64/libcuda.so.1", os.O_RDONLY, dir_fd=descriptor)
        assert os.read(inside, 100) == b"gpu-manager's"
        os.close(inside)
    finally:
        os.close(descriptor)
    assert (host.base / "nvidia").resolve() == installed.version
    assert versions(host) == sorted([installed.version.name, "nvidia-replaced-1"])
    removed, _ = DriverDirectory(host.base).prune(VolumeName.SHARED, lambda version: False)
    assert removed == ("nvidia-replaced-1",)


def test_a_version_that_somebody_damaged_is_not_mended_but_made_anew(host: FakeHost) -> None:
    """It may be mounted: a whole one goes next to it."""
    first = install(host)
    (first.version / "lib64/libcuda.so.1").unlink()
    assert not DriverDirectory(host.base).is_in_force(plan_of(host), quiet)
    second = install(host)
    assert second.version.name == f"{first.version.name}.2"
    assert (host.base / "nvidia").resolve() == second.version
    assert not (first.version / "lib64/libcuda.so.1").exists()
    assert not install(host).changed


def test_a_file_at_the_place_of_the_volume_or_a_full_disk_is_reported(host: FakeHost) -> None:
    """The error names the place, and says that nothing has changed."""
    host.base.write_text("a file")
    with pytest.raises(StartupError, match="What was in force stays") as caught:
        install(host)
    assert str(host.base) in str(caught.value)


def test_a_source_that_vanishes_leaves_the_old_version_in_force(host: FakeHost) -> None:
    """The driver may be removed between finding and reading."""
    first = install(host)
    update_driver(host)
    plan = plan_of(host)
    host.library("libcuda", "550.54.14").unlink()
    with pytest.raises(StartupError, match=r"libcuda\.so\.550\.54\.14"):
        DriverDirectory(host.base).install(plan, quiet)
    assert (host.base / "nvidia").resolve() == first.version
    assert versions(host) == [first.version.name]


def test_a_source_that_changes_while_it_is_collected_is_refused(host: FakeHost) -> None:
    """An installer that overwrites in place is caught, and nothing half is put in force."""
    plan = plan_of(host)
    victim = host.library("libnvidia-ml")

    def overwrite(what: str, done: int, total: int) -> None:
        if done == total and what == "reading":
            victim.write_bytes(victim.read_bytes() + b"changed")

    with pytest.raises(StartupError, match="changed while it was collected") as caught:
        DriverDirectory(host.base).install(plan, overwrite)
    assert str(victim) in str(caught.value)
    assert versions(host) == []
    assert not os.path.lexists(host.base / "nvidia")


def test_runs_at_the_same_time_come_to_one_version(host: FakeHost) -> None:
    """Eight runs at once: all succeed, one makes it, the others find it made."""
    with ThreadPoolExecutor(8) as pool:
        made = [run.result(DEADLINE_S) for run in [pool.submit(install, host) for _ in range(8)]]
    assert len({item.version for item in made}) == 1
    assert sum(item.changed for item in made) == 1
    assert versions(host) == [made[0].version.name]


def test_a_run_that_waits_too_long_for_another_says_so(host: FakeHost) -> None:
    """The lock of another process is respected; what is in force stays."""
    installed = install(host)
    with (host.base / ".versions/.lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(Unavailable, match="another process"):
            DriverDirectory(host.base, lock_timeout_s=0).install(plan_of(host), quiet)
    assert (host.base / "nvidia").resolve() == installed.version
    install(host)


def test_a_planted_lock_link_is_not_followed(host: FakeHost) -> None:
    """No file elsewhere is made or opened through it."""
    (host.base / ".versions").mkdir(parents=True)
    (host.base / ".versions/.lock").symlink_to(host.root / "elsewhere")
    with pytest.raises(StartupError, match=os.strerror(errno.ELOOP)):
        install(host)
    assert not (host.root / "elsewhere").exists()


@pytest.mark.slow
@pytest.mark.parametrize("before", ["a version", "gpu-manager's directory"])
def test_killed_at_any_step_it_leaves_one_whole_version_in_force(host: FakeHost, before: str) -> None:
    """SIGKILL before the first, second, … file operation of a run, each time from the same beginning.

    In force is the old version whole, or the new one whole, and the next run puts everything right.
    """
    if before == "a version":
        install(host)
    else:
        (host.base / "nvidia/lib64").mkdir(parents=True)
        (host.base / "nvidia/lib64/libcuda.so.1").write_text("gpu-manager's")
    old = tree_of((host.base / "nvidia").resolve())
    beginning = host.base.with_name("beginning")
    host.base.rename(beginning)
    update_driver(host)
    plan = plan_of(host)
    left_old = left_new = 0
    places = map(str, (host.root, host.base, host.control, host.client))
    with running(sys.executable, "-m", "tests.isolation.support_driver_kills", *places) as child:
        while True:
            shutil.copytree(beginning, host.base, symlinks=True)
            answer = child.ask(left_old + left_new + 1)
            if answer == "done":
                break
            assert answer == "killed"
            if tree_of((host.base / "nvidia").resolve()) == old:
                left_old += 1
            else:
                left_new += 1
                assert DriverDirectory(host.base).is_in_force(plan, quiet)
            DriverDirectory(host.base).install(plan, quiet)
            assert DriverDirectory(host.base).is_in_force(plan, quiet)
            assert not [name for name in versions(host) if name.startswith(".")]
            shutil.rmtree(host.base)
    assert left_old > 40
    assert left_new >= 2
