"""Options of the HTTP front and of `servax serve`, validated once."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, SecretStr, field_validator, model_validator

from .batching.shares import parse_weights
from .programs_config import ProgramsConfig


class HttpConfig(BaseModel):
    """Limits of the HTTP front.

    Attributes:
        max_body_bytes: a larger request body is refused with 413.
        retry_after_s: seconds named in `Retry-After` while the server is starting or draining.
        tokenize_inline_chars: texts of together fewer characters are tokenized on the event loop;
            more go to a worker thread. A tokenizer does about 2 million characters a second, so the
            default holds the loop for at most 10 ms, and a thread hop costs about 0.1 ms.
        tokenize_pending_chars: most characters that wait for or are in tokenizing in worker threads.
        tokenize_text_chars: most characters of one text, whatever it would be cut to; tokenizing takes some
            200 bytes of memory for each.
        client_header: header that names a client for fairness, such as `x-forwarded-for` behind a proxy that
            sets it; None takes the peer's address. An API key comes before both.
        most_lag_s: a request that the event loop could begin only after so many seconds is refused unread; a
            fifth of what callers allow lately, where that is less.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    max_body_bytes: int = Field(default=64 << 20, gt=0)
    retry_after_s: float = Field(default=2.0, gt=0)
    tokenize_inline_chars: int = Field(default=20_000, ge=0)
    tokenize_pending_chars: int = Field(default=10_000_000, gt=0)
    tokenize_text_chars: int = Field(default=1_000_000, gt=0)
    client_header: str | None = Field(default=None, min_length=1)
    most_lag_s: float = Field(default=1.0, gt=0, allow_inf_nan=False)


class GrpcConfig(BaseModel):
    """Limits of the gRPC front.

    Attributes:
        max_message_bytes: a larger request is refused with RESOURCE_EXHAUSTED, unpacked if it came
            compressed. One of more than twice that is refused by gRPC itself, before it is in memory; our
            metrics and details do not see that one.
        retry_after_s: seconds of advice to retry while the server is starting or draining.
        health_watch_s: seconds between two looks at readiness for a client that watches health.
        most_lag_s: as of HTTP.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    max_message_bytes: int = Field(default=64 << 20, gt=0, lt=1 << 30)
    retry_after_s: float = Field(default=2.0, gt=0)
    health_watch_s: float = Field(default=0.5, gt=0)
    most_lag_s: float = Field(default=1.0, gt=0, allow_inf_nan=False)


class QueueConfig(BaseModel):
    """Bounds on what may wait, over all models of the server.

    Attributes:
        rows: most rows waiting for a launch.
        elements: most real elements (tokens, pixels) waiting; None for no bound.
        bytes: most bytes of inputs waiting; None for no bound.
        client_rows: most rows of one client waiting, known by its API key, by `http.client_header`, or else
            by its address; None for no bound.
        fair: whether clients take turns inside a priority, so that one that floods the queue delays no other
            by more than about a batch.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    rows: int = Field(default=4096, gt=0)
    elements: int | None = Field(default=None, gt=0)
    bytes: int | None = Field(default=None, gt=0)
    client_rows: int | None = Field(default=None, gt=0)
    fair: bool = False


class GenerationConfig(BaseModel):
    """How a model that generates text runs; `max_batch` says how many texts run at once.

    Attributes:
        cache_tokens: tokens that the pool of keys and values holds, over all texts; None means 1,024 for each
            text that runs at once, or with `memory_budget` as many as fit. It gets fewer if they do not fit.
        page_size: tokens in a page, the unit in which the pool is given out and shared.
        prefill_chunk: most tokens of prompts read between two tokens of a running text; None means 64 on
            CPU and 512 elsewhere.
        decode_steps: tokens chosen in one launch where nobody can join or leave; 1 for never more.
        prefix_cache: whether prompts that begin alike share pages.
        draft_tokens: tokens guessed ahead of a text from what it said before, and checked in one step, while
            few texts run and where that pays; 0 for none.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    cache_tokens: int | None = Field(default=None, gt=0)
    page_size: int = Field(default=64, gt=0)
    prefill_chunk: int | None = Field(default=None, gt=0)
    decode_steps: int = Field(default=1, gt=0)
    prefix_cache: bool = True
    draft_tokens: int = Field(default=0, ge=0)


class FaultsConfig(BaseModel):
    """What is done about a device that fails.

    Attributes:
        retries: how often a batch that the device failed runs again, within the deadlines of its requests.
        open_after: so many failed batches in a row and requests are refused, until a trial run works.
        backoff_s: seconds until the first trial; each that fails doubles it.
        most_backoff_s: most seconds between two trials.
        gone_after: so many failed trials in a row and `live` turns false.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    retries: int = Field(default=2, ge=0)
    open_after: int = Field(default=3, gt=0)
    backoff_s: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    most_backoff_s: float = Field(default=30.0, gt=0, allow_inf_nan=False)
    gone_after: int = Field(default=5, gt=0)


