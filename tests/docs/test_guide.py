"""The user guide names pages, commands, files, settings and reasons that exist."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from gpushare_agent.agent.observability.usage_history import UsageHistory
from gpushare_agent.commands import COMMANDS
from gpushare_agent.core.model.usage import ContainerUse, UsageRound
from gpushare_agent.core.settings.reference import all_keys
from tests.docs.generated import CHART_TABLE
from tests.observability.support_usage import UUIDS, allocation, key_of
from tests.support_process import output_of

ROOT = Path(__file__).parents[2]
GUIDE = ROOT / "docs/how-to"
PAGES = sorted([*GUIDE.glob("*.md"), *(ROOT / "docs/tutorial").glob("*.md")])
OWN_KUSTOMIZATION = "manifests/own"
"""What install.md has the reader make."""


def text_of(path: Path) -> str:
    return path.read_text(encoding="utf-8")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_pages_commands_files_and_settings_exist(page: Path) -> None:
    """Whoever types a line of the guide gets no usage error. A name with a dot is a setting or a value of the chart."""
    text = text_of(page)
    commands = {command.name for command in COMMANDS}
    for name in re.findall(r"(?:-- |bin/|`|^)gpushare-agent ([a-z-]+)", text, flags=re.M):
        assert name in commands, name
    for path in re.findall(r"\b(manifests/[A-Za-z0-9_./-]*[A-Za-z0-9_-])", text):
        assert path.startswith(OWN_KUSTOMIZATION) or (ROOT / path).exists(), path
    keys = {key.name for key in all_keys()} | {name for name, _, _ in CHART_TABLE["rows"]()}
    sections = {key.partition(".")[0] for key in keys}
    # What its users have of another program has such names too: only what stands behind that in an item is ours.
    if page.name.startswith("migrate-from-"):
        text = "\n".join(re.findall(r"^- \*\*.*?\*\*:? (.*(?:\n  .*)*)", text, flags=re.M))
    for name in re.findall(r"`([a-z_]+\.[a-z_]+)(?:: [^`]*)?`", text):
        is_ours = name.partition(".")[0] in sections
        assert name in keys or not is_ours or name.endswith((".md", ".yaml", ".json", ".so")), name


def test_the_metrics_that_the_guide_names_exist() -> None:
    """A query of a metric that nobody has is answered with nothing, and no error."""
    known = re.findall(r"^- \*\*`([a-z_]+)`\*\*", text_of(ROOT / "docs/reference/metrics.md"), flags=re.M)
    named = [
        name for page in PAGES for name in re.findall(r"\b(?<!:)(gpushare_(?!agent|extender)[a-z_]+)", text_of(page))
    ]
    # What rules and adapters of the pages make of them: tests/manifests/test_monitoring.py.
    made = {"gpushare_gpu_hourly_price", "gpushare_share_use"}
    assert set(named) - made <= set(known)
    assert "gpushare_container_sm_utilization_ratio" in named


async def test_the_guides_question_of_the_api_names_the_pod_that_uses_most(short_dir: Path) -> None:
    """The jq program of the page, over a history as the agent serves it."""
    if (jq := shutil.which("jq")) is None:
        pytest.skip("jq is missing: apt-get install jq")
    (program,) = re.findall(r"--arg GPU \"\$UUID\" '(.*?)'", text_of(GUIDE / "see-usage.md"), flags=re.S)
    moments = iter([10.0, 20.0])
    allocated = {
        key.key: key for key in (allocation(key_of(1), (0,), pod="lazy"), allocation(key_of(2), (0,), pod="busy"))
    }
    allocated |= {one.key: one for one in [allocation(key_of(3), (1,), pod="elsewhere")]}
    history = UsageHistory(60, 6, allocations=lambda: allocated, clock=lambda: next(moments))
    for busy in (0.5, 0.7):
        use = {(key_of(1), 0): 0.1, (key_of(2), 0): busy, (key_of(3), 1): 0.9}
        history.add(
            UsageRound(
                sampled_at=1.0,
                gpus={},
                containers={
                    (key, UUIDS[gpu]): ContainerUse(key=key, uuid=UUIDS[gpu], pids=(), memory_bytes=0, sm_ratio=sm)
                    for (key, gpu), sm in use.items()
                },
                unattributed={},
            )
        )
    document = short_dir / "history.json"
    document.write_text(b"".join(history.pieces()).decode(), encoding="utf-8")
    _, out, _ = await output_of(jq, "-c", "--arg", "GPU", UUIDS[0], program, document)
    assert [(one["namespace"], one["pod"], one["container"], round(one["sm"], 3)) for one in json.loads(out)] == [
        ("default", "busy", "main", 0.6),
        ("default", "lazy", "main", 0.1),
    ]
