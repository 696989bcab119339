"""Shell completion: what is offered for a line, and the scripts in the shells themselves."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from gpushare_agent import __main__
from gpushare_agent.commands import COMMAND_LINE, COMMANDS, main
from gpushare_agent.core.cli.completion import completions
from gpushare_agent.core.settings.reference import all_keys
from gpushare_agent.kubectl.plugin import complete

TIMEOUT_S = 60
ROOT = Path(__file__).parents[2]

ASK_BASH = """
source "$1"
COMP_LINE=$2 COMP_POINT=${#2} COMP_TYPE=9
_python_argcomplete "${2%% *}"
printf '%s\\n' "${COMPREPLY[@]}"
"""
PROGRAM = """\
#!{python}
import sys
from gpushare_agent.__main__ import {function}
sys.exit({function}())
"""


def offered(*words: str) -> list[str]:
    """For the last of the words behind `gpushare-agent`."""
    return completions(COMMAND_LINE, words)


def test_commands_are_completed() -> None:
    """All of them, or those that begin so."""
    assert offered("") == [command.name for command in COMMANDS]
    assert offered("expl") == ["explain"]
    assert offered("--v") == ["--version"]
    assert offered("xx") == []


def test_flags_and_settings_are_completed() -> None:
    """A command's own, and those of the settings that it uses: of all of them for `run`."""
    flags = offered("top", "-")
    assert {"--once", "--interval", "--server", "-o", "--output", "--help", "--web.port", "--query-port"} <= set(flags)
    assert len(offered("top", "--")) <= 20
    settings = {f"--{name}" for key in all_keys() for name in (key.flag, *key.aliases)}
    assert settings <= set(offered("run", "-"))
    assert offered("top", "--web.p") == ["--web.port"]
    assert offered("vdevice", "--web") == []
    assert "--no-register" in offered("vdevice", "-")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("inspect", "-o", ""), ["table", "wide", "json", "yaml"]),
        (("inspect", "--output", "j"), ["json"]),
        (("inspect", "--output="), ["--output=table", "--output=wide", "--output=json", "--output=yaml"]),
        (("inspect", "--output=y"), ["--output=yaml"]),
        (("config", "-o", ""), ["table", "wide", "json", "yaml"]),
        (("run", "--driver", ""), ["nvml", "simulated"]),
        (("run", "--isolation=v"), ["--isolation=vcuda"]),
        (("run", "--log.level", "d"), ["debug"]),
        (("run", "--share-mode="), ["--share-mode=true", "--share-mode=false"]),
        (("run", "--device-list-strategy", "cdi"), ["cdi-annotations", "cdi-cri"]),
        (("cdi", ""), ["generate", "list"]),
        (("completion", "z"), ["zsh"]),
        (("sandbox", "--samples", "f"), ["fitting"]),
        (("sandbox", "app"), ["apply"]),
        (("sandbox", "fail-"), ["fail-gpu"]),
        (("sandbox", "--gpu-"), ["--gpu-memory-mib"]),
        (("top", "--interval", ""), []),
    ],
)
def test_values_are_completed(words: tuple[str, ...], expected: list[str]) -> None:
    """Choices of options, of settings and of arguments, behind a blank or behind "="."""
    assert offered(*words) == expected


def test_the_commands_of_a_command_are_completed() -> None:
    """Behind `sandbox exec` its own flags, and no setting's."""
    flags = offered("sandbox", "exec", "-")
    assert "--container" in flags
    assert "--samples" not in flags
    assert "--web.port" not in flags


@pytest.fixture
def scripts(short_dir: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, Path]:
    """What `completion SHELL` prints, by shell. Next to them lie both programs."""
    made = {}
    for shell in ("bash", "zsh", "fish"):
        assert main(["completion", shell], {}) == 0
        made[shell] = short_dir / f"script.{shell}"
        made[shell].write_text(capsys.readouterr().out)
    for name, function in (("gpushare-agent", "main"), ("kubectl-gpushare", "run_plugin")):
        program = short_dir / name
        program.write_text(PROGRAM.format(python=sys.executable, function=function))
        program.chmod(0o755)
    return made


def run(*command: str | Path, cwd: Path) -> str:
    """In a directory with the programs, which is first in PATH."""
    done = subprocess.run(
        list(map(str, command)),
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
        cwd=cwd,
        env=os.environ | {"PATH": f"{cwd}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)},
    )
    assert (done.returncode, done.stderr) == (0, ""), done
    return done.stdout


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("gpushare-agent expl", ["explain"]),
        ("gpushare-agent top --web.p", ["--web.port"]),
        ("gpushare-agent run --driver=si", ["simulated"]),
        ("kubectl-gpushare inspect -o j", ["json"]),
        ("gpushare-agent run --config scr", ["script.bash", "script.fish", "script.zsh"]),
    ],
)
def test_bash_completes(line: str, expected: list[str], scripts: dict[str, Path]) -> None:
    """Through the script: bash itself puts what stands before "=" back."""
    out = run("bash", "--norc", "-c", ASK_BASH, "ask", scripts["bash"], line, cwd=scripts["bash"].parent)
    assert sorted(out.split()) == expected


