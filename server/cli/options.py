"""Flags made from the schema: each option of `ServeConfig` becomes one, with its description as the help."""

import copy
import inspect
import re
import types
import typing
from collections.abc import Callable, Iterable
from typing import Annotated, Any, Literal, NamedTuple

import typer
from pydantic import BaseModel, SecretStr
from pydantic.fields import FieldInfo
from typer.core import TyperCommand

from ..config import ModelConfig, ServeConfig
from ..programs_config import ProgramsConfig
from ..settings import paths_of
from .exits import EXIT_USAGE, fail

MODEL_PATHS = tuple(paths_of(ModelConfig))
PROGRAM_PATHS = tuple(ProgramsConfig.model_fields)
STORE_PATHS = ("store", "use_store", "store_max_bytes")
MORE_ARGUMENTS = {"allow_extra_args": True}
"""Settings of a command `with_flags`, which refuses more than one model itself."""
_CONTEXT = inspect.Parameter("context", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)
_OFF = {"use_store": "--no-store"}
_REST = "Address, security and logs"
_PANELS = {
    "Language models": ("generation",),
    "Model": MODEL_PATHS,
    _REST: (),
    "Queue, batching and deadlines": (
        *("queue", "faults", "priorities", "max_wait_ms", "wait", "max_request_rows", "max_age_s"),
        *("timeout_s", "stall_s", "drain_s"),
    ),
    "Programs and their store": (*PROGRAM_PATHS, *STORE_PATHS, "refit", "seal", "strict", "ready_when"),
    "Limits of the HTTP and gRPC fronts": ("http", "grpc"),
}
# In which order the help shows them; the first match above decides.
_ORDER = ["Model", "Language models", _REST, *list(_PANELS)[3:]]


class FlagCommand(TyperCommand):
    """A command `with_flags`, whose help names each of them in full on a terminal of 80 columns.

    The names that switch something off take a column of their own from rich, which then cuts both; the help
    of such a flag names its opposite instead.
    """

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the help, with one name a flag."""
        whole = self.params
        self.params = [_shown_once(one) for one in whole]
        try:
            super().format_help(ctx, formatter)
        finally:
            self.params = whole


def _shown_once(parameter: Any) -> Any:
    shown = copy.copy(parameter)
    shown.secondary_opts = []
    return shown


def with_flags(paths: Iterable[str] | None = None) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command a flag for each option; it receives them by path in a mapping, None for those not given.

    Args:
        paths: which options; None for all. `model` becomes the argument of the command.

    Returns:
        A decorator for a function that takes that mapping first and its own options by keyword.
    """
    chosen = None if paths is None else set(paths)

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        found = {one.path.replace(".", "_"): one for one in _options(ServeConfig)}
        kept = {name: one for name, one in found.items() if chosen is None or one.path in chosen}
        kept = dict(sorted(kept.items(), key=lambda pair: _ORDER.index(_panel(pair[1].path))))
        own = [one for one in inspect.signature(command).parameters.values() if one.kind is one.KEYWORD_ONLY]

        def run(context: typer.Context, **values: Any) -> None:
            _check_one(values.get("model"), context.args)
            flags = {one.path: values.pop(name) for name, one in kept.items()}
            command(flags, **values)

        parameters = [_parameter(name, one) for name, one in kept.items()] + own + [_CONTEXT]
        parameters.sort(key=lambda one: one.name != "model")
        run.__doc__, run.__name__ = command.__doc__, command.__name__
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {one.name: one.annotation for one in parameters}
        return run

    return decorate


def _check_one(model: str | None, more: list[str]) -> None:
    """Several models are options of several models: more than a command line can tell apart."""
    if more:
        names = ", ".join(map(repr, [model, *more]))
        fail(
            f"A command takes one model, got {names}; several are given in a TOML file, each in a table: a "
            f'line [[models]], below it model = "{model}"; then leave the names out and give --config FILE.',
            EXIT_USAGE,
        )


class _Option(NamedTuple):
    path: str
    field: FieldInfo
    text: str


def _options(model: type[BaseModel], prefix: str = "") -> Iterable[_Option]:
    helps = _described(model)
    for name, one in model.model_fields.items():
        kind = one.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            yield from _options(kind, f"{prefix}{name}.")
        elif name != "models":
            yield _Option(prefix + name, one, helps.get(name, ""))


def _described(model: type[BaseModel]) -> dict[str, str]:
    """The `Attributes` of a class and of its bases, by name."""
    found: dict[str, str] = {}
    for one in reversed(model.__mro__):
        text = inspect.cleandoc(one.__dict__.get("__doc__") or "")
        section = text.partition("Attributes:")[2]
        for name, words in re.findall(r"^ {4}(\w+): (.*(?:\n {8}.*)*)", section, re.MULTILINE):
            found[name] = " ".join(words.split())
    return found


def _parameter(name: str, option: _Option) -> inspect.Parameter:
    text, default = option.text, option.field.default
    kind, words = _plain_type(option.field.annotation)
    if words:
        text += f" One of {words}."
    if default not in (None, ()) and not isinstance(default, BaseModel):
        shown = str(default).lower() if isinstance(default, bool) else default
        text += f" [default: {shown}]"
    # Help is markup to typer: what stands in brackets would vanish.
    text = text.replace("`", "").replace("[", "\\[")
    if option.path == "model":
        detail: Any = typer.Argument(help=text, show_default=False)
    else:
        flag = "--" + name.replace("_", "-")
        if kind is bool:
            off = _OFF.get(name, f"--no-{flag[2:]}")
            flag, text = f"{flag}/{off}", f"{text} Off: {off}"
        detail = typer.Option(flag, help=text, show_default=False, rich_help_panel=_panel(option.path))
    annotation = Annotated[kind | None, detail]  # type: ignore[valid-type]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def _panel(path: str) -> str:
    """Under which heading the help lists an option."""
    for heading, paths in _PANELS.items():
        if path in paths or path.partition(".")[0] in paths:
            return heading
    return _REST


def _plain_type(annotation: Any) -> tuple[Any, str]:
    """The type of a flag, and the words it takes if they are few; what else holds the schema checks."""
    origin = typing.get_origin(annotation)
    if origin in (types.UnionType, typing.Union):
        return _plain_type(next(one for one in typing.get_args(annotation) if one is not types.NoneType))
    if origin is Literal:
        return str, ", ".join(typing.get_args(annotation))
    if origin is tuple:
        inner = typing.get_args(annotation)[0]
        return list[str] if inner is SecretStr else list[inner], ""  # type: ignore[valid-type]
    return annotation, ""
