"""Shell completion: the scripts, in the shells themselves."""

from __future__ import annotations

import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

from gpushare_agent.cli import kubectl as cli_kubectl
from gpushare_agent.cli.kubectl import complete
from gpushare_agent.cli.main import COMMANDS, main
from gpushare_agent.settings.reference import all_keys

TIMEOUT_S = 30
ROOT = Path(__file__).parents[2]

ASK_BASH = """
source "$1"
COMP_WORDS=("${@:3}")
COMP_CWORD=$((${#COMP_WORDS[@]} - 1))
"$2"
printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.fixture
def scripts(short_dir: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, Path]:
    """What `completion SHELL` prints, by shell."""
    made = {}
    for shell in ("bash", "zsh", "fish"):
        assert main(["completion", shell], {}) == 0
        made[shell] = short_dir / f"script.{shell}"
        made[shell].write_text(capsys.readouterr().out)
    return made


def run(*command: str | Path, cwd: Path | None = None) -> str:
    done = subprocess.run(
        list(map(str, command)), capture_output=True, text=True, timeout=TIMEOUT_S, check=False, cwd=cwd
    )
    assert (done.returncode, done.stderr) == (0, ""), done
    return done.stdout


def in_bash(script: Path, *words: str, cwd: Path | None = None) -> list[str]:
    """What bash offers for the last of the words, cut as bash cuts them."""
    function = "_" + words[0].replace("-", "_")
    return run("bash", "--norc", "-c", ASK_BASH, "ask", script, function, *words, cwd=cwd).split()


def test_bash_completes_commands(scripts: dict[str, Path]) -> None:
    """All of them, or those that begin so."""
    offered = in_bash(scripts["bash"], "gpushare-agent", "")
    assert offered == [*(command.name for command in COMMANDS), "--help", "--version"]
    assert in_bash(scripts["bash"], "gpushare-agent", "expl") == ["explain"]
    assert in_bash(scripts["bash"], "gpushare-agent", "xx") == []


def test_bash_completes_flags_and_settings(scripts: dict[str, Path]) -> None:
    """A command's own and, where it takes them, every setting's with its aliases."""
    offered = in_bash(scripts["bash"], "gpushare-agent", "top", "-")
    assert {"--once", "--interval", "--server", "-o", "--output", "--help"} <= set(offered)
    assert {f"--{name}" for key in all_keys() for name in (key.flag, *key.aliases)} <= set(offered)
    assert in_bash(scripts["bash"], "gpushare-agent", "top", "--web.p") == ["--web.port"]
    assert in_bash(scripts["bash"], "gpushare-agent", "vdevice", "--web") == []
    assert "--no-register" in in_bash(scripts["bash"], "gpushare-agent", "vdevice", "-")


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (("inspect", "-o", ""), ["table", "json", "yaml"]),
        (("inspect", "--output", "j"), ["json"]),
        (("inspect", "--output", "="), ["table", "json", "yaml"]),
        (("inspect", "--output", "=", "y"), ["yaml"]),
        (("config", "-o", ""), ["table", "json", "yaml", "markdown"]),
        (("run", "--driver", ""), ["nvml", "simulated"]),
        (("run", "--isolation", "=", "m"), ["mps"]),
        (("run", "--log.level", "d"), ["debug"]),
        (("run", "--share-mode", "=", ""), ["true", "false"]),
        (("run", "--device-list-strategy", "cdi"), ["cdi-annotations", "cdi-cri"]),
        (("cdi", ""), ["generate", "list"]),
        (("completion", "z"), ["zsh"]),
        (("sandbox", "--samples", "f"), ["fitting"]),
        (("sandbox", "app"), ["apply"]),
        (("top", "--interval", ""), []),
    ],
)
def test_bash_completes_values(words: tuple[str, ...], offered: list[str], scripts: dict[str, Path]) -> None:
    """Choices of options, of settings and of arguments; bash makes three words of --flag=value."""
    assert in_bash(scripts["bash"], "gpushare-agent", *words) == offered


def test_bash_completes_the_commands_of_a_command(scripts: dict[str, Path]) -> None:
    """Behind `sandbox exec` its own flags, and no setting's."""
    offered = in_bash(scripts["bash"], "gpushare-agent", "sandbox", "exec", "-")
    assert "--container" in offered
    assert "--samples" not in offered
    assert "--web.port" not in offered


def test_bash_completes_paths(scripts: dict[str, Path], short_dir: Path) -> None:
    """Where a file or directory is meant."""
    (short_dir / "settings.yaml").touch()
    for words in (("run", "--config", "set"), ("run", "--config", "=", "set"), ("sandbox", "--topology", "set")):
        assert in_bash(scripts["bash"], "gpushare-agent", *words, cwd=short_dir) == ["settings.yaml"]


