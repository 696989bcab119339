"""`gpushare-agent driver-volume`: collects the driver's files of this host into the volumes that containers mount.

Runs before the agent serves (for example as an init container) and after each update of the driver. A volume that fails
does not stop the other, nor the removal of old versions; its former version stays in force. For operators:
docs/how-to/driver-volume.md. A version that a process of this PID namespace has mounted, by
/proc/<pid>/mountinfo, stays.
"""

from __future__ import annotations

import errno
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from msgspec import Struct, field, to_builtins

from gpushare_agent.agent.delivery.host_libraries import plan_of
from gpushare_agent.agent.delivery.volume_config import configured_volumes
from gpushare_agent.agent.delivery.volume_directory import DriverDirectory
from gpushare_agent.agent.delivery.volume_plan import DriverVolume, VolumeName, driver_version_text
from gpushare_agent.core.cli.command_line import Form, Invocation
from gpushare_agent.core.cli.render_text import Report, print_report, progress
from gpushare_agent.core.model.errors import AgentError
from gpushare_agent.core.model.names import MIB
from gpushare_agent.core.settings.settings import Settings

_ROOT_FIELD = 3
"""mountinfo's fourth field: the mounted directory as a path in its own file system (proc(5))."""


class MountedDirectories(Struct, frozen=True, kw_only=True):
    """`roots` are paths within their file systems, octal escapes as the kernel writes them."""

    roots: frozenset[str]
    unreadable_processes: int

    def has(self, directory: str) -> bool:
        """Is a directory with this path's end, or something in it, mounted? `.versions/x` finds /any/.versions/x/lib."""
        # The kernel appends //deleted to a root that was removed while it is mounted; with slashes around, x does not
        # find x2.
        return any(f"/{directory}/" in f"{root.removesuffix('//deleted')}/" for root in self.roots)


def read_mounted_directories(proc: Path = Path("/proc")) -> MountedDirectories:
    """What all visible processes have mounted."""
    roots: set[str] = set()
    unreadable = 0
    for process in proc.iterdir():
        if not process.name.isdecimal():
            continue
        try:
            text = (process / "mountinfo").read_text(encoding="utf-8", errors="surrogateescape")
        except OSError as error:
            # Counted apart: what cannot be looked into may have any version mounted.
            unreadable += error.errno in (errno.EACCES, errno.EPERM)  # any other: it has ended
            continue
        for line in text.splitlines():
            # The kernel writes blanks in paths as octal, so a blank parts fields.
            fields = line.split(" ", _ROOT_FIELD + 1)
            if len(fields) > _ROOT_FIELD:
                roots.add(fields[_ROOT_FIELD])
    return MountedDirectories(roots=frozenset(roots), unreadable_processes=unreadable)


class VolumeReport(Struct):
    """What was done for one volume. `state`: made, unchanged, would change (with --check), failed."""

    name: str
    directory: str
    state: Literal["made", "unchanged", "would change", "failed"] = "failed"
    version: str = ""
    driver_version: str = ""
    files: dict[str, str] = field(default_factory=dict)
    links: dict[str, str] = field(default_factory=dict)
    removed: list[str] = field(default_factory=list)
    would_remove: list[str] = field(default_factory=list)
    kept: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    error: str = ""


def run(call: Invocation) -> int:
    """Raises StartupError as `collect`."""
    settings, options = call.settings(None), call.options
    only = VolumeName(options.only) if options.only else None
    return collect(settings, check=options.check, prune=options.prune, form=options.output, only=only)


