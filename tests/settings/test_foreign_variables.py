"""settings/foreign_variables.py: what a manifest for gpu-manager or for NVIDIA's plugin sets in vain."""

from __future__ import annotations

import re

from gpushare_agent.settings.foreign_variables import INSTEAD, WITHOUT, foreign_variables
from gpushare_agent.settings.reference import all_keys


def test_what_is_set_is_named_with_what_to_do() -> None:
    """The empty ones, which a chart writes for its defaults, are not."""
    environ = {
        "LOG_LEVEL": "5",
        "MIG_STRATEGY": "none",
        "PASS_DEVICE_SPECS": "",
        "PATH": "/bin",
        "GPUSHARE_LOG__LEVEL": "info",
    }
    found = foreign_variables(environ)
    assert list(found) == ["LOG_LEVEL", "MIG_STRATEGY"]
    assert "GPUSHARE_LOG__LEVEL" in found["LOG_LEVEL"]


def test_every_variable_to_use_instead_is_one_of_ours() -> None:
    """And none of ours is called foreign."""
    ours = {key.variable for key in all_keys()}
    named = {name for text in INSTEAD.values() for name in re.findall(r"GPUSHARE_\w+", text)}
    assert named and named <= ours
    assert not {*INSTEAD, *WITHOUT} & ours
    assert not set(INSTEAD) & set(WITHOUT)
