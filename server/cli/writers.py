"""From a configuration to the server of a language model."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import PurePath
from typing import Any, TypeGuard

from ...jit_cache import WarmupStep
from ...jit_cache.device_memory import memory_budget
from ...jit_cache.store import Store
from ..api import Server
from ..batching.shares import parse_weights
from ..config import ModelConfig, ServeConfig
from ..errors import ConfigError
from ..fleet import Part
from ..generation import GenerationServer, LanguageModel
from ..generation.seam import FIRST_PAGE
from ..hosting.programs import OnPlan
from ..metrics import Metrics

DEFAULT_ROWS = 32


@dataclass(frozen=True, slots=True)
class Writer:
    """A language model, loaded, and what it was configured with."""

    model: LanguageModel
    config: ModelConfig

    @property
    def name(self) -> str:
        """The name it is served by."""
        return self.config.name or PurePath(self.model.name).name.removesuffix(".gguf")


def is_language_model(found: Any) -> TypeGuard[LanguageModel]:
    """Whether something that a user names is a language model; see `LanguageModel`."""
    return all(hasattr(found, name) for name in ("step", "kv_shapes", "tokenizer", "eos_ids"))


def writer(model: LanguageModel, config: ModelConfig, *, own: bool = False) -> Writer:
    """Check the options of a language model.

    Args:
        model: loaded.
        config: its options.
        own: whether it was made by the user's code, which sets its length.

    Raises:
        ConfigError: one of them is for models of tensors.
    """
    for option, what in (("max_length", "limit"), ("dtype", "weights"), ("quantize", "weights")):
        if own and (value := getattr(config, option)) is not None:
            raise ConfigError(
                f"A language model brings its own {what}, got {option}={value!r} for "
                f"{config.model!r}; set it there."
            )
    for option in ("scheme", "max_elements", "layout", "max_segments", "sizes"):
        if (value := getattr(config, option)) is not None:
            raise ConfigError(
                f"buckets of a language model are made from max_batch and generation.prefill_chunk; got "
                f"{option}={value!r} for {config.model!r}: leave it out"
            )
    return Writer(model, config)


def refuse_generation(config: ModelConfig) -> None:
    """Refuse options of language models for another one.

    Raises:
        ConfigError: naming one that is set.
    """
    given = config.generation.model_dump(exclude_unset=True)
    if given:
        raise ConfigError(
            f"options of generation are for models that generate text; got generation.{next(iter(given))} "
            f"for {config.model!r}: leave it out"
        )


def generation_server(
    one: Writer,
    config: ServeConfig,
    metrics: Metrics,
    *,
    store: Store | None,
    before: Sequence[Part],
    on_progress: Callable[[str, WarmupStep], None],
    on_plan: OnPlan | None,
) -> GenerationServer:
    """The server of a language model, not started yet.

    Args:
        one: the model.
        config: options of the whole process.
        metrics: told of each step.
        store: where programs are kept.
        before: servers that take their memory first.
        on_progress: told of each warm program.
        on_plan: told of the memory plan.
    """
    options, rows = one.config.generation, one.config.max_batch or DEFAULT_ROWS
    size = options.page_size
    tokens = options.cache_tokens
    if tokens is None and config.memory_budget is not None:  # then as many as fit
        tokens = rows * one.model.limits["tokens"]
    server = GenerationServer(
        one.model,
        name=one.name,
        pages=None if tokens is None else FIRST_PAGE + -(-tokens // size),
        page_size=size,
        max_rows=rows,
        prefill_chunk=options.prefill_chunk,
        decode_steps=options.decode_steps,
        draft_tokens=options.draft_tokens,
        prefix_cache=options.prefix_cache,
        max_waiting=config.queue.rows,
        client_rows=config.queue.client_rows,
        priority_weights=parse_weights(config.priorities),
        timeout_s=config.timeout_s,
        stall_s=config.stall_s,
        seal=config.seal,
        store=store,
        memory_bytes=partial(_budget, config.memory_budget, before),
        on_step=partial(metrics.step_record, one.name),
        on_progress=on_progress,
        on_plan=on_plan,
    )
    metrics.watch_rows(one.name, partial(_load, server, "waiting"), partial(_load, server, "running"))
    metrics.watch_pages(one.name, partial(_load, server, "free_pages"))
    return server


def _load(server: GenerationServer, what: str) -> float:
    return server.load()[what]


def _budget(asked: str | None, before: Sequence[Part]) -> int:
    """Bytes that are left when the warm-up of a model begins."""
    if asked is None or asked == "auto":
        return memory_budget()
    plans: list[Any] = []
    for part in before:
        if isinstance(part, Server):
            plans += [model.keeper.plan for model in part.models.values()]
        elif isinstance(part, GenerationServer):
            plans.append(part.plan)
    taken: int = sum(plan.need_bytes for plan in plans if plan is not None)
    return int(asked) - taken
