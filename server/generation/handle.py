"""What transports see of a model that generates text: one model among the others, without tensors."""

from collections.abc import Mapping, Sequence
from typing import NoReturn

import numpy as np

from ..errors import BadRequest
from ..seam import TensorSpec


class TextHandle:
    """A `ModelHandle` whose requests go to the routes for text.

    Attributes:
        name: the name clients ask for.
        limits: `tokens`, of prompt and text together; `batch`, the texts that run at once.
    """

    name: str
    limits: Mapping[str, int]
    version = "1"
    inputs: Sequence[TensorSpec] = ()
    outputs: Sequence[TensorSpec] = ()
    max_request_rows = 1
    allow_nonfinite = False

    async def submit(
        self, rows: Sequence[Mapping[str, np.ndarray]], *, priority: int = 0, timeout_s: float | None = None
    ) -> NoReturn:
        """Refuse tensors.

        Raises:
            BadRequest: always, naming the routes.
        """
        raise BadRequest(
            f"model {self.name!r} continues texts and takes no tensors; got {len(rows)} rows: send a prompt "
            f"to /v1/completions, /v1/chat/completions or /v2/models/{self.name}/generate"
        )
