"""The whole measurement: installs the packed wheels, takes the steps in order, and writes the report after each of them.

Every step is bounded, and the run as a whole; a step that fails, or for which no time is left, is in the report with the
reason and does not end the others. Nothing of the GPU's settings is changed. State owned: the working directory, which is
removed at the end, and the record of the steps.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from bench.gpu import machine as machine_facts
from bench.gpu import steps
from bench.gpu.pack import MANIFEST, tag_of
from bench.gpu.programs import StepFailed
from bench.gpu.report import render
from bench.gpu.sandbox import ROOT, Sandbox, Surroundings, why_no_namespaces
from bench.gpu.verdicts import COMPARED

ISOLATIONS = ("gpushare", "hami-core", "driver", "mps", "vcuda", "none")
"""Those that are measured unless others are named, in this order: what is cut for want of time is what matters least."""
COMBINED = ("hami-core+driver", "mps+driver")
RESULTS, REPORT = "results.json", "report.md"
_FORMAT = 1
_INSTALL_TIMEOUT_S = 120.0
_MPS_START_S, _MPS_END_S = 20.0, 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Of the command line."""

    package: Path
    out: Path
    limit_s: float
    isolations: tuple[str, ...]
    driver_libraries: Path | None
    passed: Mapping[str, str]
    has_faults: bool
    is_quick: bool = False


class CannotRun(Exception):  # noqa: N818 - said to a person as it stands
    """Nothing can be measured here; the text says what is missing."""


@dataclass(slots=True)
class Record:
    """The results, written after each step. `deadline` is monotonic."""

    out: Path
    deadline: float
    results: dict[str, Any] = field(default_factory=dict)

    def step(self, isolation: str, name: str, at_least_s: float, body: Callable[[], Any]) -> Any:
        """What `body` found; None where it failed or no time was left for it."""
        found: Any = None
        step: dict[str, Any] = {"isolation": isolation, "step": name, "state": "done", "reason": "", "seconds": 0.0}
        started = time.monotonic()
        if self.deadline - started < at_least_s:
            step |= {"state": "skipped", "reason": "no time was left"}
        else:
            try:
                found = body()
            except StepFailed as error:
                step |= {"state": "failed", "reason": str(error)[:1500]}
            except Exception as error:  # noqa: BLE001 - one step's fault must not cost the others' results
                step |= {"state": "failed", "reason": f"{type(error).__name__}: {error}"[:1500]}
        step["seconds"] = round(time.monotonic() - started, 2)
        step["found"] = found
        say(f"{isolation}: {name}: {step['state']} in {step['seconds']} s {step['reason']}".rstrip())
        self.results["steps"].append(step)
        self.write()
        return found

    def skip(self, isolation: str, name: str, reason: str) -> None:
        say(f"{isolation}: {name}: skipped: {reason}")
        step = {
            "isolation": isolation,
            "step": name,
            "state": "skipped",
            "reason": reason,
            "seconds": 0.0,
            "found": None,
        }
        self.results["steps"].append(step)
        self.write()

    def write(self) -> None:
        self.out.mkdir(parents=True, exist_ok=True)
        (self.out / RESULTS).write_text(json.dumps(self.results, indent=1) + "\n")
        (self.out / REPORT).write_text(render(self.results))


def say(text: str) -> None:
    print(f"gpu: {text}", file=sys.stderr, flush=True)  # noqa: T201 - progress, on the terminal


def run(options: Options) -> None:
    """Measures and writes. Raises CannotRun where there is nothing to measure with."""
    started = time.monotonic()
    os.environ.update(options.passed)  # for NVML, which this process calls
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the working directory and the sandbox go as after Ctrl-C
    manifest = read_manifest(options.package)
    record = Record(out=options.out, deadline=started + options.limit_s)
    with tempfile.TemporaryDirectory(prefix="gsgpu-", dir="/tmp", ignore_cleanup_errors=True) as name:
        work = Path(name)
        around = _prepare(options, manifest, work)
        nvml = machine_facts.Nvml(around.library_path, 0)
        try:
            nvml.open()
        except Exception as error:
            raise CannotRun(f"NVML cannot be opened: {error}") from error
        try:
            measure(options, manifest, around, nvml, record)
        finally:
            nvml.close()
            record.results["took_s"] = round(time.monotonic() - started, 1)
            if "steps" in record.results:
                record.write()
    say(f"the report is {options.out / REPORT}, the numbers are in {options.out / RESULTS}")


# --- preparation ---


