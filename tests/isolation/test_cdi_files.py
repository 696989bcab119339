"""The CDI spec directories, with everything that may lie in them."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

import pytest

from gpushare_agent.agent.delivery.cdi_files import MAX_BYTES, MAX_FILES, MAX_YAML_BYTES, CdiFiles
from gpushare_agent.core.model.errors import Unavailable
from tests.isolation.support_cdi import NVIDIA_CTK, spec, write_spec


@pytest.fixture
def etc(short_dir: Path) -> Path:
    (short_dir / "etc").mkdir()
    return short_dir / "etc"


@pytest.fixture
def files(short_dir: Path, etc: Path) -> CdiFiles:
    """/etc/cdi is there, /run/cdi is not."""
    return CdiFiles([etc, short_dir / "run" / "cdi"])


def problem_of(files: CdiFiles) -> str:
    [file] = files.read()
    assert file.kind == "" and file.devices == ()
    return file.problem


def test_json_and_yaml_are_read_in_the_order_of_directories_and_names(files: CdiFiles, etc: Path) -> None:
    """Kind and device names of each; other files and directories are nobody's spec."""
    (etc / "nvidia.yaml").write_bytes(NVIDIA_CTK)
    write_spec(etc / "a.json", "GPU-9", kind="x.io/gpu")
    write_spec(files.own_path, "GPU-7")
    (etc / "notes.txt").write_text("no spec")
    (etc / "old.json.bak").write_text("no spec")
    (etc / "sub.json").mkdir()
    found = files.read()
    assert [Path(file.path).name for file in found] == ["a.json", "nvidia.yaml", "gpushare-agent.json"]
    assert [file.kind for file in found] == ["x.io/gpu", "nvidia.com/gpu", "nvidia.com/gpu"]
    assert found[1].devices == ("0", "GPU-0", "1", "GPU-1", "all")
    assert [file.directory for file in found] == [str(etc), str(etc), str(files.own_path.parent)]
    assert not any(file.problem for file in found)


def test_a_link_to_a_spec_is_read_as_runtimes_do(files: CdiFiles, etc: Path, short_dir: Path) -> None:
    """Administrators link specs; one that leads nowhere, to itself, or to a name that is too long is reported."""
    (etc / "a.json").symlink_to(write_spec(short_dir / "elsewhere.json", "GPU-0"))
    assert files.read()[0].devices == ("GPU-0",)
    (short_dir / "elsewhere.json").unlink()
    for target in ("b.json", "x" * 300):
        (etc / "b.json").symlink_to(target)
        assert ["cannot be read" in file.problem for file in files.read()] == [True, True], target
        (etc / "b.json").unlink()


def changed(**changes: Any) -> bytes:
    return json.dumps({**spec("GPU-0"), **changes}).encode()


_LEVELS = ["a0: &a0 {x: 1}"]
_LEVELS += [f"a{level}: &a{level} {{<<: [{', '.join([f'*a{level - 1}'] * 10)}]}}" for level in range(1, 9)]
MERGE_BOMB = "\n".join(_LEVELS).encode()
"""462 bytes that a loader with merges makes gigabytes of."""
BROKEN = [
    ("a.json", b"", "is no JSON"),
    ("a.json", b"\xff\xfe\x00", "is no JSON"),
    ("a.json", b'{"x":' * 200_000, "nested too deeply"),
    ("a.yaml", b"[" * 20_000, "nested too deeply"),
    ("a.yaml", b"a: [1", "is no YAML"),
    ("a.yaml", b"!!python/object/apply:os.system ['true']", "is no CDI spec"),
    ("a.yaml", b"x: !!timestamp foo", "missing required field `cdiVersion`"),
    ("a.yaml", b"x: " + b"1:" * 300 + b"1.5", "missing required field `cdiVersion`"),
    ("a.yaml", b"a: &a {x: 1}\nb: {<<: [*a, *a]}", "aliases, which"),
    ("a.yaml", MERGE_BOMB, "aliases"),
    ("a.yaml", b"", "Expected `object`"),
    ("a.json", b"[]", "Expected `object`"),
    ("a.json", changed(cdiVersion=1), "`$.cdiVersion`"),
    ("a.json", changed(kind="nvidia.com"), "kind"),
    ("a.json", changed(kind=["nvidia.com/gpu"]), "kind"),
    ("a.json", changed(devices=[]), "length >= 1 - at `$.devices`"),
    ("a.json", changed(devices={"GPU-0": {}}), "Expected `array`"),
    ("a.json", changed(devices=["GPU-0"]), "`$.devices[0]`"),
    ("a.json", changed(devices=[{"name": "a b", "containerEdits": {"env": []}}]), "`$.devices[0].name`"),
    ("a.json", changed(devices=[{"name": "GPU-0"}]), "missing required field `containerEdits`"),
    ("a.json", changed(devices=[{"name": "GPU-0", "containerEdits": {}}]), "`$.devices[0].containerEdits`"),
    ("a.json", changed(devices=spec("GPU-0")["devices"] * 2), "a device twice"),
    ("a.json", changed(devices=spec(*map(str, range(4097)))["devices"]), "length <= 4096"),
    ("a.json", b" " * (MAX_BYTES + 1), "larger than"),
    ("a.yaml", b" " * (MAX_YAML_BYTES + 1), "larger than"),
]


