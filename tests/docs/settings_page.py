"""The lists of docs/reference/settings.md, from the settings' own texts."""

from __future__ import annotations

import re

from gpushare_agent.core.settings.reference import Key, all_keys, text_of

_ESCAPED = str.maketrans({"*": r"\*"})
"""Two stars are emphasis."""


def settings_lists() -> str:
    """A list for each section, in the tree's order."""
    lines: list[str] = []
    section = ""
    for key in all_keys():
        if key.section != section:
            section = key.section
            lines += ["", f"## {_linked(section.rstrip('.'))}", ""]
        names = " ".join([f"**`{key.name}`**{_default(key)}", *(f"`--{alias}`" for alias in key.aliases)])
        lines.append(f"- {names}: {_linked(key.description.translate(_ESCAPED))}")
    return "\n".join(lines).lstrip()


def _default(key: Key) -> str:
    """The default and, in brackets, bounds, or the words of a choice where the description does not explain each."""
    default = text_of(key.default)
    allowed = "\u2013".join(re.findall(r"(?<=from |. to )[0-9.]*[0-9]", key.kind.allowed))
    explained = {word.strip("`.,:;()") for word in key.description.split()}
    if not key.is_boolean and not explained.issuperset(key.kind.choices):
        allowed = ", ".join(key.kind.choices)
    return (f" `{default}`" if default else "") + (f" ({allowed})" if allowed else "")


def _linked(text: str) -> str:
    """Paths of pages as links from docs/reference."""
    text = re.sub(r"docs/reference/([a-z-]+\.md)", r"[\1](\1)", text)
    return re.sub(r"docs/([a-z-]+/([a-z-]+\.md))", r"[\2](../\1)", text)