def read_manifest(package: Path) -> dict[str, Any]:
    """Raises CannotRun where the package is incomplete or not for this Python."""
    try:
        manifest = json.loads((package / MANIFEST).read_text())
    except (OSError, ValueError) as error:
        raise CannotRun(
            f"{package} is no package of this command ({error}); make one where there is a network: "
            f"nox -s gpu -- --pack {package}"
        ) from error
    changed = [name for name, file in manifest["files"].items() if _digest(package / name) != file["sha256"]]
    if changed:
        raise CannotRun(f"{package}: not as it was packed: {', '.join(sorted(changed)[:5])}")
    if tag_of(sys.version_info) not in manifest["interpreters"]:
        raise CannotRun(
            f"this is Python {sys.version.split()[0]}, and the package has wheels for {', '.join(manifest['interpreters'])}"
        )
    if os.uname().machine != manifest["machine"]:
        raise CannotRun(f"this machine is {os.uname().machine}, and the package is for {manifest['machine']}")
    return dict(manifest)


def _digest(path: Path) -> str:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError:
        return ""


def _prepare(options: Options, manifest: Mapping[str, Any], work: Path) -> Surroundings:
    """Installs the wheels and finds the driver. Raises CannotRun."""
    try:
        library_path = machine_facts.library_path(options.driver_libraries)
    except FileNotFoundError as error:
        raise CannotRun(str(error)) from error
    site = work / "site"
    if manifest["wheels"]:
        _install(options.package, manifest, site)
    sys.path.insert(0, str(site))
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("GPUSHARE_", "PYTHON"))}
    environment = {
        **kept,
        **options.passed,
        "PYTHONPATH": f"{site}:{ROOT}",
        "PYTHONPYCACHEPREFIX": str(work / "pycache"),
        "LD_LIBRARY_PATH": library_path,
        "PATH": os.environ.get("PATH", os.defpath),
    }
    if not library_path:
        del environment["LD_LIBRARY_PATH"]
    reason = why_no_namespaces() if os.geteuid() == 0 else "not root"
    return Surroundings(
        python=sys.executable, agent_environment=environment, library_path=library_path, work=work,
        passed={**options.passed, "CUDA_CACHE_PATH": str(work / "nv")}, why_no_namespaces=reason,
    )  # fmt: skip


def _install(package: Path, manifest: Mapping[str, Any], site: Path) -> None:
    """With the packed pip, which runs out of its own wheel: neither pip nor venv need be here. Raises CannotRun."""
    wheels = package / "wheels"
    pip = next(wheels.glob("pip-*.whl"))
    wanted = [f"{name}=={version}" for name, version in manifest["wheels"].items() if name != "pip"]
    command = [
        sys.executable, f"{pip}/pip", "--isolated", "install", "--quiet", "--no-index", "--find-links", str(wheels),
        "--no-deps", "--no-compile", "--no-cache-dir", "--disable-pip-version-check", "--root-user-action", "ignore",
        "--target", str(site), *wanted,
    ]  # fmt: skip
    started = time.monotonic()
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_INSTALL_TIMEOUT_S, check=False)  # noqa: S603
    except subprocess.TimeoutExpired as error:
        raise CannotRun("installing the packed wheels took too long") from error
    if done.returncode:
        raise CannotRun(f"the packed wheels cannot be installed: {done.stderr.strip()[-800:]}")
    say(f"installed {len(wanted)} wheels in {time.monotonic() - started:.1f} s")


# --- the measurement ---


