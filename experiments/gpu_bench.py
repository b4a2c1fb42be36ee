"""The random encoder of `gpu_check`, its texts, its servers and its store."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from .float64_bert import random_params


@dataclass(frozen=True)
class Sizes:
    """How much is done.

    Attributes:
        layers: of the random encoder.
        width: of it.
        batches: rows of its buckets.
        lengths: tokens of its buckets.
        references: texts that are compared with float64.
        requests: of the sealed run and of batching.
        streams: of continuous batching.
        tokens: that each of them writes.
        decoder: options of the random language model.
    """

    layers: int = 6
    width: int = 384
    batches: tuple[int, ...] = (1, 8, 32, 128)
    lengths: tuple[int, ...] = (32, 64, 128, 256)
    references: int = 24
    requests: int = 4000
    streams: int = 64
    tokens: int = 128
    decoder: Mapping[str, int] = field(
        default_factory=lambda: {"hidden_size": 576, "num_layers": 12, "num_heads": 9, "num_kv_heads": 3}
    )


REDUCED = Sizes(1, 24, (4,), (16, 32), 4, 64, 4, 8, {})


class Bench:
    """The random encoder, its texts, and a store that its programs are kept in.

    Args:
        sizes: how much is done.
        folder: for the store.
    """

    def __init__(self, sizes: Sizes, folder: Path) -> None:
        from ..models import BertConfig, bert

        self.sizes, self.folder = sizes, folder
        self.config = BertConfig(
            vocab_size=2000,
            hidden_size=sizes.width,
            num_layers=sizes.layers,
            num_heads=12,
            intermediate_size=4 * sizes.width,
            max_position_embeddings=max(sizes.lengths),
            normalize=True,
        )
        self.params = random_params(self.config, seed=0)
        self.apply = partial(bert.apply, self.config)
        rng = np.random.default_rng(0)
        lengths = np.minimum(rng.geometric(4 / max(sizes.lengths), sizes.requests), max(sizes.lengths))
        self.texts = [rng.integers(1, 2000, int(n)).astype(np.int32) for n in lengths]

    def servable(self) -> Any:
        """The encoder over the grid of all batches and lengths."""
        from ..bucketing import Grid
        from ..jit_cache import Servable

        shapes = [(rows, length) for length in self.sizes.lengths for rows in self.sizes.batches]
        return Servable(
            self.apply,
            self.params,
            inputs={"ids": "int32[length]", "mask": "mask[length]"},
            grid=Grid.explicit(("batch", "length"), shapes),
            name="random",
        )

    def store(self) -> Any:
        """The store; a new one each time, as a new process would open it."""
        from ..jit_cache.store import Store

        (self.folder / "home").mkdir(mode=0o700, exist_ok=True)
        return Store.open(self.folder / "store", home=self.folder / "home")

    def server(self, **options: Any) -> Any:
        """A server of the encoder, not started."""
        from ..server import Server

        return Server(self.servable(), store=self.store(), **options)
