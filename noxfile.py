"""Every check of the project, each in an environment of its own: `nox -s NAME`, `nox -l` lists them."""

import difflib
import filecmp
import hashlib
import json
import os
import shutil
import sys
import tarfile
import tempfile
from collections.abc import Mapping
from pathlib import Path

import nox

if sys.version_info < (3, 11):  # noqa: UP036 - nox runs on older ones; nothing here may be a syntax error there
    older = sys.version.split()[0]
    sys.exit(f"gpushare-agent needs Python 3.11 or newer, this is {older}: remove .venv and make it with a newer one")
import tomllib

nox.needs_version = ">=2024.4.15"  # the last one for Python 3.7, which is to read what is above
nox.options.sessions = ["tests", "lint", "types", "protos", "lock", "docs"]
nox.options.reuse_existing_virtualenvs = True
nox.options.error_on_missing_interpreters = False  # tests-on-3.13 is skipped on a machine that has only 3.11

MERMAID = (
    "11.12.1",
    "525219ad16ab881d754d8d51b538145a9eb9b6986d06fe024aaeefc92d996764"
    "e0a0c8ecda7968abec05ab18b07319611d4becec33c680c8ecd9a790c73e61f6",
)
"""Version and SHA-512 of the npm package."""
RUFF = "ruff>=0.17.5,<0.18"
IMPORT_LINTER = "import-linter>=2.16,<3"
MYPY = "mypy>=2.4,<3"
CHECK_JSONSCHEMA = "check-jsonschema>=0.39,<0.40"  # has the schemas of GitHub's files with it
ZIZMOR = "zizmor==1.32.0"  # rights, pins and injections in workflows; another version has other rules
CLANG_FORMAT = "clang-format==23.1.5"  # another version breaks lines elsewhere
YAML_TYPES = "types-PyYAML>=6.0.12,<7"
GRPC_TOOLS = "grpcio-tools==1.85.1"
UV = "uv>=0.13,<0.14"
BETTERPROTO_COMPILER = "betterproto2-compiler==0.10.1"  # its minor must be the library's

START_ARM64 = r"""
magic='\x7fELF\x02\x01\x01\x00\x00\x00\x00\x00\x00\x00\x00\x00\x02\x00\xb7\x00'
mask='\xff\xff\xff\xff\xff\xff\xff\x00\xff\xff\xff\xff\xff\xff\xff\xff\xfe\xff\xff\xff'
mount -t binfmt_misc binfmt_misc /proc/sys/fs/binfmt_misc &&
printf %s ":arm64:M::$magic:$mask:$0:F" >/proc/sys/fs/binfmt_misc/register && exec "$@"
"""
"""Shell script: runs a command where the kernel starts programs and libraries of arm64 by the emulator $0."""
ROOT = Path(__file__).parent
REQUIREMENTS = ROOT / "requirements"
WIRE = ROOT / "gpushare_agent" / "core" / "wire"
SAMPLES = "manifests/samples"  # as a person types it: the output says how to go on


@nox.session
def sandbox(session: nox.Session) -> None:
    """Install everything and run the main job once on the embedded node: pods get their share of a GPU."""
    _install(session, ".")
    samples = [] if "--apply" in session.posargs else ["--apply", SAMPLES]
    # stderr=None: nox would mix the progress into standard output, where -o json has its document
    session.run("gpushare-agent", "sandbox", "--once", *samples, *session.posargs, stderr=None)


@nox.session
def tests(session: nox.Session) -> None:
    """Pass the default tests on the Python that runs nox: all without a session of their own below."""
    _install(session, ".[dev]")
    _pytest(
        session,
        "not slow and not browser and not containers and not isolation and not mutants and not suites and not e2e",
        # Hundreds of starts, half a second of imports each. All other sessions, and pytest by itself, start by exec.
        {"TESTS_START_BY_FORK": "1"},
    )


