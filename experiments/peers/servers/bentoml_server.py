# mypy: ignore-errors
"""The same encoder under BentoML, with its adaptive batching."""

import bentoml
from encoder import MAX_BATCH, Encoder


@bentoml.service(workers=1, traffic={"timeout": 60})
class Embed:
    """One worker process."""

    def __init__(self):
        self.encoder = Encoder()

    @bentoml.api(batchable=True, max_batch_size=MAX_BATCH, max_latency_ms=10_000)
    def embed(self, text: list[str]) -> list[list[float]]:
        """Vectors of a batch; a request is a list of one."""
        return self.encoder(text).tolist()
