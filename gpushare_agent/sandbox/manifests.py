"""Manifests from YAML files, directories of them, and the samples shipped with the package: Pods, and the other kinds of
APPLIED_KINDS.

Everything is checked before anything is created: a mistake names the file, the document and the field.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import yaml
from msgspec import Struct

from gpushare_agent.core.kit.shallow_yaml import ShallowLoader
from gpushare_agent.core.model.errors import Rejected
from gpushare_agent.sandbox.api.kinds import APPLIED_KINDS
from gpushare_agent.sandbox.api.validation import completed, unknown_fields
from gpushare_agent.sandbox.pod_manifest import RawObject

EXPECTATION_ANNOTATION = "sandbox.gpushare/expect"
"""On a sample that is not meant to run: what it shows."""
STANDARD_INPUT = Path("-")
MAX_BYTES = 1 << 20
"""The largest file. The reader in Python takes 6.7 s of processor time for one of short values (measured)."""
MAX_VALUES = 200_000
"""Of a file, counted wherever an alias is named: 400 bytes of aliases can stand for gigabytes, and one for itself."""
FORMER_APPS = ("apps/v1beta1", "apps/v1beta2")
"""Versions that Kubernetes 1.16 removed, read as apps/v1."""
SAMPLE_SETS = ("all", "fitting", "waiting", "none")


class ManifestError(Rejected):
    """A file cannot be applied. Ends in exit code 2."""


class Manifest(Struct, frozen=True, kw_only=True):
    """A Pod, or an object of APPLIED_KINDS, as written; `origin` says where, for messages."""

    raw: RawObject
    origin: str


def read_manifests(paths: Sequence[Path]) -> list[Manifest]:
    """The manifests in the given order, a directory's files by name, documents as they stand. Raises ManifestError."""
    found = [
        manifest for path in paths for file in _files(path) for manifest in parse_manifests(_text(file), _origin(file))
    ]
    # Files without a document are most often a wrong path.
    if paths and not found:
        raise ManifestError(f"no pods in {', '.join(map(_origin, paths))}: a file needs at least one Pod manifest")
    _check_names(found)
    return found


def sample_manifests(which: str, *, by_claims: bool = False, has_mig: bool = False) -> list[Manifest]:
    """One of SAMPLE_SETS; "fitting" leaves out what is not meant to run, "waiting" all else. By claims, also of MIG
    instances, every sample is meant to run, and the device classes come with any set."""
    if by_claims:
        found = _shipped("claim_samples")
        if has_mig:
            found = [one for one in found if one.raw["kind"] == "DeviceClass"] + _shipped("mig_samples")
        return [one for one in found if one.raw["kind"] == "DeviceClass"] if which == "none" else found
    found = _shipped("samples") if which != "none" else []
    return [m for m in found if which == "all" or (expectation(m.raw) is None) == (which == "fitting")]


def _shipped(folder: str) -> list[Manifest]:
    files = sorted(resources.files(__package__).joinpath(folder).iterdir(), key=lambda f: f.name)
    return [
        m for f in files if f.name.endswith(".yaml") for m in parse_manifests(f.read_text(encoding="utf-8"), f.name)
    ]


def expectation(raw: RawObject) -> str | None:
    text = (raw["metadata"].get("annotations") or {}).get(EXPECTATION_ANNOTATION)
    return None if text is None else str(text)


def _origin(path: Path) -> str:
    return "standard input" if path == STANDARD_INPUT else str(path)


def _files(path: Path) -> Iterable[Path]:
    if path != STANDARD_INPUT and path.is_dir():
        files = sorted(f for f in path.iterdir() if f.suffix in (".yaml", ".yml", ".json") and f.is_file())
        if not files:
            raise ManifestError(f"{path}: no .yaml, .yml or .json file in this directory")
        return files
    return [path]