@pytest.mark.parametrize(("name", "content", "why"), BROKEN, ids=[f"{name}-{why}" for name, _, why in BROKEN])
def test_what_is_no_spec_is_reported_and_passed_over(
    files: CdiFiles, etc: Path, name: str, content: bytes, why: str
) -> None:
    """The file next to it is read all the same. Whoever may write there must not end the agent, nor fill its memory."""
    (etc / name).write_bytes(content)
    assert why in problem_of(files)
    write_spec(etc / "b.json", "GPU-1")
    assert files.read()[1].devices == ("GPU-1",)


def test_a_pipe_among_the_specs_stops_nobody(files: CdiFiles, etc: Path) -> None:
    """Opening it would wait for a writer for ever."""
    os.mkfifo(etc / "a.json")
    assert "no regular file" in problem_of(files)


def test_of_very_many_files_the_first_are_read_and_the_rest_is_reported(files: CdiFiles, etc: Path) -> None:
    """In order of name."""
    for number in range(MAX_FILES + 1):
        (etc / f"{number:04d}.json").write_text(json.dumps(spec(f"GPU-{number}")))
    found = files.read()
    assert [file.devices for file in found[:-1]] == [(f"GPU-{number}",) for number in range(MAX_FILES)]
    assert f"{MAX_FILES + 1} files" in found[-1].problem


def test_a_file_that_changed_is_read_again_and_another_is_not(files: CdiFiles, etc: Path) -> None:
    """By its identity: the second read of an unchanged file gives the very same value."""
    path = write_spec(etc / "a.json", "GPU-0")
    first = files.read()[0]
    assert files.read()[0] is first
    write_spec(etc / "new", "GPU-1").rename(path)
    assert files.read()[0].devices == ("GPU-1",)
    path.unlink()
    assert files.read() == ()


def test_no_directory_at_all_is_no_spec(short_dir: Path) -> None:
    """As on a host that never heard of CDI; a file in its place is reported."""
    assert CdiFiles([short_dir / "none"]).read() == ()
    (short_dir / "file").write_text("")
    assert "cannot be listed" in problem_of(CdiFiles([short_dir / "file"]))


def test_the_own_spec_is_written_whole_and_for_everybody(files: CdiFiles) -> None:
    """The directory is made; the mode does not depend on the umask; nothing half-written stays."""
    before = os.umask(0o077)
    try:
        files.write(b"one")
        assert files.holds(b"one") and not files.holds(b"two")
        files.write(b"two")
    finally:
        os.umask(before)
    assert files.own_path.read_bytes() == b"two"
    assert stat.S_IMODE(files.own_path.stat().st_mode) == 0o644
    assert os.listdir(files.own_path.parent) == [files.own_path.name]
    files.own_path.chmod(0o600)
    assert not files.holds(b"two")


def test_a_link_in_place_of_the_own_spec_is_replaced_and_not_followed(files: CdiFiles, short_dir: Path) -> None:
    """What it led to stays as it was."""
    victim = short_dir / "victim"
    victim.write_text("precious")
    files.own_path.parent.mkdir(parents=True)
    files.own_path.symlink_to(victim)
    assert not files.holds(b"precious")
    files.write(b"spec")
    assert victim.read_text() == "precious"
    assert files.holds(b"spec") and not files.own_path.is_symlink()


def test_a_directory_under_the_own_name_is_left_alone(files: CdiFiles) -> None:
    """It may hold what somebody needs."""
    (files.own_path / "inner").mkdir(parents=True)
    with pytest.raises(Unavailable, match=r"gpushare-agent\.json"):
        files.write(b"spec")
    with pytest.raises(Unavailable):
        files.remove()
    assert (files.own_path / "inner").is_dir()


def test_removing_takes_the_file_and_is_content_where_there_is_none(files: CdiFiles) -> None:
    """Nothing else in the directory goes."""
    files.remove()
    files.write(b"spec")
    other = write_spec(files.own_path.with_name("other.json"), "GPU-0")
    files.remove()
    assert os.listdir(other.parent) == ["other.json"]


def test_a_directory_that_cannot_be_made_is_reported_with_the_cure(short_dir: Path) -> None:
    """Its parent is a file. The text names the spec, the reason, what follows and the setting."""
    (short_dir / "file").write_text("")
    no_room = CdiFiles([short_dir / "file" / "cdi"])
    with pytest.raises(Unavailable) as caught:
        no_room.write(b"spec")
    for part in (str(no_room.own_path), "Not a directory", "do not start", "--cdi.spec-directories"):
        assert part in str(caught.value)
    no_room.remove()


def test_one_directory_under_two_names_is_read_once(tmp_path: Path) -> None:
    """Else the agent's own spec would count as another's, be removed, and be written again, in turn."""
    (tmp_path / "run").mkdir()
    (tmp_path / "varrun").symlink_to("run")
    (tmp_path / "run" / "x.json").write_text("{}")
    files = CdiFiles([tmp_path / "run", tmp_path / "varrun"]).read()
    assert [file.directory for file in files] == [str(tmp_path / "varrun")]
