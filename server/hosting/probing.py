"""The first runs of new programs, on the device thread and through the path that requests take."""

from concurrent.futures import Future

from ...jit_cache import Program, StoredPrograms, WarmupError
from ...jit_cache.device_memory import peak_bytes
from ..batching.device import Probe
from ..batching.dispatcher import Dispatcher
from .model import Model

_TIMEOUT_S = 300.0


class Prober:
    """Has programs run that no request asked for.

    Args:
        dispatcher: takes the runs.
        stored: remembers what they took, if there is a store.
        weigh: whether plans of later starts need to know what runs take of the host's memory.
    """

    def __init__(self, dispatcher: Dispatcher, stored: StoredPrograms | None, *, weigh: bool) -> None:
        self._dispatcher = dispatcher
        self._weighs = weigh and stored is not None and stored.store is not None

    def probe(self, model: Model, program: Program) -> float:
        """Run a new program, which is planned with from there on; seconds of one run.

        Raises:
            WarmupError: if it does not come back in time; otherwise whatever the run raises.
        """
        try:
            seconds = self.trial(model, program, "open")
        except TimeoutError:
            raise WarmupError(
                f"a program is to run within {_TIMEOUT_S:g} s; {program.bucket} did not"
            ) from None
        model.maker.learned(program, seconds)
        if self._weighs and model.servable.platform == "cpu" and model.maker.scratch(program) is None:
            took = peak_bytes(lambda: self.trial(model, program, "trial"))
            if took is not None:
                model.maker.learned_scratch(program, took)
        return seconds

    def trial(self, model: Model, program: Program, purpose: str) -> float:
        """Seconds of one run, for one of the purposes of `Probe`; raises as `probe`."""
        trial = Probe(model, program, Future(), purpose)
        self._dispatcher.post(trial)
        return trial.seconds.result(_TIMEOUT_S)
