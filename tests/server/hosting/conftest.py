"""Programs of a fake device that a test can hold, count or fail."""

import pytest
from servax.jit_cache import Program, ProgramFacts
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