def _install(session: nox.Session, package: str) -> None:
    """Of the README's two sessions: nox shows nothing of an installation that succeeds, and some machines need minutes."""
    session.log("installs the package and what it needs: half a minute to some minutes, without a word")
    session.install(package)


def _pytest(session: nox.Session, marks: str, variables: Mapping[str, str] | None = None) -> None:
    """A test file given behind `--` is run alone, whatever its markers. Two workers a processor: the tests mostly wait."""
    chosen = session.posargs or ["-m", marks]
    workers = 2 * (os.cpu_count() or 1)
    env = {
        "PYTHONDONTWRITEBYTECODE": "",  # else each worker and each command that a test starts compiles everything again
        "SSL_CERT_FILE": os.devnull,  # no test needs the system's, which each TLS context reads for 25 ms
        **(variables or {}),
    }
    session.run("python", "-m", "pytest", "-n", str(workers), "--dist", "worksteal", *chosen, env=env)


@nox.session
def slow(session: nox.Session) -> None:
    """Pass the tests that take more than five seconds each: many kills, long interleavings, floods at full size."""
    session.install(".[dev]")
    _pytest(session, "slow")


@nox.session
def browser(session: nox.Session) -> None:
    """Pass the dashboard's tests in Chromium; skipped with the reason without it."""
    session.install(".[dev]")
    _pytest(session, "browser")


@nox.session
def containers(session: nox.Session) -> None:
    """Pass the tests with real containers (containerd, runc, as root); skipped with the reason without them."""
    session.install(".[dev]")
    _pytest(session, "containers")


@nox.session
def isolation(session: nox.Session) -> None:
    """Measure what the real isolation libraries keep, on a fake driver, and print the table; `-- --smoke` the few checks of
    .ci/run, `-- --table FILE` writes it, `-- --all-cells` also all cells of the limit of compute. Skipped with the reason
    without root, a C compiler or the libraries' sources."""
    session.install(".[dev,isolation]")
    # Where zig keeps what it compiled of the C library: half a minute at the first build.
    cache = str(Path(session.create_tmp()) / "zig")
    tests = ("tests/real_isolation", "tests/gpushare", "tests/gpus/test_nvml_memory_limits.py")
    session.run(
        *("python", "-m", "pytest", "-m", "isolation", *tests, *session.posargs),
        env={"ZIG_GLOBAL_CACHE_DIR": cache, "ZIG_LOCAL_CACHE_DIR": cache},
    )


@nox.session
def mutants(session: nox.Session) -> None:
    """Build libgpushare without each of its hooks in turn, and with other faults: a test must fail by each. Ten minutes;
    `-- -m "mutants and smoke"` the few of .ci/run. Skipped with the reason without a C compiler."""
    session.install(".[dev,isolation]")
    session.run(
        "python", "-m", "pytest", "-n", "2", "-m", "mutants", "tests/gpushare/test_mutants.py", *session.posargs
    )


@nox.session
def arm64(session: nox.Session) -> None:
    """Pass the smoke of libgpushare with library, driver and programs of arm64, on an x86 machine: built by Debian's
    gcc-aarch64-linux-gnu, run by qemu-user; `-- FILE` other tests of tests/gpushare. Skipped with the reason without one of
    them, or where the kernel starts no arm64 programs (Linux 6.7)."""
    if os.uname().machine == "aarch64":
        session.skip("this machine is one: nox -s isolation")
    compiler, emulator = (shutil.which(name) for name in ("aarch64-linux-gnu-gcc", "qemu-aarch64-static"))
    if not compiler or not emulator:
        session.skip("gcc-aarch64-linux-gnu, libc6-dev-arm64-cross or qemu-user-static is not installed")
    enter = ("unshare", "--user", "--map-root-user", "--mount", "sh", "-c", START_ARM64, emulator)
    if "starts" not in str(session.run(*enter, "echo", "starts", silent=True, external=True, success_codes=range(256))):
        session.skip("no binfmt_misc of a user namespace: it needs Linux 6.7, and the right to make one")
    session.install(".[dev,isolation]")
    tools = Path(session.create_tmp())
    (tools / "cc").unlink(missing_ok=True)
    (tools / "cc").symlink_to(compiler)
    env = {
        "PATH": os.pathsep.join((str(tools.resolve()), session.bin, os.environ["PATH"])),
        "QEMU_LD_PREFIX": "/usr/aarch64-linux-gnu",  # arm64's C library; by it the tests know that they are emulated
        "ZIG_GLOBAL_CACHE_DIR": str(tools / "zig"),
        "ZIG_LOCAL_CACHE_DIR": str(tools / "zig"),
    }
    chosen = session.posargs or ("-m", "smoke", "tests/gpushare")
    session.run(*enter, "python", "-m", "pytest", *chosen, env=env, external=True)


