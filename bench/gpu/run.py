"""The whole measurement: installs the packed wheels, takes the steps in order, and writes the report after each of them.

Two parts, each with the seconds of its own, can run at different times; `merge` makes one report of both. The first: shares
next to each other, and what the driver does. The second: all else of each isolation.

Every step is bounded, and the run as a whole; a step that fails, or for which no time is left, is in the report with the
reason and does not end the others. Nothing of the GPU's settings is changed. State owned: the working directory, which is
removed at the end, and the record of the steps.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
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

from bench.gpu import driver, steps, tenants
from bench.gpu import machine as machine_facts
from bench.gpu.competitor import COMPETITOR, LIBRARY_NAME, HamiCore
from bench.gpu.pack import MANIFEST, tag_of
from bench.gpu.programs import StepFailed
from bench.gpu.report import render
from bench.gpu.sandbox import ROOT, Sandbox, Surroundings, why_no_namespaces
from bench.gpu.verdicts import COMPARED

ISOLATIONS = ("gpushare", "mps", COMPETITOR, "driver", "vcuda", "none")
"""Those that are measured unless others are named, in this order: what is cut for want of time is what matters least."""
COMBINED = ("gpushare+driver", "mps+driver")
RESULTS, REPORT = "results.json", "report.md"
PARTS = (1, 2)
PART_S = 195.0
"""After which no further step of a part begins: a part ends in three and a half minutes."""
_GRACE_S = 8.0
"""For a step that hangs when the time is over, before it is ended."""
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
    parts: tuple[int, ...] = PARTS


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
            signal.setitimer(signal.ITIMER_REAL, self.deadline - started + _GRACE_S)
            try:
                found = body()
            except StepFailed as error:
                step |= {"state": "failed", "reason": str(error)[:1500]}
            except Exception as error:  # noqa: BLE001 - one step's fault must not cost the others' results
                step |= {"state": "failed", "reason": f"{type(error).__name__}: {error}"[:1500]}
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
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
        write_results(self.out, self.results)


def write_results(out: Path, results: Mapping[str, Any]) -> None:
    """A list of numbers, such as a row of a series, is one line."""
    text = json.dumps(results, indent=1)
    text = re.sub(r"\[\n([^][{}]*?)\n\s+\]", lambda row: f"[{' '.join(map(str.strip, row[1].splitlines()))}]", text)
    (out / RESULTS).write_text(text + "\n")
    (out / REPORT).write_text(render(results))


def merge(folders: Sequence[Path], out: Path) -> None:
    """One report of the parts' folders: of a step that several have the first that was done. Raises CannotRun."""
    found = []
    for folder in folders:
        try:
            found.append(json.loads((folder / RESULTS).read_text()))
        except (OSError, ValueError) as error:
            raise CannotRun(f"{folder} has no results of a part: {error}") from error
    if len({(one["machine"]["gpu"], one["machine"]["driver"], one["package"]["commit"]) for one in found}) > 1:
        raise CannotRun("these are results of different GPUs, drivers or commits")
    by_name: dict[tuple[str, str], Any] = {}
    for step in (step for one in found for step in one["steps"]):
        key = step["isolation"], step["step"]
        if key not in by_name or (by_name[key]["state"] != "done" and step["state"] == "done"):
            by_name[key] = step
    took_s = round(sum(one.get("took_s", 0.0) for one in found), 1)
    out.mkdir(parents=True, exist_ok=True)
    write_results(out, {**found[0], "steps": list(by_name.values()), "took_s": took_s})


def _end_step(*_: object) -> None:
    raise StepFailed("it went on when the time of the part was over")


def say(text: str) -> None:
    print(f"gpu: {text}", file=sys.stderr, flush=True)  # noqa: T201 - progress, on the terminal


def run(options: Options) -> None:
    """Measures and writes. Raises CannotRun where there is nothing to measure with."""
    started = time.monotonic()
    os.environ.update(options.passed)  # for NVML, which this process calls
    signal.signal(signal.SIGALRM, _end_step)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the working directory and the sandbox go as after Ctrl-C
    manifest = read_manifest(options.package)
    record = Record(out=options.out, deadline=started + options.limit_s)
    with tempfile.TemporaryDirectory(prefix="gsgpu-", dir="/tmp", ignore_cleanup_errors=True) as name:
        work = Path(name)
        work.chmod(0o711)  # a program of another user reaches what is mounted for it
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
    """All steps of the parts, on the bare machine and under each isolation."""
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
    record.step("bare", "launches", 8, partial(steps.bare_launches, machine))
    runtimes = {path.stem: str(path) for path in sorted((options.package.resolve() / "cudart").glob("*.so"))}
    plans: Mapping[int, Callable[[Options, Measured], None]] = {
        1: _tenants, 2: partial(_everything_else, runtimes=runtimes)
    }  # fmt: skip
    why_no_torch = "" if record.results["machine"]["torch"] else "no Python with PyTorch is here"
    for part in options.parts:
        record.deadline = time.monotonic() + options.limit_s if part != options.parts[0] else record.deadline
        plans[part](options, Measured(machine=machine, record=record, why_no_torch=why_no_torch, part=part))


