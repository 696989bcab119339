"""libgpushare as a library: what it exports and needs, what it does to programs that have nothing to do with CUDA, and its
region under the compiler's sanitizers.
"""

from __future__ import annotations

import json
import mmap
import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest
from elftools.elf.elffile import ELFFile
from msgspec.structs import replace

from gpushare_agent.agent.isolation.gpushare.format import (
    CONFIG_BYTES,
    CONFIG_NAME,
    CORES_OF_GPU,
    MOST_SLOTS,
    GpuLimits,
    Observed,
    write_limits,
    write_observed,
)
from native.build_gpushare import SOURCES, TARGETS, CannotBuildError, build_gpushare, run
from native.gpushare import generate as generator
from native.gpushare.generate import HOOKS, HooksError, check, declared, generate, read_hooks, versions
from tests.gpushare.conftest import MachineWith
from tests.gpushare.support_gpushare import CONTEXT_MIB, GpushareBuilt, needs_own_programs, uuid_of, write_files
from tests.native.build import NATIVE, build_program, cuda_include

pytestmark = pytest.mark.isolation

GLIBC_OF_CENTOS_7, GLIBC_OF_DEBIAN_12 = (2, 17), (2, 36)
LIMIT_MIB, MODULES_MIB = 64, 16
MEANWHILE = ("-DMEANWHILE", "-Dmadvise=madvise_meanwhile")


@pytest.fixture(scope="module")
def include() -> Path:
    try:
        return cuda_include()
    except CannotBuildError as error:
        pytest.skip(str(error))


def check_library(library: Path, machine: str, most_glibc: tuple[int, ...]) -> None:
    """Its names, so that none goes before a program's own; what it needs of the C library; and that every kernel of its
    machine can map it: arm64's may have pages of 64 KiB."""
    page = 65536 if machine == "EM_AARCH64" else 4096
    with library.open("rb") as file:
        elf = ELFFile(file)
        assert (elf["e_machine"], elf.elfclass) == (machine, 64)
        symbols = elf.get_section_by_name(".dynsym").iter_symbols()
        exported = {symbol.name for symbol in symbols if symbol["st_shndx"] != "SHN_UNDEF" and symbol.name}
        needed = elf.get_section_by_name(".gnu.version_r").iter_versions()
        names = [version.name for _, versions in needed for version in versions]
        tags = {tag.entry.d_tag: getattr(tag, "soname", "") for tag in elf.get_section_by_name(".dynamic").iter_tags()}
        segments = [segment.header for segment in elf.iter_segments()]
    hooked = {name for name, kind in read_hooks(HOOKS.read_text()).items() if kind == "hook"}
    assert exported == hooked | {"dlmopen", "dlopen", "dlsym", "dlvsym", "__asan_default_options"}
    assert max(tuple(map(int, name.removeprefix("GLIBC_").split("."))) for name in names) <= most_glibc, names
    assert tags["DT_SONAME"] == "libgpushare.so" and "DT_TEXTREL" not in tags
    loaded = [one for one in segments if one.p_type == "PT_LOAD"]
    assert loaded and all(one.p_align >= page and (one.p_vaddr - one.p_offset) % page == 0 for one in loaded), loaded
    assert not [one for one in segments if one.p_flags & 3 == 3], "a segment that is written and executed"
    assert library.stat().st_size < 384 * 1024


@pytest.mark.parametrize(
    ("target", "machine"),
    [
        ("x86_64-linux-gnu.2.17", "EM_X86_64"),
        pytest.param("aarch64-linux-gnu.2.17", "EM_AARCH64", marks=pytest.mark.smoke),
    ],
)
def test_the_image_s_library_exports_its_hooks_and_needs_an_old_glibc(
    include: Path, target: str, machine: str, tmp_path: Path
) -> None:
    """On both processors, whichever this machine has."""
    pytest.importorskip("ziglang")
    library = tmp_path / "libgpushare.so"
    assert target in TARGETS
    build_gpushare(include, library, target=target)
    check_library(library, machine, GLIBC_OF_CENTOS_7)


@pytest.mark.smoke
@pytest.mark.parametrize("compiler", ["aarch64-linux-gnu-gcc", "clang --target=aarch64-linux-gnu"])
def test_debian_s_compilers_make_arm64_s_library_too(include: Path, compiler: str, tmp_path: Path) -> None:
    """Without a warning."""
    words = compiler.split()
    if missing := [name for name in (words[0], "aarch64-linux-gnu-gcc") if shutil.which(name) is None]:
        pytest.skip(f"{missing[0]} is not installed")
    build_gpushare(include, tmp_path / "libgpushare.so", compiler=words)
    check_library(tmp_path / "libgpushare.so", "EM_AARCH64", GLIBC_OF_DEBIAN_12)


