"""Executables that some program in memory holds: whoever needs the same one takes it from there.

A new version of a model, or another fine-tune of one network, has the same programs over other weights:
nothing needs to be traced, compiled or loaded for it, and there is one copy in memory.
"""

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary, WeakValueDictionary

from .outputs import Outputs
from .servable import Servable
from .watched import Watched

SHARED = "shared"


@dataclass(frozen=True, slots=True)
class Alive:
    """What is in memory, by key, for as long as somebody else holds it; compile thread only."""

    _executables: WeakValueDictionary[Hashable, Any] = field(default_factory=WeakValueDictionary)
    _facts: WeakKeyDictionary[Any, Mapping[str, Any]] = field(default_factory=WeakKeyDictionary)
    _outputs: WeakValueDictionary[Hashable, Outputs] = field(default_factory=WeakValueDictionary)

    def find(self, key: Hashable) -> tuple[Any, Mapping[str, Any]] | None:
        """The executable of a key and what is known of it."""
        executable = self._executables.get(key)
        return None if executable is None else (executable, self._facts[executable])

    def keep(self, key: Hashable, executable: Any, facts: Mapping[str, Any]) -> None:
        """Know an executable from now on."""
        self._executables[key] = executable
        self._facts[executable] = facts

    def infer_outputs(self, servable: Servable, key: Hashable, watched: Watched) -> None:
        """Find out what a servable returns, or take it from another one of the same key and grid.

        Args:
            servable: the servable.
            key: of its code and shapes.
            watched: sees whether its code stays what the key says.

        Raises:
            OutputError, SignatureError: as `Servable.outputs`.
        """
        # The key has the shapes; which sizes may differ the declarations say.
        of = (key, repr(servable.signature), servable.grid)
        known = self._outputs.get(of)
        if known is not None:
            servable.take_outputs(known)
        else:
            found = watched.during(lambda: servable.outputs)
            if not watched.changed:
                self._outputs[of] = found
