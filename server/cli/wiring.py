"""From a configuration to a running engine: the one place that joins models, engine, text fronts, metrics.

Everything heavy (JAX, weights) is imported or read here, so that the socket can open before.
"""

import importlib
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax

from ...jit_cache import Servable, StoreError, compile_log
from ...jit_cache.replicas import devices_each
from ...jit_cache.store import Store
from ..api import Server
from ..batching.admission import QueueLimits
from ..batching.faults import FaultPolicy
from ..batching.shares import parse_weights
from ..config import ModelConfig, ServeConfig
from ..errors import ConfigError
from ..fleet import Fleet, Part
from ..hosting.model import Model
from ..hosting.programs import OnPlan
from ..hosting.refit import RefitPolicy
from ..layout import text_servable
from ..metrics import Metrics
from ..text import Embedder, Tokenizer
from ..tracing import Tracing
from .counting import OnProgress, compile_counter, load_counter
from .programs import programs_of
from .writers import Writer, generation_server, is_language_model, refuse_generation, writer

LOADER = "servax.models.registry:load"
# Options that a user's own model brings.
_FIXED = (
    *("max_batch", "max_length", "scheme", "max_elements", "layout", "max_segments", "sizes"),
    *("dtype", "quantize", "name"),
)


@dataclass(frozen=True, slots=True)
class Resolved:
    """What a model's name stands for.

    Attributes:
        servable: the model.
        tokenizer: of its texts; None where callers send tensors only.
        own: whether it is the user's own code, so that its padding is not known to be safe.
    """

    servable: Servable
    tokenizer: Tokenizer | None = None
    own: bool = False


def resolve(config: ModelConfig) -> Resolved:
    """Finds and loads the configured model of tensors.

    `module:attribute` names a `Servable`, a pair of one and its tokenizer, or a function without arguments
    that makes either. Anything else goes to the loader of text models: a built-in name, a checkpoint folder
    or a hub id.

    Raises:
        ConfigError: the name leads to nothing, or an option does not apply to it.
    """
    found = load(config, padded=True)
    if isinstance(found, Writer):
        raise ConfigError(
            f"this command is for models with buckets of rows and lengths; {config.model!r} generates text, "
            f"by programs of its own: name another model"
        )
    return found


def load(config: ModelConfig, *, padded: bool = False) -> Resolved | Writer:
    """`resolve`, or a model that generates text; `padded` as for `text_servable`.

    Raises:
        ConfigError: the name leads to nothing, or an option does not apply to it.
    """
    if ":" in config.model and not config.model.startswith((".", "/")):
        return _user_model(config)
    model = import_attribute(LOADER)(
        config.model, max_tokens=config.max_length, dtype=config.dtype, quantize=config.quantize
    )
    if model.task == "generation":
        return writer(model, config)
    refuse_generation(config)
    servable = text_servable(model, config, name=config.name, padded=padded)
    return Resolved(servable, model.tokenizer)


def _user_model(config: ModelConfig) -> Resolved | Writer:
    found = import_attribute(config.model)
    made = found() if callable(found) and not isinstance(found, Servable) else found
    if is_language_model(made):
        return writer(made, config, own=True)
    refuse_generation(config)
    servable, tokenizer = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    if not isinstance(servable, Servable):
        raise ConfigError(
            f"module:attribute must be a Servable, a pair of one and its tokenizer, or make either, got "
            f"{type(servable).__name__} from {config.model!r}; name the Servable."
        )
    given = [option for option in _FIXED if getattr(config, option) is not None]
    if given:
        raise ConfigError(
            f"A Servable brings its own grid and name, got {given[0]} for {config.model!r}; set it there."
        )
    return Resolved(servable, tokenizer, own=True)


