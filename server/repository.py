"""The model repository as clients of the protocol see it: which models there are, and loading them anew.

What there is to load is what the server was configured with, so an entry of the index is a served model. The
extension is described at
https://github.com/triton-inference-server/server/blob/main/docs/protocol/extension_model_repository.md.
"""

from collections.abc import Awaitable, Callable, Collection

from typing_extensions import TypedDict

from .errors import BadRequest, Forbidden, ServerError, Unavailable, UnknownModel
from .seam import Engine, find_model

Load = Callable[[str], Awaitable[None]]
"""Loads a model anew, by the name that it is served under; done once the new version serves."""


class ModelIndex(TypedDict):
    """A model that is served; `state` is READY, LOADING or UNAVAILABLE, `reason` why it is not ready."""

    name: str
    version: str
    state: str
    reason: str


def index(engine: Engine, *, ready: bool = False) -> list[ModelIndex]:
    """Every model, or only those that can answer now; none before the first is loaded."""
    listed = [_entry(engine, name, model.version) for name, model in engine.models.items()]
    return [one for one in listed if one["state"] == "READY" or not ready]


def _entry(engine: Engine, name: str, version: str) -> ModelIndex:
    state, reason = "READY", ""
    try:
        find_model(engine, name)
    except ServerError as error:
        lasting = engine.draining or (isinstance(error, Unavailable) and error.lasting)
        state, reason = "UNAVAILABLE" if lasting else "LOADING", str(error)
    return {"name": name, "version": version, "state": state, "reason": reason}


async def load(engine: Engine, permitted: Load | None, name: str, parameters: Collection[str]) -> None:
    """Load a model anew from where it came, in the place of the version that is served.

    Args:
        engine: serves it.
        permitted: what does so; None refuses.
        name: of the model.
        parameters: names of those in the request; none is taken.

    Raises:
        Forbidden: it is not switched on.
        UnknownModel: no model of that name is served.
        BadRequest: the request has a configuration, or files, of its own.
        ServerError: the model could not be loaded; the old version stays.
    """
    if permitted is None:
        raise Forbidden(
            "Models are loaded anew at the server (kill -HUP, or Server.replace), got a client's request for "
            f"{name!r}; start the server with --allow-load to let clients do so."
        )
    if name not in engine.models:
        served = ", ".join(sorted(engine.models)) or "none yet"
        raise UnknownModel(f"A model that is served can be loaded anew, got {name!r}; served: {served}.")
    if parameters:
        raise BadRequest(
            "A model is loaded from where the server was told, without parameters, got "
            f"{sorted(parameters)}; change the server's configuration."
        )
    await permitted(name)


def unload(name: str) -> None:
    """Refuse to.

    Raises:
        Forbidden: always.
    """
    raise Forbidden(
        f"A model stays for as long as its server runs, got a request to unload {name!r}; restart the server "
        "without it."
    )
