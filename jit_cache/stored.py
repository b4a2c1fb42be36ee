"""Programs through the store: loaded where they are known, compiled and kept where they are not."""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any
from weakref import WeakKeyDictionary

import jax

from ..bucketing import Bucket
from .errors import FingerprintError
from .placement import turn_of
from .program import Built, Program, ProgramFacts, build, compile_program, facts_of
from .servable import Servable
from .step_program import SteppedProgram, compile_stepped
from .stepped import Layout, StepPlan, build_stepped
from .store import STORE, Fingerprint, Fingerprinter, Store, load_or_compile
from .store.load import Loaded

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
        self._stepped_keys: WeakKeyDictionary[Servable, dict[StepPlan, Fingerprint | None]] = (
            WeakKeyDictionary()
        )
        self._keys: WeakKeyDictionary[Servable, dict[Bucket, Fingerprint]] = WeakKeyDictionary()

    def fingerprint(self, servable: Servable, bucket: Bucket) -> Fingerprint | None:
        """The key of a program; None if the servable's code cannot be described.

        Made for the whole grid at the first call, which belongs in the compile thread: settings of JAX are
        read then.
        """
        if servable not in self._makers:
            self._makers[servable] = self._maker(servable)
            self._keys[servable] = {}
        maker, keys = self._makers[servable], self._keys[servable]
        if maker is not None and bucket not in keys:
            # A grid at once: or storing its last programs would evict its first.
            for one in {bucket, *servable.grid} - keys.keys():
                keys[one] = maker.at(
                    servable.program_inputs(one),
                    bucket=dict(zip(one.axes, one.sizes, strict=True)),
                    outputs=servable.declared_outputs,
                )
            self.store.pin(keys.values())
        return keys.get(bucket)

    def _maker(self, servable: Servable) -> Fingerprinter | None:
        if servable.hosts is not None:  # a stored program is tried by one process alone, which cannot run it
            return None
        try:
            return Fingerprinter(
                servable.code,
                params=servable.abstract_params,
                devices=servable.devices,
                shardings=servable.placement and (servable.shardings, dict(servable.placement.inputs)),
            )
        except FingerprintError as error:
            _log.warning("model %r is compiled at every start, its code has no key: %s", servable.name, error)
            return None

    def __call__(self, servable: Servable, bucket: Bucket, leaves: Sequence[jax.Array]) -> Program:
        """Load or compile a program.

        Raises:
            CompileError, OutputError, SignatureError: as `compile_program`; the store itself raises nothing.
        """
        key = self.fingerprint(servable, bucket)
        if key is None:
            return compile_program(servable, bucket, leaves)
        loaded, facts = self._load(servable, key, lambda: build(servable, bucket))
        return Program(
            bucket,
            loaded.executable,
            leaves,
            facts,
            used_leaves=loaded.facts[_USED_LEAVES],
            used_inputs=loaded.facts[_USED_INPUTS],
            turn=turn_of(servable.devices),
            variant=servable.variant,
        )

    def stepped(self, servable: Servable, plan: StepPlan, leaves: Sequence[jax.Array]) -> SteppedProgram:
        """Load or compile a stepped program.

        Raises:
            CompileError, OutputError, SignatureError: as `compile_stepped`.
        """
        key = self._stepped_key(servable, plan)
        if key is None:
            return compile_stepped(servable, plan, leaves)
        self.store.pin([key])
        loaded, facts = self._load(servable, key, lambda: build_stepped(servable, plan))
        run_s = {case: self.timed(servable, case, plan) for case in plan.cases}
        return SteppedProgram(
            Layout(servable, plan),
            loaded.executable,
            leaves,
            facts,
            used_leaves=loaded.facts[_USED_LEAVES],
            used_inputs=loaded.facts[_USED_INPUTS],
            run_s={case: seconds for case, seconds in run_s.items() if seconds is not None},
            turn=turn_of(servable.devices),
        )

    def _load(
        self, servable: Servable, key: Fingerprint, make: Callable[[], Built]
    ) -> tuple[Loaded, ProgramFacts]:
        built: list[Built] = []

        def compile_now() -> Any:
            built.append(make())
            return built[-1].executable

        def facts(executable: Any) -> Mapping[str, Any]:
            kept = asdict(facts_of(executable, 0.0))
            # The store times the compile itself; where a program came from is no fact about it.
            for name in ("compile_s", "source", "ready_s", "run_s"):
                del kept[name]
            return kept | {
                _USED_LEAVES: list(built[-1].used_leaves),
                _USED_INPUTS: list(built[-1].used_inputs),
            }

        loaded = load_or_compile(self.store, key, compile_now, facts_of=facts, devices=servable.devices)
        known = {
            name: loaded.facts[name] for name in ProgramFacts.__dataclass_fields__ if name in loaded.facts
        }
        return loaded, replace(
            ProgramFacts(**known),
            source=loaded.source,
            ready_s=loaded.seconds,
            # A fresh executable is measured afresh, whatever one like it took before.
            run_s=self.store.timings.get(key.digest) if loaded.source == STORE else None,
        )

    def measured(
        self, servable: Servable, bucket: Bucket, run_s: float, plan: StepPlan | None = None
    ) -> None:
        """Remember how long a program runs, for starts to come; `save` writes it down.

        Args:
            servable: whose; with its function, if it has several.
            bucket: where.
            run_s: seconds of one run.
            plan: of the stepped program of which the bucket is a case; None for a program of its own.
        """
        digest = self._timed_as(servable, bucket, plan)
        if digest is not None:
            self.store.timings.set(digest, run_s)

    def timed(self, servable: Servable, bucket: Bucket, plan: StepPlan | None = None) -> float | None:
        """Seconds of one run, if an earlier start measured them; compile thread."""
        digest = self._timed_as(servable, bucket, plan)
        return None if digest is None else self.store.timings.get(digest)

    def measured_scratch(self, servable: Servable, bucket: Bucket, nbytes: int) -> None:
        """Remember what libraries took beside the compiler's scratch while a program ran."""
        key = self.fingerprint(servable, bucket)
        if key is not None:
            self.store.timings.set(f"{key.digest}:scratch", max(nbytes, 1) / 2**20)

    def scratch(self, servable: Servable, bucket: Bucket) -> int | None:
        """That many bytes, if an earlier start measured them; compile thread."""
        key = self.fingerprint(servable, bucket)
        mib = None if key is None else self.store.timings.get(f"{key.digest}:scratch")
        return None if mib is None else int(mib * 2**20)

    def _timed_as(self, servable: Servable, bucket: Bucket, plan: StepPlan | None) -> str | None:
        if plan is None:
            key = self.fingerprint(servable, bucket)
            return None if key is None else key.digest
        key = self._stepped_key(servable, plan)
        return None if key is None else f"{key.digest}:{plan.index[bucket]}"

    def _stepped_key(self, servable: Servable, plan: StepPlan) -> Fingerprint | None:
        keys = self._stepped_keys.setdefault(servable, {})
        if plan not in keys:
            covering = max(plan.cases, key=lambda case: case.elements)
            self.fingerprint(servable, covering)
            maker = self._makers[servable]
            keys[plan] = (
                None
                if maker is None
                else maker.at(
                    Layout(servable, plan).abstract(),
                    bucket=dict(zip(covering.axes, covering.sizes, strict=True)),
                    outputs=servable.declared_outputs,
                    variant=plan.described(),
                )
            )
        return keys[plan]

    def save(self) -> None:
        """Write down what was measured; at the end of a warm-up, from any thread."""
        self.store.save_timings()
