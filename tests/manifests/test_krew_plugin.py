"""The kubectl plugin that a release has for krew."""

from __future__ import annotations

import hashlib
import subprocess
import tarfile
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
WHEEL = "gpushare_agent-2.0.0a1-py3-none-any.whl"
URL = "https://forge.example/own/er/releases/download/v2.0.0a1"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("krew")
    subprocess.run(["python3", ROOT / "charts/krew_plugin.py", WHEEL, URL, directory], check=True, timeout=60)
    return directory


def test_the_manifest_names_the_archive_by_its_digest(made: Path) -> None:
    """krew refuses another; its version is a tag."""
    manifest = yaml.safe_load((made / "gpushare.yaml").read_text(encoding="utf-8"))
    assert manifest["spec"]["version"] == "v2.0.0a1"
    (platform,) = manifest["spec"]["platforms"]
    assert platform["uri"] == f"{URL}/kubectl-gpushare.tar.gz"
    assert platform["sha256"] == hashlib.sha256((made / "kubectl-gpushare.tar.gz").read_bytes()).hexdigest()
    with tarfile.open(made / "kubectl-gpushare.tar.gz") as archive:
        assert platform["bin"] in archive.getnames() and "LICENSE" in archive.getnames()


@pytest.mark.parametrize(
    ("tool", "expected"),
    [
        ("uvx", ["--quiet", "--from", f"{URL}/{WHEEL}", "kubectl-gpushare", "top", "a node"]),
        ("pipx", ["run", "--quiet", "--spec", f"{URL}/{WHEEL}", "kubectl-gpushare", "top", "a node"]),
        ("", []),
    ],
)
def test_the_script_runs_the_releases_wheel(made: Path, tmp_path: Path, tool: str, expected: list[str]) -> None:
    """By what is there; without either it says what is missing."""
    with tarfile.open(made / "kubectl-gpushare.tar.gz") as archive:
        content = archive.extractfile("kubectl-gpushare")
        assert content is not None
        (tmp_path / "kubectl-gpushare").write_bytes(content.read())
    programs = tmp_path / "bin"
    programs.mkdir()
    if tool:
        (programs / tool).write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n', encoding="utf-8")
        (programs / tool).chmod(0o755)
    done = subprocess.run(
        ["/bin/sh", tmp_path / "kubectl-gpushare", "top", "a node"],
        env={"PATH": str(programs)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stdout.splitlines() == expected
    assert (done.returncode, "needs uv" in done.stderr) == ((0, False) if tool else (1, True))
