"""Programs by their key: taken from memory or from the store where they are known, else compiled and kept."""

import logging
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import jax

from ..bucketing import Bucket
from .alive import SHARED, Alive
from .copies import Copies
from .errors import FingerprintError
from .kept import USED_INPUTS, USED_LEAVES, described, facts_from
from .monitor import compile_log
from .parts import Part, lead
from .placement import turn_of
from .program import Built, Program, build, compile_program
from .servable import Servable
from .step_program import SteppedProgram, compile_stepped
from .stepped import Layout, StepPlan, build_stepped
from .store import Fingerprint, Fingerprinter, Store, load_or_compile
from .store.load import COMPILER, Loaded
from .store.timings import Timings
from .watched import Watched

_log = logging.getLogger(__name__)


class StoredPrograms:
    """Makes programs as `compile_program` does, unless they are in memory or in the store.

    Call it in the compile thread only. A servable whose code cannot be described is compiled each time, with
    one warning where there is a store.

    Args:
        store: where programs are kept; None keeps those that some program in memory holds.
    """

    def __init__(self, store: Store | None) -> None:
        self.store = store
        self._timings = Timings(None) if store is None else store.timings
        self._alive, self._compiled, self._copies = Alive(), Alive(), Copies()
        self._log = compile_log()
        self._makers: WeakKeyDictionary[Servable, Fingerprinter | None] = WeakKeyDictionary()
        self._stepped_keys: WeakKeyDictionary[Servable, dict[StepPlan, Fingerprint | None]] = (
            WeakKeyDictionary()
        )
        self._keys: WeakKeyDictionary[Servable, dict[Bucket, Fingerprint]] = WeakKeyDictionary()
        self._changing: WeakSet[Servable] = WeakSet()

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
            self._pin(keys.values())
        return keys.get(bucket)

    def _pin(self, keys: Iterable[Fingerprint]) -> None:
        if self.store is not None:
            self.store.pin(keys)

    def infer_outputs(self, servable: Servable) -> None:
        """Find out what a servable returns; traces nothing if one in memory is the same.

        Raises:
            OutputError, SignatureError: as `Servable.outputs`.
        """
        key = self.fingerprint(servable, servable.grid.buckets[-1])
        if key is None:
            _ = servable.outputs
            return
        watched = self._watched(servable)
        self._alive.infer_outputs(servable, key.digest, watched)
        if watched.changed:
            # No program was made yet, and a first trace settles much: what is imported in it, or set once.
            self._key_anew(servable)

    def _watched(self, servable: Servable) -> Watched:
        maker = self._makers[servable]
        if maker is None:
            raise FingerprintError(f"code without a key is not watched; got {servable.name!r}: compile it")
        return Watched(maker, lambda: servable.code)

    def _made_anew(self, servable: Servable) -> None:
        """Its code is not what its keys say: nothing more is taken or kept by them."""
        if servable not in self._changing:
            self._changing.add(servable)
            _log.warning(
                "what the code of model %r reads changed while it was traced; what was traced meanwhile is "
                "neither stored nor shared: pass what changes as an argument, and remember what is computed "
                "once by functools.cache",
                servable.name,
            )
        self._key_anew(servable)

    def _key_anew(self, servable: Servable) -> None:
        self._makers[servable], self._keys[servable] = self._maker(servable), {}
        self._stepped_keys.pop(servable, None)
        self.fingerprint(servable, servable.grid.buckets[-1])

    def _maker(self, servable: Servable) -> Fingerprinter | None:
        try:
            return Fingerprinter(
                servable.code,
                params=servable.abstract_params,
                devices=servable.devices,
                # The mesh too: of a model without parameters no sharding shows it.
                shardings=servable.placement
                and (servable.shardings, dict(servable.placement.inputs), servable.placement.everywhere),
            )
        except FingerprintError as error:
            level = logging.DEBUG if self.store is None else logging.WARNING
            _log.log(
                level, "model %r is compiled at every start, its code has no key: %s", servable.name, error
            )
            return None

    def __call__(self, servable: Servable, bucket: Bucket, leaves: Sequence[jax.Array]) -> Program:
        """Load or compile a program.

        Raises:
            CompileError, OutputError, SignatureError: as `compile_program`; the store itself raises nothing.
        """
        key = self.fingerprint(servable, bucket)
        part = None if servable.hosts is None else self.part(servable, bucket)
        if key is None or (servable.hosts is not None and part is None):
            return compile_program(servable, bucket, leaves)
        if part is not None:
            loaded = lead(part, servable, bucket)
        else:
            loaded = self._load(servable, key, lambda: build(servable, bucket))
        return Program(
            bucket,
            loaded.executable,
            leaves,
            facts_from(loaded, self._timings.get(key.digest)),
            used_leaves=loaded.facts[USED_LEAVES],
            used_inputs=loaded.facts[USED_INPUTS],
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
        self._pin([key])
        loaded = self._load(servable, key, lambda: build_stepped(servable, plan))
        run_s = {case: self.timed(servable, case, plan) for case in plan.cases}
        return SteppedProgram(
            Layout(servable, plan),
            loaded.executable,
            leaves,
            facts_from(loaded, self._timings.get(key.digest)),
            used_leaves=loaded.facts[USED_LEAVES],
            used_inputs=loaded.facts[USED_INPUTS],
            run_s={case: seconds for case, seconds in run_s.items() if seconds is not None},
            turn=turn_of(servable.devices),
        )

    def part(self, servable: Servable, bucket: Bucket) -> Part | None:
        """This process's part of a program of several; None without a store, or if its code has no key."""
        key = None if self.store is None else self.fingerprint(servable, bucket)
        if self.store is None or key is None:
            return None
        return Part(self.store, key, servable, bucket, self._watched(servable))

    def _load(self, servable: Servable, key: Fingerprint, make: Callable[[], Built]) -> Loaded:
        place = (key.digest, servable.devices)
        watched = self._watched(servable)
        loaded = (
            self._shared(place) or self._copied(place) or self._load_or_compile(servable, key, make, watched)
        )
        if watched.changed:
            self._made_anew(servable)
            return loaded
        if loaded.source != SHARED:
            self._alive.keep(place, loaded.executable, loaded.facts)
        if loaded.source == COMPILER and not self._log.from_cache:  # what JAX loaded has no copies
            self._compiled.keep(key.digest, loaded.executable, loaded.facts)
        return loaded

    def _shared(self, place: Hashable) -> Loaded | None:
        found = self._alive.find(place)
        return None if found is None else Loaded(found[0], SHARED, "", found[1], 0.0)

    def _copied(self, place: tuple[str, Sequence[jax.Device] | None]) -> Loaded | None:
        digest, devices = place
        found = self._compiled.find(digest)
        return None if found is None or devices is None else self._copies.of(*found, devices)

    def _load_or_compile(
        self, servable: Servable, key: Fingerprint, make: Callable[[], Built], watched: Watched
    ) -> Loaded:
        built: list[Built] = []

        def compile_now() -> Any:
            built.append(watched.during(make))
            return built[-1].executable

        return load_or_compile(
            self.store,
            key,
            compile_now,
            facts_of=lambda _: described(built[-1]),
            devices=servable.devices,
            unfit=watched.why,
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
            self._timings.set(digest, run_s)

    def timed(self, servable: Servable, bucket: Bucket, plan: StepPlan | None = None) -> float | None:
        """Seconds of one run, if an earlier start measured them; compile thread."""
        digest = self._timed_as(servable, bucket, plan)
        return None if digest is None else self._timings.get(digest)

    def measured_scratch(self, servable: Servable, bucket: Bucket, nbytes: int) -> None:
        """Remember what libraries took beside the compiler's scratch while a program ran."""
        key = self.fingerprint(servable, bucket)
        if key is not None:
            self._timings.set(f"{key.digest}:scratch", max(nbytes, 1) / 2**20)

    def scratch(self, servable: Servable, bucket: Bucket) -> int | None:
        """That many bytes, if an earlier start measured them; compile thread."""
        key = self.fingerprint(servable, bucket)
        mib = None if key is None else self._timings.get(f"{key.digest}:scratch")
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
                    (layout := Layout(servable, plan)).abstract(),
                    bucket=dict(zip(covering.axes, covering.sizes, strict=True)),
                    outputs=servable.declared_outputs,
                    # The rows are flat: only this says what shapes they are given.
                    variant=plan.described() | {"shapes": [layout.inputs, layout.outputs]},
                )
            )
        return keys[plan]

    def save(self) -> None:
        """Write down what was measured; at the end of a warm-up, from any thread."""
        self._copies.clear()
        if self.store is not None:
            self.store.save_timings()
