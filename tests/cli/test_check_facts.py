"""`gpushare-agent check` reports rights that are missing and not needed for shares."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpushare_agent.agent.commands.check import check_node
from gpushare_agent.core.model.finding import Level
from tests.cli.support_check import complete_node, node_api, not_ok


@pytest.mark.usefixtures("many_open_files")  # else `check` warns of the limit too
@pytest.mark.parametrize(
    ("right", "without"),
    [("patch nodes", "--facts.is-written=false"), ("get runtimeclasses", "--runtime.sandboxed-handlers=")],
)
async def test_a_missing_right_is_a_warning_only_where_it_is_used(short_dir: Path, right: str, without: str) -> None:
    """The agent works without it; the cure names the role and the setting."""
    async with complete_node(short_dir, node_api(forbidden=(right,))) as node:
        (found,) = not_ok(await check_node(node.settings()))
        assert (found.level, found.what) == (Level.WARNING, "permissions")
        assert right in found.detail and without in found.cure
        assert not not_ok(await check_node(node.settings(without)))
