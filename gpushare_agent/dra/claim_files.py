"""The files of prepared claims: the record of each, and the CDI spec that the runtime reads.

    <dra.record_directory>/<claim UID>.json                    the agent's own record
    <dra.cdi_directory>/gpushare-agent-claim-<claim UID>.json   the CDI spec; gone after a reboot where it is on a tmpfs

A record is versioned JSON; unknown fields are passed over, so that a newer agent's record is still read. One that cannot be
read stays where it is and is reported: the claim is then prepared anew. Every function blocks. State owned: the files.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import structlog

from gpushare_agent.dra.decisions.claim import is_claim_uid
from gpushare_agent.dra.decisions.edits import PreparedClaim, PreparedResult, distinct_names, encode_spec
from gpushare_agent.isolation import ISOLATIONS
from gpushare_agent.kit.directories import DIRECTORY, opened, read_content, replace_file
from gpushare_agent.model.allocations import ClaimRef, ContainerKey
from gpushare_agent.model.errors import Unavailable
from gpushare_agent.model.names import PodUid

log = structlog.get_logger(__name__)

VERSION = 1
MAX_RECORD_BYTES = 1 << 20
_SPEC_PREFIX = "gpushare-agent-claim-"


class ClaimFiles:
    def __init__(self, records: Path, specs: Path) -> None:
        self._records = records
        self._specs = specs

    def load(self) -> list[PreparedClaim]:
        """All that are recorded. Raises Unavailable: the directory cannot be read."""
        try:
            names = sorted(path.stem for path in self._records.iterdir() if path.suffix == ".json")
        except FileNotFoundError:
            return []
        except OSError as e:
            raise Unavailable(f"{self._records} cannot be read: {e.strerror or e}") from e
        return [claim for name in names if is_claim_uid(name) and (claim := self._load(name)) is not None]

    def save(self, claim: PreparedClaim) -> None:
        """The spec, then the record: where the record is, everything is. Raises Unavailable."""
        self.write_spec(claim)
        self._write(
            self._records, f"{claim.ref.uid}.json", json.dumps(_document(claim)).encode() + b"\n", is_synced=True
        )

    def write_spec(self, claim: PreparedClaim) -> None:
        """Where it is not there already. Raises Unavailable."""
        self._write(self._specs, f"{_SPEC_PREFIX}{claim.ref.uid}.json", encode_spec(claim.spec))

    def remove(self, uid: str) -> None:
        """Spec and record, in this order. Raises Unavailable."""
        for path in (self._specs / f"{_SPEC_PREFIX}{uid}.json", self._records / f"{uid}.json"):
            _remove(path)

    def remove_other_specs(self, known: set[str]) -> list[str]:
        """Removes specs of claims that are not in `known`, left by an agent that was killed; returns their UIDs. Raises
        Unavailable."""
        removed = []
        for path in sorted(self._specs.glob(f"{_SPEC_PREFIX}*.json")):
            uid = path.stem.removeprefix(_SPEC_PREFIX)
            if is_claim_uid(uid) and uid not in known:
                _remove(path)
                removed.append(uid)
        return removed

    def _write(self, directory: Path, name: str, content: bytes, *, is_synced: bool = False) -> None:
        try:
            directory.mkdir(mode=0o755, parents=True, exist_ok=True)
            with opened(directory, None, DIRECTORY & ~os.O_NOFOLLOW) as descriptor:
                replace_file(descriptor, name, content, is_synced=is_synced)
        except OSError as e:
            raise Unavailable(f"{directory / name} cannot be written: {e.strerror or e}") from e

    def _load(self, uid: str) -> PreparedClaim | None:
        path = self._records / f"{uid}.json"
        try:
            with opened(self._records, None, DIRECTORY & ~os.O_NOFOLLOW) as directory:
                content = read_content(directory, path.name, MAX_RECORD_BYTES)
            claim = _parsed(json.loads(content))
        except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError) as e:
            log.error("claim_record_unreadable", path=str(path), error=repr(e), then="its claim is prepared anew")
            return None
        return claim if claim.ref.uid == uid else None


def _remove(path: Path) -> None:
    try:
        path.unlink(missing_ok=True)
    except OSError as e:
        raise Unavailable(f"{path} cannot be removed: {e.strerror or e}") from e


def _document(claim: PreparedClaim) -> dict[str, Any]:
    return {
        "version": VERSION,
        "namespace": claim.ref.namespace,
        "name": claim.ref.name,
        "uid": claim.ref.uid,
        "shown_as": claim.shown_as,
        "pod": claim.pod,
        "users": list(claim.users),
        "isolation": claim.isolation,
        "results": [
            {
                "key": one.key.container,
                "request": one.request,
                "device": one.device,
                "share_id": one.share_id,
                "gpu": one.gpu,
                "cores": one.cores,
                "memory_mib": one.memory_mib,
                "is_whole": one.is_whole,
                "core_limit": one.core_limit,
                "view": one.view,
                "is_admin": one.is_admin,
                "cdi_devices": list(one.cdi_devices),
            }
            for one in claim.results
        ],
        "spec": dict(claim.spec),
    }


def _parsed(raw: Mapping[str, Any]) -> PreparedClaim:
    """Raises KeyError, TypeError, ValueError or OverflowError."""
    ref = ClaimRef(str(raw["namespace"]), str(raw["name"]), str(raw["uid"]))
    # In an earlier build's record two results may have one key, under which the files are: `view` names it as before.
    keys = distinct_names([str(one["key"]) for one in raw["results"]])
    results = tuple(
        PreparedResult(
            key=ContainerKey(PodUid(ref.uid), key),
            request=str(one["request"]),
            device=str(one["device"]),
            share_id=str(one["share_id"]),
            gpu=str(one["gpu"]),
            cores=int(one["cores"]),
            memory_mib=int(one["memory_mib"]),
            is_whole=bool(one["is_whole"]),
            core_limit=int(one.get("core_limit", 0)),
            view=str(one.get("view", "")) or str(one["key"]),
            cdi_devices=tuple(map(str, one["cdi_devices"])),
            is_admin=bool(one.get("is_admin", False)),
        )
        for key, one in zip(keys, raw["results"], strict=True)
    )
    spec = raw["spec"]
    if not isinstance(spec, dict) or not results:
        raise ValueError("it has no spec, or no results")
    return PreparedClaim(
        ref=ref,
        shown_as=str(raw.get("shown_as", ref.name)),
        pod=str(raw["pod"]),
        isolation=ISOLATIONS[raw["isolation"]].name,
        results=results,
        spec=spec,
        users=tuple(PodUid(str(uid)) for uid in raw.get("users", ())),
    )
