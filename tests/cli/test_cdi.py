"""`gpushare-agent cdi`, run as a user does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gpushare_agent.agent.commands.cdi import cdi_specs
from gpushare_agent.agent.isolation import mounts_driver
from gpushare_agent.core.settings.settings import load_settings
from tests.isolation.support_cdi import schema, write_spec
from tests.settings.support_settings import Ended, run_program
from tests.support_core import inventory


class Command:
    """`cdi` on a host with two simulated GPUs; etc and run are its spec directories."""

    def __init__(self, root: Path) -> None:
        self.etc, self.run_directory = root / "etc", root / "run"
        self.own_path = self.run_directory / "gpushare-agent.json"
        self.flags = [
            *("--driver=simulated", "--simulated.gpus=2", "--simulated.device-nodes=true", "--node-name=n"),
            f"--cdi.spec-directories={self.etc},{self.run_directory}",
        ]

    async def run(self, *words: str) -> Ended:
        return await run_program("cdi", *words, *self.flags)

    async def json(self, *words: str, code: int = 0) -> dict[str, Any]:
        ended = await self.run(*words, "-o", "json")
        assert ended.code == code, ended.err
        document: dict[str, Any] = json.loads(ended.out)
        return document


@pytest.fixture
def command(short_dir: Path) -> Command:
    return Command(short_dir)


async def test_generate_writes_a_valid_spec_and_list_tells_of_it(command: Command) -> None:
    """Before, `list` reports that no spec names the GPUs, with the cure, and ends with 1, and --check shows the spec that is
    written afterwards."""
    before = await command.run("list")
    assert before.code == 1
    assert before.out.count(f"nobody yet: `gpushare-agent cdi generate` writes {command.own_path}") == 2
    assert len((await command.json("list", code=1))["unnamed"]) == 2

    ended = await command.run("generate", "--check")
    assert ended.code == 0 and f"{command.own_path}: would be written" in ended.out
    shown = (await command.json("generate", "--check"))["spec"]
    assert not command.run_directory.exists()
    ended = await command.run("generate")
    assert ended.code == 0, ended.err
    assert ended.out.startswith(f"{command.own_path}: written, 2 of 2 GPUs named there\n")
    spec = json.loads(command.own_path.read_text())
    assert spec == shown
    schema().validate(spec)
    assert [device["containerEdits"] for device in spec["devices"]] == [
        {"deviceNodes": [{"path": f"/dev/nvidia{minor}"}]} for minor in (0, 1)
    ]
    listed = await command.json("list")
    assert listed["named"] == {device["name"]: str(command.own_path) for device in spec["devices"]}
    assert listed["unnamed"] == []
    assert (await command.run("generate")).out.startswith(f"{command.own_path}: unchanged")
    assert (await command.json("generate"))["is_done"] is True


async def test_list_names_what_the_written_spec_names_whatever_the_settings(command: Command) -> None:
    """A spec that was written with a setting which `list` is not given is there, and is reported as such."""
    await command.run("generate")
    command.flags = [flag for flag in command.flags if not flag.startswith("--simulated.device-nodes")]
    listed = await command.run("list")
    assert (listed.code, listed.out.count("nobody yet")) == (0, 0)
    assert listed.out.count(str(command.own_path)) == 3 and "was written with others" in listed.out
    assert (await command.json("list"))["unnamed"] == []
    command.flags = [flag.replace("gpus=2", "gpus=3") for flag in command.flags]
    assert len((await command.json("list", code=1))["unnamed"]) == 1


@pytest.mark.slow
async def test_specs_of_others_are_used_and_ours_goes(command: Command) -> None:
    """Once both GPUs are named by another file, ours is removed; broken files are reported."""
    await command.run("generate")
    names = [device["name"] for device in json.loads(command.own_path.read_text())["devices"]]
    other = write_spec(command.etc / "nvidia.json", *names)
    (command.etc / "bad.yaml").write_text("a: [")
    ended = await command.run("generate")
    assert ended.code == 0
    assert f"{command.own_path}: removed" in ended.out
    assert f"passed over  {command.etc / 'bad.yaml'}: is no YAML" in ended.out
    assert not command.own_path.exists()
    again = await command.run("generate")
    assert again.out.startswith(f"{command.own_path}: not needed, 2 of 2 GPUs are named by others\n")
    assert (await command.json("list"))["named"] == dict.fromkeys(names, str(other))


async def test_an_ambiguous_name_ends_with_1_and_names_the_files(command: Command) -> None:
    """`generate` names the other GPU all the same."""
    [first, _] = (await command.json("generate", "--check"))["spec"]["devices"]
    for name in ("a.json", "b.json"):
        write_spec(command.etc / name, first["name"])
    ended = await command.run("generate")
    assert ended.code == 1
    assert f"{command.etc / 'a.json'} and {command.etc / 'b.json'}" in ended.out
    assert "written, 1 of 2 GPUs named there" in ended.out


@pytest.mark.slow
async def test_mistakes_are_readable_lines(command: Command, short_dir: Path) -> None:
    """No traceback: a directory that cannot be made, a kind that is none, no action."""
    (short_dir / "file").write_text("")
    command.flags[-1] = f"--cdi.spec-directories={short_dir}/file/cdi"
    ended = await command.run("generate")
    assert (ended.code, ended.out) == (1, "")
    assert ended.err.startswith(f"gpushare-agent: writing the CDI spec {short_dir}/file/cdi/gpushare-agent.json failed")
    assert (await command.run("generate", "--cdi.kind=gpu")).code == 2
    assert "--cdi.kind" in (await command.run("generate", "--cdi.kind=gpu")).err
    nothing = await command.run()
    assert nothing.code == 2 and "generate" in nothing.err


@pytest.mark.parametrize(("isolation", "has_mount"), [("vcuda", False), ("none", True), ("mps", True)])
def test_the_spec_mounts_the_driver_only_where_no_isolation_does(
    short_dir: Path, isolation: str, has_mount: bool
) -> None:
    """Under vcuda it would take the place of the share's limited libraries; a directory that is not there is left out."""
    base = short_dir / "vdriver"
    volume = {"name": "origin", "base": str(base), "components": {"libraries": ["libcuda.so"]}}
    config = short_dir / "volume.conf"
    config.write_text(json.dumps({"volume": [volume]}))
    flags = ["--driver=simulated", f"--volume-config={config}", f"--isolation={isolation}"]
    settings = load_settings([*flags, f"--cdi.spec-directories={short_dir}/cdi"], {}).settings
    specs = cdi_specs(settings, mounts_driver=mounts_driver(settings))
    gpus = inventory().gpus
    before = specs.plan(gpus)
    absent = before.spec
    assert before.left_out == ((f"{base}/origin: not on this host",) if has_mount else ())
    (base / "origin").mkdir(parents=True)
    present = specs.plan(gpus).spec
    assert absent is not None and "mounts" not in absent["containerEdits"]
    assert present is not None
    mounts = [(m["hostPath"], m["containerPath"]) for m in present["containerEdits"].get("mounts", [])]
    assert mounts == ([(str(base / "origin"), "/usr/local/nvidia")] if has_mount else [])
