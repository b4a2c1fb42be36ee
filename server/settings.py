"""One configuration out of four sources: defaults, a TOML file, the environment, flags; the later one wins.

Every option has one path, such as `queue.rows`: that is a key of a table in the file, `SERVAX_QUEUE__ROWS` in
the environment and `--queue-rows` on the command line. All are checked by `ServeConfig`.
"""

import difflib
import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, SecretStr, ValidationError

from .config import ModelConfig, ServeConfig
from .errors import ConfigError

Source = Literal["default", "file", "env", "flag", "code"]
PREFIX = "SERVAX_"
_FILE_VARIABLE = "SERVAX_CONFIG"
# Read elsewhere: by the command line itself and by `servax top`.
_NO_OPTIONS = (_FILE_VARIABLE, "SERVAX_DEBUG", "SERVAX_URL")
# What Kubernetes sets in every container beside a service called "servax".
_SERVICE_LINK = re.compile(r"SERVAX_(SERVICE_HOST|SERVICE_PORT.*|PORT_\d+_(TCP|UDP).*)")


@dataclass(frozen=True, slots=True)
class Settings:
    """A checked configuration, and where each option came from.

    Attributes:
        config: the options in force.
        sources: source by path of an option; what is not named is a default.
    """

    config: ServeConfig
    sources: Mapping[str, Source] = field(default_factory=dict)

    def listed(self) -> dict[str, dict[str, Any]]:
        """Value and source by path, secrets left out; for the config endpoint."""
        return {
            path: {"value": _shown(value), "source": self.sources.get(path, "default")}
            for path, value in _flat(self.config).items()
        }


def read_settings(
    flags: Mapping[str, Any], environment: Mapping[str, str] | None = None, file: str | None = None
) -> Settings:
    """Lay the sources over each other and check the result.

    Args:
        flags: values by path, given on the command line; None means not given.
        environment: variables; those that begin with `SERVAX_` count.
        file: a TOML file; by default what `SERVAX_CONFIG` names.

    Raises:
        ConfigError: for an unknown option, naming the nearest one that exists, or a value that breaks a rule,
            naming the option, its source and the value.
    """
    environment = {} if environment is None else environment
    file = environment.get(_FILE_VARIABLE) or None if file is None else file
    layers: list[tuple[Source, str, dict[str, Any]]] = []
    if file is not None:
        layers.append(("file", file, _from_file(file)))
    layers.append(("env", "the environment", _from_environment(environment)))
    layers.append(("flag", "the command line", {k: v for k, v in flags.items() if v is not None}))
    merged: dict[str, Any] = {}
    sources: dict[str, Source] = {}
    for source, _, values in layers:
        merged |= values
        sources |= dict.fromkeys(values, source)
    try:
        config = ServeConfig.model_validate(_nested(merged))
    except ValidationError as error:
        raise ConfigError(_explained(error, sources, layers)) from None
    return Settings(config, sources)


def option_paths() -> list[str]:
    """Every path that an option can have."""
    return [*paths_of(ServeConfig), "models"]


def paths_of(model: type[BaseModel], prefix: str = "") -> Iterable[str]:
    """The paths of a class of options, those of nested ones included."""
    for name, one in model.model_fields.items():
        kind = one.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            yield from paths_of(kind, f"{prefix}{name}.")
        elif name != "models":
            yield prefix + name


def _from_file(name: str) -> dict[str, Any]:
    try:
        with Path(name).open("rb") as stream:
            tree = tomllib.load(stream)
    except OSError as error:
        raise ConfigError(
            f"The configuration file must be readable, got {name}: {error}; check it."
        ) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"The configuration file must be TOML, got {name}: {error}; correct it.") from None
    values: dict[str, Any] = {}
    _collect(tree, "", values, set(option_paths()), name)
    for table in values.get("models", ()):
        for key in table if isinstance(table, Mapping) else ():
            if key not in ModelConfig.model_fields:
                raise _unknown(f"{key!r} in [[models]]", key, ModelConfig.model_fields, name)
    if isinstance(values.get("api_key"), str):
        values["api_key"] = [values["api_key"]]
    return values


def _collect(
    tree: Mapping[str, Any], prefix: str, values: dict[str, Any], known: set[str], name: str
) -> None:
    for key, value in tree.items():
        path = prefix + key
        if path in known:
            values[path] = value
        elif isinstance(value, Mapping) and any(one.startswith(f"{path}.") for one in known):
            _collect(value, f"{path}.", values, known, name)
        else:
            raise _unknown(repr(path), path, known, name)


def _from_environment(environment: Mapping[str, str]) -> dict[str, Any]:
    variables = {
        PREFIX + path.replace(".", "__").upper(): path for path in option_paths() if path != "models"
    }
    values: dict[str, Any] = {}
    for name, text in environment.items():
        if not name.startswith(PREFIX) or name in _NO_OPTIONS or _SERVICE_LINK.fullmatch(name):
            continue
        if name not in variables:
            raise _unknown(name, name, variables, "the environment")
        if "://" in text and variables[name].endswith("port"):
            continue  # a link as well
        path = variables[name]
        if text == "":
            continue
        values[path] = [key for key in text.split(",") if key] if path == "api_key" else _plain(text)
    return values


def _plain(text: str) -> Any:
    return None if text.lower() == "none" else text


def _unknown(shown: str, key: str, known: Iterable[str], where: str) -> ConfigError:
    near = difflib.get_close_matches(key, list(known), n=1, cutoff=0.0)
    return ConfigError(
        f"Options are those of `servax serve --help`; got {shown} in {where}: meant {near[0]}?"
    )


def _nested(values: Mapping[str, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for path, value in values.items():
        *tables, last = path.split(".")
        place = tree
        for table in tables:
            place = place.setdefault(table, {})
        place[last] = value
    return tree


def _explained(
    error: ValidationError, sources: Mapping[str, Source], layers: Iterable[tuple[Source, str, Any]]
) -> str:
    first = error.errors()[0]
    path = ".".join(map(str, first["loc"]))
    message = first["msg"].removeprefix("Value error, ")
    if not path:
        return message
    root = path if path in sources else path.split(".")[0]
    where = {source: name for source, name, _ in layers}.get(sources.get(root, "default"), "the defaults")
    got = "a secret" if root == "api_key" else repr(first["input"])
    return f"Option {path} has a rule: {message}; got {got} from {where}: correct it."


def _flat(model: BaseModel, prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name in type(model).model_fields:
        value = getattr(model, name)
        if isinstance(value, BaseModel):
            flat |= _flat(value, f"{prefix}{name}.")
        else:
            flat[prefix + name] = value
    return flat


def _shown(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_shown(one) for one in value]
    if isinstance(value, BaseModel):
        return value.model_dump()
    return "(secret)" if isinstance(value, SecretStr) else value
