"""servax inside Ray Serve: each replica is a whole server, warm before it takes traffic.

    from ray import serve
    from servax.server.ray_serve import application

    serve.run(application(model="minilm", store="/shared/programs", num_replicas=2))

Ray routes and restarts, servax batches. Replicas that share a store load their programs from it, so a new one
is ready in seconds. Needs `servax[ray]`.
"""

from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
from fastapi import FastAPI

from .config import ServeConfig
from .errors import BadRequest, ConfigError, Unavailable, UnknownModel

_READY_S = 900.0
QUEUED, RUNNING = "servax_rows_queued", "servax_rows_running"


class Replica:
    """What one Ray actor runs.

    Args:
        options: of `ServeConfig`, by name.

    Raises:
        ConfigError, WarmupError: as `servax serve`; Ray tries the replica again, with a growing pause.
    """

    current: ClassVar["Replica | None"] = None
    """The replica of this process; a Ray actor holds one."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        from .cli.wiring import build
        from .http.asgi import create_app
        from .metrics import Metrics

        config, metrics = ServeConfig(**options), Metrics()
        self._drain_s = config.drain_s
        self._engine, texts = build(config, metrics)
        self.http: FastAPI = create_app(self._engine, texts=texts, metrics=metrics, config=config.http)
        self._engine.start()
        try:
            self._engine.wait_ready(_READY_S)
        except BaseException:
            self._engine.close(0.0)
            raise
        Replica.current = self  # not of type(self), which is a class that Ray makes

    async def infer(
        self,
        rows: Sequence[Mapping[str, np.ndarray]],
        *,
        model: str | None = None,
        priority: int = 0,
        timeout_s: float | None = None,
    ) -> list[dict[str, np.ndarray]]:
        """Answer rows of any sizes, for calls from other deployments.

        Args:
            rows: arrays of each row by input name, without a batch dim.
            model: which one; may be left out where there is one.
            priority: 1 (most urgent) to 9; 0 means not set.
            timeout_s: seconds until the answer must be there.

        Returns:
            Output arrays of each row by output name.
        """
        answers: list[dict[str, np.ndarray]] = await self._model(model).submit(
            rows, priority=priority, timeout_s=timeout_s
        )
        return answers

    async def generate(self, prompt: str, *, model: str | None = None, **params: Any) -> AsyncIterator[str]:
        """The pieces of a text as they come; call it with `handle.options(stream=True)`.

        Args:
            prompt: what the text continues.
            model: which one; may be left out where there is one.
            params: of `servax.server.generation.SamplingParams`, by name.
        """
        from .generation import SamplingParams

        found = self._model(model)
        if not hasattr(found, "stream"):
            raise BadRequest(f"a model that generates text is asked to; {found.name!r} does not: call infer")
        async for delta in found.stream(prompt, SamplingParams(**params)):
            yield delta.text

    def _model(self, name: str | None) -> Any:
        models = self._engine.models
        if name is None and len(models) == 1:
            return next(iter(models.values()))
        if name is None or name not in models:
            raise UnknownModel(f"a model is one of {sorted(models)}; got {name!r}: name one of them")
        return models[name]

    def check_health(self) -> None:
        """Ray restarts the replica once this raised a few times.

        Raises:
            Unavailable: if the device thread is dead, or hangs.
        """
        if not self._engine.live:
            raise Unavailable(
                f"a replica answers as long as its engine lives; this one: {self._engine.status()}"
            )

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Rows that wait and rows that run, for `scale_on_queue`."""
        loads = [model.load() for model in self._engine.models.values() if hasattr(model, "load")]
        return {QUEUED: float(sum(one[0] for one in loads)), RUNNING: float(sum(one[1] for one in loads))}

    async def __del__(self) -> None:
        engine = self.__dict__.get("_engine")
        if engine is not None:
            await engine.aclose(self._drain_s)


def scale_on_queue(context: Any) -> tuple[int, dict[str, Any]]:
    """An autoscaling policy: so many replicas that each has about as many rows as `target_ongoing_requests`.

    Ray counts requests; one of ours may hold many rows, which is what the device's work goes by. Name it as
    ``policy={"policy_function": "servax.server.ray_serve:scale_on_queue"}`` in `autoscaling_config`.

    Args:
        context: `ray.serve.config.AutoscalingContext`.

    Returns:
        How many replicas there should be, and nothing to remember.
    """
    metrics = context.aggregated_metrics or {}
    rows = sum(sum(metrics.get(name, {}).values()) for name in (QUEUED, RUNNING))
    target = context.config.target_ongoing_requests or 1
    wanted = max(1, -(-int(rows) // int(target)))
    bounds = context.capacity_adjusted_min_replicas, context.capacity_adjusted_max_replicas
    return min(max(wanted, bounds[0]), bounds[1]), {}


def _app_of_this_replica() -> FastAPI:
    if Replica.current is None:
        raise Unavailable("an application is asked for once its replica is warm; this process has none")
    return Replica.current.http


def application(
    *,
    name: str = "servax",
    num_replicas: int | str | None = None,
    autoscaling_config: Mapping[str, Any] | None = None,
    ray_actor_options: Mapping[str, Any] | None = None,
    max_ongoing_requests: int = 1024,
    health_check_period_s: float = 5.0,
    **options: Any,
) -> Any:
    """A Ray Serve application that serves models as `servax serve` does, with the same routes.

    Args:
        name: of the deployment.
        num_replicas: see `ray.serve.deployment`, as the four that follow.
        autoscaling_config: see there, and `scale_on_queue`.
        ray_actor_options: see there.
        max_ongoing_requests: see there; servax queues and refuses by its own limits, so it is high.
        health_check_period_s: see there.
        options: of `servax.server.config.ServeConfig`, such as ``model``, ``store`` and ``max_batch``.

    Returns:
        A `ray.serve.Application`, for `serve.run`.

    Raises:
        ConfigError: if Ray is not installed.
        pydantic.ValidationError: if an option is not known or its value is none it may have.
    """
    config = ServeConfig(**options)
    try:
        from ray import serve
    except ImportError as error:
        raise ConfigError("a Ray application needs Ray; install it: pip install 'servax[ray]'") from error
    given: dict[str, Any] = {"num_replicas": num_replicas, "autoscaling_config": autoscaling_config}
    deploy = serve.deployment(
        name=name,
        ray_actor_options=dict(ray_actor_options or {}),
        max_ongoing_requests=max_ongoing_requests,
        health_check_period_s=health_check_period_s,
        graceful_shutdown_timeout_s=config.drain_s + 5.0,
        **{key: value for key, value in given.items() if value is not None},
    )
    return deploy(serve.ingress(_app_of_this_replica)(Replica)).bind(dict(options))
