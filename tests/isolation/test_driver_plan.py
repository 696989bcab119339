"""What goes where in a driver volume."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from msgspec.structs import replace

from gpushare_agent.agent.delivery.volume_plan import (
    CONTROLLED,
    Control,
    DriverVolume,
    ElfClass,
    FoundLibrary,
    FoundProgram,
    HostDriver,
    VolumeName,
    VolumePlan,
    choose_libraries,
    driver_version,
    driver_version_text,
    plan_volume,
)
from gpushare_agent.core.model.errors import StartupError

BASE = Path("/etc/gpu-manager/vdriver")


def library(
    name: str, soname: str, elf_class: ElfClass = 64, *, found_as: str = "", machine: str = "", baseline: bool = True
) -> FoundLibrary:
    return FoundLibrary(
        path=Path("/usr/lib") / str(elf_class) / name,
        found_as=found_as or soname,
        elf_class=elf_class,
        machine=machine or ("EM_X86_64" if elf_class == 64 else "EM_386"),
        soname=soname,
        is_baseline=baseline,
    )


CLIENT = FoundProgram(path=Path("/opt/gpu-client"), machine="EM_X86_64")
CONTROL = Control(library=library("libcuda-control.so", "libcuda-control.so"), client=CLIENT)
DRIVER = (
    library("libcuda.so.535.104.05", "libcuda.so.1"),
    library("libcuda.so.535.104.05", "libcuda.so.1", 32),
    library("libnvidia-ml.so.535.104.05", "libnvidia-ml.so.1"),
    library("libnvcuvid.so.535.104.05", "libnvcuvid.so.1"),
    library("libnvcuvid.so.535.104.05", "libnvcuvid.so.1", 32),
)
LISTED = ("libcuda.so", "libnvidia-ml.so", "libnvcuvid.so")


def planned(
    name: VolumeName,
    libraries: tuple[FoundLibrary, ...] = DRIVER,
    *,
    listed: tuple[str, ...] = LISTED,
    control: Control | None = CONTROL,
    binaries: tuple[str, ...] = ("nvidia-smi",),
    programs: dict[str, Path] | None = None,
) -> VolumePlan:
    volume = DriverVolume(name=name, base=BASE, binaries=binaries, libraries=listed)
    host = HostDriver(
        libraries=libraries,
        programs={"nvidia-smi": Path("/usr/bin/nvidia-smi")} if programs is None else programs,
        library_places=("/etc/ld.so.cache", "/usr/lib64"),
        program_places=("/usr/bin",),
    )
    return plan_volume(volume, host, "x86_64", control)


def refused(*args: object, **more: object) -> str:
    with pytest.raises(StartupError) as caught:
        planned(*args, **more)  # type: ignore[arg-type]
    return str(caught.value)


@pytest.mark.parametrize(
    ("name", "version"),
    [
        ("libcuda.so.535.104.05", (535, 104, 5)),
        ("libcuda.so.440.33", (440, 33)),
        ("libcuda.so.1", None),
        ("libcuda.so.1.1", None),
        ("libcuda.so.1.1.0", None),
        ("libcuda.so", None),
        ("libcuda.so.535.104.05.bak", None),
        ("libcuda.so.535.104.05\n", None),
        ("libcudart.so.12.2", None),
        ("libnvidia-ml.so.535.104.05", None),
        ("libcuda.so.535.104.٥", None),
    ],
)
def test_the_driver_version_is_in_the_full_name_of_libcuda(name: str, version: tuple[int, ...] | None) -> None:
    """Only libcuda.so.<major>.<minor>[.<patch>] has it."""
    assert driver_version(name) == version
    assert driver_version_text([name]) == ("" if version is None else name.removeprefix("libcuda.so."))


def test_the_version_for_a_person_is_the_highest_with_its_zeros() -> None:
    assert driver_version_text(["libcuda.so.535.54.03", "libcuda.so.535.104.05", "libcuda.so.1"]) == "535.104.05"


def test_the_volume_for_whole_gpus_is_as_the_driver_has_it() -> None:
    """Files by ELF class, a link for the soname, and a bare one to that."""
    made = planned(VolumeName.ORIGIN)
    assert {target: str(source) for target, source in made.files.items()} == {
        "bin/nvidia-smi": "/usr/bin/nvidia-smi",
        "lib/libcuda.so.535.104.05": "/usr/lib/32/libcuda.so.535.104.05",
        "lib/libnvcuvid.so.535.104.05": "/usr/lib/32/libnvcuvid.so.535.104.05",
        "lib64/libcuda.so.535.104.05": "/usr/lib/64/libcuda.so.535.104.05",
        "lib64/libnvcuvid.so.535.104.05": "/usr/lib/64/libnvcuvid.so.535.104.05",
        "lib64/libnvidia-ml.so.535.104.05": "/usr/lib/64/libnvidia-ml.so.535.104.05",
    }
    links = dict(made.links)
    assert links["lib64/libcuda.so.1"] == "libcuda.so.535.104.05"
    assert links["lib64/libcuda.so"] == "libcuda.so.1"
    assert links["lib/libcuda.so.1"] == "libcuda.so.535.104.05"
    assert len(links) == 10
    assert made.driver_version == (535, 104, 5)
    assert made.warnings == ()


def test_a_share_gets_no_libcuda_that_nothing_controls() -> None:
    """The 32-bit libcuda is left out next to a 64-bit control library, with a warning; other 32-bit libraries stay."""
    made = planned(VolumeName.SHARED)
    targets = {*made.files, *made.links}
    assert not any(target.startswith(("lib/libcuda", "lib/libnvidia-ml")) for target in targets)
    assert "lib/libnvcuvid.so.1" in targets
    (warning,) = made.warnings
    assert "/usr/lib/32/libcuda.so.535.104.05" in warning


OF_AARCH64 = replace(CONTROL, client=replace(CLIENT, machine="EM_AARCH64"))
OF_32_BITS = replace(CONTROL, library=library("c", "c", 32))


@pytest.mark.parametrize(
    ("name", "given", "text"),
    [
        pytest.param(VolumeName.ORIGIN, {"libraries": DRIVER[2:]}, "/etc/ld.so.cache, /usr/lib64", id="no libcuda"),
        (VolumeName.ORIGIN, {"libraries": DRIVER[1:]}, "(only the 32-bit /usr/lib/32/libcuda.so.535.104.05"),
        pytest.param(VolumeName.ORIGIN, {"listed": LISTED[1:2]}, "volume.conf", id="it lists no libcuda"),
        pytest.param(VolumeName.SHARED, {"control": OF_32_BITS}, "32-bit", id="it would limit nothing"),
        (VolumeName.SHARED, {"control": None}, "control_library"),
        pytest.param(VolumeName.SHARED, {"control": OF_AARCH64}, "driver_volume.gpu_client", id="it would not run"),
    ],
)
def test_a_volume_that_would_not_serve_is_refused(name: VolumeName, given: dict[str, object], text: str) -> None:
    assert text in refused(name, **given)


def test_a_missing_library_or_program_is_a_warning_that_names_it() -> None:
    """The rest is still of use."""
    absent = ("libnvidia-opencl.so", "libnvoptix.so", "libnvidia-cfg.so")
    made = planned(VolumeName.ORIGIN, listed=(*LISTED, *absent), programs={})
    assert len(made.warnings) == 2, "one line for all libraries, however many lack"
    assert "libnvidia-opencl.so, libnvoptix.so or libnvidia-cfg.so was found" in made.warnings[0]
    assert "nvidia-smi" in made.warnings[1]
    assert "/usr/bin" in made.warnings[1]


def test_files_of_two_drivers_in_one_volume_are_a_warning() -> None:
    """One line that names them; libraries with versions of their own (libGL.so.1.7.0) say nothing of the driver."""
    newer = tuple(library(f"libnvidia-x{n}.so.550.54.14", f"libnvidia-x{n}.so.1") for n in range(5))
    others = (*newer, library("libnvidia-egl-wayland.so.1.1.13", "libnvidia-egl-wayland.so.1"))
    listed = (*LISTED, "libnvidia-x", "libnvidia-egl-wayland.so")
    for name in VolumeName:
        text = "\n".join(planned(name, (*DRIVER[:1], *DRIVER[2:4], *others), listed=listed).warnings)
        assert text.startswith(f"volume {name}: libcuda is of driver 535.104.05, but libnvidia-x0.so.550.54.14, ")
        assert "libnvidia-x2.so.550.54.14 and 2 more of another" in text
        assert "wayland" not in text
        assert text.count("\n") == 0
    assert planned(VolumeName.ORIGIN).warnings == ()


def test_the_volume_for_shares_has_our_gpu_client_whatever_the_host_has() -> None:
    """Listed or not, and without a warning where the host lacks it. The volume for whole GPUs has the host's."""
    for listed in ((), ("gpu-client",)):
        for programs in ({}, {"gpu-client": Path("/usr/bin/gpu-client")}):
            made = planned(
                VolumeName.SHARED, DRIVER[2:3] + DRIVER[:1], binaries=listed, programs=programs, listed=LISTED[:2]
            )
            assert made.files["bin/gpu-client"] == CLIENT.path
            assert made.warnings == ()
    assert "bin/gpu-client" not in planned(VolumeName.ORIGIN).files


