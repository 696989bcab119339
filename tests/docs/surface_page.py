"""docs/reference/surface.md: what can be set, asked and read, each kind from what defines it."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path

from gpushare_agent.agent.isolation import ISOLATIONS
from gpushare_agent.commands import COMMAND_LINE
from gpushare_agent.core.model import names
from gpushare_agent.core.model.errors import RefusalReason
from gpushare_agent.core.settings.reference import all_keys

ROOT = Path(__file__).parents[2]
_WITH_DOMAIN = re.compile(r"[a-z0-9.-]+/[\w.-]+")
_WITH_DOMAINS = "resources, annotations and labels"
_OWN_NAME = re.compile(
    r"(?<![\w./-])(?:gpushare-agent|(?:gaia\.)?tencent\.com|aliyun\.com)/[a-z][a-z.-]*[a-z](?![\w./-])"
)


def surface() -> Mapping[str, tuple[str, Sequence[str]]]:
    """Kind -> the page that explains it, from docs/reference, and its names."""
    return {
        "settings": ("settings.md", [key.name for key in all_keys()]),
        "commands": ("cli.md", [command.name for command in COMMAND_LINE.commands]),
        "metrics": ("metrics.md", _rows("docs/reference/metrics.md") + _rows("docs/reference/extender.md")),
        _WITH_DOMAINS: ("formats.md", _names_with_domain()),
        "components": ("components.md", sorted(path.name for path in (ROOT / "manifests/components").iterdir())),
        "chart values": ("../../charts/gpushare-agent/README.md", _rows("charts/gpushare-agent/README.md", r"[\w.]+")),
        "refusal reasons": ("metrics.md", list(RefusalReason)),
        "isolations": ("../explanation/isolation.md", list(ISOLATIONS)),
    }


def surface_lists() -> str:
    """How many there are of each kind, and the page that has them; the names of those that no page has all of."""
    kinds = surface()
    lines = [f"- [{kind}]({page}): {len(found)}" for kind, (page, found) in kinds.items()]
    names = ", ".join(f"`{name}`" for name in kinds[_WITH_DOMAINS][1])
    lines += ["", f"The {_WITH_DOMAINS}:", "", *textwrap.wrap(names, 160, break_on_hyphens=False)]
    return "\n".join(lines)


def _rows(page: str, name: str = r"(?:gpushare|container)_\w+") -> list[str]:
    """What stands first in the rows of a page's table, or of its lists, which code makes."""
    text = (ROOT / page).read_text(encoding="utf-8")
    return sorted(set(re.findall(rf"^(?:\| |- \*\*)`({name})`(?: \||\*\*)", text, flags=re.M)))


def _names_with_domain() -> list[str]:
    """Those of core/model/names.py, and what else the pages name: names of nodes, namespaces, claims and the extender."""
    texts = [
        text
        for value in vars(names).values()
        for text in (value if isinstance(value, tuple) else [value])
        if isinstance(text, str) and _WITH_DOMAIN.fullmatch(text)
    ]
    pages = [path for path in (ROOT / "docs").rglob("*.md") if path.name != "surface.md"]
    return sorted({*texts, *(name for page in pages for name in _OWN_NAME.findall(page.read_text(encoding="utf-8")))})
