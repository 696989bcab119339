"""MkDocs calls these while it builds the site: some files, most from outside docs/, become pages, and links lead to pages.

A link to a file that is no page leads into the repository, where its address is known (`repo_url`), and is plain text else.
Source: MkDocs 1.6, "Hooks" and `File.generated`.
"""

from __future__ import annotations

import os
import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
OUTSIDE = {
    "README.md": "index.md",
    "docs/README.md": "how-do-i.md",
    "charts/gpushare-agent/README.md": "reference/chart.md",
    "CHANGELOG.md": "project/changelog.md",
    "CONTRIBUTING.md": "project/contributing.md",
    "SECURITY.md": "project/security.md",
}
"""Path in the repository: path on the site."""

MERMAID, DRAWN_BY = os.environ.get("MERMAID"), "assets/mermaid.min.js"
"""What draws, on this machine (`nox -s docs`) and on the site. Without it the theme fetches one from unpkg.com."""

_MARKER = re.compile(r"(?:\d+\.|-) +")
_LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)#:\s]+)(#[^)\s]*)?\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for source, target in OUTSIDE.items():
        files.append(File.generated(config, target, content=(ROOT / source).read_text(encoding="utf-8")))
    if MERMAID:
        files.append(File.generated(config, DRAWN_BY, abs_src_path=MERMAID))
    return files


def on_post_page(output: str, page: Page, config: MkDocsConfig) -> str:
    if not MERMAID or 'class="mermaid"' not in output:
        return output
    script = posixpath.relpath(DRAWN_BY, page.url)
    return output.replace("</body>", f'<script src="{script}"></script></body>')


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    origin = {target: source for source, target in OUTSIDE.items()}.get(page.file.src_uri, f"docs/{page.file.src_uri}")

    def moved(link: re.Match[str]) -> str:
        image, text, target, anchor = link[1], link[2], link[3], link[4] or ""
        path = posixpath.normpath(posixpath.join(posixpath.dirname(origin), target))
        on_site = OUTSIDE.get(path) or (path.removeprefix("docs/") if path.startswith("docs/") else None)
        if on_site is not None:
            return f"{image}[{text}]({posixpath.relpath(on_site, posixpath.dirname(page.file.src_uri))}{anchor})"
        if not (ROOT / path).exists():
            return link[0]  # MkDocs warns, which ends a strict build
        return f"[{text}]({config.repo_url.rstrip('/')}/blob/main/{path}{anchor})" if config.repo_url else text

    def shown(part: re.Match[str]) -> str:  # of <picture>, which MkDocs leaves as it is: from the page's address on
        path = posixpath.normpath(posixpath.join(posixpath.dirname(origin), part[2])).removeprefix("docs/")
        return f'{part[1]}="{posixpath.relpath(path, page.url or ".")}"'

    markdown = re.sub(r'\b(src|srcset)="([^":]+)"', shown, markdown)
    return _LINK.sub(moved, _indented(markdown))


def _indented(markdown: str) -> str:
    """What an item of a list contains, by four spaces: Python-Markdown wants them, GitHub the width of the marker."""
    lines, width, is_code = [], 0, False
    for line in markdown.split("\n"):
        is_inside = width > 0 and line.startswith(" " * width)
        if line and not is_code and not is_inside:
            marker = _MARKER.match(line)
            width = len(marker[0]) if marker else 0
        is_code ^= line.lstrip().startswith("```")
        lines.append("    " + line[width:] if is_inside else line)
    return "\n".join(lines)