@nox.session
def e2e(session: nox.Session) -> None:
    """Install the product on the cluster that KUBECONFIG names, and try it there; `-- -m smoke` the few tests of .ci/run,
    more options by `-- --help`. Skipped with the reason without a cluster."""
    session.install(".[dev,isolation]")  # the fake driver's headers
    session.run("python", "-m", "pytest", "-m", "e2e", "tests/e2e", *session.posargs)


@nox.session
def suites(session: nox.Session) -> None:
    """Pass suites of other projects, each skipped with the reason where no variable names its folder: MOKKA, SMI_CAPTURES
    (tests/gpus/test_mokka.py), GFD_EXPECTED_OUTPUTS (tests/cluster/test_feature_labels.py), HAMI_CORE_SOURCE,
    HAMI_CORE_TESTS_SOURCE, VGPU_MANAGER_SOURCE (tests/real_isolation/test_foreign_programs.py)."""
    session.install(".[dev,isolation]")
    session.run("python", "-m", "pytest", "-m", "suites", *session.posargs)


@nox.session(name="tests-on", python=["3.11", "3.12", "3.13"])
def tests_on(session: nox.Session) -> None:
    """Pass the tests on one more Python: `nox -s tests-on-3.13`. Skipped where the machine lacks it."""
    tests(session)


@nox.session
def docs(session: nox.Session) -> None:
    """Build the site of README.md and docs/ into build/site; a link or an anchor that leads nowhere is an error."""
    session.install("--require-hashes", "-r", str(REQUIREMENTS / "docs.txt"))
    session.run("mkdocs", "build", *session.posargs, env={"NO_MKDOCS_2_WARNING": "1", **_mermaid(session)})


def _mermaid(session: nox.Session) -> dict[str, str]:
    """Where the script is that draws the site's drawings; without npm the theme has readers' browsers fetch it."""
    folder, (version, digest) = Path(session.create_tmp()), MERMAID
    archive = folder / f"mermaid-{version}.tgz"
    if not archive.exists() and shutil.which("npm"):
        pack = ("npm", "pack", f"mermaid@{version}", "--silent", "--fetch-retries=0", "--pack-destination", str(folder))
        session.run(*pack, external=True, success_codes=range(256))
    if not archive.exists():
        session.warn("npm brings no mermaid: the site will fetch it from elsewhere")
        return {}
    if hashlib.sha512(archive.read_bytes()).hexdigest() != digest:
        session.error(f"{archive} is not what MERMAID says")
    with tarfile.open(archive) as package:
        package.extract("package/dist/mermaid.min.js", folder)
    return {"MERMAID": str(folder.resolve() / "package/dist/mermaid.min.js")}


@nox.session
def pages(session: nox.Session) -> None:
    """Compare the pages of settings, metrics, commands, isolations and chart values; `-- --write` writes them."""
    session.install(".[dev]")
    session.run("python", "-m", "tests.docs.generated", *session.posargs)