def collect(
    settings: Settings,
    *,
    check: bool = False,
    prune: bool = False,
    form: Form = "table",
    only: VolumeName | None = None,
) -> int:
    """Makes (or, with `check`, only examines) every volume, or `only` one, and prints the report; 1 if one failed, else 0.

    Raises:
        StartupError: volume.conf is missing or wrong.
    """
    with progress("MiB") as report:
        reports = [
            _volume_report(settings, volume, report, check=check, prune=prune)
            for volume in configured_volumes(settings)
            if only in (None, volume.name)
        ]
    document = {
        "errors": sum(bool(report.error) for report in reports),
        "volumes": [to_builtins(item) for item in reports],
    }
    print_report(form, document, _as_text(reports))
    return 1 if any(report.error for report in reports) else 0


def _volume_report(
    settings: Settings, volume: DriverVolume, shown: Report, *, check: bool, prune: bool
) -> VolumeReport:
    report = VolumeReport(name=volume.name.value, directory=str(volume.directory))
    directory = DriverDirectory(volume.base)
    errors: list[str] = []
    try:
        # A volume that fails must not stop the other, so its error goes into the report.
        _make(settings, directory, volume, report, _in_mib(shown, volume), check=check)
    except AgentError as error:
        errors.append(str(error))
    if prune:  # also where making failed, as on the host itself, which has no control library: what is in force stays
        try:
            _prune(directory, volume, report, check=check)
        except AgentError as error:
            errors.append(str(error))
    report.error = "; ".join(errors)
    return report


def _make(
    settings: Settings,
    directory: DriverDirectory,
    volume: DriverVolume,
    report: VolumeReport,
    shown: Report,
    *,
    check: bool,
) -> None:
    plan = plan_of(settings, volume)
    report.warnings += plan.warnings
    report.driver_version = driver_version_text(Path(target).name for target in plan.files)
    report.files = {target: str(source) for target, source in plan.files.items()}
    report.links = dict(plan.links)
    if check:
        # Compares the files as well, because a file of the driver may have been replaced under its name.
        report.state = "unchanged" if directory.is_in_force(plan, shown) else "would change"
        return
    installed = directory.install(plan, shown)
    report.version = str(installed.version)
    report.state = "made" if installed.changed else "unchanged"


def _prune(directory: DriverDirectory, volume: DriverVolume, report: VolumeReport, *, check: bool) -> None:
    """With `check` the version in force now is not among those to remove."""
    mounted = functools.cache(read_mounted_directories)  # read at the first question, when no other run works here

    def is_in_use(version: str) -> bool:
        return bool(mounted().unreadable_processes) or mounted().has(f".versions/{version}")

    found, used = directory.prune(volume.name, is_in_use, is_asked_only=check)
    report.kept = list(used)
    report.would_remove, report.removed = (list(found), []) if check else ([], list(found))
    # The warning only where it matters: without an old version nothing was held back.
    if used and (hidden := mounted().unreadable_processes):
        report.warnings.append(
            f"volume {volume.name}: no old version {'would be' if check else 'was'} removed, because the mounts of {hidden}"
            " processes cannot be read and one may use it; run this as the host's root, with the capability SYS_PTRACE"
        )


def _in_mib(shown: Report, volume: DriverVolume) -> Report:
    return lambda what, done, total: shown(f"volume {volume.name}: {what}", done // MIB, total // MIB)


def _as_text(reports: Sequence[VolumeReport]) -> str:
    lines: list[str] = []
    for report in reports:
        version = f", driver {report.driver_version}" if report.driver_version else ""
        lines.append(f"volume {report.name}: {report.state}{version} ({report.version or report.directory})")
        rows = [(target, "file", source) for target, source in report.files.items()]
        rows += [(target, "link", points_to) for target, points_to in report.links.items()]
        lines += [f"  {kind:<9}  {target} <- {source}" for target, kind, source in sorted(rows)]
        lines += [f"  removed    {name}" for name in report.removed]
        lines += [f"  to remove  {name}" for name in report.would_remove]
        lines += [f"  in use     {name}" for name in report.kept]
        lines += [f"  warning    {warning}" for warning in report.warnings]
        lines += [f"  error      {report.error}"] if report.error else []
    return "\n".join(lines)
