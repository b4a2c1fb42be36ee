"""What `servax doctor` looks at; each check gives verdicts and never raises."""

import contextlib
import importlib.metadata
import importlib.util
import platform
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

from ... import _version
from ..errors import ConfigError

Verdict = Literal["ok", "warn", "fail"]
# Below that a first warm-up of an ordinary model may not fit, and nothing at all.
_LITTLE_DISK_BYTES, _NO_DISK_BYTES = 1 << 30, 64 << 20
_FEW_FILES = 1024
_EXTRAS = ("serve", "models", "client", "store", "otel")


@dataclass(frozen=True, slots=True)
class Found:
    """What a check found.

    Attributes:
        check: its name.
        verdict: `ok`; `warn`: it works, but; `fail`: it cannot serve so.
        detail: what there is.
        remedy: what to do; "" if nothing.
    """

    check: str
    verdict: Verdict
    detail: str
    remedy: str = ""

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


Check = Callable[[str | None], Iterable[Found]]


def run_check(check: Check, store: str | None) -> list[Found]:
    """What a check finds; an error of its own is a failure with its words."""
    try:
        return list(check(store))
    except Exception as error:
        name = check.__name__.replace("_", " ")
        return [
            Found(name, "fail", f"{type(error).__name__}: {error}", "see the message; report it if it helps")
        ]


def versions(store: str | None) -> Iterable[Found]:
    """Python, ours, and whether JAX's two halves fit each other."""
    yield Found(
        "servax", "ok", f"{_version.__version__} on Python {platform.python_version()}, {sys.platform}"
    )
    import jax
    from jaxlib import version as jaxlib

    text = f"jax {jax.__version__}, jaxlib {jaxlib.__version__}, numpy {importlib.metadata.version('numpy')}"
    if jax.__version_info__ < (0, 10):
        yield Found("jax", "fail", text, "servax needs jax 0.10 or later: pip install -U jax")
    elif jax.__version_info__ != jaxlib.__version_info__:
        yield Found("jax", "warn", text, "the two should be the same: pip install -U jax jaxlib")
    else:
        yield Found("jax", "ok", text)


def devices(store: str | None) -> Iterable[Found]:
    """What programs run on, and whether an accelerator's plug-in lies idle."""
    import jax

    found = jax.devices()
    kinds = sorted({one.device_kind for one in found})
    text = f"{len(found)} x {', '.join(kinds)} ({jax.default_backend()})"
    plugins = [name for name in _installed() if re.fullmatch(r"jax-(cuda|rocm)\d+-plugin|libtpu", name)]
    if plugins and jax.default_backend() == "cpu":
        remedy = "look at JAX_PLATFORMS, at the driver and at the plug-in's version"
        yield Found("devices", "warn", f"{text}, although {', '.join(plugins)} is installed", remedy)
    else:
        yield Found("devices", "ok", text)


def _installed() -> Iterable[str]:
    return {dist.name.lower() for dist in importlib.metadata.distributions() if dist.name}


def processor(store: str | None) -> Iterable[Found]:
    """Cores, memory and the instructions that XLA's code for processors lives on."""
    from ...jit_cache.device_memory import host_free_bytes
    from ...jit_cache.store.environment import cpu_facts

    with contextlib.suppress(OSError):
        facts = cpu_facts(Path("/proc/cpuinfo").read_text(), platform.machine())
        yield from features(facts["machine"], facts["features"])
    free = host_free_bytes()
    yield Found(
        "memory",
        "ok" if free > _LITTLE_DISK_BYTES else "warn",
        f"{free / 1e9:.1f} GB free for this process",
        "" if free > _LITTLE_DISK_BYTES else "serve a smaller model, or give the container more",
    )


def features(machine: str, found: Sequence[str]) -> Iterable[Found]:
    """What a processor's instruction set is worth."""
    vector = [
        one for one in ("avx2", "fma", "avx512f", "avx512_bf16", "avx512_vnni", "amx_tile") if one in found
    ]
    if machine in ("x86_64", "AMD64"):
        good = "avx2" in vector and "fma" in vector
        remedy = "" if good else "matrix products run several times slower: choose another machine type"
        yield Found(
            "processor", "ok" if good else "warn", f"{machine}: {' '.join(vector) or 'no AVX2'}", remedy
        )
    else:
        yield Found("processor", "ok", machine)


def program_store(location: str | None) -> Iterable[Found]:
    """Whether programs can be kept: permissions, key, entries, free disk."""
    from ...jit_cache import StoreError
    from ...jit_cache.store import Store, config_home
    from .store import check_location

    try:
        check_location(location)
        opened = Store.open(location)
    except (StoreError, ConfigError) as error:
        yield Found("store", "fail", str(error), "mend it as told, or serve with --no-store")
        return
    entries = opened.ls()
    text = f"{opened.root}: {len(entries)} programs, {sum(one.nbytes for one in entries) / 1e6:.1f} MB"
    if opened.writable:
        yield Found("store", "ok", f"{text}; key in {config_home()}")
    else:
        remedy = "every start compiles anew: make the directory and the key's folder writable"
        yield Found("store", "warn", f"{text}; it cannot be written", remedy)
    folder = next(one for one in (opened.root, *opened.root.parents) if one.is_dir())
    yield disk(shutil.disk_usage(folder).free, str(folder))


