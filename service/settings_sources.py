"""Where settings come from: flags, the environment, a file, defaults, in this precedence.

A name that nobody knows and a value that cannot be are errors of one line, never ignored. Tenants are tables, so they
come from the file alone.
"""

import argparse
import json
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn, get_args

import msgspec
import tomli_w
import yaml

from service.plain_files import read_text
from service.setting_values import nearest, parse_size
from service.settings import FIELDS, SECRETS, Field, Origin, Settings, SettingsError, check_together
from service.tenant_settings import TenantSettings, as_tables, read_tenants

PREFIX = "PAGEWALK_"
ADMIN_KEY_FILE = "PAGEWALK_ADMIN_API_KEY_FILE"
ADMIN_URL = "PAGEWALK_ADMIN_URL"
"""Where `pagewalk ps` and its siblings look. No setting of a server."""
OTHER_VARIABLES = ("PAGEWALK_CONFIG", ADMIN_KEY_FILE, ADMIN_URL)


def load_settings(flags: Mapping[str, Any], environ: Mapping[str, str]) -> tuple[Settings, dict[str, Origin]]:
    """Settings from all sources, and where each value came from (by outside name).

    flags: what `add_flags` made argparse find, and `config`. Raises SettingsError.
    """
    values: dict[str, Any] = {}
    origins: dict[str, Origin] = dict.fromkeys(FIELDS, "default")
    config = flags.get("config") or environ.get(f"{PREFIX}CONFIG")
    sources: list[tuple[Origin, dict[str, Any]]] = []
    tenants: dict[str, TenantSettings] = {}
    if config:
        from_file, tenants = _read_file(Path(config))
        sources.append((config, from_file))
    sources.append(("env", _read_environment(environ)))
    sources.append(("flag", {name: flags[name] for name in FIELDS if name in flags}))
    for origin, given in sources:
        for name, value in given.items():
            values[name] = _convert(FIELDS[name], value, origin)
            origins[name] = origin
    try:
        settings = msgspec.convert(values, Settings)
    except msgspec.ValidationError as error:  # each value was checked before: this is our own mistake
        raise AssertionError(f"settings disagree with themselves: {error}") from error
    settings = msgspec.structs.replace(settings, tenants=tenants)
    check_together(settings)
    return settings, origins


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Give a parser one flag for each setting, --config, and MODEL in place of --model."""
    parser.usage = f"{parser.prog} [MODEL] [flags]"
    parser.add_argument("model", nargs="?", metavar="MODEL", default=argparse.SUPPRESS, help="same as --model")
    parser.add_argument("--config", metavar="FILE", default=argparse.SUPPRESS, help="settings in TOML or YAML")
    parser.epilog = (
        "Limits of tenants go into the --config file, a table for each name: [tenants.NAME] with memory_min, "
        "memory_low, memory_high, memory_max, swap_max (a size such as 4GiB, or a share such as 25% of the pool or the "
        "swap area), weight, isolate, requests_per_minute, tokens_per_minute and max_concurrent_requests. A name that "
        "is not listed has no limits. Whose requests are whose, --api-key-file says."
    )
    groups: dict[str, Any] = {}
    for field in FIELDS.values():
        group = groups.get(field.about.group) or parser.add_argument_group(field.about.group)
        groups[field.about.group] = group
        if field.is_switch:
            group.add_argument(
                field.flag,
                *field.about.aliases,
                dest=field.name,
                action=argparse.BooleanOptionalAction,
                default=argparse.SUPPRESS,
                help=_help(field).replace("%", "%%"),
            )
            continue
        choices = field.choices
        metavar = "{" + ",".join(choices) + "}" if choices else field.about.metavar or field.name.split("_")[-1].upper()
        group.add_argument(
            field.flag,
            *field.about.aliases,
            dest=field.name,
            metavar=metavar,
            nargs="+" if field.is_list else None,
            default=argparse.SUPPRESS,
            help=_help(field).replace("%", "%%"),
        )


def to_toml(settings: Settings, origins: Mapping[str, Origin]) -> str:
    """All settings as a file that `--config` reads, with their origins; secrets are masked."""
    lines = []
    values = msgspec.to_builtins(settings)
    for field in FIELDS.values():
        value, origin = values[field.name], origins[field.name]
        if field.name in SECRETS and value:
            lines.append(f"# {field.name} is set ({origin})")
        elif value is None and not field.about.auto:
            lines.append(f"# {field.name} is not set")
        else:
            shown = "auto" if value is None else value
            # tomli_w breaks lists over lines; of strings, JSON's form is TOML's too
            text = msgspec.json.encode(shown).decode() if isinstance(shown, list) else tomli_w.dumps({"": shown})[5:-1]
            lines.append(f"{field.name} = {text}  # {origin}")
    if settings.tenants:
        lines += ["", tomli_w.dumps({"tenants": as_tables(settings.tenants)}).rstrip()]
    return "\n".join(lines) + "\n"


class Parser(argparse.ArgumentParser):
    """argparse with errors of one line, a hint for misspelt flags, and no abbreviations."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{**kwargs, "allow_abbrev": False})

    def error(self, message: str) -> NoReturn:
        unknown = re.search(r"unrecognized arguments: (--[^\s=]+)", message)
        if unknown:
            flags = [flag for field in FIELDS.values() for flag in (field.flag, *field.about.aliases)]
            message = f"{unknown[1]} is no flag{nearest(unknown[1], [*flags, '--config'])}"
        self.exit(2, f"pagewalk: error: {message}\n")