def measure(
    options: Options, manifest: Mapping[str, Any], around: Surroundings, nvml: machine_facts.Nvml, record: Record
) -> None:
    """All steps, on the bare machine and under each isolation."""
    facts = nvml.facts()
    environment = {**around.agent_environment, **around.passed}
    for name in ("PYTHONPATH", "PYTHONPYCACHEPREFIX"):
        environment.pop(name)
    if (facts["gpus"] or 1) > 1:
        environment["CUDA_VISIBLE_DEVICES"] = facts["uuid"]
    machine = steps.Machine(
        nvml=nvml, probe=str((options.package / "bin" / "gpu-probe").resolve()), environment=environment, around=around,
        memory_mib=facts["memory_mib"], uuid=facts["uuid"],
        durations=steps.QUICK if options.is_quick else steps.Durations(),
    )  # fmt: skip
    record.results |= {
        "format": _FORMAT,
        "started": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        "machine": {**facts, **machine_facts.system_facts(environment)},
        "namespaces": "" if not around.why_no_namespaces else around.why_no_namespaces,
        "package": {"libraries": manifest["libraries"], "missing": manifest["missing"], "commit": manifest["commit"]},
        "plan": {
            "cores": [steps.SMALL, steps.LARGE, steps.NEARLY_ALL], "share_mib": machine.share_mib,
            "limit_s": options.limit_s,
        },
        "steps": [],
    }  # fmt: skip
    record.step("bare", "facts", 10, partial(steps.bare_facts, machine))
    if not machine.bare.rounds:
        return  # no CUDA program runs here: the reason is in the report
    record.step("bare", "launches", 15, partial(steps.bare_launches, machine))
    record.step("bare", "overhead", 10, partial(steps.bare_overhead, machine))
    record.step("bare", "events", 10, partial(steps.bare_events, machine))
    record.step("bare", "utilization", 10, partial(steps.bare_utilization, machine))
    runtimes = {path.stem: str(path) for path in sorted((options.package.resolve() / "cudart").glob("*.so"))}
    record.step("bare", "programs", 20, partial(steps.bare_programs, machine, runtimes))
    has_torch = bool(record.results["machine"]["torch"])
    if has_torch:
        record.step("bare", "torch", 30, partial(steps.bare_torch, machine))
    for isolation in options.isolations:
        with ExitStack() as stack:
            try:
                flags = _flags(options, machine, isolation, stack)
            except StepFailed as error:
                record.skip(isolation, "start", str(error))
                continue
            _measure_isolation(
                machine, record, isolation, flags, runtimes, has_torch=has_torch, has_faults=options.has_faults
            )


def _measure_isolation(
    machine: steps.Machine, record: Record, isolation: str, flags: Sequence[str], runtimes: Mapping[str, str], *,
    has_torch: bool, has_faults: bool,
) -> None:  # fmt: skip
    with ExitStack() as stack:
        opened: list[Sandbox] = []

        def open_sandbox() -> Any:
            opened.append(stack.enter_context(Sandbox(machine.around, isolation, flags)))
            return {}

        if record.step(isolation, "sandbox", 40, open_sandbox) is None:
            return
        sandbox = opened[0]
        if isolation == "gpushare":  # while no pod has its GPU
            record.step(isolation, "proof", 30, partial(steps.probed, sandbox, isolation))
        started: list[steps.Pods] = []

        def start(cores: Mapping[str, int]) -> Any:
            if (machine.nvml.facts()["gpus"] or 1) > 1:
                sandbox.cordon_others(machine.uuid)
            started[:] = [steps.start_pods(machine, sandbox, cores)]
            return steps.answered(started[0])

        if record.step(isolation, "pods", 30, partial(start, {"a": steps.SMALL, "b": steps.LARGE})) is None:
            return
        if not _in_two_pods(record, isolation, started[0], has_faults=has_faults):
            return
        record.step(isolation, "pods end", 20, partial(sandbox.delete_pods, ["a", "b"]))
        if record.step(isolation, "pod of 99 cores", 30, partial(start, {"c": steps.NEARLY_ALL})) is None:
            return
        record.step(isolation, "overhead", 20, partial(steps.overhead, started[0], "c"))
        if isolation in COMPARED:
            record.step(isolation, "programs", 30, partial(steps.programs, started[0], "c", runtimes))
        if has_torch:
            record.step(isolation, "torch", 40, partial(steps.torch, started[0], "c"))


def _in_two_pods(record: Record, isolation: str, pods: steps.Pods, *, has_faults: bool) -> bool:
    """Whether programs start at all."""
    step = partial(record.step, isolation)
    limits = isolation != "none"  # where nothing is limited one step of each kind shows it
    if step("view", 10, partial(steps.view, pods, "a")) is None:
        record.skip(isolation, "all others", "no CUDA program starts in a container: see the step before")
        return False
    for kind in steps.MEMORY_KINDS if limits else steps.MEMORY_KINDS[:1]:
        step(f"memory {kind}", 12, partial(steps.memory, pods, "a", kind))
    step("compute 30+60", 25, partial(steps.compute, pods, ["a", "b"]))
    if limits:
        step("compute 30", 20, partial(steps.compute, pods, ["a"]))
        step("compute 60", 20, partial(steps.compute, pods, ["b"]))
        for kind in steps.LAUNCH_KINDS[1:]:
            step(f"launch {kind}", 15, partial(steps.launch_kind, pods, "a", kind))
    if isolation in COMPARED:
        step("reserved", 15, partial(steps.reserved, pods, "a"))
        step("killed", 20, partial(steps.killed, pods, "a"))
    step("usage", 20, partial(steps.usage, pods, "b"))
    if has_faults:
        step("fault", 25, partial(steps.fault, pods, "a", "b"))
    return True


# --- what each isolation needs ---