def test_bash_completes_the_plugin(scripts: dict[str, Path]) -> None:
    """The program that kubectl calls, by its own name."""
    assert in_bash(scripts["bash"], "kubectl-gpushare", "")[:4] == ["top", "inspect", "graph", "explain"]
    flags = in_bash(scripts["bash"], "kubectl-gpushare", "top", "-")
    assert "--node" in flags
    assert "--server" not in flags


def test_bash_reads_the_script_without_a_word(scripts: dict[str, Path]) -> None:
    """Sourced by every shell that is started, it prints nothing and is quick to read."""
    assert run("bash", "--norc", "-euc", 'source "$1"; complete -p gpushare-agent', "x", scripts["bash"]) == (
        "complete -o default -F _gpushare_agent gpushare-agent\n"
    )
    assert scripts["bash"].stat().st_size < 100_000


needs_fish = pytest.mark.skipif(shutil.which("fish") is None, reason="fish is not installed")
needs_zsh = pytest.mark.skipif(shutil.which("zsh") is None, reason="zsh is not installed")


def in_fish(script: Path, line: str) -> list[str]:
    """The words that fish offers, without what it says of them."""
    out = run("fish", "--no-config", "-c", f"source {script}; complete -C '{line}'", cwd=script.parent)
    return [offered.partition("\t")[0] for offered in out.splitlines()]


@needs_fish
def test_fish_completes_commands_flags_and_values(scripts: dict[str, Path]) -> None:
    """As bash does."""
    assert in_fish(scripts["fish"], "gpushare-agent expl") == ["explain"]
    assert in_fish(scripts["fish"], "gpushare-agent top --web.p") == ["--web.port"]
    assert set(in_fish(scripts["fish"], "gpushare-agent inspect -o ")) == {"table", "json", "yaml"}
    assert in_fish(scripts["fish"], "gpushare-agent run --driver=si") == ["--driver=simulated"]
    assert set(in_fish(scripts["fish"], "gpushare-agent cdi ")) == {"generate", "list"}
    assert "--container" in in_fish(scripts["fish"], "gpushare-agent sandbox exec --con")
    assert in_fish(scripts["fish"], "kubectl-gpushare gr") == ["graph"]


@needs_zsh
def test_zsh_takes_the_script(scripts: dict[str, Path], short_dir: Path) -> None:
    """It parses, names both functions when it is sourced, and is found in $fpath by its first line."""
    run("zsh", "-f", "-n", scripts["zsh"])
    sourced = f"autoload -U compinit; compinit -u -d {short_dir}/dump; source {scripts['zsh']}"
    assert run("zsh", "-f", "-c", f"{sourced}; print $_comps[gpushare-agent] $_comps[kubectl-gpushare]") == (
        "_gpushare_agent _kubectl_gpushare\n"
    )
    functions = short_dir / "functions"
    functions.mkdir()
    shutil.copy(scripts["zsh"], functions / "_gpushare-agent")
    loaded = f"fpath=({functions} $fpath); autoload -U compinit; compinit -u -d {short_dir}/other"
    assert run("zsh", "-f", "-c", f"{loaded}; print $_comps[gpushare-agent] $_comps[kubectl-gpushare]") == (
        "_gpushare-agent _gpushare-agent\n"
    )


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        (["gr"], ["graph"]),
        (["top", "--no"], ["--node", "--node-name", "--node-labels"]),
        (["top", "-o", ""], ["table", "json", "yaml"]),
        (["top", "--output=j"], ["--output=json"]),
        (["top", "--isolation", "m"], ["mps"]),
        (["top", "--node", ""], []),
        (["explain", ""], []),
        (["nonsense", ""], []),
    ],
)
def test_kubectl_is_reported_what_may_follow(
    words: list[str], answer: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """A word a line, and last that names of files are not wanted."""
    assert complete(words) == 0
    assert capsys.readouterr().out.splitlines() == [*answer, ":4"]


def test_kubectl_is_reported_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    """Also where nothing was typed at all."""
    for words in ([], [""]):
        assert complete(words) == 0
        assert capsys.readouterr().out.splitlines()[:2] == ["top", "inspect"]


def test_the_package_installs_the_programs_that_kubectl_looks_for() -> None:
    """By the names that kubectl makes from the plugin's."""
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert scripts["kubectl-gpushare"] == f"{cli_kubectl.__name__}:{cli_kubectl.main.__name__}"
    assert scripts["kubectl_complete-gpushare"] == f"{cli_kubectl.__name__}:{complete.__name__}"


def test_an_unknown_shell_ends_in_2(capsys: pytest.CaptureFixture[str]) -> None:
    """And names those that are known."""
    assert main(["completion", "csh"], {}) == 2
    assert "'bash', 'zsh', 'fish'" in capsys.readouterr().err
