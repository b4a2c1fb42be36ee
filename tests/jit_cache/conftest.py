import jax
import pytest
from servax.bucketing import Bucket
from servax.jit_cache import CompileService, Servable, Staging, check_item, compile_program


class Harness:
    """A servable's programs without a server: compile, pad, run, cut."""

    def __init__(self, servable):
        self.servable = servable
        self.leaves = [jax.device_put(leaf) for leaf in servable.leaves]
        self.programs = {}

    def bucket(self, *sizes):
        return Bucket(self.servable.grid.axes, sizes)

    def program(self, *sizes):
        bucket = self.bucket(*sizes)
        if bucket not in self.programs:
            self.programs[bucket] = compile_program(self.servable, bucket, self.leaves)
        return self.programs[bucket]

    def run(self, sizes, *items):
        """Answers of the items, run together in the bucket of these sizes."""
        program = self.program(*sizes)
        known = self.servable
        options = {"allow_nonfinite": known.allow_nonfinite}
        checked = [check_item(known.signature, item, known.limits, **options) for item in items]
        staging = Staging(known.signature, program.bucket)
        outputs = program(staging.fill([item for item, _ in checked], [size for _, size in checked]))
        arrays = list(map(jax.device_get, outputs))
        known.outputs.check_batch(arrays, program.bucket.rows)
        rows = known.outputs.cut(arrays, [size for _, size in checked])
        return [jax.tree.unflatten(known.outputs.treedef, row) for row in rows]


@pytest.fixture
def harness():
    def make(apply, params=None, **options):
        return Harness(apply if isinstance(apply, Servable) else Servable(apply, params, **options))

    return make


@pytest.fixture
def service():
    service = CompileService()
    yield service
    service.close()
