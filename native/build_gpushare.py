"""Builds libgpushare.so, the library in the container, from native/gpushare:

    python -m native.build_gpushare --include DIR --output libgpushare.so [--target x86_64-linux-gnu.2.17]

With a target by zig (the wheel `ziglang`), which links against that version of the C library: with 2.17 the library loads in
CentOS 7 and whatever is newer; with Debian 12's own compiler it needs 2.34 and does not load in ubuntu:20.04 or ubi8
(measured). Without a target by this machine's cc, as tests do. The include directory is that of cuda.h and nvml.h: NVIDIA's
wheels nvidia-cuda-runtime and nvidia-nvml-dev have them under nvidia/cu13/include. Standard library alone: the image's build
stage runs it.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from native.gpushare.generate import HooksError, generate

TARGETS = ("x86_64-linux-gnu.2.17", "aarch64-linux-gnu.2.17")
SOURCES = Path(__file__).parent / "gpushare"
CALL = SOURCES.parent / "vdevice.c"
"""Which gpu-client uses too."""
_TIMEOUT_S = 600
FLAGS = ("-std=c11", "-Wall", "-Wextra", "-Werror", "-O2", "-g1", "-shared", "-fPIC", "-fvisibility=hidden")


class CannotBuildError(Exception):
    """Why there is no library: what was tried, and the tool's own words."""


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


def build_gpushare(
    include: Path,
    output: Path,
    *,
    target: str = "",
    directory: str = "",
    flags: Sequence[str] = (),
    compiler: Sequence[str] = ("cc",),
) -> None:
    """Writes the library to `output`. For tests: `directory` is where it looks for its two files instead of /etc/vcuda, and
    for NUMA nodes; `compiler` is used without a target. Raises CannotBuildError.
    """
    with tempfile.TemporaryDirectory(prefix="gpushare-library-") as name:
        scratch = Path(name)
        compiler = [sys.executable, "-m", "ziglang", "cc", "-target", target] if target else compiler
        try:
            generate(include, scratch, compiler)
        except (HooksError, OSError, subprocess.CalledProcessError) as error:
            raise CannotBuildError(str(error)) from error
        command = [*compiler, *FLAGS, f"-I{SOURCES}", f"-I{CALL.parent}", f"-I{scratch}", f"-I{include}"]
        command += [f'-DGPUSHARE_{name}="{directory}"' for name in ("DIRECTORY", "NODES")] if directory else []
        command += [*map(str, sorted(SOURCES.glob("*.c"))), str(CALL), str(scratch / "table.c"), *flags]
        command += [
            "-Wl,-z,now,-Bsymbolic",
            "-Wl,-soname,libgpushare.so",
            f"-Wl,--version-script={scratch / 'exports.map'}",
        ]
        # zig keeps what it compiled of the C library; without a place of the caller's it goes with the rest.
        caches = {"ZIG_GLOBAL_CACHE_DIR": str(scratch / "zig"), "ZIG_LOCAL_CACHE_DIR": str(scratch / "zig")}
        run([*command, "-o", str(scratch / "library"), "-ldl", "-lpthread"], env=caches | dict(os.environ))
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_bytes((scratch / "library").read_bytes())
        output.chmod(0o755)


def main() -> int:
    parser = argparse.ArgumentParser(description="Build libgpushare.so.")
    parser.add_argument("--include", type=Path, required=True, help="directory of cuda.h and nvml.h")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--target", choices=TARGETS, default="")
    arguments = parser.parse_args()
    try:
        build_gpushare(arguments.include, arguments.output.absolute(), target=arguments.target)
    except CannotBuildError as error:
        print(f"build_gpushare: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
