"""What a start of a language model makes, loads, plans and allocates."""

from dataclasses import replace

import numpy as np
import pytest
from servax.jit_cache import ProgramFacts
from servax.jit_cache.errors import MemoryPlanError
from servax.jit_cache.store import Store
from servax.server.errors import Unavailable
from servax.server.generation import GenerationServer, SamplingParams, api
from servax.server.generation.pool_plan import plan_pool, rounded_down
from servax.server.generation.programs import Key, Programs, Shapes
from servax.server.generation.rows import LENGTH
from servax.server.generation.seam import SINK_PAGE

SMALL = {
    "page_size": 8,
    "max_rows": 2,
    "prefill_buckets": ((1, 8),),
    "mixed_buckets": (),
    "decode_rows": (2,),
}
PARAMS = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
MIB = 1 << 20


@pytest.fixture(scope="module")
def open_store(tmp_path_factory):
    """One store for all, so that programs are compiled once."""
    folder = tmp_path_factory.mktemp("store")
    for name in ("programs", "home"):
        (folder / name).mkdir(mode=0o700)
    return lambda: Store.open(folder / "programs", home=folder / "home")


def test_S7_a_second_start_compiles_nothing(tiny, open_store, compiles):
    steps = []
    with GenerationServer(tiny, pages=28, store=open_store(), **SMALL) as first:
        expected = first.generate([5, 6, 7], PARAMS).ids
        assert {one.facts.source for one in first.report.warm} == {"compiled"}
    with compiles.none():
        options = {"seal": True, "on_progress": lambda name, step: steps.append((name, step))}
        with GenerationServer(tiny, pages=28, store=open_store(), name="other", **options, **SMALL) as second:
            assert second.generate([5, 6, 7], PARAMS).ids == expected
            assert {one.facts.source for one in second.report.warm} == {"store"}
            assert second.warm
            pool = second.engine.programs.kv_bytes
            stepping = [key for key in second.engine.programs.compiled if key.rows]
            assert min(second.engine.programs.alias_bytes[key] for key in stepping) >= pool, (
                "as it was stored"
            )
    assert [name for name, _ in steps] == ["other"] * 5
    assert [step.done for _, step in steps] == [1, 2, 3, 4, 5]
    assert all(step.total == 5 and step.error is None for _, step in steps)


class Measured(Programs):
    """Programs whose compiler says what the test wants."""

    def compile(self, key):
        self.facts[key] = ProgramFacts(1.0, 1.0, 1.0, 0, self.kv_bytes + 5 * MIB, 40 * MIB, 1 * MIB)
        self.compiled[key], self.alias_bytes[key] = None, self.kv_bytes
        return 0.0


KEYS = [Key("zeros"), Key("prefill", 1, 8), Key("prefill", 4, 1), Key("decode", 2, 1)]
SHAPES = Shapes(pages=60, page_size=8, width=64, slots=4, biases=4, tops=3)


def test_programs_of_other_pages_have_other_keys(tiny):
    key = Key("decode", 2, 1)
    one, same, other = (
        Programs(tiny, replace(SHAPES, pages=pages)).recipe(key).fingerprint() for pages in (20, 20, 21)
    )
    assert one == same
    assert one.digest != other.digest


def test_W6_the_pool_takes_what_fits(tiny):
    programs = Measured(tiny, SHAPES)
    roomy = plan_pool(programs, KEYS, budget_bytes=400 * MIB, depth=2)
    assert roomy.pages == 60
    assert set(programs.facts) == {Key("prefill", 1, 8), Key("decode", 2, 1)}, "only those that need most"
    beside = roomy.programs
    assert (beside.temp_bytes, beside.outputs_bytes, beside.code_bytes) == (40 * MIB, 10 * MIB, 4 * MIB)
    fixed = roomy.need_bytes - 60 * roomy.page_bytes
    tight = plan_pool(programs, KEYS, budget_bytes=fixed + 30 * roomy.page_bytes, depth=2)
    assert tight.pages == 28, "30 fit, rounded to three bits"
    assert tight.need_bytes <= fixed + 30 * roomy.page_bytes
    assert "28 pages of 8 tokens" in tight.explain()
    with pytest.raises(MemoryPlanError, match=r"a page of the KV pool must fit; they need .* MiB of"):
        plan_pool(programs, KEYS, budget_bytes=fixed, depth=2)
    assert programs.params is None, "nothing was put on the device"


