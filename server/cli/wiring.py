"""From a configuration to a running engine: the one place that joins models, engine, text fronts, metrics.

Everything heavy (JAX, weights) is imported or read here, so that the socket can open before.
"""

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import PurePath
from typing import Any

from ...jit_cache import (
    WARMUP,
    Servable,
    StoreError,
    WarmupStep,
    compile_log,
)
from ...jit_cache.store import Store
from ..api import Server
from ..batching.admission import QueueLimits
from ..config import ModelConfig, ServeConfig
from ..errors import ConfigError
from ..events import CAUSES, ProgramEvent
from ..hosting.model import Model
from ..hosting.programs import OnPlan
from ..hosting.refit import RefitPolicy
from ..metrics import Metrics
from ..text import Embedder, Tokenizer
from .programs import programs_of

LOADER = "servax.models.registry:load"
DEFAULT_MAX_BATCH = 32
DEFAULT_SCHEME = "powers_of_two:16"
OnProgress = Callable[[str, WarmupStep], None]


@dataclass(frozen=True, slots=True)
class Resolved:
    """What a model's name stands for; `tokenizer` is None where callers send tensors only."""

    servable: Servable
    tokenizer: Tokenizer | None = None


def resolve(config: ModelConfig) -> Resolved:
    """Finds and loads the configured model.

    `module:attribute` names a `Servable`, or a function without arguments that makes one. Anything else
    goes to the loader of text models: a built-in name, a checkpoint folder or a hub id.

    Raises:
        ConfigError: the name leads to nothing, or an option does not apply to it.
    """
    if ":" in config.model and not config.model.startswith((".", "/")):
        return Resolved(_user_servable(config))
    load = import_attribute(LOADER)
    model = load(config.model, max_tokens=config.max_length)
    if model.task != "embedding":
        raise ConfigError(
            f"servax serve answers with embeddings; {config.model!r} is a model for {model.task}: name an "
            f"embedding model"
        )
    servable = Servable(
        model.apply,
        model.params,
        inputs=model.inputs,
        limits={**model.limits, "batch": config.max_batch or DEFAULT_MAX_BATCH},
        scheme=config.scheme or DEFAULT_SCHEME,
        max_elements=config.max_elements,
        name=config.name or PurePath(model.name).name,
    )
    return Resolved(servable, model.tokenizer)


def _user_servable(config: ModelConfig) -> Servable:
    found = import_attribute(config.model)
    servable = found() if callable(found) and not isinstance(found, Servable) else found
    if not isinstance(servable, Servable):
        raise ConfigError(
            f"module:attribute must be a Servable or make one, got {type(servable).__name__} from "
            f"{config.model!r}; name the Servable."
        )
    fixed = {
        "max_batch": config.max_batch,
        "max_length": config.max_length,
        "scheme": config.scheme,
        "max_elements": config.max_elements,
        "name": config.name,
    }
    given = [option for option, value in fixed.items() if value is not None]
    if given:
        raise ConfigError(
            f"A Servable brings its own grid and name, got {given[0]} for {config.model!r}; set it there."
        )
    return servable


def import_attribute(path: str) -> Any:
    """Imports `module:attribute`; raises `ConfigError` that names the part that is not there."""
    module_name, _, attribute = path.partition(":")
    try:
        found: Any = importlib.import_module(module_name)
    except ImportError as error:
        raise ConfigError(
            f"The module of {path!r} must be importable, got: {error}; check the name and PYTHONPATH."
        ) from error
    for part in attribute.split("."):
        if not hasattr(found, part):
            raise ConfigError(f"{path!r} must exist, got no {part!r} in {found!r}; check the name.")
        found = getattr(found, part)
    return found


