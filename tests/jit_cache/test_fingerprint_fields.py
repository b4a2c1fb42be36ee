"""The fields of a fingerprint: an allow-list, compared as a whole, explained line by line."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec
from servax.jit_cache.errors import FingerprintError
from servax.jit_cache.store import Fingerprint, Fingerprinter, explain
from servax.jit_cache.store.environment import cpu_facts, environment_facts, xla_flags


def apply(params, x):
    return x @ params["w"]


def other(params, x):
    return x @ params["w"] * 2


def abstract(*shape, dtype=jnp.float32):
    return {"x": jax.ShapeDtypeStruct(shape, dtype)}


PARAMS = {"w": np.zeros((4, 4), np.float32)}
BASE = Fingerprinter(apply, params=PARAMS).at(abstract(2, 4), bucket={"batch": 2})


def made(code=apply, params=PARAMS, inputs=None, *, at=None, **options):
    inputs = inputs if inputs is not None else abstract(2, 4)
    return Fingerprinter(code, params=params, **options).at(inputs, bucket={"batch": 2}, **(at or {}))


def test_S6_equal_things_have_equal_keys():
    assert made() == BASE
    assert made().digest == BASE.digest
    assert len(BASE.digest) == 64
    assert made(params={"w": np.ones((4, 4), np.float32)}) == BASE
    assert made(params={"w": jax.ShapeDtypeStruct((4, 4), jnp.float32)}) == BASE


@pytest.mark.parametrize(
    ("change", "field"),
    [
        (lambda: made(other), "model.code"),
        (lambda: made(params={"w": np.zeros((4, 5), np.float32)}), "model.params"),
        (lambda: made(params={"w": np.zeros((4, 4), np.float16)}), "model.params"),
        (lambda: made(params={"v": np.zeros((4, 4), np.float32)}), "model.params_tree"),
        (lambda: made(config={"heads": 4}), "model.config"),
        (lambda: made(inputs=abstract(8, 2)), "program.inputs"),
        (lambda: made(inputs=abstract(8)), "program.inputs"),
        (lambda: made(inputs=abstract(2, 4, dtype=jnp.bfloat16)), "program.inputs"),
        (lambda: made(inputs=abstract(2, 4, dtype=jnp.int32)), "program.inputs"),
        (lambda: made(inputs={"y": jax.ShapeDtypeStruct((2, 4), jnp.float32)}), "program.inputs"),
        (lambda: made(at={"variant": "blockwise"}), "program.variant"),
        (lambda: made(at={"outputs": {"y": "float32[4]"}}), "program.outputs"),
        (lambda: made(donated=["x"]), "program.donated"),
        (lambda: made(options={"xla_cpu_enable_fast_math": True}), "program.options"),
        (lambda: made(shardings=PartitionSpec("d")), "placement.shardings"),
    ],
)
def test_C1_every_difference_gives_another_key_and_a_reason(change, field):
    changed = change()
    assert changed != BASE
    assert changed.digest != BASE.digest
    assert field in explain(BASE, changed)


def test_settings_of_jax_count():
    with jax.default_matmul_precision("float32"):
        precise = made()
    assert precise.environment_digest != BASE.environment_digest
    assert explain(BASE, precise).splitlines() == [
        "environment.config.jax_default_matmul_precision",
        "  - null",
        '  + "float32"',
    ]


def test_S6_explain_names_the_function_that_changed():
    assert explain(BASE, made()) == "same key"
    text = explain(BASE, made(other))
    assert f"{__name__}.other: only in +" in text
    assert text.startswith("model.code\n  - ")


def test_only_fields_on_the_list_get_in():
    with pytest.raises(FingerprintError, match=r"a fingerprint has the fields.*hostname.*remove it"):
        Fingerprint({"environment": {"hostname": "here"}})
    with pytest.raises(FingerprintError, match="a fingerprint has the fields"):
        Fingerprint({"secrets": {}})
    with pytest.raises(FingerprintError, match="plain JSON"):
        Fingerprint({"model": {"config": float("nan")}})
    with pytest.raises(FingerprintError, match="plain JSON"):
        Fingerprint({"model": {"config": object()}})


def test_nothing_of_this_machine_but_its_kind_gets_in(monkeypatch, tmp_path):
    monkeypatch.setenv("HOSTNAME", "unmistakable")
    monkeypatch.setenv("PORT", "54321")
    monkeypatch.chdir(tmp_path)
    text = json.dumps(made().fields)
    assert made() == BASE
    for word in ("unmistakable", "54321", str(tmp_path), "0x"):
        assert word not in text


def test_a_key_survives_json():
    assert Fingerprint(json.loads(json.dumps(BASE.fields))) == BASE
    assert Fingerprint({"program": {"bucket": {"batch": 1}, "donated": ("a",)}}) == Fingerprint(
        {"program": {"donated": ["a"], "bucket": {"batch": 1}}}
    )


def test_environment_says_what_runs_programs():
    facts = environment_facts(jax.devices()[0])
    assert facts["jax"] == jax.__version__
    assert facts["platform"] == "cpu"
    assert facts["cpu"]["features"]
    assert facts["cpu_threads"] >= 1
    assert facts["config"]["jax_enable_x64"] in (True, False)
    json.dumps(facts)


def test_flags_that_only_write_files_do_not_count():
    first = {"XLA_FLAGS": "--xla_dump_to=here --xla_cpu_enable_fast_math=true --xla_a=1"}
    second = {"XLA_FLAGS": "--xla_a=2 --xla_a=1 --xla_cpu_enable_fast_math=true"}
    second["XLA_FLAGS"] += " --xla_force_host_platform_device_count=8"
    assert xla_flags(first) == xla_flags(second) == {"--xla_a": "1", "--xla_cpu_enable_fast_math": "true"}
    assert xla_flags({"XLA_FLAGS": '--xla_a="open'}) == {"--xla_a": '"open'}
    assert xla_flags({}) == {}


INTEL = """processor\t: 0
vendor_id\t: GenuineIntel
cpu family\t: 6
model\t\t: 85
model name\t: Something 8175M @ 2.50GHz
stepping\t: 4
microcode\t: {microcode}
cpu MHz\t\t: {mhz}
flags\t\t: fpu {extra} sse4_2 avx2 fma avx512f

processor\t: 1
flags\t\t: fpu
"""


def test_two_machines_of_one_kind_look_alike():
    one = cpu_facts(INTEL.format(microcode=1, mhz=2500, extra="hypervisor"), "x86_64")
    two = cpu_facts(INTEL.format(microcode=2, mhz=3100, extra="constant_tsc"), "x86_64")
    assert one == two
    assert one["features"] == ["avx2", "avx512f", "fma", "sse4_2"]
    assert one["model"] == ["GenuineIntel", "6", "85"]
    assert cpu_facts(INTEL.format(microcode=1, mhz=1, extra="amx_tile"), "x86_64") != one
    arm = cpu_facts("Features : fp asimd sve\nCPU implementer : 0x41\nCPU part : 0xd40\n", "aarch64")
    assert arm == {"machine": "aarch64", "model": ["0x41", "0xd40"], "features": ["asimd", "fp", "sve"]}
    assert cpu_facts("", "x86_64")["features"] == []
