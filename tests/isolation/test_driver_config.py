"""volume.conf: what is read, and how a mistake is reported."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gpushare_agent.agent.delivery import volume_config
from gpushare_agent.agent.delivery.volume_config import configured_volumes, read_volume_config
from gpushare_agent.agent.delivery.volume_plan import DriverVolume, VolumeName
from gpushare_agent.core.model.errors import StartupError
from gpushare_agent.core.settings.settings import load_settings

EXAMPLE = Path(__file__).parent.parent.parent / "manifests/base/volume.conf"


def entry(**changes: Any) -> dict[str, Any]:
    components = {"binaries": ["nvidia-smi"], "libraries": ["libcuda.so"]}
    return {"name": "nvidia", "base": "/var/vdriver", "mode": "ro", "components": components} | changes


def read(directory: Path, document: object) -> tuple[DriverVolume, ...]:
    return read_volume_config(_written(directory, document))


def _written(directory: Path, document: object) -> Path:
    path = directory / "volume.conf"
    path.write_text(document if isinstance(document, str) else json.dumps(document))
    return path


def test_the_volumes_are_read_in_their_order(short_dir: Path) -> None:
    """Names given twice count once; binaries and mode may be left out."""
    short = {"name": "origin", "base": "/b/", "components": {"libraries": ["libcuda.so", "libcuda.so"]}}
    assert read(short_dir, {"volume": [entry(), short]}) == (
        DriverVolume(
            name=VolumeName.SHARED, base=Path("/var/vdriver"), binaries=("nvidia-smi",), libraries=("libcuda.so",)
        ),
        DriverVolume(name=VolumeName.ORIGIN, base=Path("/b"), binaries=(), libraries=("libcuda.so",)),
    )


def test_the_example_of_the_manifests_is_read() -> None:
    """It describes both volumes, with libcuda and nvidia-smi in each."""
    volumes = read_volume_config(EXAMPLE)
    assert [volume.name for volume in volumes] == list(VolumeName)
    for volume in volumes:
        assert str(volume.directory) == f"/etc/gpu-manager/vdriver/{volume.name}"
        assert {"libcuda.so", "libnvidia-ml.so"} <= set(volume.libraries)
        assert "nvidia-smi" in volume.binaries


def test_a_base_without_a_place_goes_with_the_containers_directories(short_dir: Path) -> None:
    """As in the manifests, where one variable then moves it."""
    (volume,) = read_volume_config(_written(short_dir, {"volume": [entry(base="vdriver")]}), Path("/var/lib/x"))
    assert volume.directory == Path("/var/lib/x/vdriver/nvidia")
    (volume,) = read_volume_config(_written(short_dir, {"volume": [entry()]}), Path("/var/lib/x"))
    assert volume.directory == Path("/var/vdriver/nvidia")


def test_only_a_file_of_our_manifests_moves_with_the_containers_directories(
    short_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """gpu-manager's flag for these moves no driver: its DaemonSet mounts that at one place."""
    path = _written(short_dir, {"volume": [entry(base="vdriver")]})
    flags = [f"--volume-config={path}", "--virtual-manager-path=/data/vm"]
    (volume,) = configured_volumes(load_settings(flags, {}).settings)
    assert volume.base == Path("/data/vdriver")
    monkeypatch.setattr(volume_config, "USUAL_CONFIG", path)
    for chosen in (flags, flags[1:]):
        (volume,) = configured_volumes(load_settings(chosen, {}).settings)
        assert volume.base == short_dir / "vdriver"


def with_components(**components: Any) -> dict[str, Any]:
    return entry(components={"binaries": [], "libraries": ["libcuda.so"]} | components)


@pytest.mark.parametrize(
    ("document", "place"),
    [
        ("", "volume.conf"),
        ("{", "volume.conf"),
        ("[" * 100_000, "volume.conf"),
        ('{"volume": [], "volume": []}', "given twice"),
        ([], "Expected `object`, got `array`"),
        ({}, "missing required field `volume`"),
        ({"volume": [entry()], "volumes": []}, "unknown field `volumes`"),
        ({"volume": {}}, "`$.volume`"),
        ({"volume": []}, "`$.volume`"),
        ({"volume": ["nvidia"]}, "`$.volume[0]`"),
        ({"volume": [entry(), entry()]}, "described twice"),
        ({"volume": [entry(name="share")]}, "'share' - at `$.volume[0].name`"),
        ({"volume": [entry(name=["nvidia"])]}, "`$.volume[0].name`"),
        ({"volume": [entry(mode="rw")]}, "'rw' - at `$.volume[0].mode`"),
        ({"volume": [entry(), entry(name="origin", Mode="ro")]}, "unknown field `Mode` - at `$.volume[1]`"),
        ({"volume": [entry(base="etc/vdriver")]}, "`$.volume[0].base`"),
        ({"volume": [entry(base="/var/../etc")]}, "`$.volume[0].base`"),
        ({"volume": [entry(base="/a\0b")]}, "`$.volume[0].base`"),
        ({"volume": [entry(base="/\ud800")]}, "`$.volume[0].base`"),
        ({"volume": [entry(base="//")]}, "`$.volume[0].base`"),
        ({"volume": [entry(base=7)]}, "`$.volume[0].base`"),
        ({"volume": [entry(components=[])]}, "`$.volume[0].components`"),
        ({"volume": [with_components(library=[])]}, "unknown field `library` - at `$.volume[0].components`"),
        ({"volume": [entry(components={})]}, "missing required field `libraries` - at `$.volume[0].components`"),
        ({"volume": [with_components(libraries="libcuda.so")]}, "`$.volume[0].components.libraries`"),
        ({"volume": [with_components(libraries=["libcuda.so", 1])]}, "`$.volume[0].components.libraries[1]`"),
        ({"volume": [with_components(libraries=["../libcuda.so"])]}, "`$.volume[0].components.libraries[0]`"),
        ({"volume": [with_components(binaries=["/usr/bin/env"])]}, "`$.volume[0].components.binaries[0]`"),
        ({"volume": [with_components(binaries=[".."])]}, "`$.volume[0].components.binaries[0]`"),
        ({"volume": [with_components(binaries=["a\n"])]}, "`$.volume[0].components.binaries[0]`"),
        ({"volume": [with_components(binaries=[""])]}, "`$.volume[0].components.binaries[0]`"),
        ({"volume": [with_components(binaries=["x"] * 1001)]}, "`$.volume[0].components.binaries`"),
        (" " * (1024 * 1024) + "{}", "larger than"),
    ],
)
def test_a_mistake_is_reported_with_its_place(short_dir: Path, document: object, place: str) -> None:
    """The message names the file and the key, and is one line."""
    with pytest.raises(StartupError) as caught:
        read(short_dir, document)
    assert place in str(caught.value)
    assert str(short_dir / "volume.conf") in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 600


def test_a_file_that_cannot_be_read_is_reported(short_dir: Path) -> None:
    """Missing, or a directory, or not UTF-8."""
    (short_dir / "bytes").write_bytes(b'{"volume": "\xff"}')
    for name in ("missing", ".", "bytes"):
        with pytest.raises(StartupError, match="volume config"):
            read_volume_config(short_dir / name)