def _help(field: Field) -> str:
    if "(default" in field.about.text:
        return field.about.text
    if field.is_switch:
        return f"{field.about.text} (default: {'on' if field.default else 'off'})"
    default = "auto" if field.default is None and field.about.auto else field.default
    if isinstance(default, float) and default.is_integer() and not field.name.endswith("utilization"):
        default = int(default)
    shown = "none" if default is None or default == [] else default
    return f"{field.about.text} (default: {shown})"


def _read_file(path: Path) -> tuple[dict[str, Any], dict[str, TenantSettings]]:
    """Settings by name, not converted yet, and the tenants. Raises SettingsError."""
    try:
        text = read_text(path)
    except ValueError as error:
        raise SettingsError(f"--config {error}") from error
    try:
        if path.suffix == ".toml":
            values: Any = tomllib.loads(text)
        elif path.suffix in (".yaml", ".yml"):
            values = yaml.safe_load(text) or {}
        else:
            raise SettingsError(f"--config {path}: the name must end in .toml, .yaml or .yml")
    except (tomllib.TOMLDecodeError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())
        raise SettingsError(f"--config {path}: {reason}") from error
    if not isinstance(values, dict):
        raise SettingsError(f"--config {path}: must be a list of name = value")
    table = values.pop("tenants", {})
    for name in values:
        if name not in FIELDS:
            raise SettingsError(f"{path}: {name} is no setting{nearest(str(name), [*FIELDS, 'tenants'])}")
    try:
        return values, read_tenants(table)
    except ValueError as error:
        raise SettingsError(f"{path}: {error}") from None


def _read_environment(environ: Mapping[str, str]) -> dict[str, Any]:
    """PAGEWALK_* variables; an empty one counts as not set, as Compose and shells leave them behind."""
    values: dict[str, Any] = {}
    known = {PREFIX + name.upper(): name for name in FIELDS}
    for variable, text in environ.items():
        if not variable.startswith(PREFIX) or variable in OTHER_VARIABLES or not text:
            continue
        if variable not in known:
            raise SettingsError(f"{variable} is no setting{nearest(variable, [*known, *OTHER_VARIABLES])}")
        values[known[variable]] = text
    if (key := admin_key(environ)) is not None:
        values["admin_api_key"] = key
    return values


def admin_key(environ: Mapping[str, str]) -> str | None:
    """The admin key that the environment names. Raises SettingsError."""
    given, path = environ.get(f"{PREFIX}ADMIN_API_KEY") or None, environ.get(ADMIN_KEY_FILE)
    if not path:
        return given
    if given is not None:
        raise SettingsError(f"{ADMIN_KEY_FILE} and {PREFIX}ADMIN_API_KEY are both set: use one")
    try:
        keys = read_text(path).split()
    except ValueError as error:
        raise SettingsError(f"{ADMIN_KEY_FILE}: {error}") from error
    if len(keys) != 1:
        raise SettingsError(f"{ADMIN_KEY_FILE}: {path} holds {len(keys)} keys")
    return keys[0]


def _convert(field: Field, value: Any, origin: Origin) -> Any:
    """The typed value of what a source gave. Text from flags and variables may stand for a number."""
    is_text = origin in ("flag", "env")
    if field.is_list and isinstance(value, str):
        value = [part.strip() for part in value.split(",")] if is_text else [value]
    if field.about.auto and value == "auto":
        return None
    try:
        _check_text(value)
        if field.about.size and isinstance(value, str):
            value = parse_size(value)
        elif is_text and isinstance(value, str):
            value = _number_or_text(field, value)
        return msgspec.convert(value, field.type)
    except (ValueError, msgspec.ValidationError) as error:
        where = {
            "flag": field.flag,
            "env": PREFIX + field.name.upper(),
        }.get(origin, f"{origin}: {field.name}")
        shown = (
            ""
            if field.name in SECRETS
            else f", got {value if isinstance(value, str) else json.dumps(value, default=str)}"
        )
        raise SettingsError(f"{where}: {_reason(field, str(error))}{shown}") from None


def _check_text(value: Any) -> None:
    """Raises ValueError for what answers and the system could not take: arguments may be any bytes."""
    for text in value if isinstance(value, list) else [value]:
        if isinstance(text, str) and ("\0" in text or text != text.encode("utf-8", "replace").decode()):
            raise ValueError("must be text in UTF-8")


def _number_or_text(field: Field, text: str) -> Any:
    plain = {int, float}
    kinds = {part for part in _leaves(field.type) if part in plain}
    if int in kinds:
        return int(text) if re.fullmatch(r"[+-]?\d+", text) else text
    if float in kinds:
        return float(text) if re.fullmatch(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", text) else text
    if field.is_switch:
        return {"true": True, "false": False, "1": True, "0": False}.get(text.lower(), text)
    return text


def _leaves(kind: Any) -> list[Any]:
    return [leaf for part in get_args(kind) for leaf in _leaves(part)] or [kind]


def _reason(field: Field, text: str) -> str:
    """msgspec's words, made for those who set a flag."""
    if field.choices:
        return "must be one of " + ", ".join(field.choices)
    text = re.sub(r" - at `.*`$", "", text).replace("`", "")
    expected = re.match(r"Expected (\w+)( \| null)? ?(.*?)(, got \w+)?$", text)
    if expected:
        text = f"must be {_KINDS.get(expected[1], expected[1])} {expected[3]}"
    if "matching regex" in text:
        return "must be printable ASCII without spaces"
    return text.strip()


_KINDS = {"bool": "true or false", "int": "a whole number", "float": "a number", "str": "text", "array": "a list"}
