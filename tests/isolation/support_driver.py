"""A host with a driver, small but of real shared objects: compiled by cc, linked and cached by ldconfig."""

from __future__ import annotations

import functools
import json
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

from gpushare_agent.agent.delivery.volume_plan import DriverVolume, VolumeName

NATIVE = Path(__file__).parents[1] / "native"
LDCONFIG = shutil.which("ldconfig") or shutil.which("ldconfig", path="/usr/sbin:/sbin")
LIBRARY_DIRECTORY = "usr/lib/x86_64-linux-gnu"
LIBRARY_DIRECTORY_32 = "usr/lib/i386-linux-gnu"
VERSION = "535.104.05"
REAL, CONTROL = 1, 2
"""What which_library() of a driver's library and of the control library answers."""


@functools.cache
def require_cc() -> str:
    cc = shutil.which("cc")
    if cc is None:
        pytest.skip("no C compiler (cc) on this machine")
    return cc


@functools.cache
def has_m32() -> bool:
    probe = subprocess.run(
        [require_cc(), "-m32", "-shared", "-nostdlib", "-xc", "-", "-o", "/dev/null"],
        check=False,
        input=b"",
        capture_output=True,
    )
    return probe.returncode == 0


def compile_library(path: Path, soname: str | None, *, which: int = REAL, m32: bool = False) -> Path:
    """A shared object without any dependency."""
    flags = ("-m32",) if m32 else ()
    flags += (f"-Wl,-soname,{soname}",) if soname else ()
    return _write(path, compiled(*flags, "-shared", "-nostdlib", "-fPIC", f"-DWHICH={which}"))


def compile_program(path: Path, *flags: str) -> Path:
    """A static program; it is never run."""
    return _write(path, compiled(*(flags or ("-static", "-nostdlib", "-Wl,-e,which_library")), f"-DWHICH={REAL}"))


def _write(path: Path, content: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    path.write_bytes(content)
    path.chmod(0o755)
    return path


@functools.cache
def compiled(*flags: str) -> bytes:
    """libdriver.c, once for all tests of a worker: each host has a handful."""
    with tempfile.NamedTemporaryFile(prefix="gs") as made:
        command = [require_cc(), *flags, "-o", made.name, str(NATIVE / "libdriver.c")]
        subprocess.run(command, check=True, capture_output=True)
        return Path(made.name).read_bytes()


class FakeHost:
    """A host's file system below `root`, with a driver; `control` and `client` are outside, as in the agent's image."""

    def __init__(self, directory: Path) -> None:
        self.root = directory / "host"
        self.base = directory / "vdriver"
        self.control = compile_library(directory / "image/libcuda-control.so", "libcuda-control.so", which=CONTROL)
        self.client = compile_program(directory / "image/gpu-client")
        (self.root / "etc").mkdir(parents=True)
        (self.root / "usr/bin").mkdir(parents=True)
        (self.root / "lib").symlink_to("usr/lib")
        self.add_program("nvidia-smi")
        for stem in ("libcuda", "libnvidia-ml", "libnvidia-ptxjitcompiler"):
            self.add_library(stem)

    def add_program(self, name: str, text: str = "#!/bin/sh\n", mode: int = 0o755) -> Path:
        path = self.root / "usr/bin" / name
        path.write_text(text)
        path.chmod(mode)
        return path

    def add_library(
        self,
        stem: str,
        version: str = VERSION,
        *,
        which: int = REAL,
        directory: str = LIBRARY_DIRECTORY,
        m32: bool = False,
    ) -> Path:
        """<stem>.so.<version> with the soname <stem>.so.1 and its link, as a driver package has it."""
        path = compile_library(self.root / directory / f"{stem}.so.{version}", f"{stem}.so.1", which=which, m32=m32)
        link = path.with_name(f"{stem}.so.1")
        link.unlink(missing_ok=True)
        link.symlink_to(path.name)
        return path

    def library(self, stem: str, version: str = VERSION) -> Path:
        return self.root / LIBRARY_DIRECTORY / f"{stem}.so.{version}"

    def ldconfig(self, form: str = "new") -> Path:
        """Makes the host's cache with the real program; needs chroot."""
        if LDCONFIG is None:
            pytest.skip("no ldconfig on this machine")
        directories = [name for name in (LIBRARY_DIRECTORY, LIBRARY_DIRECTORY_32) if (self.root / name).is_dir()]
        (self.root / "etc/ld.so.conf").write_text("".join(f"/{name}\n" for name in directories))
        made = subprocess.run([LDCONFIG, "-c", form, "-r", str(self.root)], check=False, capture_output=True, text=True)
        if made.returncode != 0 and os.geteuid() != 0:
            pytest.skip(f"ldconfig -r needs root to change its root: {made.stderr.strip()}")
        assert made.returncode == 0, made.stderr
        return self.root / "etc/ld.so.cache"

    def volume(self, name: str = "nvidia", **components: list[str]) -> DriverVolume:
        entry = self.entry(name, **components)["components"]
        return DriverVolume(
            name=VolumeName(name),
            base=self.base,
            binaries=tuple(entry["binaries"]),
            libraries=tuple(entry["libraries"]),
        )

    def entry(self, name: str = "nvidia", **components: list[str]) -> dict:  # type: ignore[type-arg]
        listed = {
            "binaries": ["nvidia-smi"],
            "libraries": ["libcuda.so", "libnvidia-ml.so", "libnvidia-ptxjitcompiler.so"],
        }
        return {"name": name, "base": str(self.base), "mode": "ro", "components": listed | components}

    def write_config(self, *entries: object) -> Path:
        path = self.root.parent / "volume.conf"
        path.write_text(json.dumps({"volume": list(entries) or [self.entry("nvidia"), self.entry("origin")]}))
        return path

    def arguments(self) -> list[str]:
        return [
            "driver-volume",
            f"--volume-config={self.root.parent / 'volume.conf'}",
            f"--driver-volume.root={self.root}",
            f"--driver-volume.control-library={self.control}",
            f"--driver-volume.gpu-client={self.client}",
        ]


def tree_of(directory: Path) -> dict[str, str | bytes]:
    """Everything below a directory: relative path -> content, or what a link points to."""
    return {
        str(path.relative_to(directory)): f"-> {path.readlink()}" if path.is_symlink() else path.read_bytes()
        for path in sorted(directory.rglob("*"))
        if path.is_symlink() or path.is_file()
    }