@nox.session
def lint(session: nox.Session) -> None:
    """Style, formatting, the direction of imports, and GitHub's files."""
    session.install(RUFF, IMPORT_LINTER, CHECK_JSONSCHEMA, ZIZMOR, CLANG_FORMAT, ".")
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")
    session.run("clang-format", "--dry-run", "--Werror", *sorted(map(str, (ROOT / "native/gpushare").glob("*.[ch]"))))
    session.run("lint-imports")
    of_schema = {
        "workflows": "workflows/*",
        "issue-config": "ISSUE_TEMPLATE/config.yml",
        "issue-forms": "ISSUE_TEMPLATE/[!c]*",
    }
    for schema, files in of_schema.items():
        found = sorted(map(str, (ROOT / ".github").glob(files)))
        session.run("check-jsonschema", "--builtin-schema", f"vendor.github-{schema}", *found)
    session.run("zizmor", "--quiet", "--offline", ".github")


@nox.session
def types(session: nox.Session) -> None:
    """mypy, strict."""
    session.install(MYPY, YAML_TYPES, ".")
    session.run("mypy")


@nox.session
def protos(session: nox.Session) -> None:
    """Generate the messages again and compare with the committed ones; `-- --write` takes them over."""
    session.install(GRPC_TOOLS, BETTERPROTO_COMPILER, RUFF)  # the compiler formats with whatever ruff there is
    with tempfile.TemporaryDirectory(prefix="gpushare-protos-") as directory:
        made = Path(directory)
        sources = sorted(map(str, (ROOT / "protos").glob("*.proto")))
        options = "server_generation=async,client_generation=async"
        with session.chdir(directory):  # outside the project, whose ruff settings are for written code
            session.run(
                *("python", "-m", "grpc_tools.protoc", "-I", str(ROOT / "protos")),
                *(f"--python_betterproto2_out={made}", f"--python_betterproto2_opt={options}", *sources),
            )
        if "--write" in session.posargs:
            shutil.rmtree(WIRE)
            shutil.copytree(made, WIRE)
        else:
            differences = _differences(made, WIRE)
            if differences:
                what = "gpushare_agent/core/wire is not what protos/ generate; run `nox -s protos -- --write`"
                session.error(f"{what}\n{differences}")


@nox.session
def lock(session: nox.Session) -> None:
    """Compare requirements/ with pyproject.toml; `-- --write` takes over what changed, `-- --upgrade` newer versions too."""
    session.install(UV)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    locked = {
        "agent.txt": project["project"]["dependencies"],
        "build.txt": project["build-system"]["requires"] + project["dependency-groups"]["image"],
        "compiler.txt": project["project"]["optional-dependencies"]["isolation"],
        "docs.txt": project["dependency-groups"]["docs"],
    }
    with tempfile.TemporaryDirectory(prefix="gpushare-lock-") as directory:
        made = Path(directory)
        for name, requirements in locked.items():
            wanted, output = made / f"{name}.in", made / name
            wanted.write_text("\n".join(requirements), encoding="utf-8")
            if (REQUIREMENTS / name).exists() and "--upgrade" not in session.posargs:
                shutil.copy(REQUIREMENTS / name, output)  # uv keeps the versions that it finds there
            session.run(
                *("uv", "pip", "compile", "--quiet", "--universal", "--python-version", "3.11", "--generate-hashes"),
                *("--no-header", "--no-annotate", "--output-file", str(output), str(wanted)),
            )
            wanted.unlink()
        if {"--write", "--upgrade"} & set(session.posargs):
            shutil.copytree(made, REQUIREMENTS, dirs_exist_ok=True)
        else:
            differs = [name for name in locked if _versions(made / name) != _versions(REQUIREMENTS / name)]
            if differs:
                session.error(f"{', '.join(differs)}: not what pyproject.toml asks for; run `nox -s lock -- --write`")


def _versions(lock_file: Path) -> list[str]:
    """Without the hashes: more of them appear when wheels of the same version are added."""
    lines = lock_file.read_text(encoding="utf-8").splitlines() if lock_file.exists() else []
    return [line.removesuffix(" \\") for line in lines if "==" in line]


