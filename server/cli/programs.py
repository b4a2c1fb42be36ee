"""From the options about programs to those of a server: files are read, sizes looked up."""

import logging
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from ...jit_cache import Servable, WarmupError
from ...jit_cache.device_memory import memory_budget
from ...jit_cache.recorded import read_recorded
from ..errors import ConfigError
from ..hosting.programs import OnPlan, Programs
from ..programs_config import ProgramsConfig

_log = logging.getLogger(__name__)


def programs_of(
    config: ProgramsConfig,
    servables: Sequence[Servable],
    vocabularies: Mapping[str, int],
    *,
    own: Collection[str],
    strict: bool,
    on_plan: OnPlan | None = None,
) -> Programs:
    """The options of a server.

    Args:
        config: what was asked for.
        servables: what is served.
        vocabularies: size of each vocabulary by model, where there is a tokenizer.
        own: names of the models that are the user's own code.
        strict: whether a bad line of recorded requests is an error; otherwise it is logged.
        on_plan: told of each memory plan.

    Raises:
        ConfigError: if the recorded requests cannot be read, or options do not go together.
    """
    memory = config.memory_budget
    return Programs(
        policy=config.policy,
        cache_bytes=config.cache_bytes,
        memory_bytes=None if memory is None else memory_budget() if memory == "auto" else int(memory),
        budget_s=config.budget_seconds,
        budget_bytes=config.budget_bytes,
        shapes=_shapes(config.replay, servables, strict) if config.replay is not None else None,
        check_padding=_checks(config.check_padding, servables, vocabularies, own),
        check_outputs=config.check_outputs,
        on_plan=on_plan,
    )


def _shapes(name: str, servables: Sequence[Servable], strict: bool) -> Mapping[str, Any]:
    try:
        recorded = read_recorded(Path(name), strict=strict)
    except WarmupError as error:
        raise ConfigError(str(error)) from error
    for number, why in recorded.problems.items():
        _log.warning("line %d of %s is left out: %s", number, name, why)
    return {one.name: recorded.shapes(one.name, one.signature.axes) for one in servables}


def _checks(
    wanted: bool | None,
    servables: Sequence[Servable],
    vocabularies: Mapping[str, int],
    own: Collection[str],
) -> Mapping[str, Mapping[str, Any]]:
    found: dict[str, Mapping[str, Any]] = {}
    for one in servables:
        size = vocabularies.get(one.name)
        if wanted or (wanted is None and one.name in own):
            ids = any(given.name == "ids" for given in one.signature.inputs)
            found[one.name] = {"ids_below": {"ids": size}} if size is not None and ids else {}
    return found
