"""From a peer of the table to a running process."""

import os
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from .environments import environment
from .folders import Weights
from .processes import Process, free_ports
from .table import Peer

_SERVERS = Path(__file__).parent / "servers"


@dataclass(frozen=True)
class Place:
    """What the commands of all peers are filled in with.

    Attributes:
        work: folder of environments, models, logs and our store of programs.
        weights: what peers read.
        python: the interpreter that runs servax.
        threads: processor threads each may compute with.
        more: further words for the commands.
    """

    work: Path
    weights: Weights
    python: str
    threads: int = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 2
    more: Mapping[str, str] = field(default_factory=dict)

    def start(self, peer: Peer, *, pipes: bool = False) -> tuple[Process, int]:
        """Install it if need be and start it.

        Returns:
            The process and the port that it is to listen on.

        Raises:
            ExperimentError: if it cannot be installed.
        """
        folder = environment(peer, self.work)
        port, *others = free_ports(3)
        words = self.words(folder) | {"port": str(port)}
        command = [part.format(**words) for part in peer.start]
        return Process(command, self._env(peer, words, others), self._log(peer), pipes=pipes), port

    def words(self, bin_folder: Path) -> dict[str, str]:
        """The words in braces, but for the port."""
        weights = {name: str(path) for name, path in vars(self.weights).items() if path is not None}
        return {
            **weights,
            "bin": str(bin_folder),
            "servers": str(_SERVERS),
            "python": self.python,
            "python_lib": str(sysconfig.get_config_var("LIBDIR")),
            "store": str(self.work / "store"),
            **self.more,
        }

    def _env(self, peer: Peer, words: Mapping[str, str], ports: list[int]) -> dict[str, str]:
        env = {
            "PYTHONUNBUFFERED": "1",
            "NO_COLOR": "1",
            "OMP_NUM_THREADS": str(self.threads),
            "PEER_THREADS": str(self.threads),
            "PEER_PORT": words["port"],
            "PEER_MORE_PORTS": ",".join(map(str, ports)),
            "PEER_ONNX": str(self.weights.onnx),
            "PEER_ENCODER": str(self.weights.encoder),
            "PEER_TOKENIZER": str(self.weights.encoder / "tokenizer.json"),
        }
        if not peer.environment:
            env.pop("OMP_NUM_THREADS")
        return env | {name: value.format(**words) for name, value in peer.env.items()}

    def _log(self, peer: Peer) -> Path:
        return self.work / "logs" / f"{peer.name}.log"
