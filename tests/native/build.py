"""Builds what the isolation tests run: the fake driver, and the real isolation libraries from source.

| what | from | by |
|---|---|---|
| fake driver | tests/native/fake_driver, NVIDIA's headers | cc |
| HAMi-core | $HAMI_CORE_SOURCE | cc, with the options of its build.sh |
| vcuda-control | $VCUDA_SOURCE | cc |
| vgpu-manager's library | $VGPU_MANAGER_SOURCE | cc |
| gpu-client | native/gpu-client.c, native/vdevice.c | cc |

A source is a directory, a tar archive, or a git URL with `#` and a revision; by default the archive in the folder
shared/third-party next to the checkout, where there is one. The headers cuda.h and nvml.h are those of NVIDIA's
wheels, in this Python's environment, or in $CUDA_INCLUDE. What is missing raises CannotBuildError with the
reason.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from native.build_gpushare import CannotBuildError as CannotBuildError  # noqa: PLC0414 - exported on
from native.build_gpushare import run
from tests.native.fake_driver.generate import generate
from tests.native.sources import opened_source

NATIVE = Path(__file__).parent
FAKE_DRIVER = NATIVE / "fake_driver"

_ARCHIVES = NATIVE.parents[2] / "shared" / "third-party"
_SOURCES = {
    "HAMI_CORE_SOURCE": "HAMi-core-*.tar.*",
    "VCUDA_SOURCE": "vcuda-controller-*.tar.*",
    "VGPU_MANAGER_SOURCE": "vgpu-manager-*.tar.*",
    "HAMI_CORE_TESTS_SOURCE": "tests-of-HAMi-core-*.tar.*",
}
_WARNINGS = ("-Wall", "-Wextra", "-Werror")
_FOREIGN_LIBRARY = ("-O2", "-g", "-w", "-D_GNU_SOURCE", "-shared", "-fPIC", "-static-libgcc")
_VCUDA_FILES = ("hijack_call.c", "cuda_originals.c", "nvml_entry.c", "loader.c", "register.c")
_HAMI_CORE_CONFIG = """\
/* What HAMi-core's CMake writes from its build.sh. */
#define MULTIPROCESS_LIMIT_ENABLE
#define DLSYM_HOOK_ENABLE
#define HOOK_MEMINFO_ENABLE
#define HOOK_NVML_ENABLE
extern size_t GIT_HASH_unknown;
extern size_t GIT_BRANCH_unknown;
"""
_VDPAU = """\
/* The four types that vcuda-control's declarations need of libvdpau-dev's header. Source: VDPAU API, vdpau.h. */
#include <stdint.h>
typedef uint32_t VdpDevice, VdpVideoSurface, VdpOutputSurface, VdpFuncId;
typedef int VdpStatus;
typedef VdpStatus VdpGetProcAddress(VdpDevice device, VdpFuncId function, void **address);
"""


def library_source(variable: str) -> str:
    """What an environment variable names, or the archive next to the checkout. Raises CannotBuildError."""
    if given := os.environ.get(variable):
        return given
    found = sorted(_ARCHIVES.glob(_SOURCES[variable]))
    if not found:
        raise CannotBuildError(f"no source: set {variable} to a directory, a tar archive or a git URL with #REVISION")
    return str(found[-1])


def cuda_include() -> Path:
    """The directory with cuda.h and nvml.h. Raises CannotBuildError."""
    found = [Path(given)] if (given := os.environ.get("CUDA_INCLUDE")) else []
    found += [Path(entry) / "nvidia" / "cu13" / "include" for entry in sys.path]
    for directory in found:
        if (directory / "cuda.h").exists() and (directory / "nvml.h").exists():
            return directory
    raise CannotBuildError(
        "no cuda.h and nvml.h: install the wheels nvidia-cuda-runtime and nvidia-nvml-dev, or set CUDA_INCLUDE"
    )


def _compiler() -> str:
    if (compiler := shutil.which("cc")) is None:
        raise CannotBuildError("no C compiler (cc)")
    return compiler


def build_fake_driver(directory: Path, lacks: Sequence[str] = ()) -> Path:
    """libcuda.so.1 and libnvidia-ml.so.1 in `directory`, which is returned. `lacks`: names that they do not export, as an
    older driver does not.

    With a source of an isolation library at hand, the functions that it looks for are known too. Raises
    CannotBuildError.
    """
    include, compiler = cuda_include(), _compiler()
    directory.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        generate(include, directory, [stack.enter_context(opened_source(source)) for source in _known_sources()])
    common = [str(FAKE_DRIVER / name) for name in ("machine.c", "slices.c", "rest.c")]
    for stem, source in (("libcuda", "cuda"), ("libnvidia-ml", "nvml")):
        rest = directory / f"{source}_rest.c"
        files = [str(FAKE_DRIVER / f"{source}.c"), *common, str(rest)]
        flags = [*_WARNINGS, "-O1", "-g", "-shared", "-fPIC", "-pthread", f"-I{include}", f"-I{FAKE_DRIVER}"]
        # As NVIDIA's: its own table and its own calls are bound to its own functions, whatever is preloaded before it.
        flags += ["-Wl,-Bsymbolic"]
        # A program that links to both libraries must not mix their functions; and a stub's type is not its function's.
        exports = directory / "exports.map"
        exports.write_text(
            f"{{ global: cu*; nvml*; local: {' '.join(f'{name};' for name in lacks)} *; }};\n", encoding="utf-8"
        )
        flags += [f"-Wl,--version-script={exports}", "-Wno-builtin-declaration-mismatch"]
        library = directory / f"{stem}.so"
        run([compiler, *flags, f"-Wl,-soname,{stem}.so.1", "-o", str(library), *files])
        rest.unlink()
        exports.unlink()
        link = directory / f"{stem}.so.1"
        link.unlink(missing_ok=True)
        link.symlink_to(library.name)
    return directory


def _known_sources() -> list[str]:
    found: list[str] = []
    for variable in ("HAMI_CORE_SOURCE", "VCUDA_SOURCE", "VGPU_MANAGER_SOURCE"):
        try:
            found.append(library_source(variable))
        except CannotBuildError:
            continue
    return found


def build_vgpu(output: Path) -> Path:
    """HAMi-core's libvgpu.so, for the table of libraries. Raises CannotBuildError."""
    with opened_source(library_source("HAMI_CORE_SOURCE")) as source:
        files = [path for path in sorted((source / "src").rglob("*.c")) if path.name != "shrreg_tool.c"]
        files = [path for path in files if "test" not in path.relative_to(source).parts]
        if not files:
            raise CannotBuildError(f"{source} has no src/**/*.c: it is not HAMi-core's source")
        with tempfile.TemporaryDirectory(prefix="gpushare-hami-core-") as scratch:  # not next to what may be packed
            (Path(scratch) / "static_config.h").write_text(_HAMI_CORE_CONFIG, encoding="utf-8")
            includes = [f"-I{path}" for path in (source / "src", scratch, cuda_include())]
            flags = ["-shared", "-fPIC", "-O2", "-w", "-D_GNU_SOURCE", *includes]
            run([_compiler(), *flags, *map(str, files), "-o", str(output), "-lpthread", "-ldl", "-lrt"])
    return output


