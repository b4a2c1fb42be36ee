"""What a program is traced from, and its executable: out of the store if it is known, compiled if not."""

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from typing import Any, NamedTuple

import jax

from ...jit_cache import ProgramFacts
from ...jit_cache.errors import FingerprintError
from ...jit_cache.program import facts_of
from ...jit_cache.store import Fingerprint, Fingerprinter, Store, load_or_compile

_log = logging.getLogger(__name__)
# Of one start, and no facts of the program.
_OURS = frozenset({"compile_s", "source", "ready_s", "run_s"})
_ALIAS = "alias_bytes"


class Recipe(NamedTuple):
    """What a program is traced from.

    Attributes:
        run: the function.
        arguments: abstract arrays in trees, what it is called with.
        donated: places of the arguments that it takes over.
        sizes: for people.
    """

    run: Callable[..., Any]
    arguments: tuple[Any, ...]
    donated: tuple[int, ...]
    sizes: Mapping[str, int]

    def compile(self) -> Any:
        """Trace, lower and compile."""
        return jax.jit(self.run, donate_argnums=self.donated).lower(*self.arguments).compile()

    def fingerprint(self) -> Fingerprint:
        """Its key in a store; made in the compile thread, since settings of JAX are read.

        Raises:
            FingerprintError: its code cannot be described.
        """
        donated = [str(place) for place in self.donated]
        return Fingerprinter(self.run, donated=donated).at(self.arguments, bucket=self.sizes)


class Made(NamedTuple):
    """A program ready to call.

    Attributes:
        executable: what to call.
        facts: what the compiler said.
        alias_bytes: of its arguments that it updates in place.
    """

    executable: Any
    facts: ProgramFacts
    alias_bytes: int


class Maker:
    """Makes executables; for the compile thread.

    Args:
        store: where they are kept; None compiles all of them.
    """

    def __init__(self, store: Store | None) -> None:
        self.store = store
        self._keys: dict[str, Fingerprint | None] = {}

    def key(self, name: str, recipe: Recipe) -> Fingerprint | None:
        """The key of a program, pinned from now on; None without a store, or if its code has none."""
        if self.store is None:
            return None
        if name not in self._keys:
            try:
                self._keys[name] = recipe.fingerprint()
            except FingerprintError as error:
                _log.warning("program %s is compiled at every start, its code has no key: %s", name, error)
                self._keys[name] = None
        key = self._keys[name]
        if key is not None:
            self.store.pin([key])
        return key

    def make(self, name: str, recipe: Recipe, check: Callable[[Any], int]) -> Made:
        """Load or compile.

        Args:
            name: of the program, the same for the same recipe.
            recipe: what to compile.
            check: looks at a fresh executable, raises if it may not be used, and gives the bytes of its
                arguments that it updates in place.
        """
        alias: list[int] = []

        def build() -> Any:
            executable = recipe.compile()
            alias.append(check(executable))
            return executable

        def facts(executable: Any) -> Mapping[str, Any]:
            said = asdict(facts_of(executable, 0.0))
            return {fact: said[fact] for fact in said.keys() - _OURS} | {_ALIAS: alias[-1]}

        key = self.key(name, recipe)
        if key is None:
            begin_s = time.perf_counter()
            executable = build()
            return Made(executable, facts_of(executable, time.perf_counter() - begin_s), alias[-1])
        found = load_or_compile(self.store, key, build, facts_of=facts)
        known = {fact: found.facts[fact] for fact in ProgramFacts.__dataclass_fields__ if fact in found.facts}
        made = replace(ProgramFacts(**known), source=found.source, ready_s=found.seconds)
        return Made(found.executable, made, found.facts[_ALIAS])
