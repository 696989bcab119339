"""libgpushare and the fake driver, built once; a GPU for each test."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.gpushare.support_gpushare import SHARE_MIB, Container, GpushareBuilt, Machine, build_for_gpushare, built_in
from tests.native.build import CannotBuildError

MachineWith = Callable[..., Machine]


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("isolation")
    group.addoption("--built", metavar="DIRECTORY", help="what was built before is in it (test_mutants.py)")
    group.addoption(
        "--all-cells", action="store_true", help="all cells of the limit of compute (test_turns.py), some ten minutes"
    )


@pytest.fixture(scope="session")
def gpushare(tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config) -> GpushareBuilt:
    if built := pytestconfig.getoption("--built"):
        return built_in(Path(built))
    try:
        return build_for_gpushare(tmp_path_factory.mktemp("gpushare"))
    except CannotBuildError as error:
        pytest.skip(str(error))


@pytest.fixture
def machine_with(gpushare: GpushareBuilt, tmp_path: Path) -> MachineWith:
    """Of the fake driver's settings."""

    def machine_with(**settings: object) -> Machine:
        directory = tmp_path / f"machine-{len(list(tmp_path.iterdir()))}"
        directory.mkdir()
        return Machine(gpushare, directory, settings)

    return machine_with


@pytest.fixture
def share(machine_with: MachineWith) -> Container:
    """Of memory alone."""
    return machine_with().container(memory_mib=SHARE_MIB)
