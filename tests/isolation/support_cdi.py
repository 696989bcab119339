"""The published CDI schema, and small specs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from jsonschema import Draft7Validator
from referencing import Registry, Resource

DATA = Path(__file__).parents[1] / "data" / "cdi"
NVIDIA_CTK = (DATA / "nvidia-ctk.yaml").read_bytes()


def schema() -> Draft7Validator:
    """schema.json, whose references lead into defs.json."""
    main, definitions = (json.loads((DATA / name).read_text()) for name in ("schema.json", "defs.json"))
    draft7 = main["$schema"]
    registry: Registry[Any] = Registry().with_resource(
        "defs.json", Resource.from_contents({"$schema": draft7, **definitions})
    )
    return Draft7Validator(main, registry=registry)


def spec(*names: str, kind: str = "nvidia.com/gpu") -> dict[str, Any]:
    """A spec that names these devices."""
    edits = {"deviceNodes": [{"path": "/dev/nvidia0"}]}
    return {"cdiVersion": "0.3.0", "kind": kind, "devices": [{"name": name, "containerEdits": edits} for name in names]}


def write_spec(path: Path, *names: str, kind: str = "nvidia.com/gpu") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(spec(*names, kind=kind)))
    return path
