"""settings/node_configuration.py: which configuration a node has, and where its values come between the other places."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpushare_agent.core.settings.node_configuration import LABELS, NamedConfiguration, choose_name
from gpushare_agent.core.settings.settings import SettingsError, load_settings

OURS, THEIRS = LABELS


@pytest.mark.parametrize(
    ("labels", "names", "default", "chosen"),
    [
        ({}, [], "", ""),
        ({}, ["a"], "", "a"),
        ({}, ["a", "b"], "", ""),
        ({}, ["a", "default"], "", "default"),
        ({}, ["a", "default"], "a", "a"),
        ({THEIRS: "b"}, ["a", "b"], "a", "b"),
        ({THEIRS: "b", OURS: "a"}, ["a", "b"], "", "a"),
        ({THEIRS: "b", OURS: ""}, ["a", "b"], "", "b"),
        ({}, ["..data", "..2026_01_01", "a"], "", "a"),
    ],
)
def test_the_label_names_the_configuration_else_the_default_rules_do(
    labels: dict[str, str], names: list[str], default: str, chosen: str
) -> None:
    """Ours before NVIDIA's; without a label the named default, the only one, the one called default, or none."""
    assert choose_name(labels, names, default) == chosen


@pytest.mark.parametrize("name", ["c", "..", "..data", "../a", "a/../a", "/etc/passwd", "a\n", "x" * 300])
def test_a_name_that_is_not_there_is_refused(name: str) -> None:
    """It is compared with the names that there are, and used for nothing."""
    with pytest.raises(ValueError, match="which is not there; there are: a, b"):
        choose_name({THEIRS: name}, ["a", "b", "..data"], "")


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "settings.yaml"
    path.write_text("{share_mode: false, sample_period_s: 7, web: {port: 1}, node_labels: {zone: a, rack: 7}}")
    return str(path)


def test_a_configuration_beats_the_file_and_not_a_variable(file: str) -> None:
    """Its values name it as their source."""
    named = NamedConfiguration(name="a", content=b"{share_mode: true, sample_period_s: 9}")
    loaded = load_settings(["--config", file], {"GPUSHARE_SAMPLE_PERIOD_S": "8"}, named)
    assert (loaded.settings.share_mode, loaded.settings.sample_period_s, loaded.settings.web.port) == (True, 8, 1)
    assert loaded.sources["share_mode"] == "configuration a"


def test_pairs_of_a_configuration_replace_those_of_the_file(file: str) -> None:
    """Mappings of two files, which are one value: they are not merged."""
    named = NamedConfiguration(name="a", content=b"node_labels: {zone: b}")
    assert load_settings(["--config", file], {}, named).settings.node_labels == {"zone": "b"}


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"node_configuration: {default: b}", "configuration a: node_configuration.default cannot be set for a single"),
        (b"node_name: other", "configuration a: node_name cannot be set for a single node"),
        (b"config: /x", "configuration a: config cannot be set in a file"),
        (b"[1]", "configuration a: cannot be read: it is a list"),
        (b"web: {port: high}", "configuration a: 'high' is not allowed for --web.port"),
    ],
)
def test_a_mistake_names_the_configuration(content: bytes, problem: str) -> None:
    """And the key."""
    with pytest.raises(SettingsError) as error:
        load_settings([], {}, NamedConfiguration(name="a", content=content))
    assert error.value.problems[0].startswith(problem)


def test_a_configuration_of_nvidias_plugin_is_read_as_one() -> None:
    """Its variables beat it, as in the plugin, and it beats the file of all nodes."""
    content = b"{version: v1, sharing: {timeSlicing: {resources: [{name: nvidia.com/gpu, replicas: 4}]}}}"
    named = NamedConfiguration(name="a", content=content)
    settings = load_settings([], {"MIG_STRATEGY": "mixed"}, named).settings.nvidia
    assert (settings.replicas, settings.mig_strategy) == (("nvidia.com/gpu=4",), "mixed")
    assert load_settings([], {}, named).settings.nvidia.mig_strategy == "none"