def test_a_dynamic_gpu_client_is_a_warning() -> None:
    """It would run in some containers."""
    control = replace(CONTROL, client=replace(CLIENT, interpreter="/lib64/ld-linux-x86-64.so.2"))
    assert any("/lib64/ld-linux-x86-64.so.2" in text for text in planned(VolumeName.SHARED, control=control).warnings)


def test_a_libcuda_without_a_version_cannot_stand_behind_the_control_library() -> None:
    """Its own name is the one that the control library must have."""
    bare = (library("libcuda.so.1", "libcuda.so.1"),)
    assert "libcuda.so.1 has the name that programs load" in refused(VolumeName.SHARED, bare)
    made = planned(VolumeName.ORIGIN, bare, listed=("libcuda.so",))
    assert made.driver_version is None
    assert "NVML" in made.warnings[0]


def test_of_several_libraries_with_one_soname_the_loaders_one_is_taken() -> None:
    """That found under its soname, then a baseline build, then the highest version; other machines' never."""
    old = library("libcuda.so.470.82", "libcuda.so.1")
    new = library("libcuda.so.535.104.05", "libcuda.so.1", found_as="libcuda.so.535.104.05")
    foreign = library("libcuda.so.999.1", "libcuda.so.1", machine="EM_AARCH64")
    special = library("libcuda.so.999.2", "libcuda.so.1", baseline=False)
    assert choose_libraries([new, foreign, special, old], ["libcuda.so"], "x86_64") == (old,)
    newer = library("libcuda.so.1000.1", "libcuda.so.1")
    assert choose_libraries([old, newer], ["libcuda.so"], "x86_64") == (newer,)
    assert choose_libraries([old], ["libcudart"], "x86_64") == ()


