"""The files of prepared claims: the record of each, and the CDI spec that the runtime reads.

    <state_directory>/claims/<claim UID>.json                  the agent's own record, with a copy in claims.last/
    <cdi.spec_directories>/gpushare-agent-claim-<claim UID>.json   the CDI spec; gone after a reboot where it is on a tmpfs

A record is versioned JSON; unknown fields are ignored, so that a newer agent's record is still read. One that cannot be
read stays where it is and is reported: its copy counts, else the claim is prepared again. Every function blocks, and raises
OSError. State owned: the files.
"""

from __future__ import annotations

import os
from contextlib import suppress
from hashlib import sha256
from pathlib import Path

import structlog
from msgspec import Raw, Struct, json
from msgspec.json import Decoder
from msgspec.structs import replace

from gpushare_agent.agent.dra.decisions.edits import PreparedClaim, encode_spec
from gpushare_agent.agent.isolation import ISOLATIONS
from gpushare_agent.agent.runtime.machine import is_before_boot, this_boot
from gpushare_agent.core.claims.claim import is_claim_uid
from gpushare_agent.core.kit.directories import DIRECTORY, opened, read_content, remove_left_behind, replace_file
from gpushare_agent.core.kit.json_schema import decoded
from gpushare_agent.core.kit.supervision import ReportOnce
from gpushare_agent.core.model.errors import Corrupt, may_pass

log = structlog.get_logger(__name__)

VERSION = 1
MAX_RECORD_BYTES = 1 << 20
_SPEC_PREFIX = "gpushare-agent-claim-"


class ClaimFiles:
    def __init__(self, records: Path, specs: Path) -> None:
        self._records = records
        self._copies = records.with_name(f"{records.name}.last")
        self._specs = specs
        self._unreadable = ReportOnce()

    def load(self) -> list[PreparedClaim]:
        """All that are recorded. Raises OSError: the directory, or a record and its copy, cannot be read now."""
        for directory in (self._records, self._copies, self._specs):
            remove_left_behind(directory)
        try:
            names = sorted(path.stem for path in self._records.iterdir() if path.suffix == ".json")
        except FileNotFoundError:
            return []
        return [claim for name in names if is_claim_uid(name) and (claim := self._load(name)) is not None]

    def save(self, claim: PreparedClaim) -> None:
        """The spec, then the record: where the record is, everything is. Writes neither where it is there already."""
        self.write_spec(claim)
        raw = json.encode(claim)
        content = json.encode(_Record(claim=Raw(raw), digest=sha256(raw).hexdigest())) + b"\n"
        self._write(self._records, f"{claim.ref.uid}.json", content, is_synced=True)
        self._write(self._copies, f"{claim.ref.uid}.json", content)

    def write_spec(self, claim: PreparedClaim) -> None:
        """Where it is not there already."""
        self._write(self._specs, f"{_SPEC_PREFIX}{claim.ref.uid}.json", encode_spec(claim))

    def remove(self, uid: str) -> None:
        """Spec and record, in this order."""
        # The record last: cut off between the two, the claim is still known and removed again.
        self.remove_spec(uid)
        for directory in (self._copies, self._records):
            (directory / f"{uid}.json").unlink(missing_ok=True)

    def remove_spec(self, uid: str) -> None:
        """The record stays."""
        (self._specs / f"{_SPEC_PREFIX}{uid}.json").unlink(missing_ok=True)

    def remove_other_specs(self, known: set[str]) -> list[str]:
        """Removes specs of claims that are not in `known`, left by an agent that was killed; returns their UIDs."""
        removed = []
        for path in sorted(self._specs.glob(f"{_SPEC_PREFIX}*.json")):
            uid = path.stem.removeprefix(_SPEC_PREFIX)
            # Another program may have files next to ours: only names that this agent gives are touched.
            if is_claim_uid(uid) and uid not in known:
                path.unlink(missing_ok=True)
                removed.append(uid)
        return removed

    def _write(self, directory: Path, name: str, content: bytes, *, is_synced: bool = False) -> None:
        directory.mkdir(mode=0o755, parents=True, exist_ok=True)
        with opened(directory, None, DIRECTORY & ~os.O_NOFOLLOW) as descriptor:
            try:
                replace_file(descriptor, name, content, is_synced=is_synced)
            except OSError as e:  # it names the temporary file
                raise OSError(e.errno, e.strerror, str(directory / name)) from e

    def _load(self, uid: str) -> PreparedClaim | None:
        failure: OSError | None = None
        for place, then in ((self._records, "its copy is read"), (self._copies, "its claim is prepared again")):
            path = place / f"{uid}.json"
            try:
                with opened(place, None, DIRECTORY & ~os.O_NOFOLLOW) as directory:
                    content = read_content(directory, path.name, MAX_RECORD_BYTES)
                claim = _claim_of(content)
                # Of an agent that noted no boot: containers run with its files, unless the boot came later.
                if not claim.boot_id and not is_before_boot(path.stat()):
                    claim = replace(claim, boot_id=this_boot())
            except (OSError, Corrupt) as e:
                if isinstance(e, OSError) and may_pass(e):
                    failure = failure or OSError(e.errno, e.strerror, str(path))  # a read names no file
                elif self._unreadable.is_new(str(e), str(path)):
                    log.error("claim_record_unreadable", path=str(path), error=str(e), then=then)
                continue
            with suppress(OSError):  # a full disk: what was read counts all the same
                self._write(self._copies, path.name, content)
            # The file's name is what `remove` goes by: a record under another name would never end.
            return claim if claim.ref.uid == uid else None
        # Without it the files of its containers, which run, would be removed, and its instances given away.
        if failure is not None:
            raise failure
        return None


class _Record(Struct, kw_only=True):
    """The file. `digest` is the SHA-256 of the claim's text: by one wrong bit the claim would have another GPU, and its own
    would be given away twice."""

    version: int = VERSION
    claim: Raw
    digest: str


_RECORD, _CLAIM = Decoder(_Record), Decoder(PreparedClaim)


def _claim_of(content: bytes) -> PreparedClaim:
    """Raises Corrupt."""
    record = decoded(_RECORD, content, "it")
    if record.digest != sha256(record.claim).hexdigest():
        raise Corrupt("its digest is not its claim's")
    claim = decoded(_CLAIM, record.claim, "its claim")
    # Of a newer agent, or a build without it: what it keeps on the host nobody here knows.
    for name in (one.isolation for one in claim.results):
        if name not in ISOLATIONS:
            raise Corrupt(f"isolation {name[:80]!r} is none of this agent's")
    return claim
