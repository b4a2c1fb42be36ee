"""The bytes of an entry: nothing is handed out, or unpickled, before it was checked."""

import os
import pickle
import stat
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from servax.jit_cache.errors import EntryError, StoreUnsafe
from servax.jit_cache.store import entry
from servax.jit_cache.store.keyfile import Key, config_home, load_or_create

KEY = Key.of(b"k" * 32)
DATA = entry.encode({"fingerprint": {"model": {"code": "abc"}}}, b"payload" * 20, KEY)


def kind_of(data, key=KEY):
    with pytest.raises(EntryError) as caught:
        entry.decode(data, key)
    return caught.value.kind


def test_round_trip():
    header, payload = entry.decode(DATA, KEY)
    assert header == {"fingerprint": {"model": {"code": "abc"}}, "key": KEY.name}
    assert payload == b"payload" * 20


@given(st.integers(0, len(DATA) - 1), st.integers(1, 255))
def test_S1_any_changed_byte_is_found(position, change):
    changed = bytearray(DATA)
    changed[position] ^= change
    with pytest.raises(EntryError):
        entry.decode(bytes(changed), KEY)


@given(st.integers(0, len(DATA) - 1))
def test_S1_any_cut_is_found(length):
    assert kind_of(DATA[:length]) in ("empty", "torn", "foreign")


@given(st.binary(max_size=300))
@settings(max_examples=50)
def test_S1_any_other_file_is_found(data):
    with pytest.raises(EntryError):
        entry.decode(data, KEY)
    with pytest.raises(EntryError):
        entry.decode(DATA + data + b"x", KEY)


def test_kinds():
    assert kind_of(b"") == "empty"
    assert kind_of(DATA[:-1]) == "torn"
    assert kind_of(pickle.dumps([1])) == "foreign"
    assert kind_of(DATA[:40] + b"\0" + DATA[41:]) == "corrupt"
    assert kind_of(DATA, Key.of(b"x" * 32)) == "unsigned"
    assert kind_of(DATA[:-32] + bytes(32)) == "unsigned"
    future = entry.MAGIC + struct.pack(">I", entry.VERSION + 1) + DATA[12:]
    assert kind_of(future) == "future"


def test_an_unsigned_entry_names_both_keys():
    other = Key.of(b"x" * 32)
    with pytest.raises(EntryError, match=f"{other.name}.*{KEY.name}"):
        entry.decode(DATA, other)


def test_peek_reads_a_header_from_few_bytes():
    assert entry.peek(DATA[:30]) is None
    header = entry.peek(DATA[:200])
    assert header is not None
    assert header["key"] == KEY.name


def test_a_key_file_is_made_once_and_private(tmp_path):
    path = tmp_path / "home" / "store.key"
    first = load_or_create(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert load_or_create(path) == first
    assert [one.name for one in path.parent.iterdir()] == ["store.key"]
    assert "secret" not in repr(first)


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660])
def test_a_key_that_others_can_read_is_refused(tmp_path, mode):
    path = tmp_path / "store.key"
    load_or_create(path)
    os.chmod(path, mode)
    with pytest.raises(StoreUnsafe, match=r"mode 0600.*chmod 600"):
        load_or_create(path)


def test_a_damaged_key_is_refused(tmp_path):
    path = tmp_path / "store.key"
    load_or_create(path)
    path.write_text("abc")
    with pytest.raises(StoreUnsafe, match="64 hexadecimal digits"):
        load_or_create(path)


def test_a_key_made_by_a_faster_process_wins(tmp_path, monkeypatch):
    path = tmp_path / "store.key"
    link = os.link

    def too_late(source, target):
        monkeypatch.setattr(os, "link", link)
        faster.append(load_or_create(path))
        link(source, target)

    faster: list[Key] = []
    monkeypatch.setattr(os, "link", too_late)
    assert load_or_create(path) == faster[0]


def test_homes_follow_the_environment(tmp_path):
    assert config_home({"XDG_CONFIG_HOME": str(tmp_path)}) == tmp_path / "servax"
