"""Fixtures for every room. JAX is imported by those that need it: bucketing's tests do without."""

import contextlib
import os

import pytest
from hypothesis import settings

# A time limit would test the machine.
settings.register_profile("servax", settings(deadline=None))
settings.load_profile("servax")


@pytest.fixture(scope="session", autouse=True)
def _own_homes(tmp_path_factory):
    """The store of whoever runs the tests is neither used nor filled."""
    home = tmp_path_factory.mktemp("homes")
    with pytest.MonkeyPatch.context() as patch:
        for name in ("XDG_CACHE_HOME", "XDG_CONFIG_HOME"):
            folder = home / name
            folder.mkdir(mode=0o700)
            patch.setitem(os.environ, name, str(folder))
        yield


@pytest.fixture
def strict_numerics():
    """No silent rank or dtype promotion, in every thread; opt in with `pytest.mark.usefixtures`."""
    import jax

    wanted = {"jax_numpy_rank_promotion": "raise", "jax_numpy_dtype_promotion": "strict"}
    before = {name: getattr(jax.config, name) for name in wanted}
    for name, value in wanted.items():
        jax.config.update(name, value)
    yield
    for name, value in before.items():
        jax.config.update(name, value)


class Compiles:
    """Traces and compiles of the whole process since the test began."""

    def __init__(self, log):
        self._log = log
        self._begin = log.total()

    @property
    def traces(self):
        return self._log.total()[0] - self._begin[0]

    @property
    def count(self):
        return self._log.total()[1] - self._begin[1]

    @contextlib.contextmanager
    def none(self):
        """Fail the test if anything is traced or compiled in the block, by whatever thread."""
        traces, count = self.traces, self.count
        yield
        extra = (self.traces - traces, self.count - count)
        assert extra == (0, 0), f"{extra[0]} traces and {extra[1]} compiles where there must be none"


@pytest.fixture
def compiles():
    """Counts compilations; ``with compiles.none(): ...`` fails a test that compiles when it may not."""
    from servax.jit_cache import compile_log

    return Compiles(compile_log())
