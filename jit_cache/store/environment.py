"""What a compiled program depends on beside the model: versions, device, processor, flags, settings.

Everything is taken from an allow-list. Host names, paths, ports, process numbers and the rest of the
environment cannot get in.
"""

import functools
import hashlib
import os
import platform
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from ..._version import __version__
from .library import PYTHON, owner, release
from .relocate import relocatable

_CONFIG = (
    "jax_allow_f16_reductions",
    "jax_bcoo_cusparse_lowering",
    "jax_compiler_enable_remat_pass",
    "jax_debug_infs",
    "jax_debug_nans",
    "jax_default_device",
    "jax_default_dtype_bits",
    "jax_default_matmul_precision",
    "jax_default_prng_impl",
    "jax_disable_jit",
    "jax_enable_custom_prng",
    "jax_enable_x64",
    "jax_error_checking_behavior_divide",
    "jax_error_checking_behavior_nan",
    "jax_error_checking_behavior_oob",
    "jax_exec_time_optimization_effort",
    "jax_explicit_x64_dtypes",
    "jax_high_dynamic_range_gumbel",
    "jax_memory_fitting_effort",
    "jax_memory_fitting_level",
    "jax_numpy_dtype_promotion",
    "jax_optimization_level",
    "jax_pallas_use_mosaic_gpu",
    "jax_ragged_dot_use_gpu_pallas_triton_lowering",
    "jax_ragged_dot_use_ragged_dot_instruction",
    "jax_random_seed_offset",
    "jax_softmax_custom_jvp",
    "jax_threefry_gpu_kernel_lowering",
    "jax_threefry_partitionable",
    "jax_use_magma",
    "jax_use_shardy_partitioner",
    "jax_xla_profile_version",
)
# Flags that say where to write, not what to compile; the number of devices stands in the placement.
_IDLE_FLAGS = re.compile(
    r"--(xla_dump_.*|xla_force_host_platform_device_count|xla_gpu_cuda_data_dir|xla_tpu_sdc_checker_.*"
    r"|xla_gpu_experimental_autotune_cache_mode|xla_gpu_per_fusion_autotune_cache_dir)"
)
_PLUGINS = {
    "gpu": (
        *("jax-cuda12-plugin", "jax-cuda12-pjrt", "jax-cuda13-plugin", "jax-cuda13-pjrt"),
        *("jax-rocm60-plugin", "jax-rocm7-plugin", "nvidia-cudnn-cu12", "nvidia-cudnn-cu13"),
        *("nvidia-cublas-cu12", "nvidia-cublas"),
    ),
    "tpu": ("libtpu",),
}
_CPU_FEATURE = re.compile(
    r"(sse|ssse|avx|fma|bmi|f16c|popcnt|v?aes|v?pclmul|gfni|sha|amx|abm|lzcnt|adx|movbe|mmx).*"
)


def environment_facts(device: jax.Device) -> dict[str, Any]:
    """All that decides whether a program compiled elsewhere runs here and computes the same.

    Settings are those of the calling thread: ask in the thread that compiles, or under the same `with`.

    Args:
        device: one of those that will run it.

    Returns:
        Plain JSON values.
    """
    client = _client_facts(device.platform)
    return {
        "servax": _own_release(),
        "python": PYTHON,
        "jax": jax.__version__,
        "jaxlib": release("jaxlib"),
        **client,
        "device_kind": device.device_kind,
        "xla_flags": xla_flags(os.environ),
        "config": {name: _plain(getattr(jax.config, name)) for name in _CONFIG if hasattr(jax.config, name)},
    }


@functools.cache
def _own_release() -> str:
    """Our version and content: how a servable is traced is decided in this package's files."""
    if (installed := owner(__name__)) is not None:
        return installed
    content = hashlib.sha256()
    for path in sorted(Path(__file__).parent.parent.glob("*.py")):
        content.update(path.read_bytes())
    return f"servax=={__version__}+{content.hexdigest()[:12]}"


@functools.cache
def _client_facts(platform_name: str) -> dict[str, Any]:
    from jax.extend import backend

    facts: dict[str, Any] = {
        "platform": platform_name,
        "platform_version": backend.get_backend(platform_name).platform_version,
        "libraries": {name: found for name in _PLUGINS.get(platform_name, ()) if (found := release(name))},
    }
    if platform_name == "cpu":
        # XLA cuts loops into as many parts as the process may use cores.
        facts["cpu"] = cpu_facts(_read_cpuinfo(), platform.machine())
        facts["cpu_threads"] = _cores()
    return facts


def xla_flags(environ: Mapping[str, str]) -> dict[str, str]:
    """The compiler flags in force, by name; the last of equals wins, as in XLA."""
    flags: dict[str, str] = {}
    for variable in ("XLA_FLAGS", "LIBTPU_INIT_ARGS"):
        for word in _words(environ.get(variable, "")):
            name, _, value = word.partition("=")
            if name.startswith("--") and not _IDLE_FLAGS.fullmatch(name):
                flags[name] = value
    return flags


def _words(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError:  # an open quote: XLA will say so itself
        return text.split()


def cpu_facts(cpuinfo: str, machine: str) -> dict[str, Any]:
    """Instruction set and model of a processor, from the text of ``/proc/cpuinfo``.

    Only features that code generators use are kept: a kernel's or hypervisor's flags differ between
    machines that run the same code.
    """
    fields: dict[str, str] = {}
    for line in cpuinfo.split("\n\n", 1)[0].splitlines():
        name, _, value = line.partition(":")
        fields[name.strip().lower()] = value.strip()
    if "features" in fields:  # Arm lists only what matters
        features = fields["features"].split()
    else:
        features = [one for one in fields.get("flags", "").split() if _CPU_FEATURE.fullmatch(one)]
    names = ("vendor_id", "cpu family", "model", "cpu implementer", "cpu part")
    return {
        "machine": machine,
        "model": [fields[name] for name in names if name in fields] or [platform.processor()],
        "features": sorted(features),
    }


def _read_cpuinfo() -> str:
    try:
        return Path("/proc/cpuinfo").read_text()
    except OSError:
        return ""


def _cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def placement_facts(devices: Sequence[jax.Device]) -> dict[str, Any]:
    """On how many devices a program runs, and on which where it is bound to them.

    A part of one that several processes run is of this process alone.
    """
    facts: dict[str, Any] = {
        "count": len(devices),
        "kinds": sorted({device.device_kind for device in devices}),
        "processes": jax.process_count(),
    }
    if not relocatable(devices):
        facts |= {"ids": [device.id for device in devices], "process": jax.process_index()}
    return facts


def _plain(value: Any) -> Any:
    return value if isinstance(value, (bool, int, float, str, type(None))) else str(value)