class ModelConfig(BaseModel):
    """One model to serve.

    Attributes:
        model: a built-in name, a checkpoint folder, a GGUF file, a hub id, or `module:attribute` that names a
            `Servable`.
        name: the model's name on the wire; None takes the model's own.
        max_batch: rows of the largest bucket, or texts that are generated at once; None means 32.
        max_length: limit of the length axis in tokens, or of prompt and text together; None takes the model's
            own.
        scheme: sizes of varying axes: `exact`, `single`, `linear:32`, `powers_of_two:8`, `geometric:1.5`,
            `bounded_waste:25` or `explicit:64,128`; None means `powers_of_two:16`.
        max_elements: most elements (rows x tokens) of a bucket; None for no bound.
        layout: `padded`: each text a row of its own; `packed`: texts share rows, which wastes less, where the
            model can tell them apart. None means `packed` for the text models that we know, unless scheme,
            max_batch, sizes or refit say something about rows of their own.
        max_segments: most texts in one packed row; None means 16.
        sizes: `static`: a program for each bucket; `switched`: one program that holds all buckets; `tuned`:
            both, and each bucket runs by the faster. None means `static`.
        dtype: in which numbers a text model's matrices are held and multiplied: `bfloat16` is half the bytes,
            and faster where the processor has such products; None means `float32`.
        quantize: `int8` for weights in eight bits, instead of a dtype, of a text model.
        generation: of a model that generates text.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: str = Field(default="minilm", min_length=1)
    name: str | None = Field(default=None, min_length=1)
    max_batch: int | None = Field(default=None, gt=0)
    max_length: int | None = Field(default=None, gt=0)
    scheme: str | None = None
    max_elements: int | None = Field(default=None, gt=0)
    layout: Literal["padded", "packed"] | None = None
    max_segments: int | None = Field(default=None, gt=0)
    sizes: Literal["static", "switched", "tuned"] | None = None
    dtype: Literal["float32", "bfloat16"] | None = None
    quantize: Literal["int8"] | None = None
    generation: GenerationConfig = GenerationConfig()


class ServeConfig(ModelConfig, ProgramsConfig):
    """Everything `servax serve` and `servax warmup` can be told.

    One model is described by the fields of `ModelConfig`, several by `models`.

    Attributes:
        models: several models, instead of the one.
        host: address to listen on.
        port: TCP port; 0 lets the system choose.
        max_wait_ms: how long an idle device may wait for more rows.
        wait: `fixed`: an idle device always waits that long; `adaptive`: only as long as it is predicted to
            pay.
        priorities: `strict`: a request of a lower number always goes first; or weights by number such as
            `1=8,5=2,9=1`: under full load each gets its share of the device's time (1 if not named).
        max_age_s: a request that waited so long goes before every younger one, whatever the priorities.
        max_request_rows: most rows in one request.
        timeout_s: most seconds that a request may take; a caller may ask for less. None for no bound.
        replicas: how many copies of the models there are, each on a device (or a mesh) of its own, all fed by
            one queue; 0 takes all devices.
        stall_s: a device that finishes nothing for so long is taken for hung.
        ready_when: `grid`: ready once every program is warm; `coverage`: once the one that holds all is.
        queue: bounds on what may wait.
        faults: what is done about a device that fails.
        store: where programs are kept between starts: a directory or an fsspec URL; None means the user's
            cache directory.
        use_store: whether programs are kept at all.
        store_max_bytes: most bytes of stored programs; None for no bound.
        refit: whether sizes that no longer fit what arrives are fitted anew, in the background.
        grpc_port: TCP port of the same protocol over gRPC; None for none, 0 lets the system choose.
        api_key: keys, one of which a request must bring; none lets everybody in. Probes and metrics need
            none.
        tls_cert: file of the certificate chain (PEM), for both protocols; None for plain text.
        tls_key: file of its private key (PEM).
        allow_load: whether clients may have a model loaded anew from where it came, as SIGHUP has all.
        seal: whether JAX tracing is switched off in the whole process after warm-up.
        strict: whether a program that cannot be made stops the server.
        drain_s: seconds that admitted requests get after a stop signal.
        log_level: of the server's logs; `info` has a line for each request.
        log_format: `text` for people, `json` for machines.
        traces: whether spans of each request are exported by OpenTelemetry, as its OTEL_* variables say;
            needs `servax[otel]`.
        http: limits of the HTTP front.
        grpc: limits of the gRPC front.
    """

    models: tuple[ModelConfig, ...] = ()
    host: str = "127.0.0.1"
    port: int = Field(default=8000, ge=0, le=65535)
    max_wait_ms: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    wait: Literal["fixed", "adaptive"] = "fixed"
    priorities: str = "strict"
    max_age_s: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    max_request_rows: int = Field(default=2048, gt=0)
    timeout_s: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    replicas: int = Field(default=1, ge=0)
    stall_s: float = Field(default=120.0, gt=0)
    ready_when: Literal["grid", "coverage"] = "grid"
    queue: QueueConfig = QueueConfig()
    faults: FaultsConfig = FaultsConfig()
    store: str | None = Field(default=None, min_length=1)
    use_store: bool = True
    store_max_bytes: int | None = Field(default=None, gt=0)
    refit: bool = False
    grpc_port: int | None = Field(default=None, ge=0, le=65535)
    api_key: tuple[SecretStr, ...] = ()
    tls_cert: str | None = Field(default=None, min_length=1)
    tls_key: str | None = Field(default=None, min_length=1)
    allow_load: bool = False
    seal: bool = True
    strict: bool = False
    drain_s: float = Field(default=30.0, ge=0, allow_inf_nan=False)
    log_level: Literal["critical", "error", "warning", "info", "debug"] = "warning"
    log_format: Literal["text", "json"] = "text"
    traces: bool = False
    http: HttpConfig = HttpConfig()
    grpc: GrpcConfig = GrpcConfig()

    @property
    def served(self) -> tuple[ModelConfig, ...]:
        """The models to serve, one or several."""
        return self.models or (self,)

    @field_validator("priorities")
    @classmethod
    def _readable(cls, text: str) -> str:
        parse_weights(text)
        return text

    @model_validator(mode="after")
    def _consistent(self) -> "ServeConfig":
        if (self.tls_cert is None) != (self.tls_key is None):
            given, missing = ("tls_cert", "tls_key") if self.tls_key is None else ("tls_key", "tls_cert")
            raise ValueError(f"TLS needs tls_cert and tls_key; got {given} alone: set {missing} too")
        if self.wait == "adaptive" and not self.max_wait_ms:
            raise ValueError(
                "wait = 'adaptive' needs a bound; got max_wait_ms 0: set it to the most that one request may "
                "wait for others"
            )
        if self.max_request_rows > self.queue.rows:
            raise ValueError(
                f"max_request_rows is at most the {self.queue.rows} of queue.rows; got "
                f"{self.max_request_rows}: change one of them"
            )
        if self.faults.backoff_s > self.faults.most_backoff_s:
            raise ValueError(
                f"faults.backoff_s is at most faults.most_backoff_s, {self.faults.most_backoff_s:g}; got "
                f"{self.faults.backoff_s:g}: change one of them"
            )
        single = sorted(self.model_fields_set & set(ModelConfig.model_fields))
        if self.models and single:
            raise ValueError(
                f"options of a model go into its table where [[models]] lists several; got {single[0]} beside"
                " them: move it there"
            )
        if any(not key.get_secret_value() for key in self.api_key):
            raise ValueError("an api_key has at least one character; got an empty one: drop it")
        return self
