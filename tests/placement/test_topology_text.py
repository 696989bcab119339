"""Reading the text of `nvidia-smi topo -m`."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpushare_agent.core.model.errors import Corrupt
from gpushare_agent.core.model.gpus import Link, LinkKind
from gpushare_agent.core.placement.topology import parse_topology
from tests.gpus.support_gpus import TOPOLOGY_NAMES, topology_text

P40 = topology_text("p40-x7-two-switches")
MODERN = (
    "\t\x1b[4mGPU0\tGPU1\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m\n"
    "GPU0\t X \tNV12\tPXB\t0-31,64-95\t0\t\tN/A\n"
    "GPU1\tNV12\t X \tSYS\t32-63\t1\t\tN/A\n"
    "NIC0\tPXB\tSYS\t X \t\t\t\t\n"
    "\nLegend:\n\n  X    = Self\n\nNIC Legend:\n\n  NIC0: mlx5_0\n"
)


@pytest.mark.parametrize("name", TOPOLOGY_NAMES)
def test_every_sample_gives_a_square_matrix_with_itself_on_the_diagonal(name: str) -> None:
    """Each sample text is read; the matrix is square and symmetric, and a GPU's link to itself is SELF."""
    parsed = parse_topology(topology_text(name))
    size = range(len(parsed.links))
    assert len(parsed.numa) == len(parsed.links) > 0
    assert all(parsed.links[a][b] == parsed.links[b][a] for a in size for b in size)
    assert all((parsed.links[a][b].kind is LinkKind.SELF) == (a == b) for a in size for b in size)


def test_nic_rows_and_columns_are_ignored() -> None:
    """The P40 machine has seven GPUs; its InfiniBand adapter is none."""
    parsed = parse_topology(P40)
    assert len(parsed.links) == 7
    assert parsed.links[0][2] == Link(kind=LinkKind.PIX)
    assert parsed.links[0][3] == Link(kind=LinkKind.PHB)
    assert parsed.numa == (0,) * 7


def test_a_modern_text_with_escapes_nics_and_gpu_numa_ids_is_read() -> None:
    """The header's underline escapes, the NIC legend and the extra columns do not disturb."""
    parsed = parse_topology(MODERN)
    assert parsed.links[0][1] == Link(kind=LinkKind.NVLINK, nvlinks=12)
    assert parsed.numa == (0, 1)


def test_escapes_that_lost_their_escape_character_are_removed_too() -> None:
    """A text pasted from a terminal keeps `[4m` alone."""
    assert parse_topology(MODERN.replace("\x1b", "")) == parse_topology(MODERN)


@pytest.mark.parametrize("name", TOPOLOGY_NAMES)
def test_spaces_instead_of_tabs_and_windows_line_ends_change_nothing(name: str) -> None:
    """The same matrix results whichever way the text was copied."""
    text = topology_text(name)
    parsed = parse_topology(text)
    assert parse_topology(text.expandtabs(8)) == parsed
    assert parse_topology(text.replace("\n", "\r\n")) == parsed
    assert parse_topology(f"$ nvidia-smi topo -m\n\n{text}") == parsed


def test_soc_is_the_older_word_for_sys() -> None:
    """gpu-manager's texts say SOC where today's tool says SYS."""
    assert parse_topology(topology_text("six-cards-pix-phb-soc")).links[0][5] == Link(kind=LinkKind.SYS)


def test_numa_is_unknown_without_its_column() -> None:
    """Older texts have no affinity columns."""
    assert parse_topology(topology_text("six-cards-pix-phb-soc")).numa == (None,) * 6


@pytest.mark.parametrize("cell", ["N/A", "0-1", "0,1", ""])
def test_numa_is_unknown_where_the_cell_names_no_single_node(cell: str) -> None:
    """Several nodes, none, or an empty cell are no node."""
    text = f"\tGPU0\tCPU Affinity\tNUMA Affinity\nGPU0\t X \t0-15\t{cell}\n"
    assert parse_topology(text).numa == (None,)


def test_missing_last_cells_are_an_unknown_numa_node() -> None:
    """A row that ends after its links is enough."""
    assert parse_topology("\tGPU0\tGPU1\tCPU Affinity\tNUMA Affinity\nGPU0\tX\tPIX\nGPU1\tPIX\tX\t0-3\t1\n").numa == (
        None,
        1,
    )


@pytest.mark.parametrize(
    ("text", "line", "what"),
    [
        (P40.replace("GPU6\tPHB\tPHB\tPHB\tPIX\tPIX\tPIX\t X \tPHB\t0-13,28-41\t0\n", ""), 7, "row of GPU6 is missing"),
        (P40.replace("GPU1\tPIX", "GPU1\tPIF"), 3, "GPU1 with GPU0 reads 'PIF'"),
        (P40.replace("GPU1\tPIX", "GPU1\tNV0"), 3, "'NV0'"),
        (P40.replace("GPU1\tPIX", "GPU1\tPHB"), 3, "GPU1 to GPU0 is not what line 2 says"),
        (P40.replace("GPU1\tPIX\t X ", "GPU1\tPIX\tPIX"), 3, "X belongs on the diagonal"),
        (P40.replace("GPU1\tPIX", "GPU1\tX"), 3, "X belongs on the diagonal"),
        ("\tGPU0\tGPU1\nGPU0\tX\tPIX\nGPU1\tPIX\n", 3, "row GPU1 has 1 cells, 2 are needed"),
        ("\tGPU0\nGPU0\tX\nGPU1\tX\n", 3, "row GPU1 has no column"),
        ("\tGPU0\nGPU0\tX\nGPU0\tX\n", 3, "row GPU0 appears again, first in line 2"),
        ("\tGPU0\tGPU2\nGPU0\tX\tPIX\nGPU2\tPIX\tX\n", 1, "column 2 of the GPUs is GPU2, not GPU1"),
        ("\tGPU0\tmlx5_0\tGPU1\n", 1, "another column stands between"),
        ("GPU0\tX\tPIX\nGPU1\tPIX\tX\n", 1, "comes before the header"),
        ("\t".join(["", *(f"GPU{n}" for n in range(65))]), 1, "65 GPUs are named, at most 64"),
    ],
)
def test_a_faulty_text_is_refused_naming_line_and_fault(text: str, line: int, what: str) -> None:
    """Whoever made the text finds the place at once."""
    with pytest.raises(Corrupt, match=f"line {line}: .*{re.escape(what)}"):
        parse_topology(text)


@pytest.mark.parametrize("text", ["", "\n\n", "No devices were found\n", "mlx5_0\tX\n"])
def test_a_text_without_gpus_is_refused(text: str) -> None:
    """There is no topology of nothing."""
    with pytest.raises(Corrupt, match="no line names a GPU"):
        parse_topology(text)


WORDS = st.sampled_from(
    ["GPU0", "GPU1", "X", "PIX", "NV2", "SYS", "NUMA Affinity", "\t", " ", "\n", "0", "\x1b[4m", "é"]
)


@given(st.lists(WORDS, max_size=30).map("\t".join))
def test_any_text_is_read_or_refused_as_corrupt(text: str) -> None:
    """No text, however mangled, ends in another error."""
    try:
        parsed = parse_topology(text)
    except Corrupt:
        return
    assert all(len(row) == len(parsed.links) for row in parsed.links)
