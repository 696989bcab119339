"""Builds HAMi-core's libvgpu.so from source, without CUDA, a GPU or the host's C library:

    python native/build_hami_core.py SOURCE --include DIR --output libvgpu.so [--target …] [--sha256 DIGEST]

SOURCE is a directory, a tar archive, or a git URL with `#` and a full commit or a tag. The include directories are
those of cuda.h and nvml.h: NVIDIA's wheels nvidia-cuda-runtime and nvidia-nvml-dev have them under
nvidia/cu13/include. The compiler is zig, of the wheel `ziglang`: it links against the C library version named in the
target, whatever this machine has. With 2.17 the library loads in CentOS 7 and
whatever is newer; with Debian 12's own compiler it needs 2.34 and does not load in ubuntu:20.04 or ubi8 (measured).

The digest is of the files below src, by name, whatever they came in: an archive of the same commit may differ from one
day to the next. COMMIT and SHA256 are those that the image is built from.

The options are those of HAMi-core's build.sh. Standard library alone: the image's build stage runs it, and so do the
tests.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

COMMIT = "8f3a89c67b037d8fdfe6c4cd4d8c4f0cd6504811"
"""Of Project-HAMi/HAMi-core, June 2026; the agent knows this version's shared region."""
SHA256 = "d43a7f3dd44d9ac6211646b697a900a295952c2af339c6d0f9cf08303f82f25a"
TARGETS = ("x86_64-linux-gnu.2.17", "aarch64-linux-gnu.2.17")

_TIMEOUT_S = 600
_MAX_ARCHIVE_BYTES = 256 * 1024 * 1024
_NOT_IN_THE_LIBRARY = ("test", "shrreg_tool.c")  # shrreg_tool.c is a program of its own, with a main
_STATIC_CONFIG = """\
/* What HAMi-core's CMake writes from its build.sh; the two names tell its build from another one's. */
#define MULTIPROCESS_LIMIT_ENABLE
#define DLSYM_HOOK_ENABLE
#define HOOK_MEMINFO_ENABLE
#define HOOK_NVML_ENABLE
extern size_t GIT_HASH_unknown;
extern size_t GIT_BRANCH_unknown;
"""


class CannotBuildError(Exception):
    """Why there is no library: what was tried, and the tool's own words."""


@contextlib.contextmanager
def opened_source(source: str) -> Iterator[Path]:
    """The directory with the sources of a directory, an archive or a git URL; what was unpacked is removed behind it.

    Raises CannotBuildError.
    """
    if Path(source).is_dir():
        yield Path(source)
        return
    with tempfile.TemporaryDirectory(prefix="gpushare-source-") as name:
        directory = Path(name)
        if Path(source).is_file():
            yield _unpack(Path(source), directory)
        elif "://" in source:
            _fetch(source, directory)
            yield directory
        else:
            raise CannotBuildError(f"{source} is no directory, no archive and no git URL")


def _unpack(archive: Path, directory: Path) -> Path:
    """The directory with the sources, which is the archive's one folder where all is in that. Files and folders alone are
    written, below the directory: `extractall(filter="data")` is not to be had in Debian 12's Python 3.11.2.
    """
    try:
        with tarfile.open(archive) as opened:
            members = opened.getmembers()
            if sum(member.size for member in members) > _MAX_ARCHIVE_BYTES:
                raise CannotBuildError(f"{archive} holds more than {_MAX_ARCHIVE_BYTES} bytes")
            for member in members:
                _write_member(opened, member, directory)
    except (tarfile.TarError, OSError, EOFError) as error:
        raise CannotBuildError(f"unpacking {archive} failed: {error}") from error
    entries = list(directory.iterdir())
    return entries[0] if len(entries) == 1 and entries[0].is_dir() else directory


def _write_member(archive: tarfile.TarFile, member: tarfile.TarInfo, directory: Path) -> None:
    """Raises OSError for a member that is no file and no folder, or that leads out; a leading `/` is left out."""
    path = directory / member.name.lstrip("/")
    content = archive.extractfile(member) if member.isreg() else None
    if ".." in path.parts or not (member.isdir() or content is not None):
        raise OSError(f"{member.name!r} leads out of the archive, or is neither a file nor a folder")
    if content is None:
        path.mkdir(parents=True, exist_ok=True)
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with content, path.open("wb") as written:
        shutil.copyfileobj(content, written)


