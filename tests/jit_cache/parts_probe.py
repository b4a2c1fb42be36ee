"""One of two processes that serve a model together and share a store, start after start; prints JSON.

python parts_probe.py NUMBER FOLDER PORTS...: that of `jax.distributed`, and one for each start.
"""

import json
import shutil
import sys
from pathlib import Path

import jax
from processes_probe import ask, difference, servable, spread
from servax.jit_cache import Hosts, compile_log, follow
from servax.jit_cache.store import Store
from servax.server import Server

KEPT = "kept"


def opened(folder):
    return Store.open(folder / "store", home=folder / "home")


def mine(folder):
    """The file of one of this process's parts."""
    keys = [one for one in opened(folder).ls() if one.fingerprint is not None]
    own = [
        one.digest for one in keys if one.fingerprint.fields["placement"]["process"] == jax.process_index()
    ]
    return next((folder / "store").rglob(f"{min(own)}*"))


def lose(folder):
    path = mine(folder)
    (folder / KEPT).mkdir()
    shutil.copy(path, folder / KEPT)
    path.unlink()


def restore(folder):
    """What it had before, of a compile of which the other process has nothing any more."""
    (old,) = (folder / KEPT).iterdir()
    shutil.copy(old, mine(folder).with_name(old.name))


STARTS = {"first": None, "again": None, "lost": lose, "healed": None, "stale": restore, "storeless": None}


def start(name, hosts, folder):
    log = compile_log()
    before = log.compiles.total()
    store = None if name == "storeless" else opened(folder)
    one = servable("model", spread(hosts))
    answers = None
    if jax.process_index() == 0:
        with Server(one, store=store) as server:
            answers = ask(server, "model")
        hosts.close()
    else:
        change = STARTS.get(name)
        if change is not None:
            change(folder)
        follow(one, store=store)
    counts = None if store is None else [store.report().loaded, store.report().compiled]
    return answers, {"compiles": log.compiles.total() - before, "store": counts}


def main(number, folder, coordinator, *ports):
    jax.distributed.initialize(f"127.0.0.1:{coordinator}", 2, number)
    with Server(servable("alone"), devices=jax.local_devices()[:1]) as server:
        wanted = ask(server, "alone")
    found = {"far": 0.0}
    # The second pair of processes is a restart.
    names = ["restarted"] if (folder / KEPT).exists() else list(STARTS)
    for name, port in zip(names, ports, strict=False):
        answers, found[name] = start(name, Hosts(("127.0.0.1", port), b"known to both of them"), folder)
        if answers is not None:
            found["far"] = max(found["far"], difference(answers, wanted))
    print(json.dumps(found))


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]), *map(int, sys.argv[3:]))