@dataclass(slots=True, kw_only=True)
class Measured:
    """The bare machine, or one isolation with its sandbox and the pods that run in it."""

    machine: steps.Machine
    record: Record
    why_no_torch: str
    part: int
    name: str = "bare"
    sandbox: Sandbox | None = None
    pods: steps.Pods | None = None
    created: list[str] = field(default_factory=list)
    """The names of the pods that are there, also where they did not start."""

    def step(self, name: str, at_least_s: float, body: Callable[..., Any], *arguments: Any) -> Any:
        return self.record.step(self.name, name, at_least_s, partial(body, *arguments))

    def torch_step(self, name: str, at_least_s: float, body: Callable[..., Any], *arguments: Any) -> None:
        if self.why_no_torch:
            self.record.skip(self.name, name, self.why_no_torch)
        else:
            self.step(name, at_least_s, body, *arguments)

    def start(self, step: str, cores: Mapping[str, int]) -> steps.Pods | None:
        """These pods instead of those that are there; None where they do not start, the second time too."""
        sandbox = self.sandbox
        if sandbox is None:
            return None

        def body() -> Any:
            if (self.machine.nvml.facts()["gpus"] or 1) > 1:
                sandbox.cordon_others(self.machine.uuid)
            try:
                return start()
            except StepFailed as error:
                say(f"{self.name}: {step}: once more, for {error}"[:500])
                return start()

        def start() -> Any:
            if self.created:
                sandbox.delete_pods(self.created)
            self.created = list(cores)
            self.pods = steps.start_pods(self.machine, sandbox, cores)
            return steps.answered(self.pods)

        return self.pods if self.step(step, 8, body) is not None else None


def _isolated(options: Options, bare: Measured, isolation: str, stack: ExitStack) -> Measured | None:
    """With a sandbox under that isolation; None where it cannot be tried or does not start, which the report has."""
    try:
        flags = _flags(options, bare.machine, "none" if isolation == COMPETITOR else isolation, stack)
        limit = [_competitor(options, bare.machine.around).limit] if isolation == COMPETITOR else []
    except StepFailed as error:
        bare.record.skip(isolation, "start", str(error))
        return None
    found = Measured(
        machine=bare.machine, record=bare.record, why_no_torch=bare.why_no_torch, part=bare.part, name=isolation
    )

    def open_sandbox() -> Any:
        found.sandbox = stack.enter_context(Sandbox(bare.machine.around, f"{bare.part}-{isolation}", flags, *limit))
        return {}

    if found.step("sandbox", 10, open_sandbox) is None or found.sandbox is None:
        return None
    if isolation == "gpushare":  # while no pod has its GPU
        found.step("proof", 5, steps.probed, found.sandbox, isolation)
    return found


def _tenants(options: Options, bare: Measured) -> None:
    """The first part."""
    machine, durations = bare.machine, bare.machine.durations
    with ExitStack() as stack:
        own = _isolated(options, bare, "gpushare", stack) if "gpushare" in options.isolations else None
        if own is not None and (pods := own.start("pods", {"a": steps.SMALL, "b": steps.LARGE})) is not None:
            own.step("compute 30+60", 14, tenants.compute, pods, ["a", "b"], durations.compute_s)
            own.torch_step("works 30", 40, tenants.works, pods, "a")
            own.torch_step("works 30+60", 22, tenants.mixed_works, pods, ["a", "b"])
            own.step("compute 30", 10, tenants.compute, pods, ["a"], durations.alone_s)
            own.step("compute 60", 10, tenants.compute, pods, ["b"], durations.alone_s)
        if own is not None and (pods := own.start("three pods", {"c": 20, "d": 30, "e": 50})) is not None:
            own.step("compute 20+30+50", 14, tenants.compute, pods, ["c", "d", "e"], durations.compute_s)
        if own is not None and (pods := own.start("pod of 99 cores", {"f": steps.NEARLY_ALL})) is not None:
            own.step("overhead", 14, steps.overhead, pods, "f")
    for count in (2, 3, 1):
        bare.step(f"turns of {count}", 8, driver.turns, machine, count)
    bare.step("bias", 9, driver.bias, machine, machine.start_probe, machine.start_probe)
    bare.step("events", 8, steps.bare_events, machine)
    bare.step("rows", 8, driver.utilization_rows, machine)
    bare.step("utilization", 8, steps.bare_utilization, machine)


