"""Programs of a fake device that a test can hold, count or fail."""

import jax.numpy as jnp
import numpy as np
import pytest
from servax.jit_cache import Program, ProgramFacts, Servable
from servax.jit_cache.packed import PackedServable
from servax.server.batching.fake_device import FakeDevice


class Compiler:
    """Programs with a size and a compile that can be held or fail."""

    def __init__(self, nbytes=1024, on_compile=lambda bucket: None):
        self.device = FakeDevice()
        self.compiled = []
        self.on_compile = on_compile
        self._nbytes = nbytes

    def __call__(self, servable, bucket, leaves):
        self.compiled.append(bucket)
        self.on_compile(bucket)
        made = self.device.compile(servable, bucket, leaves)
        facts = ProgramFacts(0.0, 0.0, 0.0, 0, 0, 0, self._nbytes)
        return Program(bucket, made.executable, leaves, facts)


@pytest.fixture
def compiler_of():
    """Makes a compiler that says what it compiled."""
    return Compiler


class PackedSums:
    """Sums of items, twice over; packed, at most `segments` of them a row."""

    segments = 8

    @staticmethod
    def padded(params, *, x, mask):
        return {"sum": params * jnp.sum(jnp.where(mask, x, 0.0), axis=1), "each": jnp.where(mask, x, 0.0)}

    @staticmethod
    def packed(params, *, x, segment_ids, positions):
        numbers = jnp.arange(1, PackedSums.segments + 1, dtype=jnp.int32)[None, :, None]
        sums = jnp.sum(jnp.where(segment_ids[:, None, :] == numbers, x[:, None], 0.0), axis=2)
        return {"sum": params * sums, "each": jnp.where(segment_ids > 0, x, 0.0)}

    def __call__(self, grid, packed=None):
        """The model on a grid, or with another function over packed rows."""
        inputs = {"x": "float32[length]", "mask": "mask[length]"}
        base = Servable(self.padded, np.float32(2), inputs=inputs, grid=grid)
        return PackedServable(base, packed or self.packed, max_segments=self.segments)


@pytest.fixture(scope="session")
def packed_sums():
    """Makes that model."""
    return PackedSums()
