"""Where the sources of an isolation library come from, and what is refused."""

from __future__ import annotations

import io
import subprocess
import tarfile
from pathlib import Path

import pytest

from native.build_hami_core import CannotBuildError, build_hami_core, opened_source


def _archive(path: Path, *names: str, kind: bytes = tarfile.REGTYPE) -> str:
    with tarfile.open(path, "w:xz") as made:
        for name in names:
            member = tarfile.TarInfo(name)
            member.type = kind
            member.linkname = "/etc/passwd"
            member.size = 2 if kind == tarfile.REGTYPE else 0
            made.addfile(member, io.BytesIO(b"x\n"))
    return str(path)


def test_an_archive_is_unpacked_and_removed(tmp_path: Path) -> None:
    """Its one top folder is the source."""
    with opened_source(_archive(tmp_path / "a.tar.xz", "lib-1/src/a.c", "lib-1/README")) as directory:
        assert sorted(path.name for path in directory.rglob("*")) == ["README", "a.c", "src"]
    assert not directory.exists()


@pytest.mark.parametrize("name", ["../a.c", "/a.c", "lib/../../a.c"])
def test_an_archive_that_leads_out_is_refused(name: str, tmp_path: Path) -> None:
    """A name with `..` is an error; an absolute one is unpacked below the directory."""
    archive = _archive(tmp_path / "a.tar.xz", name)
    if name.startswith("/"):
        with opened_source(archive) as directory:
            assert [path.name for path in directory.iterdir()] == ["a.c"]
        return
    with pytest.raises(CannotBuildError, match="unpacking"), opened_source(archive):
        pass


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.FIFOTYPE])
def test_an_archive_with_links_or_devices_is_refused(kind: bytes, tmp_path: Path) -> None:
    """A link wherever it leads, a device node, a pipe."""
    with (
        pytest.raises(CannotBuildError, match="unpacking"),
        opened_source(_archive(tmp_path / "a.tar.xz", "a", kind=kind)),
    ):
        pass


def test_a_repository_is_fetched_at_a_revision(tmp_path: Path) -> None:
    """A git URL with # and a tag, without its history."""
    repository = tmp_path / "repository"
    (repository / "src").mkdir(parents=True)
    git = ["git", "-C", str(repository), "-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run(["git", "init", "--quiet", str(repository)], check=True)
    for text, tag in (("old", "v1"), ("new", "v2")):
        (repository / "src" / "a.c").write_text(text)
        subprocess.run([*git, "add", "src/a.c"], check=True)
        subprocess.run([*git, "commit", "--quiet", "-m", text], check=True)
        subprocess.run([*git, "tag", tag], check=True)
    with opened_source(f"file://{repository}#v1") as directory:
        assert (directory / "src" / "a.c").read_text() == "old"


def test_what_is_no_source_is_said(tmp_path: Path) -> None:
    """No directory, no archive, no URL; and a directory of something else."""
    with pytest.raises(CannotBuildError, match="no directory, no archive and no git URL"), opened_source("nothing"):
        pass
    with pytest.raises(CannotBuildError, match="not HAMi-core's source"):
        build_hami_core(str(tmp_path), include=[], output=tmp_path / "libvgpu.so")