def build_gpu_client(output: Path) -> Path:
    """The static program that vcuda-control runs to register, with the machine's own C library; the image's is built with
    musl. Raises CannotBuildError."""
    flags = ["-static", "-O2", "-std=c11", "-D_GNU_SOURCE", *_WARNINGS]
    sources = [str(NATIVE.parents[1] / "native" / name) for name in ("gpu-client.c", "vdevice.c")]
    run([_compiler(), *flags, "-o", str(output), *sources])
    return output


def build_vcuda(output: Path) -> Path:
    """vcuda-control's library, with the options of its CMakeLists.txt. Raises CannotBuildError."""
    compiler = _compiler()
    with opened_source(library_source("VCUDA_SOURCE")) as source:
        missing = [name for name in _VCUDA_FILES if not (source / "src" / name).exists()]
        if missing:
            raise CannotBuildError(f"{source} has no src/{missing[0]}: it is not vcuda-controller's source")
        header = output.parent / "vdpau" / "vdpau.h"
        header.parent.mkdir(parents=True, exist_ok=True)
        header.write_text(_VDPAU, encoding="utf-8")
        flags = [*_FOREIGN_LIBRARY, f"-I{source}", f"-I{output.parent}", f"-fmacro-prefix-map={source}/="]
        files = [str(source / "src" / name) for name in _VCUDA_FILES]
        run([compiler, *flags, "-o", str(output), *files, "-ldl", "-lpthread"])
        shutil.rmtree(header.parent)
    return output


def build_vgpu_manager(output: Path) -> Path:
    """libvgpu-control.so, with the options of its CMakeLists.txt. Raises CannotBuildError."""
    compiler = _compiler()
    with opened_source(library_source("VGPU_MANAGER_SOURCE")) as source:
        library = source / "library"
        files = sorted(map(str, (library / "src").glob("*.c")))
        if not files:
            raise CannotBuildError(f"{source} has no library/src/*.c: it is not vgpu-manager's source")
        script = library / "deploy" / "libvgpu-control.exports.ld"
        flags = [*_FOREIGN_LIBRARY, "-fno-semantic-interposition", f"-I{library}", f"-Wl,--version-script={script}"]
        run([compiler, *flags, "-o", str(output), *files, "-ldl", "-lpthread"])
    return output


def build_program(output: Path, source: Path, flags: Sequence[str] = ()) -> Path:
    """One C file against NVIDIA's headers. Raises CannotBuildError."""
    own = [*_WARNINGS, "-O1", "-g", "-pthread", f"-I{cuda_include()}", "-o", str(output), str(source)]
    run([_compiler(), *own, *flags])
    return output


def install_driver(built: Path, directory: Path, version: str) -> Path:
    """The fake driver's libraries as a package of driver `version` names and links them; returns the directory."""
    directory.mkdir(parents=True)
    for stem in ("libcuda", "libnvidia-ml"):
        name = f"{stem}.so.{version}"
        shutil.copyfile(built / f"{stem}.so", directory / name)
        for link, target in ((f"{stem}.so.1", name), (f"{stem}.so", f"{stem}.so.1")):
            (directory / link).symlink_to(target)
    return directory


def proc_version(kernel_module: str, version: str) -> str:
    """/proc/driver/nvidia/version as the kernel module `proprietary` or `open` writes it."""
    name = {"proprietary": "UNIX x86_64 Kernel Module  ", "open": "UNIX Open Kernel Module for x86_64  "}[kernel_module]
    return f"NVRM version: NVIDIA {name}{version}  Tue Sep 23 10:11:16 UTC 2025\nGCC version:  gcc version 12.2.0\n"
