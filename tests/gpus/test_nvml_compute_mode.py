"""The GPUs' compute mode with the real nvidia-ml-py, in the supervisor's own process, on a small libnvidia-ml.so.1."""

from __future__ import annotations

import asyncio
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.isolation.support_mps import MpsPlace, mps_place, poll_until
from tests.settings.support_settings import clean_environment

SOURCE = Path(__file__).parents[1] / "native" / "fake_nvml_modes.c"


@pytest.fixture
def place(short_dir: Path) -> MpsPlace:
    """With the library beside the control program."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler (cc) to build the fake libnvidia-ml.so.1 with")
    flags = ("-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-Wl,-soname,libnvidia-ml.so.1")
    command = [compiler, *flags, "-o", "libnvidia-ml.so.1", str(SOURCE)]
    subprocess.run(command, cwd=short_dir, check=True)
    (short_dir / "modes").write_text("03")
    return mps_place(short_dir)


async def supervisor(place: MpsPlace, *flags: str, **more: str) -> asyncio.subprocess.Process:
    library = {"LD_LIBRARY_PATH": str(place.root), "FAKE_NVML_MODES": str(place.root / "modes")}
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "gpushare_agent", "mps", *place.flags(), *flags),
        env=clean_environment(**library, **more),
        stderr=asyncio.subprocess.PIPE,
    )


async def end_of(process: asyncio.subprocess.Process) -> tuple[int | None, str]:
    try:
        _, err = await process.communicate()
    except BaseException:
        process.kill()
        raise
    return process.returncode, err.decode()


@pytest.mark.parametrize(
    ("flags", "before", "meanwhile"),
    [(["--mps.exclusive-process=true"], "03", "33"), ([], "03", "03"), (["--mps.exclusive-process=true"], "x0", "x3")],
)
async def test_the_mode_is_set_only_if_the_setting_asks_and_set_back_at_the_end(
    place: MpsPlace, flags: list[str], before: str, meanwhile: str
) -> None:
    """A GPU that had it before keeps it: somebody else has set it. One that does not answer costs the others nothing."""
    (place.root / "modes").write_text(before)
    process = await supervisor(place, *flags)
    try:
        await poll_until(lambda: place.record("set_default"), "a daemon with its default")
        assert (place.root / "modes").read_text() == meanwhile
    finally:
        process.send_signal(signal.SIGTERM)
        code, err = await end_of(process)
    assert code == 0, err
    assert (place.root / "modes").read_text() == before


async def test_without_the_right_to_set_it_no_daemon_is_started(place: MpsPlace) -> None:
    """The last line names what failed and how to do without."""
    code, err = await end_of(await supervisor(place, "--mps.exclusive-process=true", FAKE_NVML_DENIES="1"))
    assert code == 1 and place.daemons() == []
    last = err.splitlines()[-1]
    assert "EXCLUSIVE_PROCESS failed: Insufficient Permissions" in last and "mps.exclusive_process" in last