def _fetch(source: str, directory: Path) -> None:
    url, _, revision = source.partition("#")
    run(["git", "init", "--quiet", str(directory)])
    run(["git", "-C", str(directory), "fetch", "--quiet", "--depth=1", "--", url, revision or "HEAD"])
    run(["git", "-C", str(directory), "checkout", "--quiet", "--detach", "FETCH_HEAD"])


def run(command: Sequence[str], env: dict[str, str] | None = None) -> None:
    """Raises CannotBuildError with the end of what the command wrote."""
    try:
        done = subprocess.run(
            command, check=False, capture_output=True, text=True, errors="replace", timeout=_TIMEOUT_S, env=env
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CannotBuildError(f"{command[0]} could not be run to its end: {error}") from error
    if done.returncode != 0:
        raise CannotBuildError(f"`{' '.join(command[:6])} …` failed:\n{done.stderr[-4000:]}")


def source_digest(directory: Path) -> str:
    """SHA-256 of each file's path below `directory`, size and content, in order of the paths."""
    digest = hashlib.sha256()
    for path in sorted(path for path in (directory / "src").rglob("*") if path.is_file()):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(directory).as_posix()}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()


def build_hami_core(
    source: str, *, include: Sequence[Path], output: Path, target: str = TARGETS[0], sha256: str = ""
) -> None:
    """Writes the library to `output`; `sha256`, where given, must be the source's. Raises CannotBuildError."""
    with opened_source(source) as directory, tempfile.TemporaryDirectory(prefix="gpushare-hami-core-") as name:
        scratch = Path(name)
        if sha256 and (found := source_digest(directory)) != sha256:
            raise CannotBuildError(
                f"the source of {source} has the digest {found}, not {sha256}: it is another version"
            )
        files = [
            str(path)
            for path in sorted((directory / "src").rglob("*.c"))
            if not set(path.relative_to(directory).parts) & set(_NOT_IN_THE_LIBRARY)
        ]
        if not files:
            raise CannotBuildError(f"{source} has no src/**/*.c: it is not HAMi-core's source")
        (scratch / "static_config.h").write_text(_STATIC_CONFIG, encoding="utf-8")
        includes = [f"-I{path}" for path in (directory / "src", scratch, *include)]
        command = [sys.executable, "-m", "ziglang", "cc", "-target", target, "-shared", "-fPIC", "-O2", "-D_GNU_SOURCE"]
        # A process that waits for the lock of cuInit looks each second whether it was freed from outside, and not every 30.
        command += ["-DSEM_WAIT_TIME_POSTINIT=1", "-DSEM_WAIT_RETRY_TIMES_POSTINIT=330"]
        command += [*includes, *files, "-o", str(scratch / "libvgpu.so"), "-lpthread", "-ldl", "-lrt"]
        # zig keeps what it compiled of the C library; without a place of the caller's it goes with the rest.
        caches = {"ZIG_GLOBAL_CACHE_DIR": str(scratch / "zig"), "ZIG_LOCAL_CACHE_DIR": str(scratch / "zig")}
        run(command, env=caches | dict(os.environ))
        output.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(scratch / "libvgpu.so", output)
        output.chmod(0o755)


def main() -> int:
    parser = argparse.ArgumentParser(description="Build HAMi-core's libvgpu.so with zig.")
    parser.add_argument("source", help="directory, tar archive, or git URL with #COMMIT")
    parser.add_argument(
        "--include", type=Path, action="append", required=True, help="directory of cuda.h or nvml.h; again for more"
    )
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--target", choices=TARGETS, default=TARGETS[0])
    parser.add_argument("--sha256", default="", help="digest that the source must have")
    arguments = parser.parse_args()
    try:
        build_hami_core(
            arguments.source,
            include=arguments.include,
            output=arguments.output.absolute(),
            target=arguments.target,
            sha256=arguments.sha256,
        )
    except CannotBuildError as error:
        print(f"build_hami_core: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
