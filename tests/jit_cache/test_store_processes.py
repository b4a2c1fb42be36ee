"""Many processes on one directory, and processes that are killed in the middle of writing.

One Python process imports everything once and forks its workers, so that eight of them cost little.
"""

import json
import subprocess
import sys
import textwrap

import pytest

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="forks and kills")

_COMMON = """
    import json, os, pickle, random, signal, sys, warnings
    from pathlib import Path
    warnings.simplefilter("ignore")  # jax warns of forks
    from servax.jit_cache.store import Fingerprint, Store, load_or_compile

    root = Path(sys.argv[1])

    def key(number):
        return Fingerprint({"program": {"bucket": {"batch": number}}})

    def opened():
        return Store.open(root / "store", home=root / "home", trial=None)

    class Numbers:
        def dump(self, executable, devices):
            return pickle.dumps(executable), {}
        def load(self, payload, devices):
            return pickle.loads(payload)

    def dies(moment):
        # Kills this process at its n-th step of writing: before, between and after the system calls.
        left = [moment]
        def stepping(call):
            def step(*arguments, **options):
                left[0] -= 1
                if left[0] == 0:
                    if call is os_write:
                        os_write(arguments[0], arguments[1][: len(arguments[1]) // 2])
                    os.kill(os.getpid(), signal.SIGKILL)
                return call(*arguments, **options)
            return step
        os_write = os.write
        for name in ("open", "write", "utime", "fsync", "replace", "unlink", "close"):
            setattr(os, name, stepping(getattr(os, name)))

    def fork(work):
        if (child := os.fork()) == 0:
            try:
                work()
            finally:
                os._exit(0)
        return child
"""

_EIGHT = """
    def worker(number):
        if number == 0:
            dies(9)
        store = opened()
        order = list(range(12))
        random.Random(number).shuffle(order)
        answers = {}
        for one in order:
            def build():
                with open(root / "compiled", "a") as log:
                    log.write(f"{number} {one}\\n")
                return one * 10, "x" * 100_000
            answers[one] = load_or_compile(store, key(one), build, codec=Numbers()).executable[0]
        with open(root / f"answers-{number}", "w") as out:
            json.dump([answers, store.report().total, store.report().refused], out)

    opened()
    children = [fork(lambda: worker(number)) for number in range(8)]
    for child in children:
        os.waitpid(child, 0)
"""

_HUNDRED = """
    store = opened()
    rng = random.Random(0)
    seen = {"old": 0, "new": 0, "broken": 0, "killed": 0}
    for attempt in range(100):
        store.put(key(0), b"old" * 1000)
        moment = 1 + rng.randrange(24)
        def work():
            dies(moment)
            mine = opened()
            while True:
                mine.put(key(0), b"new" * 50_000)
                with mine.lease(key(1).digest, 0):
                    pass
        status = os.waitpid(fork(work), 0)[1]
        seen["killed"] += os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
        found = opened().get(key(0))
        name = "broken" if found is None else found.payload[:3].decode()
        whole = found is not None and found.payload in (b"old" * 1000, b"new" * 50_000)
        seen[name if whole else "broken"] += 1
    last = opened()
    orphans = last.gc()
    print(json.dumps({**seen, "orphans": orphans, "again": last.gc(),
                      "status": [one.status for one in last.verify()]}))
"""


def run(script, folder):
    code = textwrap.dedent(_COMMON) + textwrap.dedent(script)
    done = subprocess.run(
        [sys.executable, "-c", code, str(folder)], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_S4_eight_processes_compile_each_program_once(tmp_path):
    run(_EIGHT, tmp_path)
    answers = [tmp_path / f"answers-{number}" for number in range(8)]
    done = [json.loads(path.read_text()) for path in answers if path.exists()]
    assert len(done) == 7  # the one that was killed in mid-write
    right = {str(number): number * 10 for number in range(12)}
    assert all(one == [right, 12, 0] for one in done)
    compiled = [line.split() for line in (tmp_path / "compiled").read_text().splitlines()]
    assert {program for _, program in compiled} == set(right)
    by_the_living = [program for worker, program in compiled if worker != "0"]
    assert len(by_the_living) == len(set(by_the_living)) >= 11
    assert len(compiled) <= 13


def test_S4_a_hundred_kills_leave_whole_entries(tmp_path):
    seen = json.loads(run(_HUNDRED, tmp_path))
    assert seen["killed"] == 100
    assert seen["broken"] == 0
    assert seen["old"] > 0
    assert seen["new"] > 0
    assert seen["orphans"] > 0
    assert seen["again"] == 0
    assert seen["status"] == ["ok"]
