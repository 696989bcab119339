"""Gathers what a run needs into one folder: wheels, the isolations' libraries, the test program. Needs a network, no GPU.

    <folder>/manifest.json    what is in it, with SHA-256 sums, and what is missing and why
    <folder>/wheels/          the agent's dependencies, one version of each for all interpreters, and pip itself
    <folder>/lib/             libgpushare.so; libvgpu.so and libcuda-control.so from the sources of tests/native/build.py
    <folder>/cudart/          NVIDIA's libcudart.so of several versions of CUDA, out of their wheels
    <folder>/bin/             gpu-probe (probe.c), gpu-client (native/gpu-client.c)

The agent itself is not in it: it is that of the checkout, which goes along.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
import zipfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.gpu.sandbox import ROOT

MANIFEST = "manifest.json"
INTERPRETERS = ("3.11", "3.12", "3.13")
MOST_MIB = 60
"""Such a folder is to travel: what gets larger is refused."""

RUNTIMES = (
    "nvidia-cuda-runtime-cu11==11.8.*", "nvidia-cuda-runtime-cu12==12.4.*", "nvidia-cuda-runtime-cu12==12.8.*",
    "nvidia-cuda-runtime==13.*",
)  # fmt: skip
"""Of the CUDA runtime: the oldest that frameworks are built with, and those since then that ask otherwise."""

_FORMAT = 1
_SOURCE = Path(__file__).parent
_GLIBC = "2.17"
_TIMEOUT_S = 300
_WHEEL = re.compile(r"([A-Za-z0-9_.]+?)-([^-]+)-.*\.whl")
_PLATFORMS = ("manylinux_2_28", "manylinux_2_17", "manylinux2014", "manylinux_2_5", "manylinux1")


class CannotPack(Exception):  # noqa: N818 - said to a person as it stands
    """The folder cannot be made; the text says why."""


def tag_of(version: Sequence[Any]) -> str:
    """`3.12` of sys.version_info."""
    return f"{version[0]}.{version[1]}"


def pack(folder: Path, say: Callable[[str], None], *, has_wheels: bool = True) -> dict[str, Any]:
    """Makes the folder again and returns its manifest. Without wheels the machine's Python must have the agent's
    dependencies. Raises CannotPack."""
    if folder.exists() and any(folder.iterdir()) and not (folder / MANIFEST).exists():
        raise CannotPack(f"{folder} holds other files; name a new or empty folder")
    shutil.rmtree(folder, ignore_errors=True)
    for name in ("wheels", "lib", "bin", "cudart"):
        (folder / name).mkdir(parents=True)
    wheels = _download(folder / "wheels", say) if has_wheels else {}
    build_probe(folder / "bin" / "gpu-probe")
    _build_gpu_client(folder / "bin" / "gpu-client")
    missing = _build_libraries(folder, say) | _download_runtimes(folder / "cudart", say)
    manifest = manifest_of(folder, wheels, missing, commit=_commit(), machine=os.uname().machine)
    size_mib = sum(file["bytes"] for file in manifest["files"].values()) / (1 << 20)
    if size_mib > MOST_MIB:
        raise CannotPack(f"{folder} has {size_mib:.0f} MiB, more than {MOST_MIB}")
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n")
    say(f"{folder}: {len(manifest['files'])} files, {size_mib:.0f} MiB; missing: {', '.join(missing) or 'nothing'}")
    return manifest


def manifest_of(
    folder: Path, wheels: Mapping[str, str], missing: Mapping[str, str], *, commit: str, machine: str
) -> dict[str, Any]:
    """Every file of the folder with its size and sum, and what a run must know without opening one."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != MANIFEST)
    return {
        "format": _FORMAT,
        "machine": machine,
        "commit": commit,
        "interpreters": list(INTERPRETERS),
        "wheels": dict(sorted(wheels.items())),
        "libraries": sorted(path.name for path in paths if path.parent.name in ("lib", "bin", "cudart")),
        "missing": dict(sorted(missing.items())),
        "files": {
            str(path.relative_to(folder)): {
                "bytes": path.stat().st_size,
                "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
            }
            for path in paths
        },
    }


def _commit() -> str:
    try:
        return _run(["git", "-C", str(ROOT), "rev-parse", "HEAD"]).strip()
    except CannotPack:
        return "unknown"


# --- wheels ---


