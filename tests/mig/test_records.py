"""The file of what was made, and what this node's object says of who may change it."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from msgspec import Raw
from structlog.testing import capture_logs

from gpushare_agent.agent.mig.decisions.plan import MadeInstance, MigState
from gpushare_agent.agent.mig.own_node import MANAGER_LABEL, WITHOUT_MANAGER_LABEL, OwnNode
from gpushare_agent.agent.mig.records import InstanceRecords
from gpushare_agent.core.model.errors import AgentError, Rejected, Unavailable
from gpushare_agent.core.model.names import GpuUuid
from tests.cluster.support_kube import running
from tests.mig.support_mig import place
from tests.support_json import undecoded

MADE = [
    MadeInstance(place=place("1g.5gb", 6), profile="1g.5gb", state=MigState.READY, gi=7, uuid=GpuUuid("MIG-1")),
    MadeInstance(place=place("3g.20gb", 0, 1), profile="3g.20gb"),
]


@pytest.fixture
def boot(tmp_path: Path) -> Path:
    path = tmp_path / "boot_id"
    path.write_text("boot-1\n")
    return path


async def test_what_is_saved_is_loaded_again(tmp_path: Path, boot: Path) -> None:
    records = InstanceRecords(tmp_path / "mig.json", boot_id=boot)
    assert await records.load() == []
    await records.save(MADE)
    assert await records.load() == MADE
    document = json.loads((tmp_path / "mig.json.last").read_text())
    assert (document["version"], document["boot_id"], document["instances"][0]["place"]) == (
        *(1, "boot-1"),
        {"parent": "GPU-00000000-0000-0000-0000-000000000000", "profile": 19, "start": 6},
    )


async def test_a_reboot_ends_all_instances(tmp_path: Path, boot: Path) -> None:
    records = InstanceRecords(tmp_path / "mig.json", boot_id=boot)
    await records.save(MADE)
    boot.write_text("boot-2\n")
    with capture_logs() as logs:
        assert await records.load() == []
    assert [line["event"] for line in logs] == ["mig_records_dropped"]


async def test_where_the_boot_is_not_known_the_uuids_decide(tmp_path: Path, boot: Path) -> None:
    records = InstanceRecords(tmp_path / "mig.json", boot_id=boot)
    await records.save(MADE)
    boot.unlink()
    assert await records.load() == MADE


@pytest.mark.parametrize(
    "content",
    [
        *("null", '{"version": 2, "instances": []}', '{"version": 1, "instances": [1]}'),
        json.dumps({"version": 1, "instances": [{"place": {"parent": "GPU-1", "profile": "x", "start": 0}}]}),
        json.dumps({"version": 1, "instances": [{"place": None, "profile": "", "state": "gone"}] * 5000}),
    ],
)
async def test_what_is_not_the_format_is_not_believed(tmp_path: Path, content: str) -> None:
    """The agent goes on; what was made is the administrator's."""
    (tmp_path / "mig.json").write_text(content)
    with capture_logs() as logs:
        assert await InstanceRecords(tmp_path / "mig.json").load() == []
    assert [line["event"] for line in logs] == ["mig_records_corrupt"]
    assert "count as made by hand" in logs[0]["then"]


class Api:
    """Answers what `answers` has, in turn; then waits."""

    def __init__(self, *answers: dict[str, Any] | AgentError) -> None:
        self.answers = list(answers)

    async def get_node(self, name: str) -> Raw:
        assert name == "node"
        if not self.answers:
            await asyncio.Event().wait()
        answer = self.answers.pop(0)
        if isinstance(answer, AgentError):
            raise answer
        return undecoded(answer)


def node(*, unschedulable: bool = False, **labels: str) -> dict[str, Any]:
    named = {"config": MANAGER_LABEL, "state": f"{MANAGER_LABEL}.state", "deploy": WITHOUT_MANAGER_LABEL}
    labels = {named[name]: value for name, value in labels.items()}
    return {"metadata": {"name": "node", "labels": labels}, "spec": {"unschedulable": unschedulable}}


async def seen(*answers: dict[str, Any] | AgentError) -> list[tuple[bool, bool, str]]:
    """What was known after each change: whether it is, whether it drains, and what is said of another owner."""
    own, found = OwnNode(name="node", period_s=0.0, retry_s=0.0), []
    own.changed = lambda: found.append((own.is_known, own.is_draining, own.managed))
    api = Api(*answers)
    async with running(lambda: own.run(api)):
        while api.answers:
            await asyncio.sleep(0)
        for _ in range(5):
            await asyncio.sleep(0)
    return found


async def test_a_drain_and_its_end_are_followed() -> None:
    assert await seen(node(), node(), node(unschedulable=True), node()) == [
        *((True, False, ""), (True, True, ""), (True, False, "")),
    ]


async def test_mig_manager_is_named() -> None:
    [(_, _, why), (_, _, after)] = await seen(node(config="all-1g.10gb", state="success"), node())
    assert "mig-manager divides the node's GPUs (label nvidia.com/mig.config=all-1g.10gb, state success)" in why
    assert after == ""


async def test_a_label_without_the_manager_is_nobodys() -> None:
    assert await seen(node(config="all-disabled", deploy="false")) == [(True, False, "")]


async def test_without_the_right_there_is_no_other_owner_to_know() -> None:
    with capture_logs() as logs:
        assert await seen(Rejected("403"), Rejected("403")) == [(True, False, "")]
    assert [line["event"] for line in logs] == ["mig_node_not_read"]


async def test_an_outage_says_nothing() -> None:
    assert await seen(Unavailable("away")) == []
    assert await seen(node(config="x"), Unavailable("away")) == await seen(node(config="x"))
