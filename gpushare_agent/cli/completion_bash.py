"""The completion script for bash. Format: bash's manual, "Programmable Completion"; it works with bash 3.2 and later."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence

from gpushare_agent.cli.completion import Option, Program, Value, Word

_HEAD = """\
# Completion for bash. Print it anew after an update:
#   gpushare-agent completion bash > /etc/bash_completion.d/gpushare-agent
"""
_FUNCTION = """\
{name}() {{
    local cur=${{COMP_WORDS[COMP_CWORD]}} prev=${{COMP_WORDS[COMP_CWORD-1]}} command=${{COMP_WORDS[1]}}
    local flag="" words="" settings="" joint="" i
    COMPREPLY=()
    # bash cuts at "=": of --flag=va it makes three words
    if [[ $cur == "=" ]]; then flag=$prev cur="" joint="="
    elif [[ $prev == "=" ]]; then flag=${{COMP_WORDS[COMP_CWORD-2]}} joint="="
    elif [[ $prev == -* ]]; then flag=$prev
    fi
    if [[ $COMP_CWORD -eq 1 ]]; then
        COMPREPLY=($(compgen -W {commands} -- "$cur"))
        return
    fi
    for ((i = 2; i < COMP_CWORD; i++)); do
        case "$command/${{COMP_WORDS[i]}}" in
            {nested}) command="$command/${{COMP_WORDS[i]}}" ;;
        esac
    done
    case "$command:$flag$joint" in
{values}
    esac
    if [[ -n $joint ]]; then return; fi
    case "$command" in
{flags}
    esac
    if [[ $cur == -* ]]; then words="${{words#*|}}"; else words="${{words%%|*}}"; fi
    COMPREPLY=($(compgen -W "$words" -- "$cur"))
}}
complete -o default -F {name} {program}
"""


def script(programs: Sequence[Program], settings: Sequence[Option]) -> str:
    return _HEAD + "".join(_function(program, settings) for program in programs)


def _function(program: Program, settings: Sequence[Option]) -> str:
    name = "_" + program.name.replace("-", "_")
    places = list(_places(program))
    nested = [place for place, _, _ in places if "/" in place]
    return _FUNCTION.format(
        name=name,
        program=program.name,
        commands=shlex.quote(" ".join([word.name for word in program.words] + ["--help", "--version"])),
        nested="|".join(nested) or "/",
        values="\n".join(_value_cases(places, settings)),
        flags="\n".join(_flag_cases(places, settings)),
    )


def _places(program: Program) -> Iterator[tuple[str, Word, bool]]:
    """Each command and each command of a command: its path, its words, whether settings are taken there."""
    for word in program.words:
        yield word.name, word, word.takes_settings
        for inner in word.words:
            yield f"{word.name}/{inner.name}", inner, False


def _value_cases(places: Sequence[tuple[str, Word, bool]], settings: Sequence[Option]) -> Iterator[str]:
    """What may stand behind an option. A command's own options come first: they win where a setting has the same name."""
    for place, word, _ in places:
        for option in word.options:
            yield from _value_case(place, option)
    for option in settings:
        yield from _value_case("*", option)


def _value_case(place: str, option: Option) -> Iterator[str]:
    if option.value is Value.NONE:
        return
    joints = ("=",) if option.value is Value.OPTIONAL else ("", "=")
    pattern = "|".join(f"{place}:{name}{joint}" for name in option.names for joint in joints)
    found = f"-W {shlex.quote(' '.join(option.choices))}" if option.choices else "-f"
    if option.value is Value.TEXT and not option.choices:
        yield f"        {pattern}) return ;;"
    else:
        yield f'        {pattern}) COMPREPLY=($(compgen {found} -- "$cur")); return ;;'


def _flag_cases(places: Sequence[tuple[str, Word, bool]], settings: Sequence[Option]) -> Iterator[str]:
    yield f"        {'|'.join(place for place, _, takes in places if takes) or '-'}) settings={_quoted(settings)} ;;"
    yield "    esac"
    yield '    case "$command" in'
    for place, word, _ in places:
        choices = " ".join([*word.choices, *(inner.name for inner in word.words)])
        own = " ".join(name for option in word.options for name in option.names)
        yield f'        {place}) words="{choices}|{own} $settings" ;;'


def _quoted(settings: Sequence[Option]) -> str:
    return shlex.quote(" ".join(name for option in settings for name in option.names))
