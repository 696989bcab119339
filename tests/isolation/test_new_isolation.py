"""An isolation is added by its package alone: that of CONTRIBUTING.md, with a line of `check`, through the whole agent."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpushare_agent.agent import isolation
from gpushare_agent.agent.commands.check import check_node
from gpushare_agent.core.settings.isolation_names import isolation_names
from gpushare_agent.core.settings.settings import SettingsError, load_settings
from gpushare_agent.core.wire.v1beta1 import ContainerAllocateResponse
from tests.agent.support_agent import open_agent
from tests.docs.isolations_page import not_kept
from tests.docs.settings_page import settings_lists
from tests.sandbox.support_sandbox import CORE, container, open_test_node, pod
from tests.settings.support_settings import ROOT
from tests.support_json import written_node

CHECK = """
from gpushare_agent.agent.isolation.check import CheckProbe
from gpushare_agent.core.model.finding import ok


async def check_example(settings):
    return [ok("example", f"{settings.node_name} has all that it needs")]


def probes(open_driver):
    return (CheckProbe(name="example", run=check_example),)
"""


@pytest.fixture
def example(tmp_path: Path) -> Iterator[None]:
    """The package below a second folder of gpushare_agent.agent.isolation, while the test runs."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    (edits,) = re.findall(r"## Add an isolation\n.*?```python\n(.*?)```", text, re.S)
    package = tmp_path / "example"
    package.mkdir()
    for name, content in {"__init__": "", "edits": edits, "check": CHECK}.items():
        (package / f"{name}.py").write_text(content, encoding="utf-8")
    isolation.__path__.append(str(tmp_path))
    isolation_names.cache_clear()
    try:
        yield
    finally:
        isolation.__path__.remove(str(tmp_path))
        isolation_names.cache_clear()
        for name in [name for name in sys.modules if name.startswith(f"{isolation.__name__}.example")]:
            del sys.modules[name]


def test_without_its_package_nobody_knows_it() -> None:
    with pytest.raises(SettingsError, match=r"driver, gpushare, gpushare\+driver, mps, "):
        load_settings(["--isolation=example"], {})


@pytest.mark.usefixtures("example")
def test_settings_accept_and_list_it() -> None:
    """For the node and for pods; the page of settings and the text of a mistake have its name among the others."""
    settings = load_settings(["--isolation=example", "--isolations-allowed=none,example"], {}).settings
    assert (settings.isolation, settings.isolations_allowed) == ("example", ("none", "example"))
    listed = r"^- \*\*`isolations?(?:_allowed)?`.* \(driver, example, gpushare, gpushare\+driver, mps,"
    assert len(re.findall(listed, settings_lists(), re.M)) == 2
    with pytest.raises(SettingsError, match=r"driver, example, gpushare, gpushare\+driver, mps, "):
        load_settings(["--isolation=exampel"], {})


@pytest.mark.usefixtures("example")
def test_the_page_of_isolations_names_it() -> None:
    """By `nox -s pages -- --write`, from what its package says that it does not keep."""
    assert re.search(r"^- `bypass` \(.*`example`.*\): ", not_kept(), re.M)


@pytest.mark.usefixtures("example")
async def test_check_asks_it_and_says_what_it_keeps(tmp_path: Path) -> None:
    flags = ("--driver=simulated", "--isolation=example", "--node-name=n", f"--kubeconfig={tmp_path / 'none'}")
    found = {(one.what, one.detail) for one in await check_node(load_settings(flags, {}).settings)}
    assert ("example", "n has all that it needs") in found
    assert any(
        what == "isolation" and text.startswith("example: memory is kept by example, compute by nobody; not kept: ")
        for what, text in found
    )


@pytest.mark.usefixtures("example")
async def test_a_pod_gets_its_edits_and_the_node_document_shows_it() -> None:
    """A share; a whole GPU next to it has nothing to keep."""
    async with open_test_node() as node, open_agent(node, "--isolation=example", "--simulated.gpus=2") as agent:
        await node.wait_allocatable(CORE, 200)
        await node.start_pods(pod("share", container(cores=30, blocks=8)), pod("whole", container(cores=100)))
        given = {
            name: [ContainerAllocateResponse.parse(call.response).envs for call in node.calls_of(name)]
            for name in ("share", "whole")
        }
        document = written_node(agent.parts.observability.snapshots.current())
    assert {"2048"} == {env["EXAMPLE_MEMORY_MIB"] for env in given["share"] if "EXAMPLE_MEMORY_MIB" in env}
    assert not any("EXAMPLE_MEMORY_MIB" in env for env in given["whole"])
    assert document["agent"]["isolation"] == "example"
    (shown,) = document["agent"]["isolations"]
    assert (shown["name"], shown["kept"]["memory_by"], shown["kept"]["compute_by"]) == ("example", "example", "nobody")
