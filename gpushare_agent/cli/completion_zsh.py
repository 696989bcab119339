"""The completion script for zsh. Format: zshcompsys(1), `_arguments` and `_describe`."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence

from gpushare_agent.cli.completion import Option, Program, Value, Word, first_sentence

_HEAD = """\
#compdef {programs}
# Completion for zsh. Print it anew after an update, into a directory of $fpath:
#   gpushare-agent completion zsh > /usr/local/share/zsh/site-functions/_gpushare-agent
"""
_FILE = "_gpushare-agent"
_FUNCTION = """\
{name}() {{
    local curcontext="$curcontext" state line
    local -a commands settings
    commands=(
{commands}
    )
    settings=(
{settings}
    )
    _arguments -C '1:command:->command' '*::argument:->argument'
    case $state in
        command) _describe command commands ;;
        argument)
            case $words[1] in
{cases}
            esac ;;
    esac
}}
"""


def script(programs: Sequence[Program], settings: Sequence[Option]) -> str:
    names = " ".join(program.name for program in programs)
    functions = "".join(_function(program, settings) for program in programs)
    return _HEAD.format(programs=names) + functions + _last_lines(programs)


def _last_lines(programs: Sequence[Program]) -> str:
    """Loaded from $fpath the file is the function itself, called for one of the programs; sourced, it names both."""
    cases = "\n".join(f"        {program.name}) {_function_name(program)} ;;" for program in programs)
    defines = "\n".join(f"    compdef {_function_name(program)} {program.name}" for program in programs)
    return (
        f'if [[ "$funcstack[1]" == "{_FILE}" ]]; then\n    case "$service" in\n{cases}\n    esac\nelse\n{defines}\nfi\n'
    )


def _function_name(program: Program) -> str:
    return "_" + program.name.replace("-", "_")


def _function(program: Program, settings: Sequence[Option]) -> str:
    return _FUNCTION.format(
        name=_function_name(program),
        commands="\n".join(f"        {_described(word)}" for word in program.words),
        settings="\n".join(f"        {spec}" for option in settings for spec in _specs(option)),
        cases="\n".join(_case(word, "                ") for word in program.words),
    )


def _described(word: Word) -> str:
    return shlex.quote(f"{word.name}:{first_sentence(word.about)}")


def _case(word: Word, margin: str) -> str:
    lines = [f"{margin}{word.name})"]
    if word.words:
        nested = [f"{margin}    {word.name}-{inner.name}) {_arguments(inner)} ;;" for inner in word.words]
        names = "|".join(inner.name for inner in word.words)
        lines += [
            f"{margin}    local inner=${{${{(M)words:#({names})}}[1]}}",
            f'{margin}    case "{word.name}-$inner" in',
            *nested,
            f"{margin}    *) {_arguments(word)} ;;",
            f"{margin}    esac ;;",
        ]
        return "\n".join(lines)
    return "\n".join([*lines, f"{margin}    {_arguments(word)} ;;"])


def _arguments(word: Word) -> str:
    own = [spec for option in word.options for spec in _specs(option)]
    choices = [*word.choices, *(inner.name for inner in word.words)]
    rest = shlex.quote(f"*:argument:({' '.join(choices)})") if choices else shlex.quote("*:argument:_default")
    settings = ['"${settings[@]}"'] if word.takes_settings else []
    return " ".join(["_arguments", *own, *settings, rest])


def _specs(option: Option) -> Iterator[str]:
    """A specification for each name: `--output=[text]:value:(json yaml)`."""
    about = _escaped(first_sentence(option.about))
    for name in option.names:
        joint = "=" if option.value is not Value.NONE and name.startswith("--") else ""
        optional = "-" if option.value is Value.OPTIONAL else ""
        yield shlex.quote(f"{name}{joint}{optional}[{about}]{_action(option)}")


def _action(option: Option) -> str:
    if option.value is Value.NONE:
        return ""
    if option.choices:
        return f":value:({' '.join(option.choices)})"
    return ":path:_files" if option.value is Value.PATH else ":value: "


def _escaped(text: str) -> str:
    for letter in "\\[]:":
        text = text.replace(letter, "\\" + letter)
    return text
