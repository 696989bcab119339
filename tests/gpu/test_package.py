"""What is packed for a GPU measurement, and what a run refuses."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from bench.gpu.pack import MANIFEST, CannotPack, manifest_of, tag_of, versions_of
from bench.gpu.run import CannotRun, read_manifest


def packed(folder: Path) -> dict[str, object]:
    """A folder with one library and its manifest, for this Python and machine."""
    (folder / "lib").mkdir(parents=True)
    (folder / "lib" / "libvgpu.so").write_bytes(b"library")
    manifest = manifest_of(folder, {"pip": "26.0"}, {"gpu": "none"}, commit="c" * 40, machine=os.uname().machine)
    manifest["interpreters"] = [tag_of(sys.version_info)]
    (folder / MANIFEST).write_text(json.dumps(manifest))
    return manifest


def test_the_manifest_names_every_file_with_its_sum(tmp_path: Path) -> None:
    """And the libraries, the wheels and what is missing, so that a run need not open them."""
    manifest = packed(tmp_path / "package")
    assert manifest["libraries"] == ["libvgpu.so"]
    assert manifest["missing"] == {"gpu": "none"}
    assert manifest["files"] == {
        "lib/libvgpu.so": {"bytes": 7, "sha256": "b718f1354f7247312eca086d9a024afe5fa717ddea5adeddd6f12bcf945b2e8c"}
    }


def test_a_package_as_it_was_made_is_taken(tmp_path: Path) -> None:
    """With the manifest's content."""
    manifest = packed(tmp_path / "package")
    assert read_manifest(tmp_path / "package") == manifest


def test_a_folder_without_a_manifest_is_refused_with_the_command(tmp_path: Path) -> None:
    """The text says how to make one."""
    with pytest.raises(CannotRun, match=r"nox -s gpu -- --pack"):
        read_manifest(tmp_path)


def test_a_changed_file_is_refused(tmp_path: Path) -> None:
    """By its name."""
    packed(tmp_path / "package")
    (tmp_path / "package" / "lib" / "libvgpu.so").write_bytes(b"another")
    with pytest.raises(CannotRun, match=r"lib/libvgpu\.so"):
        read_manifest(tmp_path / "package")


@pytest.mark.parametrize(
    ("key", "value", "said"), [("interpreters", ["3.9"], "wheels for 3.9"), ("machine", "riscv64", "for riscv64")]
)
def test_a_package_for_something_else_is_refused_at_once(tmp_path: Path, key: str, value: object, said: str) -> None:
    """Another Python, another kind of machine."""
    manifest = {**packed(tmp_path / "package"), key: value}
    (tmp_path / "package" / MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(CannotRun, match=said):
        read_manifest(tmp_path / "package")


def test_wheels_for_several_interpreters_have_one_version() -> None:
    """Compiled ones come once for each interpreter; two versions would leave pip without an answer."""
    names = ["nvidia_ml_py-13.1-py3-none-any.whl", "yarl-1.2-cp311-cp311-x.whl", "yarl-1.2-cp312-cp312-x.whl"]
    assert versions_of(names) == {"nvidia-ml-py": "13.1", "yarl": "1.2"}
    with pytest.raises(CannotPack, match="two versions"):
        versions_of([*names, "yarl-1.3-cp313-cp313-x.whl"])
