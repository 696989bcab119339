"""settings/sources.py: the variables of gpu-manager's image."""

from __future__ import annotations

import pytest

from gpushare_agent.settings.settings import SettingsError, load_settings


@pytest.mark.parametrize(("value", "level"), [("0", "info"), ("4", "info"), ("5", "debug"), ("warning", "warning")])
def test_log_level_is_klogs_number_or_a_word_of_ours(value: str, level: str) -> None:
    """Below our own variable, above the file."""
    assert load_settings([], {"LOG_LEVEL": value}).settings.log.level == level
    loaded = load_settings([], {"LOG_LEVEL": value, "GPUSHARE_LOG__LEVEL": "error"})
    assert loaded.settings.log.level == "error" and loaded.outcome(loaded.migrated[0])[0]


def test_extra_flags_are_flags() -> None:
    """gpu-manager's names and ours, with klog's own reported."""
    text = "--v=5 --hostname-override=n1 --share-mode=false --logtostderr --query-port 5679"
    loaded = load_settings([], {"EXTRA_FLAGS": text})
    settings = loaded.settings
    assert (settings.node_name, settings.share_mode, settings.web.port) == ("n1", False, 5679)
    assert settings.log.level == "debug"
    assert [key.name for key in loaded.migrated if key.is_lost] == ["EXTRA_FLAGS --logtostderr"]
    assert loaded.sources["web.port"] == "variable EXTRA_FLAGS, flag --query-port"


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("EXTRA_FLAGS", "--no-such-flag=1", "variable EXTRA_FLAGS: flag --no-such-flag is unknown"),
        ("EXTRA_FLAGS", "--a='", "cannot be parted into words"),
        ("LOG_LEVEL", "loud", "is no log level"),
    ],
)
def test_mistakes_name_the_variable(name: str, value: str, words: str) -> None:
    """And end the start."""
    with pytest.raises(SettingsError, match=words):
        load_settings([], {name: value})


def test_libcuda_is_reported() -> None:
    """It changes nothing here."""
    (key,) = load_settings([], {"LIBCUDA": "/x"}).migrated
    assert key.is_lost and "volume_config" in key.reason