def disk(free_bytes: int, folder: str) -> Found:
    """Whether there is room for programs."""
    text = f"{free_bytes / 1e9:.1f} GB free at {folder}"
    if free_bytes < _NO_DISK_BYTES:
        return Found("disk", "fail", text, "make room, or name another place with --store")
    if free_bytes < _LITTLE_DISK_BYTES:
        return Found("disk", "warn", text, "a large model's programs may not fit: make room")
    return Found("disk", "ok", text)


def jax_cache(store: str | None) -> Iterable[Found]:
    """Whether JAX keeps programs of its own, which on a CPU cannot be stored again."""
    import jax

    folder = jax.config.values.get("jax_compilation_cache_dir")
    if folder and jax.config.values.get("jax_enable_compilation_cache") and jax.default_backend() == "cpu":
        remedy = "the store keeps no program that comes out of it: unset JAX_COMPILATION_CACHE_DIR"
        yield Found("jax cache", "warn", f"JAX has a cache of its own at {folder}", remedy)


def compiling(location: str | None) -> Iterable[Found]:
    """A tiny program: compiled, run, stored, and loaded again by somebody else."""
    import numpy as np

    from ...jit_cache import Servable, StoredPrograms
    from ...jit_cache.store import STORE, Store

    servable = Servable(
        lambda *, x: x @ x.swapaxes(1, 2), inputs={"x": "float32[4, 4]"}, limits={"batch": 1}, name="doctor"
    )
    bucket = next(iter(servable.grid))
    x = np.eye(4, dtype=np.float32)[None]
    with TemporaryDirectory(prefix="servax-doctor-") as folder:
        Path(folder).chmod(0o700)
        seconds, sources = [], []
        for _ in range(2):
            begin_s = time.perf_counter()
            program = StoredPrograms(Store.open(Path(folder) / "programs"))(servable, bucket, [])
            seconds.append(time.perf_counter() - begin_s)
            sources.append(program.facts.source)
            if not np.array_equal(np.asarray(program({"x": x})[0]), x):
                yield Found(
                    "compile", "fail", "a program of one product gives wrong numbers", "reinstall jaxlib"
                )
                return
    yield Found("compile", "ok", f"{seconds[0] * 1e3:.0f} ms with tracing, storing and a trial run")
    if sources[1] == STORE:
        yield Found("store round trip", "ok", f"loaded in {seconds[1] * 1e3:.1f} ms")
    else:
        remedy = "servax store verify; the log of this command says why"
        yield Found("store round trip", "warn", "what was stored was compiled again", remedy)


def extras(store: str | None) -> Iterable[Found]:
    """Which optional parts are installed, by the distribution's own list."""
    for extra, names in wanted(importlib.metadata.requires("servax") or ()).items():
        missing = sorted({name for name in names if not _has(name)})
        if missing:
            text = f"missing: {', '.join(missing)}"
            yield Found(f"extra {extra}", "warn", text, f"if you need it: pip install 'servax[{extra}]'")
        else:
            yield Found(f"extra {extra}", "ok", ", ".join(sorted(names)))


def wanted(requirements: Iterable[str]) -> dict[str, list[str]]:
    """Names of distributions by extra, of those extras that a server or a client may need."""
    found: dict[str, list[str]] = {}
    for line in requirements:
        extra = re.search(r"""extra\s*==\s*['"]([\w-]+)['"]""", line)
        name = re.match(r"[A-Za-z0-9._-]+", line)
        other_system = "sys_platform" in line and sys.platform == "win32"
        if extra and name and extra[1] in _EXTRAS and name[0] != "servax" and not other_system:
            found.setdefault(extra[1], []).append(name[0])
    return {extra: found[extra] for extra in _EXTRAS if extra in found}


def _has(name: str) -> bool:
    try:
        importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def open_files(store: str | None) -> Iterable[Found]:
    """How many connections the system lets a server hold."""
    if importlib.util.find_spec("resource") is None:
        return
    import resource

    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    few = 0 <= soft < _FEW_FILES
    remedy = "each connection is one: ulimit -n 65536" if few else ""
    yield Found(
        "open files", "warn" if few else "ok", "no limit" if soft < 0 else f"at most {soft:,}", remedy
    )


CHECKS: tuple[Check, ...] = (
    versions,
    devices,
    processor,
    open_files,
    program_store,
    jax_cache,
    compiling,
    extras,
)
