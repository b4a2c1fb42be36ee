"""Before anything is warmed: is padding safe, and does it all fit?"""

import logging
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from ...jit_cache import CompileService
from ...jit_cache.errors import JitCacheError, MemoryPlanError, SignatureError, UnsafePaddingError
from ...jit_cache.packed import PackedServable
from ...jit_cache.safety import require_safe
from ...jit_cache.safety_packed import require_packed_safe
from .model import Model
from .programs import Programs

_log = logging.getLogger(__name__)


def prepare(models: Sequence[Model], options: Programs, compiler: CompileService) -> list[Model]:
    """Check and plan models, in the compile thread; blocks.

    A model that is refused has its covering bucket marked as failed, with the reason, so that it never gets
    ready.

    Returns:
        Those that are to be warmed.
    """
    good = []
    left = options.memory_bytes
    for place, model in enumerate(models):
        try:
            checks = options.check_padding
            given = checks.get(model.name) if isinstance(checks, Mapping) else {} if checks else None
            if given is not None:
                compiler.submit(partial(_check_padding, model, given)).result()
            if left is not None:
                others = sum(other.servable.weights_bytes for other in models[place + 1 :])
                plan = compiler.submit(partial(model.keeper.make_plan, left - others)).result()
                left -= plan.need_bytes
                _log.log(logging.WARNING if plan.dropped else logging.INFO, "%s", plan.explain())
                if options.on_plan is not None:
                    options.on_plan(model.name, plan)
        except (UnsafePaddingError, MemoryPlanError) as refused:
            model.report.failed[model.order[0]] = str(refused)
        else:
            good.append(model)
    return good


def _check_padding(model: Model, given: Mapping[str, Any]) -> None:
    servable, make = model.servable, model.maker
    try:
        # The weights stay where they are: the check comes before memory is planned.
        if isinstance(servable, PackedServable):
            padded = servable.padded
            require_packed_safe(
                servable,
                lambda bucket: make.apart(padded, bucket),
                lambda bucket: model.keeper.make_early(bucket, servable.leaves),
                **given,
            )
        else:
            require_safe(
                servable,
                compile_fn=lambda bucket: model.keeper.make_early(bucket, servable.leaves),
                **given,
            )
    except UnsafePaddingError:
        raise
    except SignatureError as error:  # the model cannot be traced at all, which its warm-up tells
        _log.info("%s: padding could not be checked: %s", model.name, error)
    except Exception as error:  # the probing itself did not work out; the model may well be right
        _log.warning(
            "%s: padding could not be checked, so it is served unchecked: %s: %s; `servax check` shows more",
            model.name,
            type(error).__name__,
            error,
            exc_info=not isinstance(error, JitCacheError),
        )