def _differences(made: Path, committed: Path) -> str:
    """A unified diff of two trees of text files, empty where they are the same."""
    names = {
        path.relative_to(tree)
        for tree in (made, committed)
        for path in tree.rglob("*")
        if path.suffix in (".py", ".typed")
    }
    found: list[str] = []
    for name in sorted(names):
        before, after = committed / name, made / name
        if before.exists() and after.exists() and filecmp.cmp(before, after, shallow=False):
            continue
        lines = [path.read_text(encoding="utf-8").splitlines() if path.exists() else [] for path in (before, after)]
        found += [
            f"{name}: {'missing' if not before.exists() else 'no longer generated' if not after.exists() else 'differs'}"
        ]
        found += list(difflib.unified_diff(*lines, f"committed/{name}", f"generated/{name}", lineterm=""))[:200]
    return "\n".join(found)


@nox.session
def release(session: nox.Session) -> None:
    """Build what a release has besides the image into build/release: wheel, source, chart, Grafana's dashboard, list of
    parts, checksums; with DOCS_REPOSITORY, the repository's address, kubectl's plugin too."""
    helm = os.environ.get("HELM") or shutil.which("helm")
    if helm is None:
        session.error("helm is missing: install it, or name it by the variable HELM")
    session.install("--require-hashes", "-r", str(REQUIREMENTS / "build.txt"))
    made = ROOT / "build" / "release"
    shutil.rmtree(made, ignore_errors=True)
    made.mkdir(parents=True)
    session.run("hatchling", "build", "-t", "wheel", "-t", "sdist", "-d", str(made))
    chart = Path(session.create_tmp()) / "gpushare-agent"
    shutil.rmtree(chart, ignore_errors=True)
    shutil.copytree(ROOT / "charts" / "gpushare-agent", chart)  # with the folders that its link leads to
    repository = os.environ.get("DOCS_REPOSITORY", "").rstrip("/")
    if repository:
        with (chart / "Chart.yaml").open("a", encoding="utf-8") as metadata:
            metadata.write(f"home: {repository}\nsources: [{repository}]\n")
        (wheel,) = made.glob("*.whl")
        address = f"{repository}/releases/download/v{wheel.name.split('-')[1]}"
        session.run("python", "charts/krew_plugin.py", wheel.name, address, str(made))
    else:
        session.log("DOCS_REPOSITORY is not set: no kubectl plugin, and no addresses in package and chart")
    session.run(helm, "package", str(chart), "-d", str(made), external=True)
    shutil.copy(ROOT / "manifests" / "monitoring" / "dashboard.json", made / "grafana-dashboard.json")
    parts = made / "gpushare-agent.cdx.json"
    session.run(
        *("cyclonedx-py", "requirements", str(REQUIREMENTS / "agent.txt"), "--pyproject", "pyproject.toml"),
        *("--output-file", str(parts)),
    )
    document = json.loads(parts.read_text(encoding="utf-8"))
    # pyproject.toml has no version of its own, so neither has the list.
    document["metadata"]["component"]["version"] = str(session.run("hatchling", "version", silent=True)).strip()
    parts.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    sums = [f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in sorted(made.iterdir())]
    (made / "SHA256SUMS").write_text("".join(sums), encoding="utf-8")
    session.log(f"in {made}:\n{''.join(sums)}")


@nox.session
def bench(session: nox.Session) -> None:
    """Measure against the targets; prints a table."""
    session.install(".[dev]")
    session.run("python", "-m", "bench", *session.posargs)


@nox.session
def gpu(session: nox.Session) -> None:
    """Measure on a real GPU what the isolations keep, `-- --part 1` or `2` of it; before, where there is a network,
    `-- --pack build/gpu`."""
    if "--pack" in session.posargs:
        session.install(".[isolation]", "pip")
        session.run("python", "-m", "bench.gpu", *session.posargs)
    else:  # with the machine's own Python, for nothing can be downloaded there
        session.run(sys.executable, "-m", "bench.gpu", *session.posargs, external=True)
