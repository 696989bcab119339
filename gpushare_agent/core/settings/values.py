"""The base of a section, and the kinds of values as flags, variables and YAML have them: durations, counts, lists, paths.

A validator raises ValueError; settings/settings.py makes one line of it that names what is allowed.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

from msgspec import Struct
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, GetCoreSchemaHandler
from pydantic_core import CoreSchema, core_schema


class Section(BaseModel):
    """One section of the tree: frozen, without unknown keys. Its docstring is its title in `--help` and
    docs/reference/settings.md."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True, defer_build=True)


_GO_DURATION = re.compile(r"(?:\d+(?:\.\d+)?(?:ns|us|µs|ms|s|m|h))+")
_GO_DURATION_PART = re.compile(r"(\d+(?:\.\d+)?)(ns|us|µs|ms|s|m|h)")
_UNIT_S = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_PLAIN_NUMBER = re.compile(r"\d+(?:\.\d+)?")
_MAX_DURATION_CHARS = 40
"""The sum overflows with hundreds of digits."""


class OneOf(Struct, frozen=True):
    """Checks that a text is one of the words that there are when it is read. An enumeration has those of the import."""

    words: Callable[[], tuple[str, ...]]

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self._check, handler(source))

    def _check(self, value: str) -> str:
        if value not in self.words():
            raise ValueError(f"is none of {', '.join(self.words())}")
        return value


def parse_duration(value: object) -> object:
    """Seconds from plain seconds or Go's text (`30s`, `500ms`, `1m30s`).

    Raises:
        ValueError: the value is neither.
    """
    if isinstance(value, bool):
        raise ValueError("is no duration")
    # Seconds. Booleans, which Python counts among the integers, were refused above: YAML's `true` is no second.
    if isinstance(value, int | float):
        return value
    text = str(value).strip()
    if len(text) > _MAX_DURATION_CHARS:
        raise ValueError("is no duration")
    if _PLAIN_NUMBER.fullmatch(text):
        return float(text)
    if _GO_DURATION.fullmatch(text):
        # A plain sum's rounding errors would be shown with the setting.
        return math.fsum(float(number) * _UNIT_S[unit] for number, unit in _GO_DURATION_PART.findall(text))
    raise ValueError("is no duration")


def _no_boolean(value: object) -> object:
    """Python would take YAML's `true` for the number 1."""
    if isinstance(value, bool):
        raise ValueError("is no number")
    return value


def comma_list(value: object) -> object:
    if isinstance(value, str):
        return tuple(part.strip() for part in value.split(",")) if value.strip() else ()
    # YAML reads `ignored_xids: 13` as a number, which is a list of one.
    return (value,) if isinstance(value, int) and not isinstance(value, bool) else value


def _texts(value: object) -> object:
    # YAML reads the indexes of `excluded_gpus: [0, 1]` as numbers.
    parts = comma_list(value)
    if not isinstance(parts, list | tuple):
        return parts
    return tuple(str(one) if type(one) is int else one for one in parts)


def pairs_of(value: object) -> object:
    """`k=v,k=v` as a mapping; numbers and booleans that YAML parsed from label values become text again."""
    if isinstance(value, Mapping):
        # Labels are texts: YAML reads `zone: 1` as a number and `gpu: true` as a boolean.
        return {key: str(item).lower() if isinstance(item, bool | int | float) else item for key, item in value.items()}
    if not isinstance(value, str):
        return value
    pairs = [part.partition("=") for part in value.split(",") if part.strip()]
    # An empty value is a label's right; an empty name is none.
    if any(not separator or not key.strip() for key, separator, _ in pairs):
        raise ValueError("is no list of pairs")
    return {key.strip(): item.strip() for key, _, item in pairs}


DNS_NAME = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?")


def matches(pattern: re.Pattern[str], problem: str) -> AfterValidator:
    """The whole text matches; else the problem, such as "is no node name"."""

    def check(value: str) -> str:
        if not pattern.fullmatch(value):
            raise ValueError(problem)
        return value

    return AfterValidator(check)


_RESOURCE_NAME = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?/[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?")
MAX_RESOURCE_NAME_CHARS = 127
"""Kubernetes allows longer ones; the scanner of the kubelet's answers (kit/protobuf.py) reads a one-byte length."""
MAX_NVIDIA_RESOURCE_NAME_CHARS = 63
"""The limit of NVIDIA's plugin, prefix included: api/config/v1/consts.go of k8s-device-plugin v0.20.0."""


def check_resource_name(value: str) -> str:
    """A qualified name. Raises ValueError."""
    if not _RESOURCE_NAME.fullmatch(value):
        raise ValueError("is no resource name such as tencent.com/vcuda-core")
    if len(value) > MAX_RESOURCE_NAME_CHARS:
        raise ValueError(
            f"is a resource name of {len(value)} characters, but this agent takes at most {MAX_RESOURCE_NAME_CHARS};"
            " choose a shorter one"
        )
    return value


def empty_is_none(value: object) -> object:
    return None if value == "" else value


def _no_empty_path(value: object) -> object:
    """Path("") would be the current directory."""
    if value == "" or "\0" in str(value):
        raise ValueError("is no path")
    return value


ResourceName = Annotated[str, AfterValidator(check_resource_name)]
Texts = Annotated[tuple[str, ...], BeforeValidator(_texts)]
Seconds = Annotated[float, Field(allow_inf_nan=False), BeforeValidator(parse_duration)]
Count = Annotated[int, BeforeValidator(_no_boolean)]
OptionalPath = Annotated[Path | None, BeforeValidator(empty_is_none)]
GivenPath = Annotated[Path, BeforeValidator(_no_empty_path)]
PLACE = "place"
"""Marks a path of the node: where nothing names it, it follows from the settings root and kubelet.root_dir."""
GivenPlace = Annotated[GivenPath, PLACE]
OptionalPlace = Annotated[OptionalPath, PLACE]
