"""The table of what four libraries keep (library_table.py), a cell at a time; ours must meet its column."""

from __future__ import annotations

import pytest

from tests.real_isolation.conftest import CELLS, case
from tests.real_isolation.libraries import LIBRARIES, Libraries, Library, LibraryContainer, Limits
from tests.real_isolation.library_table import BLOCK_MIB, CORES, OURS, ROWS, SHARE_BLOCKS, Row

SMOKE = ("linked", "cuMemAllocManaged", "a child of one with 3 blocks", "kernels a second")


CASES = [
    case(one, row, name=f"{one.name}: {row.name}", is_smoke=one.name == OURS and row.name in SMOKE)
    for one in LIBRARIES
    for row in ROWS
]


@pytest.mark.parametrize(("library", "row"), CASES)
def test_a_library_keeps_what_the_table_says(
    library: Library, row: Row, libraries: Libraries, request: pytest.FixtureRequest
) -> None:
    """A change in either direction fails."""

    def measured() -> str:
        machine = libraries.machine(gpus=row.gpus, **row.driver)

        def container_of(cores: int = CORES) -> LibraryContainer:
            limits = Limits(memory_mib=SHARE_BLOCKS * BLOCK_MIB, cores=cores, gpus=row.gpus)
            return libraries.container(library, machine, limits)

        return row.measure(container_of)

    found = measured()
    if not row.is_met(library.name, found):
        found = measured()  # a machine that is loaded for a moment keeps a program from its GPU
    request.config.stash[CELLS][row.name, library.name] = found
    assert row.is_met(library.name, found), f"{found}, expected {row.expected[library.name]}"
