"""The store: compiled programs on disk, found without tracing, checked before they are loaded."""

from .codedigest import CodeDigest, digest_of
from .entry import VERSION
from .fingerprint import Fingerprint, Fingerprinter, explain
from .keyfile import Key, config_home
from .lease import Lease
from .load import STORE, Loaded, load_or_compile
from .program_entry import EntryInfo, StoredProgram
from .report import StoreReport
from .serialize import Codec, Executables
from .store import Store, cache_home
from .trial import TrialResult, run_trial

__all__ = [
    "STORE",
    "VERSION",
    "CodeDigest",
    "Codec",
    "EntryInfo",
    "Executables",
    "Fingerprint",
    "Fingerprinter",
    "Key",
    "Lease",
    "Loaded",
    "Store",
    "StoreReport",
    "StoredProgram",
    "TrialResult",
    "cache_home",
    "config_home",
    "digest_of",
    "explain",
    "load_or_compile",
    "run_trial",
]
