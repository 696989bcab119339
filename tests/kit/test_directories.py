"""What a writer that was killed left, in each directory whose files nobody else removes."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from gpushare_agent.agent.delivery.cdi_files import CdiFiles
from gpushare_agent.agent.dra.claim_files import ClaimFiles
from gpushare_agent.agent.isolation.gpushare.library import Library
from gpushare_agent.core.kit.directories import NEW_PREFIX
from tests.isolation.support_library import fake_library

OURS = f"{NEW_PREFIX}0123456789abcdef"
OF_A_WRITER = f"{NEW_PREFIX}fedcba9876543210"
OF_OTHERS = f"{NEW_PREFIX}spec"


def install(directory: Path) -> None:
    Library(fake_library(directory.parent / "source.so"), directory).install()


@pytest.mark.parametrize(
    "use",
    [
        pytest.param(lambda here: ClaimFiles(here, here.parent).load(), id="records"),
        pytest.param(lambda here: ClaimFiles(here.with_suffix(""), here.parent).load(), id="copies"),
        pytest.param(lambda here: ClaimFiles(here.parent, here).load(), id="claims' specs"),
        pytest.param(lambda here: CdiFiles([here]).write(b"{}"), id="own spec"),
        pytest.param(install, id="library"),
    ],
)
def test_an_old_new_file_is_removed(use: Callable[[Path], object], short_dir: Path) -> None:
    """Not one that may be written now, nor what another program has there."""
    directory = short_dir / "there.last"
    (directory / f"{OURS[:-1]}e").mkdir(parents=True)
    before = time.time() - 3600
    for name in (OURS, OF_A_WRITER, OF_OTHERS):
        (directory / name).touch()
        if name != OF_A_WRITER:
            os.utime(directory / name, (before, before))
    os.utime(directory / f"{OURS[:-1]}e", (before, before))
    use(directory)
    left = {path.name for path in directory.iterdir() if path.name.startswith(NEW_PREFIX)}
    assert left == {OF_A_WRITER, OF_OTHERS, f"{OURS[:-1]}e"}
