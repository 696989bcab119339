"""The driver's libraries and programs, found on hosts of real shared objects."""

from __future__ import annotations

import os
import shutil
import struct
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpushare_agent.agent.delivery.elf import read_elf
from gpushare_agent.agent.delivery.host_libraries import DriverLibraries, HostFiles, read_control
from gpushare_agent.agent.delivery.volume_plan import FoundLibrary, plan_volume
from gpushare_agent.core.model.errors import Corrupt, NotFound, StartupError
from tests.isolation.support_driver import (
    LIBRARY_DIRECTORY,
    LIBRARY_DIRECTORY_32,
    FakeHost,
    compile_library,
    compile_program,
    has_m32,
)


@pytest.fixture
def host(short_dir: Path) -> FakeHost:
    return FakeHost(short_dir)


def libcudas(host: FakeHost) -> list[FoundLibrary]:
    found = DriverLibraries(host.root).find(host.volume()).libraries
    return [library for library in found if library.soname == "libcuda.so.1"]


def test_libraries_are_found_through_the_loaders_cache(host: FakeHost) -> None:
    """The file itself is named, not the link that the cache has; the usual directories are not needed."""
    host.ldconfig()
    found = DriverLibraries(host.root).find(host.volume())
    assert found.library_places == (str(host.root / "etc/ld.so.cache"),)
    assert {(library.path, library.found_as) for library in found.libraries} == {
        (host.library("libcuda"), "libcuda.so.1"),
        (host.library("libnvidia-ml"), "libnvidia-ml.so.1"),
        (host.library("libnvidia-ptxjitcompiler"), "libnvidia-ptxjitcompiler.so.1"),
    }
    assert found.programs == {"nvidia-smi": host.root / "usr/bin/nvidia-smi"}
    assert found.warnings == ()


@pytest.mark.parametrize("directory", ["nvidia", "tegra"])
def test_a_jetsons_libcuda_is_found_and_names_no_driver(host: FakeHost, directory: str) -> None:
    """Its file is libcuda.so.1.1: the driver's version is NVML's to say."""
    shutil.rmtree(host.root / LIBRARY_DIRECTORY)
    path = host.add_library("libcuda", "1.1", directory=f"usr/lib/aarch64-linux-gnu/{directory}")
    assert {found.path for found in libcudas(host)} == {path}
    volume = host.volume("origin")
    plan = plan_volume(volume, DriverLibraries(host.root).find(volume), os.uname().machine, None)
    assert plan.links["lib64/libcuda.so.1"] == "libcuda.so.1.1" and plan.driver_version is None
    assert f"volume origin: the name of {path} has no driver version; it must come from NVML" in plan.warnings


def test_without_a_cache_the_usual_directories_are_searched(host: FakeHost) -> None:
    """The same libraries are found, and the places are reported."""
    found = DriverLibraries(host.root).find(host.volume())
    assert {library.path for library in found.libraries} == {
        host.library(stem) for stem in ("libcuda", "libnvidia-ml", "libnvidia-ptxjitcompiler")
    }
    assert str(host.root / LIBRARY_DIRECTORY) in found.library_places
    assert all(Path(place).is_dir() for place in found.library_places)


def test_a_damaged_cache_is_a_warning_and_the_directories_serve(host: FakeHost) -> None:
    """A half-written cache does not stop the node."""
    (host.root / "etc/ld.so.cache").write_bytes(b"glibc-ld.so.cache1.1 and then nothing of use")
    found = DriverLibraries(host.root).find(host.volume())
    assert len(libcudas(host)) >= 1
    assert "ldconfig" in found.warnings[0]


def test_a_library_that_only_the_directories_have_is_found_beside_the_cache(host: FakeHost) -> None:
    """A driver put in after the last run of ldconfig is not overlooked."""
    host.ldconfig()
    host.add_library("libnvcuvid")
    volume = host.volume(libraries=["libcuda.so", "libnvcuvid.so"])
    found = {library.soname for library in DriverLibraries(host.root).find(volume).libraries}
    assert found == {"libcuda.so.1", "libnvcuvid.so.1"}


def test_a_cache_that_is_older_than_a_removal_is_no_error(host: FakeHost) -> None:
    """Entries whose file is gone, or is no shared object, are passed over."""
    host.ldconfig()
    host.library("libcuda").unlink()
    host.library("libnvidia-ml").write_text("INPUT ( elsewhere )")
    found = DriverLibraries(host.root).find(host.volume())
    assert {library.soname for library in found.libraries} == {"libnvidia-ptxjitcompiler.so.1"}


def test_32_and_64_bit_libraries_are_reported_apart(host: FakeHost) -> None:
    """By the ELF header, not by the directory's name."""
    if not has_m32():
        pytest.skip("this machine's cc cannot make 32-bit objects (-m32)")
    path = host.add_library("libcuda", directory=LIBRARY_DIRECTORY_32, m32=True)
    host.ldconfig()
    assert {(library.path, library.elf_class, library.machine) for library in libcudas(host)} == {
        (host.library("libcuda"), 64, "EM_X86_64"),
        (path, 32, "EM_386"),
    }


