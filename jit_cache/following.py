"""What a process does that follows another one: it launches what the leader launches. See `hosts`."""

import contextlib
import json
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection
from typing import Any

import jax
import numpy as np

from ..bucketing import Bucket
from .errors import CompileError, SignatureError
from .handshake import reach
from .hosts import Hosts
from .kept import USED_INPUTS, USED_LEAVES
from .packed import PackedServable
from .program import Built, build
from .servable import Servable
from .store import Loaded, Store
from .stored import StoredPrograms

_RETRY_S = 0.2


def follow(*servables: Servable, store: Store | None = None) -> None:
    """Launch what the leader launches until it ends; blocks.

    Args:
        servables: those that the leader serves and that are spread over several processes, made alike.
        store: where this process keeps its parts of the programs, if the leader has a store as well; it may
            be the same. With None all are compiled at every start.

    Raises:
        SignatureError: if none of them is spread so, or this process leads.
        CompileError: if the leader is not there in time.
        Exception: whatever a program raises; the leader's requests fail then.
    """
    hosts = next((one.hosts for one in servables if one.hosts is not None), None)
    if hosts is None or jax.process_index() == 0:
        raise SignatureError(
            f"processes beside the first follow models that are spread over several; this is process "
            f"{jax.process_index()} of {jax.process_count()} with {[one.name for one in servables]}: serve "
            f"them here"
        )
    for one in servables:
        one.place()
    with _reach(hosts) as leader, ThreadPoolExecutor(1, "servax-follow") as compiler:
        _Follower(leader, {one.name: one for one in servables}, compiler, StoredPrograms(store)).run()


def _reach(hosts: Hosts) -> Connection:
    until_s = time.monotonic() + hosts.wait_s
    while True:
        try:
            return reach(hosts.address, hosts.secret)
        except AuthenticationError as error:
            raise CompileError(
                f"the leader at {hosts.address} has the secret of those who follow it; this is another: give "
                f"all the same"
            ) from error
        except OSError as error:  # it listens once it compiles
            if time.monotonic() >= until_s:
                raise CompileError(
                    f"the leader listens at {hosts.address} within {hosts.wait_s:g} s; it does not: {error}: "
                    f"start it, and let the address be reached from here"
                ) from error
            time.sleep(_RETRY_S)


class _Follower:
    """Programs by what names them: model, layout, variant and sizes."""

    def __init__(
        self,
        leader: Connection,
        by_name: Mapping[str, Servable],
        compiler: ThreadPoolExecutor,
        stored: StoredPrograms,
    ) -> None:
        self._leader, self._by_name, self._compiler, self._stored = leader, by_name, compiler, stored
        self._built: dict[str, tuple[Any, list[Any], dict[str, jax.ShapeDtypeStruct]]] = {}

    def run(self) -> None:
        """Until the leader ends."""
        while True:
            try:
                what, *program = json.loads(self._leader.recv_bytes())
                if what == "run":
                    self._launch(str(program))
                    continue
            except (EOFError, OSError):
                return
            # Beside the runs: programs that are ready serve on while others are made.
            self._compiler.submit(self._have, what, *program)

    def _have(self, what: str, made: str, name: str, layout: str, variant: str, sizes: list[int]) -> None:
        problem = ""
        try:
            servable = self._by_name[name]
            if isinstance(servable, PackedServable) and layout != servable.layout:
                servable = servable.padded
            leaves, servable = servable.leaves, servable.as_variant(variant)
            bucket = Bucket(servable.grid.axes, tuple(sizes))
            built, shapes = self._made(what, made, servable, bucket), servable.program_inputs(bucket)
            taken = {one: shapes[one] for one in sorted(built.used_inputs)}
            arguments = [leaves[index] for index in built.used_leaves]
            self._built[str([name, layout, variant, sizes])] = built.executable, arguments, taken
        except Exception as error:  # the leader reports it under the bucket's name
            problem = f"{type(error).__name__}: {error}"
        with contextlib.suppress(OSError):
            asked = [what, made, name, layout, variant, sizes]
            self._leader.send_bytes(json.dumps([asked, problem]).encode())

    def _made(self, what: str, made: str, servable: Servable, bucket: Bucket) -> Built:
        part = self._stored.part(servable, bucket) if made else None
        if what != "load":
            if part is None:
                return build(servable, bucket)
            found: Loaded | None = part.make(made)
        else:
            found = None if part is None else part.load(made)
        if found is None:
            raise CompileError(
                f"a program is loaded where its part is stored; {bucket} of {servable.name!r} is not, in "
                f"process {jax.process_index()}: compile it"
            )
        return Built(found.executable, found.facts[USED_LEAVES], found.facts[USED_INPUTS])

    def _launch(self, program: str) -> None:
        executable, arguments, shapes = self._built[program]
        inputs = {}
        for name, wanted in shapes.items():
            data = np.frombuffer(self._leader.recv_bytes(), np.uint8)
            inputs[name] = data.view(wanted.dtype).reshape(wanted.shape)
        executable(arguments, inputs)
