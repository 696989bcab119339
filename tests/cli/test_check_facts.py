"""`gpushare-agent check` reports whether the facts about the GPUs can be written to the node's object."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpushare_agent.agent.commands.check import check_node
from gpushare_agent.core.model.finding import Level
from tests.cli.support_check import complete_node, node_api, not_ok


@pytest.mark.usefixtures("many_open_files")  # else `check` warns of the limit too
async def test_a_missing_right_to_patch_nodes_is_a_warning_only_where_it_is_used(short_dir: Path) -> None:
    """The agent works without it; the cure names the role and the setting."""
    async with complete_node(short_dir, node_api(forbidden=("patch nodes",))) as node:
        (found,) = not_ok(await check_node(node.settings()))
        assert (found.level, found.what) == (Level.WARNING, "permissions")
        assert "patch nodes" in found.detail and "--facts.is-written=false" in found.cure
        assert not not_ok(await check_node(node.settings("--facts.is-written=false")))