def test_links_are_followed_as_the_host_would(host: FakeHost) -> None:
    """Absolute links, as Debian's alternatives are, lead below the root and never to this machine's own files."""
    real = host.root / "usr/lib/nvidia/current/libcuda.so.535.104.05"
    real.parent.mkdir(parents=True)
    host.library("libcuda").rename(real)
    link = host.root / LIBRARY_DIRECTORY / "libcuda.so.1"
    link.unlink()
    link.symlink_to("/etc/alternatives/libcuda")
    (host.root / "etc/alternatives").mkdir()
    (host.root / "etc/alternatives/libcuda").symlink_to("/lib/nvidia/../nvidia/current/libcuda.so.535.104.05")
    host.ldconfig()
    assert [library.path for library in libcudas(host)] == [real]

    files = HostFiles(host.root)
    (host.root / "etc/out").symlink_to("../../../../../etc/hostname")
    (host.root / "etc/circle").symlink_to("circle")
    (host.root / "etc/passwd").symlink_to("/etc/passwd")
    assert files.resolve("/etc/out") is None
    assert files.resolve("/etc/circle") is None
    assert files.resolve("/etc/passwd") is None
    assert files.resolve("/usr/../../../usr/bin") == host.root / "usr/bin"
    assert files.resolve("/etc/\0") is None


def test_only_the_hosts_usr_may_be_mounted(host: FakeHost) -> None:
    """Paths below /lib lead into /usr, where a current system has them, although the host's link is not there."""
    host.ldconfig()
    (host.root / "lib").unlink()
    files = HostFiles(host.root)
    assert files.file("/lib/x86_64-linux-gnu/libcuda.so.535.104.05") == host.library("libcuda")
    assert files.file("/bin/nvidia-smi") == host.root / "usr/bin/nvidia-smi"
    assert files.file("/etc/lib") is None


def test_a_program_must_be_an_executable_file(host: FakeHost) -> None:
    """A directory or a text of that name is none."""
    (host.root / "usr/bin/nvidia-debugdump").mkdir()
    host.add_program("nvidia-persistenced", mode=0o644)
    volume = host.volume(binaries=["nvidia-debugdump", "nvidia-persistenced", "nvidia-smi"])
    assert list(DriverLibraries(host.root).find(volume).programs) == ["nvidia-smi"]


def test_the_control_library_and_gpu_client_are_read(host: FakeHost) -> None:
    """A dynamic program shows its loader."""
    found = read_control(host.control, host.client)
    assert (found.library.elf_class, found.client.path, found.client.interpreter) == (64, host.client, "")
    dynamic = compile_program(host.root.parent / "dynamic", "-nostartfiles", "-Wl,-e,which_library")
    assert read_control(host.control, dynamic).client.interpreter.startswith("/lib")


@pytest.mark.parametrize("setting", ["control_library", "gpu_client"])
def test_what_is_neither_names_the_path_and_the_setting(host: FakeHost, setting: str) -> None:
    """A missing file, a directory, a text; a program without the right to be executed."""
    locked = compile_program(host.root.parent / "locked")
    locked.chmod(0o644)
    wrong = [host.root / "missing", host.root, host.add_program("gpu-client")]
    for path in [*wrong, locked] if setting == "gpu_client" else wrong:
        both = (path, host.client) if setting == "control_library" else (host.control, path)
        with pytest.raises(StartupError, match=rf"driver_volume\.{setting}") as caught:
            read_control(*both)
        assert str(path) in str(caught.value)


def test_soname_and_class_come_from_the_file(short_dir: Path) -> None:
    """A library without a soname has an empty one; one that is a path would become the name of a link."""
    with_soname = read_elf(compile_library(short_dir / "a.so", "liba.so.7"))
    assert (with_soname.soname, with_soname.elf_class) == ("liba.so.7", 64)
    assert read_elf(compile_library(short_dir / "b.so", None)).soname == ""
    for soname in ("../../etc/x", "/etc/x", ".."):
        with pytest.raises(Corrupt, match="soname"):
            read_elf(compile_library(short_dir / "a.so", soname))


def test_what_is_no_shared_object_is_corrupt_and_what_is_missing_not_found(short_dir: Path) -> None:
    """Texts, empty files and cut-off libraries end in the one error for them."""
    whole = compile_library(short_dir / "a.so", "liba.so.7").read_bytes()
    path = short_dir / "b.so"
    # Its program headers, of 56 bytes each, follow the header: how many there are depends on the processor.
    cut = whole[:64] + b"\xff" * (struct.unpack_from("<H", whole, 56)[0] * 56 // 2)
    for content in (b"", b"GROUP ( libc.so.6 )", b"\x7fELF", whole[:40], cut):
        path.write_bytes(content)
        with pytest.raises(Corrupt, match=str(path)):
            read_elf(path)
    for missing in (short_dir / "c.so", short_dir):
        with pytest.raises(NotFound):
            read_elf(missing)


@settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_damaged_library_is_read_or_corrupt(short_dir: Path, data: st.DataObject) -> None:
    """Whatever bytes of the ELF, program or section headers are changed."""
    whole = short_dir / "a.so"
    if not whole.exists():
        compile_library(whole, "liba.so.7")
    content = bytearray(whole.read_bytes())
    (sections,) = struct.unpack_from("<Q", content, 40)
    places = st.integers(0, 0x300) | st.integers(min(sections, len(content) - 1), len(content) - 1)
    for _ in range(data.draw(st.integers(1, 6))):
        content[data.draw(places)] = data.draw(st.integers(0, 255))
    path = short_dir / "b.so"
    path.write_bytes(content)
    try:
        elf = read_elf(path)
    except Corrupt:
        return
    assert elf.elf_class in (32, 64)
    assert os.sep not in elf.soname
