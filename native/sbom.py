"""Completes the list of the image's parts with those that are no Python packages:

    python native/sbom.py PYTHON.json ROOT OUTPUT.json

PYTHON.json is a CycloneDX document of the Python environment, ROOT the tree of files that are added to the image. What of it
this project builds or copies is added with its digest. The image's build stage runs it: standard library alone.
Format: https://cyclonedx.org/docs/1.6/json/
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path

_PARTS = {  # path in the image: name, licence, and where known package URL
    "usr/local/gpushare/libgpushare.so": ("libgpushare", "Apache-2.0", None),
    "usr/lib64/libcuda-control.so": ("vcuda-controller", "Apache-2.0", "pkg:github/tkestack/vcuda-controller"),
    "opt/gpushare-agent/bin/gpu-client": ("gpu-client", "Apache-2.0 AND MIT", None),  # MIT: musl
    "opt/gpushare-agent/bin/run-again": ("run-again", "Apache-2.0 AND MIT", None),
}


def part(path: Path, name: str, licence: str, package_url: str | None) -> dict[str, object]:
    """A CycloneDX component."""
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    hashes, licences = [{"alg": "SHA-256", "content": digest}], [{"expression": licence}]
    component = {"type": "library", "bom-ref": name, "name": name, "hashes": hashes, "licenses": licences}
    return component | ({"purl": package_url} if package_url else {})


def main(python_json: str, root: str, output: str) -> None:
    document = json.loads(Path(python_json).read_text(encoding="utf-8"))
    for path, about in _PARTS.items():
        if (Path(root) / path).exists():
            document["components"].append(part(Path(root) / path, *about))
    Path(output).parent.mkdir(parents=True, exist_ok=True)
    Path(output).write_text(json.dumps(document, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