def build(
    config: ServeConfig,
    metrics: Metrics,
    on_progress: OnProgress | None = None,
    on_plan: OnPlan | None = None,
) -> tuple[Server, dict[str, Embedder]]:
    """Loads the models and makes their server, not started yet, and its text fronts.

    Raises:
        ConfigError: a model cannot be loaded as configured.
    """
    resolved = [_resolve_or_explain(one) for one in config.served]
    server = Server(
        *[one.servable for one in resolved],
        store=open_store(config),
        max_wait_s=config.max_wait_ms / 1e3,
        queue=QueueLimits(**config.queue.model_dump()),
        max_request_rows=config.max_request_rows,
        timeout_s=config.timeout_s,
        stall_s=config.stall_s,
        ready_when=config.ready_when,
        refit=RefitPolicy() if config.refit else None,
        programs=programs_of(
            config,
            [one.servable for one in resolved],
            {one.servable.name: one.tokenizer.vocab_size for one in resolved if one.tokenizer is not None},
            strict=config.strict,
            on_plan=on_plan,
        ),
        seal=config.seal,
        on_progress=load_counter(metrics, on_progress),
        on_batch=metrics.batch_record,
    )
    compile_log().subscribe(compile_counter(metrics))
    for name in server.models:
        metrics.watch_rows(
            name, partial(_load, server.models[name], 0), partial(_load, server.models[name], 1)
        )
    texts: dict[str, Embedder] = {}
    for one in resolved:
        if one.tokenizer is not None:
            model = server.models[one.servable.name]
            texts[model.name] = Embedder(
                model,
                one.tokenizer,
                inline_chars=config.http.tokenize_inline_chars,
                pending_chars=config.http.tokenize_pending_chars,
            )
    return server, texts


def _load(model: Model, which: int) -> float:
    return model.load()[which]


def open_store(config: ServeConfig) -> Store | None:
    """The store of programs, if one is wanted.

    Raises:
        ConfigError: if others may write its directory or read its key.
    """
    if not config.use_store:
        return None
    try:
        return Store.open(config.store, max_bytes=config.store_max_bytes)
    except StoreError as error:
        raise ConfigError(f"{error} (or serve with --no-store)") from error


def compile_counter(metrics: Metrics) -> Callable[[str, float], None]:
    """Counts what XLA compiles; of what no warm-up step tells, it makes an event too."""

    def count(phase: str, seconds: float) -> None:
        metrics.compile(phase, seconds, "compiled")
        if phase != WARMUP:
            metrics.events.add(ProgramEvent(phase, "compiled", seconds, CAUSES.get(phase, phase)))

    return count


def load_counter(metrics: Metrics, on_progress: OnProgress | None) -> OnProgress:
    """Counts programs that came from the store, which no compile event tells of, and passes steps on."""

    def count(model: str, step: WarmupStep) -> None:
        facts = step.facts
        if facts is not None and facts.source != "compiled":
            metrics.compile("warmup", facts.ready_s, facts.source)
        metrics.events.add(
            ProgramEvent(
                phase=WARMUP,
                source="" if facts is None else facts.source,
                seconds=0.0 if facts is None else facts.ready_s,
                cause=CAUSES[WARMUP],
                model=model,
                bucket=str(step.bucket),
                code_bytes=0 if facts is None else facts.code_bytes,
                error=step.error,
            )
        )
        if on_progress is not None:
            on_progress(model, step)

    return count


def _resolve_or_explain(config: ModelConfig) -> Resolved:
    try:
        return resolve(config)
    except ConfigError:
        raise
    except Exception as error:  # the loader's errors are not ours to know by type
        raise ConfigError(f"The model {config.model!r} must load, got: {error}") from error


def facts_table(server: Server) -> list[Mapping[str, Any]]:
    """One row a warm or failed bucket: what `servax warmup` prints."""
    rows: list[Mapping[str, Any]] = []
    for name, report in server.reports.items():
        for warm in report.warm:
            facts = warm.facts
            rows.append(
                {
                    "model": name,
                    "bucket": str(warm.bucket),
                    "source": facts.source,
                    "ready_s": round(facts.ready_s, 4),
                    "compile_s": round(facts.compile_s, 4),
                    "run_ms": round(warm.run_s * 1e3, 3),
                    "code_bytes": facts.code_bytes,
                    "temp_bytes": facts.temp_bytes,
                    "error": None,
                }
            )
        for bucket, error in report.failed.items():
            rows.append({"model": name, "bucket": str(bucket), "error": error})
    return rows


def left_over(server: Server) -> list[str]:
    """Buckets that a budget left, or that a memory plan dropped."""
    return [
        f"{name} {bucket}"
        for name, model in server.models.items()
        for bucket in model.report.left(
            [*model.order, *(model.keeper.plan.dropped if model.keeper.plan else ())]
        )
    ]