def _everything_else(options: Options, bare: Measured, runtimes: Mapping[str, str]) -> None:
    """The second part; of an isolation beyond COMPARED the most important steps, unless it is the only one."""
    bare.step("programs", 20, steps.bare_programs, bare.machine, runtimes)
    bare.torch_step("torch", 12, steps.bare_torch, bare.machine)
    for isolation in options.isolations:
        with ExitStack() as stack:
            own = _isolated(options, bare, isolation, stack)
            if own is None:
                continue
            is_whole = isolation in COMPARED or options.isolations == (isolation,)
            _in_two_pods(own, has_faults=options.has_faults, is_whole=is_whole)
            if not is_whole or (pods := own.start("pod of 99 cores", {"f": steps.NEARLY_ALL})) is None:
                continue
            if isolation in COMPARED:
                own.step("programs", 15, steps.programs, pods, "f", runtimes)
            if isolation != "gpushare":  # it is in the first part
                own.step("overhead", 14, steps.overhead, pods, "f")
            own.torch_step("torch", 12, steps.torch, pods, "f")


def _in_two_pods(own: Measured, *, has_faults: bool, is_whole: bool) -> None:
    pods = own.start("pods", {"a": steps.SMALL, "b": steps.LARGE})
    if pods is None:
        return
    machine, durations, is_first = own.machine, own.machine.durations, own.name == "gpushare"
    limits = own.name != "none"  # where nothing is limited one step of each kind shows it
    if own.step("view", 5, steps.view, pods, "a") is None:
        own.record.skip(own.name, "all others", "no CUDA program starts in a container: see the step before")
        return
    if not is_first:  # of ours the first part has these
        own.step("compute 30+60", 14, tenants.compute, pods, ["a", "b"], durations.compute_s)
    if own.name == "mps":
        own.step("users", 20, tenants.mps_users, pods, "a", "b")
        own.step("bias", 9, driver.bias, machine, partial(pods.start_probe, "a"), partial(pods.start_probe, "b"))
    if own.name == COMPETITOR:
        own.torch_step("works 30", 20, tenants.works, pods, "a", ["gemm"])
    for kind in steps.MEMORY_KINDS if limits else steps.MEMORY_KINDS[:1]:
        own.step(f"memory {kind}", 3, steps.memory, pods, "a", kind)
    if own.name in COMPARED:
        own.step("reserved", 4, steps.reserved, pods, "a")
        own.step("killed", 5, steps.killed, pods, "a")
    if not is_whole:
        return
    own.step("usage", 11, steps.usage, pods, "b")
    if limits:
        for kind in steps.LAUNCH_KINDS[1:]:
            own.step(f"launch {kind}", 8, steps.launch_kind, pods, "a", kind)
    if limits and not is_first:
        own.step("compute 30", 10, tenants.compute, pods, ["a"], durations.alone_s)
        own.step("compute 60", 10, tenants.compute, pods, ["b"], durations.alone_s)
    if has_faults:
        own.step("fault", 12, steps.fault, pods, "a", "b")


# --- what each isolation needs ---


def _flags(options: Options, machine: steps.Machine, isolation: str, stack: ExitStack) -> list[str]:
    """The agent's settings for it. Raises StepFailed where it cannot be tried here, with the reason."""
    around, package = machine.around, options.package.resolve()
    flags = [f"--isolation={isolation}"]
    for part in isolation.split("+"):
        if part == "gpushare":
            library = _library(package, "libgpushare.so")
            flags += [f"--libgpushare.library={library}", f"--libgpushare.directory={around.work / 'gpushare'}"]
        elif part == "vcuda":
            flags += _driver_volume(around, package)
        elif part == "mps":
            flags += _mps(machine, stack)
        elif part == "driver":
            if not machine.nvml.facts()["has_memory_limits"]:
                raise StepFailed("this driver's NVML has no nvmlDeviceSetMemoryLimits_v1 (615 and later have)")
            flags.append("--driver-limits.set-by-agent=true")  # no container toolkit starts these containers
    return flags


def _competitor(options: Options, around: Surroundings) -> HamiCore:
    """Raises StepFailed where its library was not packed."""
    return HamiCore(_library(options.package.resolve(), LIBRARY_NAME), around.work / COMPETITOR)


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
        f"--mps.pipe-directory={around.work / 'mps' / 'pipe'}", f"--mps.control={control}", "--mps.drain-timeout-s=3",
    ]  # fmt: skip
    log = stack.enter_context((around.work / "mps.log").open("w+b"))
    process = subprocess.Popen(  # noqa: S603 - our own program
        [around.python, "-P", "-m", "gpushare_agent", "mps", "--driver=nvml", *flags],
        stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=dict(around.agent_environment),
    )  # fmt: skip
    stack.callback(_end, process)
    deadline = time.monotonic() + _MPS_START_S
    while not (around.work / "mps" / "pipe" / "control").exists():
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