def test_the_fake_driver_s_own_functions_are_not_bound_to_a_preloaded_library(gpushare: GpushareBuilt) -> None:
    """As NVIDIA's: neither its own calls nor its table for cuGetProcAddress."""
    for name in ("libcuda.so.1", "libnvidia-ml.so.1"):
        with (gpushare.driver / name).open("rb") as file:
            elf = ELFFile(file)
            symbols = elf.get_section_by_name(".dynsym")
            exported = {one.name for one in symbols.iter_symbols() if one["st_shndx"] != "SHN_UNDEF"}
            tables = filter(None, map(elf.get_section_by_name, (".rela.dyn", ".rela.plt")))
            bound = {symbols.get_symbol(one["r_info_sym"]).name for part in tables for one in part.iter_relocations()}
        assert len(exported) > 300 and not exported & bound


TAKES = (
    "cuMemAlloc_v3 cuLaunchKernelLater_ptsz cuMemCreateMany cuMemCreate2 cuGraphInstantiate_v9 cuFooAlloc cuMemGetNew"
)
GIVES = "cuMemFree_v3 cuPoolCompact cuCtxEnd cuMulticastUnbind_v2 cuMemPoolTrimTo_ptsz cuCheckpointProcessEvict cuMemGetFree"
CHANGES = (
    "cuCtxSetSomething cuCtxGetOrSetLimit cuStreamGetOrCreate cuMemcpy_v2 cuDeviceGetPoolReserve cuBar cuCtxGetOrInit"
)
TAKES_UNHEARD = (
    "cuMemGetBlock cuMemGetSlab_v2 cuGetArenaSpace cuMemGetOwnership cuMemPrefetchQuery cuGraphExecGetInstance"
)
TELLS_OF_MEMORY = (
    "nvmlDeviceGetMemoryInfo_v3 nvmlDeviceGetProcessDetails nvmlDeviceGetMemInfo nvmlDeviceGetFbUsage nvmlDeviceGetVram"
)


def test_every_function_is_classified(include: Path) -> None:
    """One more in a header, or one of hooks.in that no header has, and there is no library. What only tells is known by its
    sound."""
    kinds, names = read_hooks(HOOKS.read_text()), declared(include, ["cc"])
    check(kinds, names | {"cuStreamGetColour", "cuStreamGetColour_ptsz", "nvmlDeviceGetFanNoise"})
    for unknown in f"{TAKES} {TAKES_UNHEARD} {GIVES} {CHANGES} {TELLS_OF_MEMORY}".split():
        with pytest.raises(HooksError, match=f"nothing of {unknown}$"):
            check(kinds, names | {unknown})
    with pytest.raises(HooksError, match="cuMemAlloc_v2"):
        check(kinds, names - {"cuMemAlloc_v2"})


