"""What a package index shows as the project's page: hatchling calls it at each build, `pip install .` too.

An index has README.md alone, so its relative links would lead nowhere. Where the repository's address is known (the variable
DOCS_REPOSITORY, as for the site) they lead into it, at the version's tag, and the package names it; elsewhere they are plain
text, without pictures.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface


class Readme(MetadataHookInterface):
    def update(self, metadata: dict[str, Any]) -> None:
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        repository, tag = os.environ.get("DOCS_REPOSITORY", "").rstrip("/"), f"v{metadata['version']}"
        metadata["readme"] = {"content-type": "text/markdown", "text": page_of(text, repository, tag)}
        if repository:
            paths = {"Source": f"tree/{tag}", "Changelog": f"blob/{tag}/CHANGELOG.md", "Issues": "issues"}
            metadata["urls"] = {name: f"{repository}/{path}" for name, path in paths.items()}


def page_of(readme: str, repository: str, tag: str) -> str:
    """The readme with links of one page that stands elsewhere; `repository` is the address of its root, or empty."""
    readme = re.sub(r"^<!--.*-->\n", "", readme, flags=re.M)
    # Of two pictures the light one: an index shows its page in no other colours.
    readme = re.sub(
        r'<picture>.*?<img alt="([^"]*)" src="([^"]*)">\s*</picture>\n*',
        rf"![\1]({repository}/raw/{tag}/\2)\n\n" if repository else "",
        readme,
        flags=re.S,
    )
    linked = rf"[\1]({repository}/blob/{tag}/\2)" if repository else r"\1"
    return re.sub(r"(?<!!)\[([^\]]*)\]\(([^):#\s]+(?:#[^)\s]*)?)\)", linked, readme)
