"""The open files limit in processes of their own: a limit that was lowered cannot be raised again in this one. How child
processes end."""

from __future__ import annotations

import asyncio
import gc
import os
import platform
import subprocess
import sys
from contextlib import suppress

import pytest

from gpushare_agent.core.kit.process import ENOUGH_OPEN_FILES, end_process, read_open_files_limit
from tests.settings.support_settings import ROOT, clean_environment

_PROGRAM = """
import resource, sys
from gpushare_agent.core.kit import process
soft, hard, process.ENOUGH_OPEN_FILES = map(int, sys.argv[1:])
resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
print(*process.raise_open_files_limit(), *resource.getrlimit(resource.RLIMIT_NOFILE))
"""


def raised(soft: int, hard: int, enough: int = ENOUGH_OPEN_FILES) -> list[int]:
    """What it returns under these limits, and what the kernel has afterwards."""
    ended = subprocess.run(
        [sys.executable, "-c", _PROGRAM, str(soft), str(hard), str(enough)],
        check=True,
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=clean_environment(),
        timeout=30,
    )
    return [int(number) for number in ended.stdout.split()]


@pytest.mark.usefixtures("many_open_files")
def test_the_soft_limit_is_raised_to_the_hard_one() -> None:
    """And the numbers that are returned are those in force."""
    assert raised(256, 2048) == [2048, 2048, 2048, 2048]


def test_a_soft_limit_at_the_hard_one_stays() -> None:
    """There is nothing to raise."""
    assert raised(512, 512) == [512, 512, 512, 512]


@pytest.mark.usefixtures("many_open_files")
def test_a_large_hard_limit_is_not_used_up() -> None:
    """A leak of descriptors shall show; a soft limit above is the operator's and stays."""
    assert raised(256, 2048, enough=1024) == [1024, 2048, 1024, 2048]
    assert raised(1500, 2048, enough=1024) == [1500, 2048, 1500, 2048]


def test_the_limit_is_read_as_numbers() -> None:
    """Soft is at most hard, and "unlimited" is the largest number there is."""
    soft, hard = read_open_files_limit()
    assert 0 < soft <= hard


async def test_of_a_child_that_did_not_read_its_standard_input_nothing_is_logged_later() -> None:
    told: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: told.append(context))
    process = await asyncio.create_subprocess_exec("true", stdin=asyncio.subprocess.PIPE)
    assert process.stdin is not None
    with suppress(ChildProcessError):  # asyncio's thread was first
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    process.stdin.write(b"nobody reads this")
    await end_process(process, 5.0)
    del process
    await asyncio.sleep(0)
    gc.collect()
    assert told == []


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library has other rules")
def test_what_each_read_takes_stays_and_what_is_large_goes_back() -> None:
    """Memory that the process has again takes no page from the system; a large answer takes all of its pages each time."""
    code = """
import resource
from gpushare_agent.core.kit.process import give_back_memory
def pages(size):
    b"x" * size
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(10):
        b"x" * size
    return (resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) * resource.getpagesize() / size
give_back_memory()
print(pages(262144), pages(4 << 20))
"""
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    read, large = map(float, run.stdout.split())
    assert read < 2 and large > 8, run.stdout
