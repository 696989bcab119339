"""The files of the Container Device Interface (CDI), as far as the agent needs them.

Source: the CDI specification, and what its reference library accepts: containers get devices through that library in every
common runtime. A name is `<kind>=<device>`, a kind `<vendor>/<class>`.
"""

from __future__ import annotations

import re

from msgspec import Struct

OWN_SPEC_NAME = "gpushare-agent.json"
"""The agent's own file, in the last spec directory; no other program's may have this name there."""

_KIND = re.compile(r"[A-Za-z]([A-Za-z0-9_.-]*[A-Za-z0-9])?/[A-Za-z]([A-Za-z0-9_.-]*[A-Za-z0-9])?")
_DEVICE = re.compile(r"[A-Za-z0-9]([A-Za-z0-9_.:-]*[A-Za-z0-9])?")


def is_kind(text: str) -> bool:
    return _KIND.fullmatch(text) is not None


def is_device_name(text: str) -> bool:
    return _DEVICE.fullmatch(text) is not None


class SpecFile(Struct, frozen=True, kw_only=True):
    """One file of a spec directory. `problem` is why a runtime ignores it (then kind and devices are empty)."""

    path: str
    directory: str
    kind: str = ""
    devices: tuple[str, ...] = ()
    problem: str = ""
