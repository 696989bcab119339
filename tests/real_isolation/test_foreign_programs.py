"""The C programs by which HAMi-core and vgpu-manager test their own libraries, under libgpushare on the fake driver.

Built from the sources next to the checkout (tests/native/build.py) and never kept. Those written for CUDA's runtime, and
those in CUDA C++, are left out: the runtime asks the driver for tables that no header describes, and there is no nvcc here.
Each must pass in a share with room for it; in one that has hardly more than a context, those that take more must be refused.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import pytest

from native.build_gpushare import CannotBuildError, run
from tests.gpushare.support_gpushare import Container, Machine, build_for_gpushare
from tests.native.build import cuda_include, library_source
from tests.native.sources import opened_source

pytestmark = [pytest.mark.isolation, pytest.mark.suites]

PASSING = {
    "HAMi-core": ("test_alloc", "test_alloc_host", "test_alloc_managed", "test_alloc_pitch", "test_create_3d_array",
                  "test_create_array", "test_host_alloc", "test_host_register", "test_mem_create"),
    "vgpu-manager": ("test_alloc", "test_alloc_host", "test_alloc_managed", "test_alloc_pitch", "test_create_3d_array",
                     "test_create_array", "test_cuda13_abi", "test_dlsym_rtld_next", "test_getproc_routing",
                     "test_host_register", "test_mem_create", "test_alloc_pool_async"),
}  # fmt: skip
NOT_FOR_OURS = {
    "test_alloc_hold": "HAMi-core: holds memory until it is killed",
    "test_alloc_async_accounting": "vgpu-manager: reads its library's own file of memory to come",
    "test_dlsym_hijack": "vgpu-manager: reads its library's log of functions that it has no hook for",
    "test_config_seqlock": "vgpu-manager: of its library's file alone; no library is called",
    "test_sm_node_shared": "vgpu-manager: of its library's file alone; no library is called",
    "test_vmem_region_concurrency": "vgpu-manager: of its library's file alone; no library is called",
}
ROOM_MIB, HARDLY_MIB = 16384, 340
TAKE_MORE = {"test_alloc", "test_alloc_managed", "test_mem_create", "test_cuda13_abi"}
"""Programs of both projects that take more than the 40 MiB that the context leaves of the small share, the last one a second
context; the others take less, or the host's memory."""
REFUSED = r"(:[0-9]+: 2\n|cuMemCreate returned 2 |`test(_one)?\(|-> 2 \()"
"""CUDA_ERROR_OUT_OF_MEMORY as each of them shows it: with its line, in a sentence, by an assertion, next to the call."""
IS_SKIPPED = 77
"""A program's code where a part of it did not run: of test_alloc_pool_async what concerns memory above the GPU's."""
_RUNTIME = "#include <cuda.h>\n#include <stdint.h>\n"
"""In the place of cuda_runtime.h, of which these programs use nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Programs:
    """`includes` are where their headers lie."""

    folder: Path
    includes: tuple[Path, ...]


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("foreign")
    (directory / "include").mkdir()
    (directory / "include/cuda_runtime.h").write_text(_RUNTIME)
    return directory


@pytest.fixture(scope="module")
def machine(scratch: Path) -> Machine:
    try:
        built = build_for_gpushare(scratch)
    except CannotBuildError as error:
        pytest.skip(str(error))
    # Some look whether their own project's library is preloaded, by its name.
    (scratch / "libvgpu-control.so").write_bytes(built.library.read_bytes())
    return Machine(built, scratch, {})


@pytest.fixture(scope="module")
def projects() -> Iterator[dict[str, Programs]]:
    """Both; what is missing of one is the reason why neither is tested."""
    with ExitStack() as stack:
        names = ("HAMI_CORE_TESTS_SOURCE", "HAMI_CORE_SOURCE", "VGPU_MANAGER_SOURCE")
        try:
            tests, library, manager = (stack.enter_context(opened_source(library_source(name))) for name in names)
        except CannotBuildError as error:
            pytest.skip(str(error))
        yield {
            "HAMi-core": Programs(folder=tests / "test", includes=(library / "src",)),
            "vgpu-manager": Programs(folder=manager / "library/test", includes=()),
        }


def ended(
    machine: Machine, scratch: Path, programs: Programs, name: str, memory_mib: int
) -> subprocess.CompletedProcess[str]:
    where = f"{programs.folder.parent.name}-{name}-{memory_mib}"
    share: Container = machine.container(where, memory_mib=memory_mib, cores=9000)
    program, driver = share.directory / name, machine.built.driver
    includes = [f"-I{path}" for path in (scratch / "include", cuda_include(), *programs.includes)]
    command = ["cc", "-w", "-O1", "-g", "-pthread", *includes, "-o", str(program), str(programs.folder / f"{name}.c")]
    run([*command, f"-L{driver}", "-Wl,--no-as-needed", "-lcuda", "-lnvidia-ml", "-ldl", "-lrt"])
    # What concerns vgpu-manager's memory above the GPU's leaves itself out under another library's name.
    library = machine.built.library if name == "test_alloc_pool_async" else scratch / "libvgpu-control.so"
    return subprocess.run(
        [program], cwd=share.directory, env=machine.env([library]), capture_output=True, text=True, timeout=60,
        check=False, errors="replace",
    )  # fmt: skip


@pytest.mark.parametrize("memory_mib", [ROOM_MIB, HARDLY_MIB])
@pytest.mark.parametrize(("project", "name"), [(project, name) for project, names in PASSING.items() for name in names])
def test_a_program_passes_where_it_has_room_and_is_refused_where_it_has_not(
    machine: Machine, scratch: Path, projects: dict[str, Programs], project: str, name: str, memory_mib: int
) -> None:
    done = ended(machine, scratch, projects[project], name, memory_mib)
    said = done.stdout[-500:] + done.stderr[-500:]
    if memory_mib == HARDLY_MIB and name in TAKE_MORE:
        assert done.returncode not in (0, IS_SKIPPED), said
        assert re.search(REFUSED, done.stdout + done.stderr), said
    else:
        assert done.returncode == (IS_SKIPPED if name == "test_alloc_pool_async" else 0), said
        assert "FAIL" not in done.stdout


def test_every_c_program_is_listed(projects: dict[str, Programs]) -> None:
    """One more in a newer source is looked at before it is left out."""
    found = {path.stem for one in projects.values() for path in one.folder.rglob("*.c")}
    of_runtime = {name for name in found if name.startswith("test_runtime_")}
    assert found - of_runtime == {*chain(*PASSING.values()), *NOT_FOR_OURS}
