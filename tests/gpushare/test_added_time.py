"""What libgpushare adds to a call of the driver, over a driver that does nothing (tests/native/null_driver.c): measured and
printed, not asserted, for a busy machine shows what it likes. The goal is 0.5 µs a launch and 2 µs an allocation."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.gpushare.conftest import MachineWith
from tests.gpushare.support_gpushare import Container
from tests.native.build import NATIVE, build_program

pytestmark = pytest.mark.isolation

CALLS, RUNS = 100_000, 5


def least_us(share: Container, null_driver: Path, is_limited: bool) -> tuple[float, float]:
    """An allocation with its release, and a launch: the least of some runs, which is what the machine can."""
    preload = [share.machine.built.library] if is_limited else []
    env = {"LD_LIBRARY_PATH": str(null_driver)}
    steps = [share.run(f"speed:{CALLS}", preload=preload, env=env).step("speed") for _ in range(RUNS)]
    assert {step.get("result") for step in steps} == {0}, steps
    return min(step["alloc_us"] for step in steps), min(step["launch_us"] for step in steps)


@pytest.mark.parametrize("others", [0, 63])
def test_what_a_launch_and_an_allocation_take_more(
    machine_with: MachineWith, tmp_path: Path, capsys: pytest.CaptureFixture[str], others: int
) -> None:
    """In a container with one process, and where 64 have had slots: who asks for memory adds them up."""
    library = tmp_path / "libcuda.so.1"
    build_program(library, NATIVE / "null_driver.c", ["-shared", "-fPIC", "-O2"])
    machine = machine_with(context_mib=1)
    share = machine.container(memory_mib=20_000, cores=9900)
    held = [share.start("sleep:600") for _ in range(others)]
    try:
        while len(share.usage()[1]) < others:
            assert all(one.poll() is None for one in held)
        (alone_alloc, alone_launch), (alloc, launch) = (least_us(share, tmp_path, limited) for limited in (False, True))
    finally:
        for one in held:
            one.kill()
            one.communicate()
    assert share.usage()[0].launches >= CALLS
    with capsys.disabled():
        print(  # noqa: T201 - for whoever runs it
            f"\nbeside {others}: {alloc - alone_alloc:.2f} µs more for an allocation and its release,"
            f" {launch - alone_launch:.2f} µs for a launch"
        )