def _download(directory: Path, say: Callable[[str], None]) -> dict[str, str]:
    """The version of each distribution by name. The versions found for the first interpreter hold for the others."""
    requirements = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    versions: dict[str, str] = {}
    for interpreter in INTERPRETERS:
        say(f"wheels for Python {interpreter}")
        wanted = [f"{name}=={version}" for name, version in versions.items()] or [*requirements, "pip"]
        _run([
            sys.executable, "-m", "pip", "download", "--quiet", "--only-binary=:all:", "--implementation=cp",
            "--disable-pip-version-check", f"--python-version={interpreter}", "--dest", str(directory),
            *(f"--platform={platform}_{os.uname().machine}" for platform in _PLATFORMS), *wanted,
        ])  # fmt: skip
        versions = versions_of(path.name for path in directory.glob("*.whl"))
    return versions


def versions_of(names: Any) -> dict[str, str]:
    """Versions by distribution, of wheels' file names. Raises CannotPack where one comes in two versions."""
    versions: dict[str, str] = {}
    for name in sorted(names):
        match = _WHEEL.fullmatch(name)
        if match is None:
            raise CannotPack(f"{name} is not named as a wheel")
        distribution = match[1].replace("_", "-").lower()
        if versions.setdefault(distribution, match[2]) != match[2]:
            raise CannotPack(f"{distribution} comes in two versions, {versions[distribution]} and {match[2]}")
    return versions


def _download_runtimes(directory: Path, say: Callable[[str], None]) -> dict[str, str]:
    """The library alone, by its version: the wheels have headers too. By name why one could not be had."""
    missing: dict[str, str] = {}
    for wheel in RUNTIMES:
        say(f"wheel {wheel}")
        with tempfile.TemporaryDirectory(prefix="gsgpu-") as name:
            try:
                _run([
                    sys.executable, "-m", "pip", "download", "--quiet", "--only-binary=:all:", "--no-deps",
                    "--disable-pip-version-check", "--dest", name, wheel,
                ])  # fmt: skip
            except CannotPack as error:
                missing[wheel] = str(error)[-300:]
                continue
            [path] = Path(name).glob("*.whl")
            with zipfile.ZipFile(path) as archive:
                [library] = [entry for entry in archive.namelist() if re.search(r"/libcudart\.so\.[0-9.]+$", entry)]
                target = directory / f"{path.name.split('-')[1]}.so"
                target.write_bytes(archive.read(library))
    return missing


# --- programs and libraries ---


def build_probe(output: Path) -> None:
    """The test program: it loads on every machine with this C library or a newer one. Raises CannotPack."""
    from tests.native.build import CannotBuildError, cuda_include

    try:
        include = cuda_include()
    except CannotBuildError as error:
        raise CannotPack(str(error)) from error
    flags = ["-target", f"{os.uname().machine}-linux-gnu.{_GLIBC}", "-O2", f"-I{include}", "-ldl"]
    _compile(_SOURCE / "probe.c", output, flags)


def _build_gpu_client(output: Path) -> None:
    """Static, for any container, as the image's; by zig, which the other programs need anyway. Raises CannotPack."""
    flags = ["-target", f"{os.uname().machine}-linux-musl", "-static", "-Os", "-std=c11", "-D_GNU_SOURCE"]
    _compile(ROOT / "native" / "gpu-client.c", output, [*flags, "vdevice.c"])


def _compile(source: Path, output: Path, flags: Sequence[str]) -> None:
    if importlib.util.find_spec("ziglang") is None:
        raise CannotPack("no zig: install the wheel ziglang")
    command = [sys.executable, "-m", "ziglang", "cc", "-Wall", "-Wextra", "-Werror", "-s", "-o", str(output.absolute())]
    _run([*command, source.name, *flags], cwd=source.parent)  # there, for probe.c includes kernels.ptx


def _build_libraries(folder: Path, say: Callable[[str], None]) -> dict[str, str]:
    """By name why one could not be built: without one the others can be measured."""
    from tests.native.build import CannotBuildError, build_vcuda, build_vgpu

    missing: dict[str, str] = {}
    builds = {"libgpushare.so": _build_gpushare, "libvgpu.so": build_vgpu, "libcuda-control.so": build_vcuda}
    for name, build in builds.items():
        say(f"building {name}")
        try:
            build(folder / "lib" / name)
        except CannotBuildError as error:
            missing[name] = str(error)[:500]
    return missing


def _build_gpushare(output: Path) -> Path:
    """As the image has it. Raises CannotBuildError."""
    from native.build_gpushare import build_gpushare
    from tests.native.build import cuda_include

    build_gpushare(cuda_include(), output, target=f"{os.uname().machine}-linux-gnu.{_GLIBC}")
    return output


def _run(command: Sequence[str], cwd: Path | None = None) -> str:
    try:
        done = subprocess.run(list(command), cwd=cwd, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)  # noqa: S603
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CannotPack(f"{command[0]}: {error}") from error
    if done.returncode:
        raise CannotPack(f"`{' '.join(command[:5])} …` failed:\n{done.stderr.strip()[-2000:]}")
    return done.stdout
