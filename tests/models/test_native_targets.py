"""Kernels for processors and systems that are not here compile, and call nothing that is not there."""

import ctypes
import json
import subprocess
import sys
from pathlib import Path

import pytest
from servax.models.errors import KernelUnavailable
from servax.models.native import Tile
from servax.models.native.target import fitting

pytest.importorskip("llvmlite")

AVX2 = ("avx2", "fma", "f16c")
AVX512 = ("avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512cd")
CASES = [
    ("x86_64-unknown-linux-gnu", "haswell", *AVX2),
    ("x86_64-unknown-linux-gnu", "znver2", *AVX2),
    ("x86_64-unknown-linux-gnu", "x86-64", *AVX2),
    ("x86_64-unknown-linux-gnu", "skylake-avx512", *AVX512),
    ("x86_64-unknown-linux-gnu", "sapphirerapids", *AVX512, "avx512bf16", "avx512vnni"),
    ("x86_64-apple-darwin22.6.0", "haswell", *AVX2),
    ("aarch64-unknown-linux-gnu", "cortex-a72"),
    ("aarch64-unknown-linux-gnu", "neoverse-n1"),
    ("aarch64-unknown-linux-gnu", "neoverse-v2"),
    ("arm64-apple-darwin23.1.0", "apple-m1"),
]
EVERYWHERE = {"malloc", "calloc", "free", "memset", "sched_yield"}
ON_LINUX = EVERYWHERE | {"sched_getcpu", "sched_getaffinity", "sched_setaffinity"}
# LLVM calls a function of macOS to fill with zeros, where it has one.
ON_MACOS = EVERYWHERE | {"bzero", "__bzero"}


def test_other_machines_have_code_and_all_that_it_calls():
    """In a process of its own, which LLVM ends where it has no instructions for something."""
    command = [sys.executable, str(Path(__file__).parent / "targets_probe.py"), json.dumps(CASES)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert done.returncode == 0, (lines[-1:], done.stderr[-3000:])
    found = list(zip(lines[::2], lines[1::2], strict=True))
    assert {(of["triple"], of["cpu"]) for of, _ in found} == {case[:2] for case in CASES}
    assert {of["target"] for of, _ in found if of["cpu"] == "apple-m1"} == {
        "servax_panels_matmul_float32_v2_12",
        "servax_panels_matmul_bfloat16_widened_v2_12",
        "servax_rows_attention_v2",
        "servax_paged_attention_float32_v1",
        "servax_paged_attention_float16_v1",
    }
    for of, called in found:
        there = ON_MACOS if "darwin" in of["triple"] else ON_LINUX
        assert set(called) <= there, of
        assert {"malloc", "free", "sched_yield"} <= set(called), of


@pytest.mark.skipif(sys.platform != "linux", reason="what a process on Linux has")
def test_what_is_called_on_linux_is_in_this_process():
    process = ctypes.CDLL(None)
    assert not [name for name in ON_LINUX if not hasattr(process, name)]


@pytest.mark.parametrize(
    ("features", "machine", "system", "sizes"),
    [
        (AVX2, "x86_64", "linux", (8, 3, 4)),
        (AVX2 + AVX512, "x86_64", "darwin", (16, 3, 8)),
        ((), "aarch64", "linux", (4, 3, 8)),
        (("neon",), "arm64", "darwin", (4, 3, 8)),
        (AVX2[:2], "x86_64", "linux", None),  # float16 would be widened by a function that is nowhere
        (AVX2[1:], "x86_64", "linux", None),
        (("vsx",), "ppc64le", "linux", None),
        (AVX2, "amd64", "win32", None),
    ],
)
def test_processors_and_systems_have_tiles_or_none(features, machine, system, sizes):
    if sizes is None:
        with pytest.raises(KernelUnavailable, match=r"are for 64-bit Linux|need AVX2 with FMA and F16C"):
            fitting(dict.fromkeys(features, True), machine, system)
        return
    tile = fitting(dict.fromkeys(features, True), machine, system)
    assert isinstance(tile, Tile)
    assert tile[:3] == sizes
    assert system == "linux" or not tile.told