def test_bash_reads_the_script_silently(scripts: dict[str, Path]) -> None:
    """Every shell that starts sources it: it prints nothing and is short."""
    asked = 'source "$1"; complete -p gpushare-agent; complete -p kubectl-gpushare'
    out = run("bash", "--norc", "-euc", asked, "x", scripts["bash"], cwd=scripts["bash"].parent)
    assert [line.rpartition(" ")[2] for line in out.splitlines()] == ["gpushare-agent", "kubectl-gpushare"]
    assert scripts["bash"].stat().st_size < 10_000


needs_fish = pytest.mark.skipif(shutil.which("fish") is None, reason="fish is not installed")
needs_zsh = pytest.mark.skipif(shutil.which("zsh") is None, reason="zsh is not installed")


def in_fish(script: Path, line: str) -> list[str]:
    """The words that fish offers, without its descriptions."""
    out = run("fish", "--no-config", "-c", f"source {script}; complete -C '{line}'", cwd=script.parent)
    return [offer.partition("\t")[0] for offer in out.splitlines()]


@needs_fish
def test_fish_completes_commands_flags_and_values(scripts: dict[str, Path]) -> None:
    """As bash does."""
    assert in_fish(scripts["fish"], "gpushare-agent expl") == ["explain"]
    assert in_fish(scripts["fish"], "gpushare-agent top --web.p") == ["--web.port"]
    assert set(in_fish(scripts["fish"], "gpushare-agent inspect -o ")) == {"table", "json", "yaml"}
    assert in_fish(scripts["fish"], "gpushare-agent run --driver=si") == ["--driver=simulated"]
    assert set(in_fish(scripts["fish"], "gpushare-agent cdi ")) == {"generate", "list"}
    assert "--container" in in_fish(scripts["fish"], "gpushare-agent sandbox exec --con")
    assert in_fish(scripts["fish"], "kubectl-gpushare ins") == ["inspect"]


@needs_zsh
def test_zsh_takes_the_script(scripts: dict[str, Path]) -> None:
    """It parses, is registered for both programs when it is sourced, and is found in $fpath by its first line."""
    directory = scripts["zsh"].parent
    run("zsh", "-f", "-n", scripts["zsh"], cwd=directory)
    sourced = f"autoload -U compinit; compinit -u -d {directory}/dump; source {scripts['zsh']}"
    shown = "print $_comps[gpushare-agent] $_comps[kubectl-gpushare]"
    assert run("zsh", "-f", "-c", f"{sourced}; {shown}", cwd=directory) == "_python_argcomplete _python_argcomplete\n"
    functions = directory / "functions"
    functions.mkdir()
    shutil.copy(scripts["zsh"], functions / "_gpushare-agent")
    loaded = f"fpath=({functions} $fpath); autoload -U compinit; compinit -u -d {directory}/other"
    assert run("zsh", "-f", "-c", f"{loaded}; {shown}", cwd=directory) == "_gpushare-agent _gpushare-agent\n"


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        (["ins"], ["inspect"]),
        (["top", "--agent-n"], ["--agent-namespace"]),
        (["top", "-o", ""], ["table", "wide", "json", "yaml"]),
        (["top", "--output=j"], ["--output=json"]),
        (["top", "--isolation", "v"], []),
        (["top", "--node", ""], []),
        (["explain", ""], []),
    ],
)
def test_kubectl_gets_a_word_a_line(words: list[str], answer: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """The last line means that names of files are not wanted."""
    assert complete(words) == 0
    assert capsys.readouterr().out.splitlines() == [*answer, ":4"]


def test_kubectl_gets_the_plugins_own_commands_and_flags(capsys: pytest.CaptureFixture[str]) -> None:
    """Also where nothing was typed at all. The program that kubectl calls has no `--server`."""
    for words in ([], [""]):
        assert complete(words) == 0
        assert capsys.readouterr().out.splitlines()[:3] == ["top", "inspect", "explain"]
    assert complete(["top", "-"]) == 0
    flags = capsys.readouterr().out.splitlines()
    assert "--node" in flags and "--server" not in flags


def test_the_package_installs_the_programs_that_kubectl_looks_for() -> None:
    """By the names that kubectl makes from the plugin's. A program begins in __main__, which imports nothing before Ctrl-C
    ends it quietly."""
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert {"kubectl-gpushare", "kubectl_complete-gpushare"} < scripts.keys()
    for script in scripts.values():
        module, _, function = script.partition(":")
        assert module == __main__.__name__ and callable(getattr(__main__, function))


def test_an_unknown_shell_ends_in_2(capsys: pytest.CaptureFixture[str]) -> None:
    """And names those that are known."""
    assert main(["completion", "csh"], {}) == 2
    assert "'bash', 'zsh', 'fish'" in capsys.readouterr().err