def test_W6_a_server_whose_pool_does_not_fit_gets_a_smaller_one(tiny, monkeypatch, open_store):
    def smaller(programs, keys, *, budget_bytes, depth):
        plan = plan_pool(Measured(tiny, programs.shapes), keys, budget_bytes=budget_bytes * MIB, depth=depth)
        return replace(plan, pages=28)

    monkeypatch.setattr(api, "plan_pool", smaller)
    plans = []
    options = {"memory_bytes": lambda: 400, "on_plan": lambda name, plan: plans.append((name, plan.pages))}
    with GenerationServer(tiny, pages=60, store=open_store(), **options, **SMALL) as server:
        assert plans == [("tiny", 28)]
        assert server.options["pages"] == 28
        assert server.engine.books.pool.size == 26
        assert len(server.generate([5, 6], PARAMS).ids) == 12
        with pytest.raises(ValueError, match="at most 209 tokens, what the page pool holds"):
            server.generate([5] * 300)


def test_W6_one_that_fits_nowhere_says_so(tiny, monkeypatch):
    def refuse(*_, **__):
        raise MemoryPlanError("weights must fit; they do not: give it more memory")

    monkeypatch.setattr(api, "plan_pool", refuse)
    server = GenerationServer(tiny, memory_bytes=1, **SMALL).start()
    with pytest.raises(Unavailable, match="0 of 5 programs are: weights must fit; they do not: give it more"):
        server.wait_ready(60)
    assert (server.live, server.ready, server.status()["state"]) == (True, False, "failed")
    server.close()


@pytest.mark.parametrize(
    ("pages", "kept"), [(3, 3), (7, 7), (8, 8), (9, 8), (30, 28), (514, 512), (1000, 896)]
)
def test_pages_are_rounded_to_three_bits(pages, kept):
    assert rounded_down(pages) == kept


def test_W2_a_program_that_fails_is_named(tiny, open_store):
    steps = []
    options = {"pages": 28, "store": open_store(), "on_progress": lambda _, step: steps.append(step)}
    server = GenerationServer(tiny, **options, **SMALL)
    server.engine.programs.step = lambda *_: 1 / 0
    server.start()
    with pytest.raises(Unavailable, match=r"3 of 5 programs are: prefill 1x8: ZeroDivisionError"):
        server.wait_ready(120)
    assert server.status()["failed"] == {"tiny prefill 1x8": "ZeroDivisionError: division by zero"}
    assert (steps[-1].error, steps[-1].failed) == ("ZeroDivisionError: division by zero", 1)
    assert server.wait_over(20)
    assert server.lost
    server.close()


def test_a_step_is_timed_with_a_token_in_every_place(tiny, monkeypatch):
    """A program may leave out what is padded; and nothing but the sink is written."""
    ran, step = {}, Programs.step

    def recorded(self, key, inputs):
        ran.setdefault(key, {name: value.copy() for name, value in inputs.items()})
        return step(self, key, inputs)

    monkeypatch.setattr(Programs, "step", recorded)
    buckets = {"mixed_buckets": ((2, 8),), "prefill_buckets": ((1, 8),)}
    with GenerationServer(tiny, pages=28, **SMALL | buckets) as server:
        pool = server.engine.programs.state["kv"]
        assert not any(np.asarray(leaf[:, :SINK_PAGE]).any() for leaf in pool.values())
        assert not any(np.asarray(leaf[:, SINK_PAGE + 1 :]).any() for leaf in pool.values())
        first = server.generate([5, 6, 7], PARAMS).ids
        assert first == server.generate([5, 6, 7], PARAMS).ids
    assert {key.kind for key in ran} >= {"decode", "prefill", "mixed"}
    for key, inputs in ran.items():
        lengths = inputs["ints"][:, LENGTH]
        assert (inputs["page_table"] == SINK_PAGE).all()
        tokens = {"mixed": key.rows + key.chunk, "decode": key.rows, "prefill": key.rows * key.chunk}
        assert lengths.sum() == tokens[key.kind]
        if key.kind == "mixed":
            assert (inputs["further"][1] == 0).all()
            assert lengths[0] == 1 + key.chunk