def import_attribute(path: str) -> Any:
    """Imports `module:attribute`; raises `ConfigError` that names the part that is not there.

    A module may be a file of the folder that the command is run in; what is installed goes before it.
    """
    module_name, _, attribute = path.partition(":")
    if (here := os.getcwd()) not in sys.path:  # a console script, unlike `python -m`, does not look there
        sys.path.append(here)
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
    tracing: Tracing | None = None,
    *,
    stopped: Callable[[], bool] = lambda: False,
) -> tuple[Part, dict[str, Embedder]]:
    """Loads the models and makes their server, not started yet, and its text fronts.

    Raises:
        ConfigError: a model cannot be loaded as configured.
    """
    padded = config.refit
    loaded = [_load_or_explain(one, padded) for one in config.served]
    resolved = [one for one in loaded if isinstance(one, Resolved)]
    if config.replicas > 1 and not resolved:
        raise ConfigError(
            f"replicas copy models of tensors and embeddings; {config.replicas} were asked for and all "
            f"models here write text: start a server for each device"
        )
    store, progress = open_store(config), load_counter(metrics, on_progress, stopped)
    compile_log().subscribe(compile_counter(metrics))
    parts: list[Part] = []
    texts: dict[str, Embedder] = {}
    if resolved:
        server, texts = _embedding_server(resolved, config, metrics, store, progress, on_plan, tracing)
        parts.append(server)
    for one in loaded:
        if isinstance(one, Writer):
            parts.append(
                generation_server(
                    one,
                    config,
                    metrics,
                    store=store,
                    before=tuple(parts),
                    on_progress=progress,
                    on_plan=on_plan,
                )
            )
    return parts[0] if len(parts) == 1 else Fleet(*parts), texts


def _embedding_server(
    resolved: Sequence[Resolved],
    config: ServeConfig,
    metrics: Metrics,
    store: Store | None,
    on_progress: OnProgress,
    on_plan: OnPlan | None,
    tracing: Tracing | None,
) -> tuple[Server, dict[str, Embedder]]:
    server = Server(
        *[one.servable for one in resolved],
        store=store,
        max_wait_s=config.max_wait_ms / 1e3,
        wait=config.wait,
        max_age_s=config.max_age_s,
        priority_weights=parse_weights(config.priorities),
        queue=QueueLimits(**config.queue.model_dump()),
        faults=FaultPolicy(**config.faults.model_dump()),
        devices=_replicas(config.replicas, [one.servable for one in resolved]),
        max_request_rows=config.max_request_rows,
        timeout_s=config.timeout_s,
        stall_s=config.stall_s,
        ready_when=config.ready_when,
        refit=RefitPolicy() if config.refit else None,
        programs=programs_of(
            config,
            [one.servable for one in resolved],
            {one.servable.name: one.tokenizer.vocab_size for one in resolved if one.tokenizer is not None},
            own=[one.servable.name for one in resolved if one.own],
            strict=config.strict,
            on_plan=on_plan,
        ),
        seal=config.seal,
        on_progress=on_progress,
        on_batch=metrics.batch_record,
        on_fault=metrics.fault_record,
        tracing=tracing,
    )
    metrics.refitters = server.refitters
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
                text_chars=config.http.tokenize_text_chars,
            )
    return server, texts


def _replicas(count: int, servables: Sequence[Servable]) -> "list[jax.Device] | None":
    """The devices that models are copied to; None for those that they are on anyway."""
    if count == 1:
        return None
    devices, each = jax.local_devices(), devices_each(servables)
    most = len(devices) // each
    if count > most:
        raise ConfigError(
            f"replicas are at most the {len(devices)} devices of this machine, of which each takes {each}; "
            f"got {count}: lower it, or 0 for all"
        )
    wanted = count or most
    return devices[: wanted * each] if wanted > 1 else None


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


def _load_or_explain(config: ModelConfig, padded: bool) -> Resolved | Writer:
    try:
        return load(config, padded=padded)
    except ConfigError:
        raise
    except Exception as error:  # the loader's errors are not ours to know by type
        raise ConfigError(f"The model {config.model!r} must load, got: {error}") from error


def facts_table(server: Part) -> list[Mapping[str, Any]]:
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


def left_over(server: Part) -> list[str]:
    """Buckets that a budget left, or that a memory plan dropped."""
    return [
        f"{name} {bucket}"
        for name, model in server.models.items()
        if isinstance(model, Model)
        for bucket in model.report.left(
            [*model.order, *(model.keeper.plan.dropped if model.keeper.plan else ())]
        )
    ]
