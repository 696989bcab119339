"""gpu-manager's volume.conf beside ours."""

from __future__ import annotations

import json

from tests.docs.generated import ROOT
from tests.promises.gpu_manager import LEFT_OUT, TAKEN


def test_every_name_of_gpu_managers_volume_conf_is_here_or_left_out_for_a_reason() -> None:
    """41 names of v1.1.5 and its master; what is left out is in none of our volumes."""
    volumes = json.loads((ROOT / "manifests/base/volume.conf").read_text(encoding="utf-8"))["volume"]
    here = {name for volume in volumes for names in volume["components"].values() for name in names}
    assert set(TAKEN) <= here and not here & set(LEFT_OUT) and all(LEFT_OUT.values())
