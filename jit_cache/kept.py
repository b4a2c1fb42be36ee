"""What is kept beside a program in the store, as plain values, and read again."""

from dataclasses import asdict
from typing import Any

from .program import Built, ProgramFacts, facts_of
from .store.load import COMPILER, Loaded

USED_LEAVES, USED_INPUTS = "used_leaves", "used_inputs"


def described(built: Built) -> dict[str, Any]:
    """What the compiler said about a fresh program, and which parameters and inputs it takes."""
    kept = asdict(facts_of(built.executable, 0.0))
    # The store times the compile itself; where a program came from is no fact about it.
    for name in ("compile_s", "source", "ready_s", "run_s"):
        del kept[name]
    return kept | {USED_LEAVES: list(built.used_leaves), USED_INPUTS: list(built.used_inputs)}


def facts_from(loaded: Loaded, run_s: float | None) -> ProgramFacts:
    """The facts of a program that was loaded or compiled.

    Args:
        loaded: it, with what `described` said of it.
        run_s: seconds of one run of one like it.
    """
    said = {name: loaded.facts[name] for name in ProgramFacts.__dataclass_fields__ if name in loaded.facts}
    # A fresh executable is measured afresh, whatever one like it took before.
    known_s = None if loaded.source == COMPILER else run_s
    return ProgramFacts(**said | {"source": loaded.source, "ready_s": loaded.seconds, "run_s": known_s})
