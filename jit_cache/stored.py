"""Programs through the store: loaded where they are known, compiled and kept where they are not."""

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any
from weakref import WeakKeyDictionary

import jax

from ..bucketing import Bucket
from .errors import FingerprintError
from .program import Built, Program, ProgramFacts, build, compile_program, facts_of
from .servable import Servable
from .store import Fingerprint, Fingerprinter, Store, load_or_compile

_log = logging.getLogger(__name__)
_USED_LEAVES, _USED_INPUTS = "used_leaves", "used_inputs"


class StoredPrograms:
    """Makes programs as `compile_program` does, by way of a store.

    Call it in the compile thread only. A servable whose code cannot be described is compiled without the
    store, with one warning.

    Args:
        store: where programs are kept.
    """

    def __init__(self, store: Store) -> None:
        self.store = store
        self._makers: WeakKeyDictionary[Servable, Fingerprinter | None] = WeakKeyDictionary()

    def fingerprint(self, servable: Servable, bucket: Bucket) -> Fingerprint | None:
        """The key of a program; None if the servable's code cannot be described."""
        if servable not in self._makers:
            self._makers[servable] = self._maker(servable)
        maker = self._makers[servable]
        if maker is None:
            return None
        return maker.at(
            servable.signature.abstract_at(bucket),
            bucket=dict(zip(bucket.axes, bucket.sizes, strict=True)),
            outputs=servable.declared_outputs,
        )

    def _maker(self, servable: Servable) -> Fingerprinter | None:
        try:
            return Fingerprinter((Servable.run_flat, servable.apply), params=servable.abstract_params)
        except FingerprintError as error:
            _log.warning("model %r is compiled at every start, its code has no key: %s", servable.name, error)
            return None

    def pin(self, servable: Servable, buckets: Iterable[Bucket]) -> None:
        """Say which programs are needed, so that none of them is evicted while others are stored."""
        keys = [self.fingerprint(servable, bucket) for bucket in buckets]
        self.store.pin([key for key in keys if key is not None])

    def __call__(self, servable: Servable, bucket: Bucket, leaves: Sequence[jax.Array]) -> Program:
        """Load or compile a program.

        Raises:
            CompileError, OutputError, SignatureError: as `compile_program`; the store itself raises nothing.
        """
        key = self.fingerprint(servable, bucket)
        if key is None:
            return compile_program(servable, bucket, leaves)
        built: list[Built] = []

        def compile_now() -> Any:
            built.append(build(servable, bucket))
            return built[-1].executable

        def facts(executable: Any) -> Mapping[str, Any]:
            kept = asdict(facts_of(executable, 0.0))
            # The store times the compile itself; where a program came from is no fact about it.
            for name in ("compile_s", "source", "ready_s"):
                del kept[name]
            return kept | {
                _USED_LEAVES: list(built[-1].used_leaves),
                _USED_INPUTS: list(built[-1].used_inputs),
            }

        loaded = load_or_compile(self.store, key, compile_now, facts_of=facts)
        return _program(bucket, leaves, loaded.executable, loaded.facts, loaded.source, loaded.seconds)


def _program(
    bucket: Bucket,
    leaves: Sequence[jax.Array],
    executable: Any,
    facts: Mapping[str, Any],
    source: str,
    ready_s: float,
) -> Program:
    known = {name: facts[name] for name in ProgramFacts.__dataclass_fields__ if name in facts}
    return Program(
        bucket,
        executable,
        leaves,
        replace(ProgramFacts(**known), source=source, ready_s=ready_s),
        used_leaves=facts[_USED_LEAVES],
        used_inputs=facts[_USED_INPUTS],
    )
