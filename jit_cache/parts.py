"""A program of several processes and a store: each keeps its own part, and all load theirs or all compile.

Parts that were compiled apart need not fit: on GPUs the processes agree on what they measure while they
compile, and one that compiles would wait for those that load. So the parts of one compile bear one name,
which the leader tells the others, and a part of another name is not loaded.
"""

import secrets
import time
from typing import Any

from ..bucketing import Bucket
from .hosts import Led
from .kept import USED_INPUTS, described
from .program import Built, build
from .servable import Servable
from .store import Executables, Fingerprint, Store
from .store.load import Attempt, Loaded
from .watched import Watched

_MADE = "made"


class Part:
    """What one process has of a program.

    Args:
        store: its own, or one that they share.
        key: of its part; it has the process's number.
        servable: of what.
        bucket: at which sizes.
        watched: sees whether its code stays what the key says.
    """

    def __init__(
        self, store: Store, key: Fingerprint, servable: Servable, bucket: Bucket, watched: Watched
    ) -> None:
        self._servable, self._bucket, self._watched = servable, bucket, watched
        self._attempt = Attempt(store, key, servable.devices, Executables())
        self._begin_s = time.perf_counter()

    def load(self, made: str | None = None) -> Loaded | None:
        """The part from the store; None if there is none, or none of that name.

        Args:
            made: the name that it has to bear; None for any.
        """
        found = self._attempt.load(self._begin_s)
        return found if found is not None and made in (None, found.facts.get(_MADE)) else None

    def make(self, made: str) -> Loaded:
        """Compile it and store it under a name.

        Raises:
            CompileError, OutputError, SignatureError: as `compile_program`.
        """
        built: list[Built] = []

        def compile_now() -> Any:
            built.append(self._watched.during(lambda: build(self._servable, self._bucket)))
            return built[-1].executable

        def facts(_: Any) -> dict[str, Any]:
            return {**described(built[-1]), _MADE: made}

        found, payload = self._attempt.compile(compile_now, facts, self._begin_s, self._watched.why)
        self._attempt.save(found, payload)
        return found


def lead(part: Part, servable: Servable, bucket: Bucket) -> Loaded:
    """Load or compile a program in all processes; in the first one.

    Raises:
        CompileError, OutputError, SignatureError: as `compile_program`.
    """
    hosts = servable.hosts
    if hosts is None:
        raise TypeError(f"a program of several processes is led; {servable.name!r} is of one")
    names = [servable.name, servable.layout, servable.variant, bucket.sizes]
    of = servable.name, servable.signature, names
    found = part.load()
    if found is None or hosts.load(*of, made=found.facts[_MADE]):
        made = secrets.token_hex(16)
        with hosts.compiling(*of, f"bucket {bucket}", made=made):
            found = part.make(made)
    shapes = servable.program_inputs(bucket)
    inputs = {name: shapes[name] for name in found.facts[USED_INPUTS]}
    return found._replace(executable=Led(hosts, found.executable, names, inputs))