NAMES = st.sampled_from(["libcuda", "libnvidia-ml", "libnvcuvid", "libGL"])
LIBRARIES = st.builds(
    lambda stem, suffix, soname, elf_class: library(f"{stem}.so{suffix}", soname and f"{stem}.so{soname}", elf_class),
    NAMES,
    st.sampled_from(["", ".1", ".2", ".470.82", ".535.104.05"]),
    st.sampled_from(["", ".1", ".2"]),
    st.sampled_from([32, 64]),
)


@example(libraries=[library("libnvidia-ml.so.1", "libnvidia-ml.so.2")], name=VolumeName.SHARED)
@given(libraries=st.lists(LIBRARIES, max_size=12), name=st.sampled_from(VolumeName))
def test_every_plan_can_be_laid_out_and_gives_shares_no_way_around(
    libraries: list[FoundLibrary], name: VolumeName
) -> None:
    """No target is given twice, every link leads to something, and what programs load is the control library."""
    try:
        made = planned(name, (library("libcuda.so.535.1", "libcuda.so.1"), *libraries), listed=("lib",))
    except StartupError:
        return
    targets = [*made.files, *made.links]
    assert len(targets) == len(set(targets))
    for target, points_to in made.links.items():
        assert f"{target.partition('/')[0]}/{points_to}" in targets
    if name is VolumeName.SHARED:
        for target, points_to in made.links.items():
            if target.partition("/")[2].startswith(CONTROLLED):
                assert points_to == "libcuda-control.so"
        for target in made.files:
            assert target.partition("/")[2] not in {"libcuda.so", "libcuda.so.1", "libnvidia-ml.so.1"}
