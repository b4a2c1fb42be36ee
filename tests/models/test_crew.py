"""Threads that share a job: which cores they may run on when it is done, and where there is one core only."""

import ctypes
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import jax
import numpy as np
import pytest
from servax.models import native
from servax.models.errors import KernelUnavailable
from servax.models.native import crew, header

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or not native.available(), reason="no kernel, or no cores to choose"
)


def affinities():
    """Which cores each thread of this process may run on."""
    found = {}
    for thread in os.listdir("/proc/self/task"):
        try:
            found[int(thread)] = os.sched_getaffinity(int(thread))
        except ProcessLookupError:  # it has ended since
            continue
    return found


def test_every_thread_may_run_where_it_could_before():
    """A helper that comes late may still be on its way when a product is there."""
    width = native.tile().width
    x, panels = np.ones((300, 64), np.float32), np.ones((1, 9, 64, width), np.float32)
    product = jax.jit(lambda x, panels: native.product(x, panels, np.int32(0), features=9 * width))
    product(x, panels).block_until_ready()
    before, right = affinities(), []

    def again():
        right.append(all((np.asarray(product(x, panels)) == 64).all() for _ in range(50)))

    threads = [threading.Thread(target=again) for _ in range(4)]
    for one in threads:
        one.start()
    for one in threads:
        one.join(60)
    assert right == [True] * len(threads)
    own, deadline = os.sched_getaffinity(0), time.monotonic() + 10
    while changed := {
        thread: cores for thread, cores in affinities().items() if cores != before.get(thread, own)
    }:
        assert time.monotonic() < deadline, changed
        os.sched_yield()


@pytest.fixture(scope="module")
def aside():
    """The function by which a helper leaves a core."""
    import llvmlite.binding as llvm

    try:
        source = crew.source(header.read(), native.tile())
    except KernelUnavailable as error:
        pytest.skip(str(error))
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    machine = llvm.Target.from_triple(llvm.get_process_triple()).create_target_machine(jit=True)
    call = "define void @leave_it(i64 %core) {\n  call void @aside(i64 %core)\n  ret void\n}"
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(f"{source}\n{call}"), machine)
    engine.finalize_object()
    yield ctypes.CFUNCTYPE(None, ctypes.c_int64)(engine.get_function_address("leave_it"))
    engine.close()


def in_a_thread(run):
    """What it gives in a thread of its own, whose cores are no other's."""
    found = []
    thread = threading.Thread(target=lambda: found.append(run()))
    thread.start()
    thread.join(60)
    return found[0]


def test_a_thread_leaves_the_core_it_is_on_and_may_come_back(aside):
    here = ctypes.CDLL(None).sched_getcpu

    def run():
        allowed, moved = os.sched_getaffinity(0), 0
        for _ in range(50):
            core = here()
            aside(core)
            moved += here() != core
            assert os.sched_getaffinity(0) == allowed
        return moved, len(allowed)

    moved, cores = in_a_thread(run)
    assert moved > 0 or cores == 1 or cores < os.cpu_count()


@pytest.mark.parametrize("core", [-1, 1024, 1 << 40])
def test_a_core_that_is_not_known_is_not_left(aside, core):
    def run():
        before = os.sched_getaffinity(0)
        aside(core)
        return os.sched_getaffinity(0) == before

    assert in_a_thread(run)


def test_a_thread_stays_where_it_may_run_on_one_core_alone(aside):
    def run():
        core = min(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {core})
        aside(core)
        return os.sched_getaffinity(0) == {core}

    assert in_a_thread(run)


def test_products_of_a_process_on_one_core_with_helpers_there():
    command = [sys.executable, str(Path(__file__).parent / "crew_probe.py")]
    environment = os.environ | {"NPROC": "4"}  # threads of XLA's pool, where its number is asked for
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["usable"] == [True, True]
    assert found["same"] == [True] * 4
    assert {tuple(cores) for cores in found["affinities"]} == {(min(os.sched_getaffinity(0)),)}