@pytest.mark.parametrize(
    ("name", "kind"), [("cuMemAlloc_v2", "call"), ("cuMemFree_v2", "pass"), ("cuCtxGetCurrent", "pass")]
)
def test_a_function_in_a_wrong_class_does_not_compile(
    include: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, kind: str
) -> None:
    """One that memory.c has a hook for, or calls."""
    hooks = tmp_path / "hooks.in"
    hooks.write_text(re.sub(rf" {name}\b", "", HOOKS.read_text(), count=1) + f"\n{kind} moved: {name}\n")
    monkeypatch.setattr(generator, "HOOKS", hooks)
    generate(include, tmp_path)
    includes = [f"-I{path}" for path in (SOURCES, tmp_path, include)]
    command = ["cc", "-std=c11", "-fsyntax-only", *includes, str(SOURCES / "memory.c")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode and name in done.stderr


def test_each_function_s_versions_are_the_headers(include: Path) -> None:
    """By them a hook is found where a driver answers with addresses that it does not export."""
    kinds = {name: kind for name, kind in read_hooks(HOOKS.read_text()).items() if kind in ("hook", "call")}
    known = versions(kinds, (include / "cudaTypedefs.h").read_text())
    expected = {
        "cuMemAlloc": ("cuMemAlloc", 2000, False),
        "cuMemAlloc_v2": ("cuMemAlloc", 3020, False),
        "cuMemAllocAsync_ptsz": ("cuMemAllocAsync", 11020, True),
        "cuCtxCreate_v4": ("cuCtxCreate", 12050, False),
        "cuGetProcAddress_v2": ("cuGetProcAddress", 12000, False),
        "cuGetProcAddress_v2_ptsz": ("cuGetProcAddress", 12000, True),
        "cuLaunchKernel_ptsz": ("cuLaunchKernel", 7000, True),
    }
    assert {name: known[name] for name in expected} == expected
    assert set(known) == set(kinds)


def run_preloaded(directory: Path, preload: Sequence[Path], *command: str) -> str:
    """The output of a program that has nothing to do with CUDA; it writes no error."""
    env = {"LD_PRELOAD": ":".join(map(str, preload)), "PATH": os.environ["PATH"]}
    done = subprocess.run(command, env=env, cwd=directory, capture_output=True, text=True, check=True)
    assert done.stderr == ""
    return done.stdout


@pytest.mark.smoke
@needs_own_programs
@pytest.mark.parametrize("is_first", [False, True])
def test_other_libraries_find_the_next_function(gpushare: GpushareBuilt, tmp_path: Path, is_first: bool) -> None:
    """RTLD_NEXT is behind the caller's library, not behind ours, wherever ours is loaded."""
    flags = ["-shared", "-fPIC", "-fno-builtin", "-ldl"]
    next_library = build_program(tmp_path / "libnext.so", NATIVE / "next_malloc.c", flags)
    both = [gpushare.library, next_library] if is_first else [next_library, gpushare.library]
    assert int(run_preloaded(tmp_path, both, "/bin/sh", "-c", "ls / | wc -l")) > 3


@pytest.mark.smoke
@needs_own_programs
def test_a_program_without_cuda_is_left_alone(gpushare: GpushareBuilt, tmp_path: Path) -> None:
    """No file of ours is opened, no thread started, no line written; here where the files are missing."""
    script = (
        "import ctypes, os; ctypes.CDLL(None).strlen; "
        "print(len(os.listdir('/proc/self/task')), open('/proc/self/maps').read().count('gpushare.config'))"
    )
    assert run_preloaded(tmp_path, [gpushare.library], "python3", "-c", script) == "1 0\n"


@needs_own_programs
def test_a_program_without_a_driver_gets_none(gpushare: GpushareBuilt, tmp_path: Path) -> None:
    """dlsym finds no function that is not there, though the library has a hook for it."""
    script = "import ctypes; print(hasattr(ctypes.CDLL(None), 'cuMemAlloc_v2'), hasattr(ctypes.CDLL(None), 'dlsym'))"
    assert run_preloaded(tmp_path, [gpushare.library], "python3", "-c", script) == "False True\n"


SANITIZERS = {"address": ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"], "thread": ["-fsanitize=thread"]}


def build_stress(include: Path, directory: Path, sanitizer: str, *more: str) -> Path:
    generate(include, directory)
    flags = [
        f"-I{SOURCES}",
        f"-I{directory}",
        '-DGPUSHARE_DIRECTORY="."',
        "-std=gnu11",
        str(SOURCES / "region.c"),
        *more,
    ]
    output = directory / "stress"
    try:
        return build_program(output, NATIVE / "region_stress.c", [*flags, *SANITIZERS.get(sanitizer, [])])
    except CannotBuildError as error:
        if not sanitizer:
            raise
        pytest.skip(f"no sanitizer: {error}")


def stress(program: Path, *words: str, limit_mib: int = LIMIT_MIB) -> dict[str, int]:
    write_files(program.parent, GpuLimits(uuid=uuid_of("0"), memory_bytes=limit_mib << 20))
    # TSan takes no randomized address space of newer kernels.
    command = ["setarch", os.uname().machine, "-R", str(program), *words]
    done = subprocess.run(command, cwd=program.parent, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0 and not re.search("Sanitizer|runtime error", done.stderr), done.stderr[-3000:]
    found: dict[str, int] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("sanitizer", SANITIZERS)
def test_the_region_is_exact_under_races_and_kills(include: Path, sanitizer: str, tmp_path: Path) -> None:
    """8 processes with 4 threads each: never above the limit, though it is reached; half of them are killed with memory,
    which is free afterwards."""
    found = stress(build_stress(include, tmp_path, sanitizer), "hammer", "8", "4", "2000")
    assert (found["above"], found["held"], found["failed"], found["ended"]) == (0, 0, 0, 8), found
    assert found["refused"] > 0 and found["most"] > (LIMIT_MIB << 20) * 3 // 4


@pytest.mark.parametrize("sanitizer", SANITIZERS)
def test_what_the_driver_has_beyond_the_slots_is_found_under_races(
    include: Path, sanitizer: str, tmp_path: Path
) -> None:
    """While 32 threads take and give without a pause an agent looks every millisecond. Never more is found than there is,
    and what is found is kept from the threads."""
    found = stress(build_stress(include, tmp_path, sanitizer), "observed", "8", "4", "20000")
    assert (found["above"], found["failed"], found["ended"], found["too_much"]) == (0, 0, 8, 0), found
    assert 0 < found["known"] <= MODULES_MIB << 20 and found["held"] == found["known"], found


def test_a_child_that_is_made_while_a_slot_is_taken_does_not_hold_it(include: Path, tmp_path: Path) -> None:
    """It lives on when its parent has died: the parent's memory is free all the same."""
    assert stress(build_stress(include, tmp_path, "", *MEANWHILE), "forks") == {"held": 0, "forked": 1}


def test_memory_that_is_being_counted_is_not_taken_for_what_was_observed(include: Path, tmp_path: Path) -> None:
    """A process is stopped when its context is in its slot and its question is not taken back: the agent may have looked
    before the driver made that."""
    assert stress(build_stress(include, tmp_path, ""), "stops") == {"stopped": 8 << 20, "went_on": 0}


@pytest.mark.parametrize("sanitizer", SANITIZERS)
def test_threads_of_a_program_spoil_nothing(
    gpushare: GpushareBuilt, include: Path, sanitizer: str, tmp_path: Path, machine_with: MachineWith
) -> None:
    """The whole library and all kinds of memory, in a share that is too small for all of them; at the end all is free."""
    flags, libraries = SANITIZERS[sanitizer], tmp_path / "lib"
    # Linked, and without a dlsym: a sanitizer looks for functions before it can bear instrumented ones.
    linked = ["-std=gnu11", "-Wl,--no-as-needed", f"-L{libraries}", "-lgpushare", f"-L{gpushare.driver}", "-lcuda"]
    renamed = ["-Ddlsym=unused_dlsym", "-Ddlvsym=unused_dlvsym"]
    try:
        build_gpushare(include, libraries / "libgpushare.so", directory=".", flags=[*flags, *renamed])
        program = build_program(tmp_path / "stress", NATIVE / "library_stress.c", [*linked, *flags])
    except CannotBuildError as error:
        pytest.skip(f"no sanitizer: {error}")
    machine = machine_with(kernel_us=1)
    share = machine.container(memory_mib=CONTEXT_MIB + 64, cores=9000)
    done = subprocess.run(
        ["setarch", os.uname().machine, "-R", str(program), "6", "2000"],
        env=machine.env() | {"LD_LIBRARY_PATH": f"{libraries}:{gpushare.driver}", "ASAN_OPTIONS": "detect_leaks=0"},
        cwd=share.directory,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0 and not re.search("Sanitizer|runtime error", done.stderr), done.stderr[-5000:]
    result = json.loads(done.stdout)
    assert result["failed"] == 0 and result["refused"] > 0, result
    assert result["after"] == result["before"] == 64 << 20, result


def test_of_4000_processes_at_once_as_many_have_memory_as_there_are_slots(include: Path, tmp_path: Path) -> None:
    """The others are refused it, and none is ended; behind them the slots are free."""
    found = stress(build_stress(include, tmp_path, ""), "crowd", "4000", limit_mib=MOST_SLOTS)
    assert found == {"with_memory": MOST_SLOTS, "failed": 0, "has_room": 1}


@pytest.mark.smoke
def test_what_the_agent_writes_is_read_whole(include: Path, tmp_path: Path) -> None:
    """The agent's own writer against the library's reader, which asks all the while and waits as long as a busy machine
    needs. That arm64 may see stores in another order is in tests/isolation/test_gpushare_format.py."""
    program = build_stress(include, tmp_path, "", "-DLONGEST_WRITE_NS=60000000000u")
    gpu = GpuLimits(uuid=uuid_of("0"), memory_bytes=2, cores=2)
    write_files(tmp_path, gpu)
    with (
        (tmp_path / CONFIG_NAME).open("r+b") as file,
        mmap.mmap(file.fileno(), CONFIG_BYTES) as config,
        memoryview(config) as view,
        subprocess.Popen([program, "watch"], cwd=tmp_path, stdout=subprocess.PIPE, text=True) as reader,
    ):
        try:
            assert reader.stdout and reader.stdout.readline() == "watches\n"
            for number in [*(1 + n % (CORES_OF_GPU - 1) for n in range(20_000)), 0]:
                ceiling = number if number % 2 else None
                one = replace(gpu, memory_bytes=number, cores=number, ceiling=ceiling)
                write_observed(view, 0, Observed(**dict.fromkeys(Observed.__struct_fields__, number)))
                write_limits(view, 0, one)
            output, _ = reader.communicate(timeout=60)
        finally:
            reader.kill()
    found = json.loads(output)
    assert found["torn"] == 0 and found["changes"] > 0, found


def test_a_config_of_any_bytes_is_read_or_refused(include: Path, tmp_path: Path) -> None:
    """Some are whole enough to be opened, none ends the program."""
    found = stress(build_stress(include, tmp_path, "address"), "fuzz", "300")
    assert found["failed"] == 0 and 10 < found["opened"] < 290, found


def test_the_build_says_what_is_wrong(tmp_path: Path) -> None:
    with pytest.raises(CannotBuildError):
        build_gpushare(tmp_path, tmp_path / "libgpushare.so")
    with pytest.raises(CannotBuildError, match="could not be run"):
        run([str(tmp_path / "no-compiler")])
