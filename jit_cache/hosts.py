"""A model that is spread over the devices of several processes: the first leads, the others follow.

Every process of such a program must launch it, all in one order. So the leader, which serves, tells the
others what it launches and hands them the inputs; they launch the same (`follow`). What a program returns is
gathered in every process, so that the leader has all of it.

The processes know each other by `jax.distributed.initialize`. What the leader tells goes over TCP connections
of its own, which begin with the proof of a shared secret (`handshake`) and are not encrypted: a private
network is assumed. Messages are JSON and raw arrays; nothing is unpickled.
"""

import atexit
import contextlib
import json
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from multiprocessing.connection import Connection
from typing import Any

import jax
import numpy as np

from .errors import CompileError, SignatureError
from .handshake import gather

_SECRET_BYTES = 16
# An error that begins with a status code is the device's and not the model's, as those of the runtime are.
_LOST = "UNAVAILABLE: a model is spread over several processes and one is gone"


class Hosts:
    """The processes of `jax.distributed`, of which process 0 leads.

    Made alike in all of them, and given to the `Placement` of a model. The leader listens from its first
    program on.

    Args:
        address: name and port by which the others reach the leader; not the coordinator's port.
        secret: the same for all, at least 16 bytes.
        wait_s: seconds that the others may take to come, and to compile a program.

    Raises:
        SignatureError: if the secret is short.
    """

    def __init__(self, address: tuple[str, int], secret: bytes, *, wait_s: float = 600.0) -> None:
        if len(secret) < _SECRET_BYTES:
            raise SignatureError(
                f"processes know each other by a secret of at least {_SECRET_BYTES} bytes; got "
                f"{len(secret)}: take secrets.token_bytes(32), the same in all"
            )
        self.address, self.secret, self.wait_s = address, secret, wait_s
        self._order, self._compiles = threading.Lock(), threading.Lock()
        self._others: list[Connection] | None = None
        self._joining: Future[list[Connection]] | None = None
        self._joined_by_s = 0.0
        self._known: dict[str, object] = {}

    @contextlib.contextmanager
    def compiling(
        self, model: str, made_by: object, program: Sequence[Any], where: str, made: str = ""
    ) -> Iterator[None]:
        """Within it the others compile the same program; it ends when they have.

        Args:
            model: its name.
            made_by: the same object for all programs of one version of the model.
            program: what names the program, plain values.
            where: what names it for people.
            made: what the parts of this compile are stored under; empty if they are not.

        Raises:
            SignatureError: if this process does not lead, or another version of the model was served before.
            CompileError: if one of the others is not there in time, or could not compile it.
        """
        with self._asking("compile", model, made_by, program, made) as problems:
            yield
        for problem in filter(None, problems):
            raise CompileError(
                f"every process compiles the same programs; {where} failed in another one: {problem}"
            )

    def load(self, model: str, made_by: object, program: Sequence[Any], made: str) -> str:
        """Have the others load their parts of a program.

        Args:
            model, made_by, program: see `compiling`.
            made: what the parts were stored under.

        Returns:
            Why one of them cannot; empty if all have it now.

        Raises:
            SignatureError, CompileError: as `compiling`.
        """
        with self._asking("load", model, made_by, program, made) as problems:
            pass
        return next(filter(None, problems), "")

    @contextlib.contextmanager
    def _asking(
        self, what: str, model: str, made_by: object, program: Sequence[Any], made: str
    ) -> Iterator[list[str]]:
        """The others do something about a program; once it ends the list has what went wrong in each."""
        problems: list[str] = []
        if self._known.setdefault(model, made_by) is not made_by:
            raise SignatureError(
                f"a model that is spread over several processes stays as long as they run; got another "
                f"version of {model!r}: start them anew with it"
            )
        with self._compiles:  # one after another: what the others answer is read here
            others = self._gathered()
            with self._order:
                self._tell(others, encoded(what, [made, *program]), ())
            try:
                yield problems
            finally:  # also of a program that failed here, or it would be made there while the next one is
                until_s = time.monotonic() + self.wait_s
                problems += [self._heard(other, [what, made, *program], until_s) for other in others]

    def _heard(self, other: Connection, asked: Sequence[Any], until_s: float) -> str:
        """What went wrong there; nothing if nothing did."""
        asked = json.loads(json.dumps(asked))
        try:
            while other.poll(max(0.0, until_s - time.monotonic())):
                answered, problem = json.loads(other.recv_bytes())
                if answered == asked:  # and not one that came too late for an earlier program
                    return str(problem)
            return f"it took longer than {self.wait_s:g} s: raise wait_s"
        except (OSError, EOFError) as error:
            return f"it is gone ({error}): restart all of them"

    def _gathered(self) -> list[Connection]:
        if self._others is not None:
            return self._others
        if jax.process_index() != 0:
            raise SignatureError(
                f"process 0 serves a model that is spread over several, the others follow; this is process "
                f"{jax.process_index()}: call servax.jit_cache.follow(model) here"
            )
        if self._joining is None:
            self._joining, self._joined_by_s = Future(), time.monotonic() + self.wait_s
            joining = threading.Thread(target=self._accept, args=(self._joining,), name="servax-hosts")
            joining.daemon = True
            joining.start()
        try:
            # Once for all programs: those after the first that waited in vain fail at once.
            self._others = self._joining.result(max(0.0, self._joined_by_s - time.monotonic()))
        except TimeoutError:
            raise CompileError(
                f"{jax.process_count() - 1} processes follow the leader at {self.address} within "
                f"{self.wait_s:g} s; not all came: start them together, and call servax.jit_cache.follow "
                f"there"
            ) from None
        except OSError as error:
            self._joining = None
            raise CompileError(
                f"the leader listens at {self.address} for the processes that follow it; it cannot: {error}: "
                f"give all another port"
            ) from error
        # It runs before the barrier of jax.distributed at the end, in which the others are to be.
        atexit.register(self.close)
        return self._others

    def _accept(self, joining: "Future[list[Connection]]") -> None:
        try:
            joining.set_result(gather(self.address, self.secret, jax.process_count() - 1))
        except Exception as error:  # a port that is taken
            joining.set_exception(error)

    def launch(self, program: "Led", arguments: Any, inputs: Mapping[str, np.ndarray]) -> Any:
        """Launch a program in all processes.

        Raises:
            RuntimeError: if one of them is gone.
        """
        with self._order:
            self._tell(self._others, program.told, [inputs[name] for name in program.names])
            return program.executable(arguments, inputs)

    def _tell(self, others: list[Connection] | None, told: bytes, arrays: Sequence[np.ndarray]) -> None:
        if others is None:
            raise RuntimeError(f"{_LOST}: the leader let them go; restart all of them")
        try:
            for other in others:
                other.send_bytes(told)
                for array in arrays:
                    other.send_bytes(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
        except OSError as error:
            raise RuntimeError(f"{_LOST} ({error}): restart all of them") from error

    def close(self) -> None:
        """Let the others end."""
        others, self._others = self._others, None
        for other in others or ():
            with contextlib.suppress(OSError):
                other.close()


class Led:
    """An executable of several processes, as the leader calls it: it is launched in all of them.

    Args:
        hosts: the others.
        executable: its own part.
        program: what names the program, plain values.
        inputs: shape and dtype of each input that it takes.
    """

    def __init__(
        self,
        hosts: Hosts,
        executable: Any,
        program: Sequence[Any],
        inputs: Mapping[str, jax.ShapeDtypeStruct],
    ) -> None:
        self.executable, self._hosts, self._inputs = executable, hosts, inputs
        self.names, self.told = sorted(inputs), encoded("run", program)

    def __call__(self, arguments: Any, inputs: Mapping[str, np.ndarray]) -> Any:
        """Launch it; raises TypeError, before anybody does, if an input does not fit."""
        for name, wanted in self._inputs.items():
            got = inputs[name]
            if tuple(got.shape) != tuple(wanted.shape) or got.dtype != wanted.dtype:
                raise TypeError(
                    f"{name} is {wanted.dtype}{list(wanted.shape)}, got {got.dtype}{list(got.shape)}"
                )
        return self._hosts.launch(self, arguments, inputs)


def encoded(what: str, program: Sequence[Any]) -> bytes:
    """One thing that the leader tells."""
    return json.dumps([what, *program]).encode()


def put_parts(leaf: Any, sharding: Any) -> jax.Array:
    """An array over the devices of several processes, each of which has all of it and puts its own parts."""
    if isinstance(leaf, jax.Array) and leaf.sharding == sharding:  # put there before
        return leaf
    whole = np.asarray(leaf, jax.dtypes.canonicalize_dtype(np.asarray(leaf).dtype))
    return jax.make_array_from_callback(whole.shape, sharding, lambda index: whole[index])
