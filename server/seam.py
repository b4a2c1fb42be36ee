"""The seam between transports and the engine: the smallest interface that HTTP and gRPC need.

`servax.server.fake` holds an engine that implements it with arithmetic one can do by hand.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from .errors import Closed, NotReady, UnknownModel


class TensorSpec(Protocol):
    """One input or output tensor of a model, described per item.

    Attributes:
        name: the tensor's name on the wire.
        dtype: NumPy dtype of its values; `ml_dtypes.bfloat16` is possible.
        shape: sizes of one item, without the batch dimension; an axis that varies is its name.
    """

    @property
    def name(self) -> str: ...  # noqa: D102
    @property
    def dtype(self) -> np.dtype[Any]: ...  # noqa: D102
    @property
    def shape(self) -> tuple[int | str, ...]: ...  # noqa: D102


class ModelHandle(Protocol):
    """One served model at one version.

    Attributes:
        name: the name clients ask for.
        version: the version served under that name.
        ready: whether every admissible request has a program.
        inputs: the tensors that callers send (not those that the server makes).
        outputs: the tensors that callers get.
        limits: largest size of each varying axis, such as `{"length": 256}`, and `"batch"`, the rows
            of the largest bucket.
        max_request_rows: rows that one request may hold.
        allow_nonfinite: whether NaN and infinity are admitted in float inputs.
    """

    @property
    def name(self) -> str: ...  # noqa: D102
    @property
    def version(self) -> str: ...  # noqa: D102
    @property
    def ready(self) -> bool: ...  # noqa: D102
    @property
    def inputs(self) -> Sequence[TensorSpec]: ...  # noqa: D102
    @property
    def outputs(self) -> Sequence[TensorSpec]: ...  # noqa: D102
    @property
    def limits(self) -> Mapping[str, int]: ...  # noqa: D102
    @property
    def max_request_rows(self) -> int: ...  # noqa: D102
    @property
    def allow_nonfinite(self) -> bool: ...  # noqa: D102

    async def submit(
        self, rows: Sequence[Mapping[str, np.ndarray]], *, priority: int = 0, timeout_s: float | None = None
    ) -> list[dict[str, np.ndarray]]:
        """Runs rows, ragged or not, and returns their outputs in the same order.

        Args:
            rows: one mapping a row from input name to the item's array, without a batch dimension.
            priority: 1 (most urgent) to 9; 0 means not set.
            timeout_s: seconds after which the answer is worthless; None or 0 means not set.

        Raises:
            BadTensor: a name, dtype, rank or fixed size is not the declared one.
            TooLong: an item exceeds a limit.
            TooManyRows: more than `max_request_rows` rows.
            NonFiniteInput: NaN or infinity where the model refuses it.
            Overloaded, NotReady, Closed, DeadlineExceeded, ModelError: as their names say.
        """
        ...


class Engine(Protocol):
    """Everything behind the transports.

    Attributes:
        models: served models by name.
        live: whether the process can still answer; False only when it must be restarted.
        ready: whether every model is ready and the engine is not draining.
        draining: whether `aclose` has begun.
    """

    @property
    def models(self) -> Mapping[str, ModelHandle]: ...  # noqa: D102
    @property
    def live(self) -> bool: ...  # noqa: D102
    @property
    def ready(self) -> bool: ...  # noqa: D102
    @property
    def draining(self) -> bool: ...  # noqa: D102

    def status(self) -> dict[str, Any]:
        """Where warm-up stands, as JSON: `{"state": "warming", "done": 3, "total": 29, "failed": {}}`."""
        ...

    async def aclose(self, drain_s: float) -> None:
        """Refuses new requests, answers those admitted for up to `drain_s` seconds, fails the rest."""
        ...


def find_model(engine: Engine, name: str, version: str | None = None) -> ModelHandle:
    """Looks up a model that can answer now.

    Raises:
        Closed: the engine is draining.
        NotReady: the model, or the list of models, is not complete yet.
        UnknownModel: no model of that name, or not that version of it.
    """
    if engine.draining:
        raise Closed("A draining server takes no new request; send it to another replica.")
    model = engine.models.get(name)
    if model is None and not engine.ready:
        raise _not_ready("A server", engine, engine.status().get("state") == "failed")
    if model is None:
        served = ", ".join(sorted(engine.models)) or "none"
        raise UnknownModel(f"The model must be one that is served, got {name!r}; served: {served}.")
    if version is not None and version != model.version:
        raise UnknownModel(
            f"Model {name!r} is served at version {model.version!r} only, got {version!r}; "
            "ask for that version or leave it out."
        )
    if not model.ready:
        lost = getattr(model, "lost", engine.status().get("state") == "failed")
        raise _not_ready(f"Model {name!r}", engine, lost)
    return model


def progress_text(engine: Engine) -> str:
    """Warm-up progress as words: "3 of 29 programs are warm, 1 failed (warming)"."""
    status = engine.status()
    state, total = status.get("state"), status.get("total", 0)
    if not total:
        return "the model is being loaded" if state == "loading" else f"no program is warm ({state})"
    failed = f", {count} failed" if (count := len(status.get("failed", ()))) else ""
    return f"{status.get('done', 0)} of {total} programs are warm{failed} ({state})"


def _not_ready(who: str, engine: Engine, lost: bool) -> NotReady:
    remedy = "retry later"
    if lost:
        remedy = "see the log or /v2/health/ready for the reason, mend the model and restart the server"
    said = f"{who} answers once it is warm, and {progress_text(engine)}; {remedy}."
    return NotReady(said, lasting=lost)