def _text(file: Path) -> str:
    try:
        if file == STANDARD_INPUT:
            # Bytes, because the terminal's encoding need not be UTF-8.
            content = sys.stdin.buffer.read(MAX_BYTES + 1)
        else:
            with file.open("rb") as opened:
                content = opened.read(MAX_BYTES + 1)
        if len(content) > MAX_BYTES:
            raise ManifestError(f"{_origin(file)}: is longer than {MAX_BYTES} bytes: split it")
        return content.decode()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ManifestError(f"{_origin(file)}: cannot be read: {reason}") from error


def parse_manifests(text: str, origin: str) -> list[Manifest]:
    """The Pods of a YAML text; documents of kind List are taken apart. Raises ManifestError."""
    try:
        documents = list(yaml.load_all(text, ShallowLoader))
    except RecursionError as error:
        raise ManifestError(f"{origin}: is nested too deeply") from error
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f", line {mark.line + 1}" if mark is not None else ""
        raise ManifestError(f"{origin}{where}: no valid YAML: {getattr(error, 'problem', None) or error}") from error
    except Exception as error:  # what looks like a number or a date and is none, in whatever way
        raise ManifestError(f"{origin}: no valid YAML: {error}") from error
    # safe_load makes one object of an alias, however often it is named: memory is no matter, walking it is.
    if not _is_bounded(documents):
        raise ManifestError(f"{origin}: has more than {MAX_VALUES} values, or an alias that names itself")
    found: list[Manifest] = []
    for number, document in enumerate(documents, start=1):
        where = f"{origin}, document {number}" if len(documents) > 1 else origin
        found.extend(_checked(item, where) for item in _items(document, where))
    return found


def _is_bounded(documents: list[Any]) -> bool:
    left, waiting = MAX_VALUES, documents[:]
    while waiting and left >= 0:
        value = waiting.pop()
        inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
        left -= 1 + len(inner)
        # An alias that names itself has no end: the count stops it.
        waiting += inner if left >= 0 else ()
    return left >= 0


def _items(document: Any, where: str) -> list[Any]:
    if document is None:
        return []
    # What `kubectl get -o yaml` writes.
    if isinstance(document, dict) and document.get("kind") in ("List", "PodList"):
        items = document.get("items") or []
        return items if isinstance(items, list) else [items]
    if not isinstance(document, dict):
        raise ManifestError(
            f"{where}: not a manifest: expected a mapping with kind: Pod, got {type(document).__name__}"
        )
    return [document]


def _checked(raw: Any, where: str) -> Manifest:
    """Also refuses unknown fields: in a file that a person writes one is most often a misspelt one, such as `resorces`."""
    given = raw.get("kind") if isinstance(raw, dict) else None
    kind = APPLIED_KINDS.get(str(given))
    if kind is None:
        raise ManifestError(
            f"{where}: kind {given!r} cannot be applied: the embedded node knows {', '.join(APPLIED_KINDS)}"
        )
    # GPUShare's samples have it. They run here as they are, though a cluster wants them changed.
    if raw.get("apiVersion") in FORMER_APPS and kind.group_version == "apps/v1":
        raw = {**raw, "apiVersion": "apps/v1"}
    try:
        # Checked as at creation, and thrown away: nothing is created before all files are right.
        completed(kind, raw)
        found = unknown_fields(raw, kind.name)
    except Rejected as error:
        metadata = raw.get("metadata")
        name = metadata.get("name", "") if isinstance(metadata, dict) else ""
        raise ManifestError(f"{where}: {kind.name} {name!r} is not valid: {error}") from error
    if found:
        raise ManifestError(f"{where}: {kind.name}: {', '.join(found)}")
    return Manifest(raw=raw, origin=where)


def _check_names(manifests: list[Manifest]) -> None:
    seen: dict[tuple[str, str, str], str] = {}
    for manifest in manifests:
        metadata = manifest.raw["metadata"]
        kind = manifest.raw["kind"]
        key = (metadata.get("namespace") or "default", metadata.get("name") or "", kind)
        if key[1] and key in seen:
            raise ManifestError(f"{manifest.origin}: {kind} {key[0]}/{key[1]} is there already, in {seen[key]}")
        seen[key] = manifest.origin
