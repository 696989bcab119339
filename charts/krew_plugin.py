"""The plugin `gpushare` of krew, kubectl's plugin manager, for one release: `charts/krew_plugin.py WHEEL URL DIRECTORY`.

The plugin is Python with compiled parts, which krew does not install, so its archive has a script that runs this release's
wheel by uv or pipx. URL is where the release's files are: both are named by it, so they are written where it is known.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import sys
import tarfile
from pathlib import Path

SCRIPT = """#!/bin/sh
# kubectl gpushare, of one release, in an environment that uv or pipx keeps.
wheel={url}/{wheel}
if command -v uvx >/dev/null; then exec uvx --quiet --from "$wheel" kubectl-gpushare "$@"; fi
if command -v pipx >/dev/null; then exec pipx run --quiet --spec "$wheel" kubectl-gpushare "$@"; fi
echo 'kubectl gpushare needs uv (https://docs.astral.sh/uv) or pipx, and Python 3.11 or newer' >&2
exit 1
"""
MANIFEST = """apiVersion: krew.googlecontainertools.github.com/v1alpha2
kind: Plugin
metadata:
  name: gpushare
spec:
  version: v{version}
  homepage: {homepage}
  shortDescription: Show who has which share of the GPUs, and why pods wait
  description: |
    Allocated and used cores and memory of each GPU, why a pod got its GPU or waits, which moves would make GPUs
    whole again, and a dashboard of all nodes, of clusters with gpushare-agent.
  caveats: |
    Needs uv or pipx, and Python 3.11 or newer.
  platforms:
    - selector:
        matchExpressions: [{{key: os, operator: In, values: [linux, darwin]}}]
      uri: {url}/{archive}
      sha256: {digest}
      bin: kubectl-gpushare
"""


def write(wheel: str, url: str, directory: Path) -> None:
    """The archive and `gpushare.yaml`, the same for the same arguments."""
    version, homepage = wheel.split("-")[1], url.partition("/releases/")[0]
    script = SCRIPT.format(url=url, wheel=wheel).encode()
    licence = (Path(__file__).parents[1] / "LICENSE").read_bytes()
    packed = io.BytesIO()
    with (
        gzip.GzipFile(fileobj=packed, mode="wb", mtime=0) as zipped,
        tarfile.open(fileobj=zipped, mode="w") as archive,
    ):
        for name, content, mode in (("kubectl-gpushare", script, 0o755), ("LICENSE", licence, 0o644)):
            member = tarfile.TarInfo(name)
            member.size, member.mode = len(content), mode
            archive.addfile(member, io.BytesIO(content))
    name = "kubectl-gpushare.tar.gz"
    (directory / name).write_bytes(packed.getvalue())
    manifest = MANIFEST.format(
        version=version, homepage=homepage, url=url, archive=name, digest=hashlib.sha256(packed.getvalue()).hexdigest()
    )
    (directory / "gpushare.yaml").write_text(manifest, encoding="utf-8")


if __name__ == "__main__":
    write(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
