"""sandbox/manifests.py: files of any content are read within bounds, or refused with their name."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpushare_agent.sandbox.manifests import MAX_BYTES, ManifestError, parse_manifests, read_manifests

LAUGHS = "a: &a0 [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"b{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 12)
)


@pytest.mark.parametrize(
    ("text", "problem"),
    [(LAUGHS, "values"), ("kind: &a [*a]\n", "names itself"), ("[" * 5000, "nested too deeply")],
    ids=["aliases of aliases", "an alias of itself", "deep"],
)
def test_a_manifest_that_stands_for_more_than_it_says_is_refused(text: str, problem: str) -> None:
    """Before it is copied or printed."""
    with pytest.raises(ManifestError, match=problem):
        parse_manifests(text, "a.yaml")


def test_a_file_that_is_too_long_is_not_read_to_its_end(tmp_path: Path) -> None:
    """A file without an end, too."""
    long = tmp_path / "a.yaml"
    long.write_bytes(b"#" * (MAX_BYTES + 1))
    for path in (long, Path("/dev/zero")):
        with pytest.raises(ManifestError, match=f"{path}: is longer than {MAX_BYTES} bytes"):
            read_manifests([path])
