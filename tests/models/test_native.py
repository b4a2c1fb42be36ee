"""What the kernel for panels takes from its machine, and what is served where there is none."""

import ctypes
import functools
import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from servax.models import load, native
from servax.models.errors import KernelUnavailable
from servax.models.native import header, kernel

CACHE = type(functools.cache(lambda: None))


class Version(ctypes.Structure):
    _fields_ = (
        ("struct_size", ctypes.c_size_t),
        ("extension_start", ctypes.c_void_p),
        ("major_version", ctypes.c_int),
        ("minor_version", ctypes.c_int),
    )


KINDS = {
    "size_t": ctypes.c_size_t,
    "int64_t": ctypes.c_int64,
    "int32_t": ctypes.c_int32,
    "XLA_FFI_DataType": ctypes.c_int,
    "void*": ctypes.c_void_p,
    "const struct XLA_FFI_Api*": ctypes.c_void_p,
    "XLA_FFI_Api_Version": Version,
}


@pytest.fixture(scope="module")
def text():
    return (Path(jax.ffi.include_dir()) / "xla" / "ffi" / "api" / "c_api.h").read_text()


@pytest.fixture
def anew(monkeypatch):
    """This machine is looked at anew; then what was known before is known again."""
    for module in [one for name, one in sys.modules.items() if name.startswith(native.__name__)]:
        for name, held in [*vars(module).items()]:
            if isinstance(held, CACHE):
                monkeypatch.setattr(module, name, functools.cache(held.__wrapped__))


@settings(max_examples=50)
@given(kinds=st.lists(st.sampled_from(sorted(KINDS)), min_size=1, max_size=9))
def test_fields_lie_where_c_puts_them(text, kinds):
    fields = {f"field{i}": kind for i, kind in enumerate(kinds)}
    lines = "".join(f"  {kind} {name};  // a {kind};\n" for name, kind in fields.items())
    found = header.parse(f"{text}\nstruct XLA_FFI_Drawn {{\n{lines}}};\n")
    places = [(name, KINDS[kind]) for name, kind in fields.items()]
    wanted = type("Drawn", (ctypes.Structure,), {"_fields_": places})
    assert {name: found.at(f"Drawn.{name}") for name in fields} == {
        name: getattr(wanted, name).offset for name in fields
    }
    assert found.structs["Drawn"].size == ctypes.sizeof(wanted)


def test_fields_move_with_those_before_them(text):
    start = "struct XLA_FFI_Buffer {"
    before, after = (
        header.parse(text),
        header.parse(text.replace(start, f"{start}\n  int64_t one;\n  int two;")),
    )
    assert after.at("Buffer.data") == before.at("Buffer.data") + 16
    assert after.at("CallFrame.args") == before.at("CallFrame.args")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("API_MAJOR 0", "API_MAJOR 1", r"of major version 0, got \(1, "),
        ("define XLA_FFI_API_MAJOR", "define XLA_FFI_MAIN", r"of major version 0, got \(-1, "),
        ("void* data;\n  int64_t rank", "void* numbers;\n  int64_t rank", "have the field Buffer.data"),
        (
            "struct XLA_FFI_ThreadPool_Schedule_Args {",
            "struct XLA_FFI_Hire_Args {",
            "ThreadPool_Schedule_Args",
        ),
        ("XLA_FFI_Extension_Metadata = 1", "XLA_FFI_Extension_Facts = 1", "Extension_Metadata"),
    ],
)
def test_another_interface_is_refused(anew, monkeypatch, caplog, text, old, new, message):
    assert old in text
    monkeypatch.setattr(header, "read", lambda: header.parse(text.replace(old, new)))
    with pytest.raises(KernelUnavailable, match=message):
        kernel._register()
    assert not native.available()


def test_without_llvmlite_the_golden_answers_are_the_same(anew, monkeypatch, golden):
    monkeypatch.setitem(sys.modules, "llvmlite", None)
    monkeypatch.setitem(sys.modules, "llvmlite.binding", None)
    assert not native.available()
    with pytest.raises(KernelUnavailable, match="pip install llvmlite"):
        kernel.tile()
    model = load("minilm")
    assert {type(one["kernel"]) for one in model.params["layers"].values() if "kernel" in one} == {tuple}
    texts, expected = golden
    some = [i for i, one in enumerate(texts) if len(one["input_ids"]) <= 16][:4]
    ids, mask = np.zeros((4, 16), np.int32), np.zeros((4, 16), bool)
    for row, i in enumerate(some):
        tokens = texts[i]["input_ids"]
        ids[row, : len(tokens)], mask[row, : len(tokens)] = tokens, True
    got = jax.jit(model.apply)(model.params, ids=ids, mask=mask)["embedding"]
    assert np.abs(got - expected[some]).max() <= 1e-5


def test_a_kernel_that_gives_other_numbers_is_not_used(anew, monkeypatch, caplog):
    monkeypatch.setattr(kernel, "_register", lambda: None)
    monkeypatch.setattr(
        kernel, "product", lambda x, *args, features, live: jax.numpy.zeros((len(x), features))
    )
    assert not native.available()
    assert not caplog.text

    def broken(*args, features, live):
        raise RuntimeError("INVALID_ARGUMENT: no such kernel")

    kernel._available.cache_clear()
    monkeypatch.setattr(kernel, "product", broken)
    with caplog.at_level(logging.WARNING):
        assert not native.available()
    assert "serving without" in caplog.text


@pytest.fixture(scope="module")
def probed(tmp_path_factory):
    """What `panels_probe` found on four virtual devices, in two processes one after the other."""
    if not native.available():
        pytest.skip("no kernel for panels on this machine")
    folder = tmp_path_factory.mktemp("panels")
    environment = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=4"}
    command = [sys.executable, str(Path(__file__).parent / "panels_probe.py"), str(folder)]

    def run():
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=200, check=False
        )
        assert done.returncode == 0, done.stderr[-3000:]
        return json.loads(done.stdout.splitlines()[-1])

    return run(), run()


def test_first_questions_from_many_threads_have_one_answer(probed):
    for found in probed:
        assert found["available"] == [True] * 8


def test_stored_programs_call_the_kernel_of_the_next_process(probed):
    """Sealed, on one device; two replicas load what was stored for another device."""
    first, second = probed
    assert [first[way]["store"] for way in ("alone", "replicas", "mesh")] == [[0, 1], [1, 0], [0, 1]]
    assert [found["written"].pop("sources") for found in probed] == [["compiled"], ["store"]]
    assert first["written"] == second["written"]
    for way in ("alone", "replicas", "mesh"):
        assert second[way]["store"] == [1, 0]
        assert second[way]["compiles"] == 0
        assert second[way]["bits"] == first[way]["bits"]


def test_replicas_and_a_mesh_answer_as_one_device(probed):
    for found in probed:
        assert found["replicas"]["bits"] == found["alone"]["bits"]
        assert max(found["replicas"]["differences"] + found["mesh"]["differences"]) < 1e-4