def _flags(options: Options, machine: steps.Machine, isolation: str, stack: ExitStack) -> list[str]:
    """The agent's settings for it. Raises StepFailed where it cannot be tried here, with the reason."""
    around, package = machine.around, options.package.resolve()
    flags = [f"--isolation={isolation}"]
    for part in isolation.split("+"):
        if part == "gpushare":
            library = _library(package, "libgpushare.so")
            flags += [f"--libgpushare.library={library}", f"--libgpushare.directory={around.work / 'gpushare'}"]
        elif part == "hami-core":
            library = _library(package, "libvgpu.so")
            flags += [f"--hami-core.library={library}", f"--hami-core.directory={around.work / 'hami-core'}"]
        elif part == "vcuda":
            flags += _driver_volume(around, package)
        elif part == "mps":
            flags += _mps(machine, stack)
        elif part == "driver":
            if not machine.nvml.facts()["has_memory_limits"]:
                raise StepFailed("this driver's NVML has no nvmlDeviceSetMemoryLimits_v1 (615 and later have)")
            flags.append("--driver-limits.set-by-agent=true")  # no container toolkit starts these containers
    return flags


def _library(package: Path, name: str) -> Path:
    path = package / "lib" / name
    if not path.exists():
        missing = json.loads((package / MANIFEST).read_text())["missing"].get(name, "it was not packed")
        raise StepFailed(f"no {name}: {missing}")
    return path


def _driver_volume(around: Surroundings, package: Path) -> list[str]:
    """Collects the driver's files as the init container does."""
    if around.why_no_namespaces:
        raise StepFailed("vcuda's library reads /etc/vcuda, which cannot be mounted without a mount namespace")
    base = around.work / "vdriver"
    base.mkdir(exist_ok=True)
    config = json.loads((ROOT / "manifests" / "base" / "volume.conf").read_text())
    for volume in config["volume"]:
        volume["base"] = str(base)
    path = around.work / "volume.conf"
    path.write_text(json.dumps(config))
    root = around.work / "driver"
    for directory in filter(None, around.library_path.split(":")):  # where the command does not search
        if (Path(directory) / "libcuda.so.1").exists():
            shutil.copytree(
                directory, root / "usr" / "lib64", symlinks=True, ignore=_unless_library, dirs_exist_ok=True
            )
            break
    flags = [
        f"--volume-config={path}",
        *([f"--driver-volume.root={root}"] if root.exists() else []),
        f"--driver-volume.control-library={_library(package, 'libcuda-control.so')}",
        f"--driver-volume.gpu-client={package / 'bin' / 'gpu-client'}",
    ]
    command = [around.python, "-P", "-m", "gpushare_agent", "driver-volume", *flags]
    try:
        done = subprocess.run(  # noqa: S603 - our own program
            command, capture_output=True, text=True, timeout=60, check=False, env=dict(around.agent_environment)
        )
    except subprocess.TimeoutExpired as error:
        raise StepFailed("collecting the driver's files took too long") from error
    if done.returncode:
        raise StepFailed(f"driver-volume: {(done.stdout + done.stderr).strip()[-600:]}")
    return flags


def _unless_library(directory: str, names: list[str]) -> list[str]:
    return [name for name in names if ".so" not in name]


def _mps(machine: steps.Machine, stack: ExitStack) -> list[str]:
    """Starts a daemon under the agent's own supervisor; it ends with the isolation's steps."""
    around = machine.around
    control = shutil.which("nvidia-cuda-mps-control", path=machine.environment["PATH"])
    if control is None:
        raise StepFailed("nvidia-cuda-mps-control is not in PATH")
    flags = [
        f"--mps.pipe-directory={around.work / 'mps-pipe'}", f"--mps.log-directory={around.work / 'mps-log'}",
        f"--mps.control={control}", "--mps.drain-timeout-s=3",
    ]  # fmt: skip
    log = stack.enter_context((around.work / "mps.log").open("w+b"))
    process = subprocess.Popen(  # noqa: S603 - our own program
        [around.python, "-P", "-m", "gpushare_agent", "mps", "--driver=nvml", *flags],
        stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=dict(around.agent_environment),
    )  # fmt: skip
    stack.callback(_end, process)
    deadline = time.monotonic() + _MPS_START_S
    while not (around.work / "mps-pipe" / "control").exists():
        if process.poll() is not None or time.monotonic() > deadline:
            log.seek(0)
            raise StepFailed(f"the MPS daemon did not start: {log.read()[-600:].decode(errors='replace')}")
        time.sleep(0.2)
    return flags


def _end(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(_MPS_END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
