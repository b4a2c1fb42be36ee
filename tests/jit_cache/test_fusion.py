"""The fusion report: read from the text of optimized HLO, from this machine's compiler and from others."""

import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from servax.bucketing import Bucket
from servax.jit_cache import Servable, compile_program
from servax.jit_cache.fusion import analyse, inspect_program
from servax.jit_cache.hlo import parse_hlo
from servax.jit_cache.timing import matrix_peak, time_program

# Written by hand in the printed form of a GPU and a TPU program: tiled layouts, library calls, a loop of
# unknown length, a branch, an asynchronous copy, and two lines from a future version.
OTHER = """HloModule jit_f, is_scheduled=true, entry_computation_layout={(f32[8,16]{1,0})->f32[8,4]{1,0}}

FileNames
1 "model.py"

%add (x: f32[], y: f32[]) -> f32[] {
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %sum = f32[] add(f32[] %x, f32[] %y)
}

%fused (p0: bf16[8,16], p1: bf16[16,4]) -> bf16[8,4] {
  %p0 = bf16[8,16]{1,0:T(8,128)(2,1)} parameter(0)
  %p1 = bf16[16,4]{1,0} parameter(1)
  %scaled = bf16[8,16]{1,0} multiply(%p0, %p0)
  ROOT %dot.1 = bf16[8,4]{1,0} dot(%scaled, %p1), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

%body (state: (s32[], f32[8,4])) -> (s32[], f32[8,4]) {
  %state = (s32[], f32[8,4]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%state), index=0
  %value = f32[8,4]{1,0} get-tuple-element(%state), index=1
  %next = s32[] add(%i, %i)
  %grown = f32[8,4]{1,0} negate(%value)
  ROOT %out = (s32[], f32[8,4]{1,0}) tuple(%next, %grown)
}

%condition (state.1: (s32[], f32[8,4])) -> pred[] {
  %state.1 = (s32[], f32[8,4]{1,0}) parameter(0)
  ROOT %go = pred[] constant(true)
}

%cheap (c: f32[8,4]) -> f32[8,4] {
  ROOT %c = f32[8,4]{1,0} parameter(0)
}

%dear (d: f32[8,4]) -> f32[8,4] {
  %d = f32[8,4]{1,0} parameter(0)
  ROOT %e = f32[8,4]{1,0} exponential(%d), metadata={op_name="jit(f)/calls=%nothing"}
}

ENTRY %main (a: f32[8,16], w: bf16[16,4], k: f32[8,4]) -> f32[8,4] {
  %a = f32[8,16]{1,0} parameter(0), sharding={replicated}
  %w = bf16[16,4]{1,0} parameter(1)
  %k = f32[8,4]{1,0} parameter(2)
  %half = bf16[8,16]{1,0} convert(%a)
  %hot = bf16[8,4]{1,0} fusion(%half, %w), kind=kCustom, calls=%fused, backend_config={"fusion_backend_config":{"kind":"__triton_gemm"}}
  %product = (f32[8,4]{1,0}, s8[1024]{0}) custom-call(%a, %w), custom_call_target="__cublas$gemm", backend_config={"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"],"rhs_contracting_dimensions":["0"]}}}
  %first = f32[8,4]{1,0} get-tuple-element(%product), index=0
  %zero = s32[] constant(0)
  %start = (s32[], f32[8,4]{1,0}) tuple(%zero, %first)
  %loop = (s32[], f32[8,4]{1,0}) while(%start), condition=%condition, body=%body
  %looped = f32[8,4]{1,0} get-tuple-element(%loop), index=1
  %which = pred[] constant(false)
  %branch = f32[8,4]{1,0} conditional(%which, %looped, %looped), branch_computations={%cheap, %dear}
  %copying = (f32[8,4]{1,0}, f32[8,4]{1,0}, u32[]) copy-start(%branch)
  %copied = f32[8,4]{1,0} copy-done(%copying)
  %future = f32[8,4]{1,0} @newop%3 <%copied>
  a line of another kind
  ROOT %result = f32[8,4]{1,0} add(%copied, %k)
}
"""  # noqa: E501


def test_other_platforms_text_is_understood_and_strange_lines_are_kept_apart() -> None:
    report = analyse(OTHER)
    assert len(report.unknown_lines) == 2
    assert dict(report.kernels) == {
        "convert": 1, "fusion": 1, "custom-call": 1, "add": 2, "negate": 1, "exponential": 1, "copy-start": 1,
    }  # fmt: skip
    assert dict(report.libraries) == {"triton_gemm": 1, "__cublas$gemm": 1}
    assert report.loops == {"loop": None}
    assert report.matrix_products == 2
    assert report.matrix_flops == 2 * (2 * 8 * 4 * 16)
    (fusion,) = report.fusions
    assert (fusion.kind, fusion.library) == ("kCustom", "triton_gemm")
    assert fusion.operators == {"multiply": 1, "dot": 1}
    assert fusion.saved_bytes == 8 * 16 * 2
    assert report.unfused_kernels == report.launches + 1


def compiled(function: Any, *shapes: Any) -> Any:
    arguments = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    return jax.jit(function).lower(*arguments).compile()


def test_a_chain_of_elementwise_operators_is_one_kernel() -> None:
    report = inspect_program(compiled(lambda x: jnp.tanh(x * x - 3) + x, (64, 32)))
    assert report.launches == 1
    assert report.unfused_kernels >= 4
    # The product and the difference at the least are never written.
    assert report.saved_bytes >= 2 * 64 * 32 * 4
    assert report.bytes_accessed == 2 * 64 * 32 * 4
    assert report.flops >= 4 * 64 * 32
    assert not report.unknown_lines
    assert report.intensity == report.flops / report.bytes_accessed


def test_a_product_of_matrices_counts_two_for_each_multiply_add() -> None:
    report = inspect_program(compiled(lambda a, b: a @ b, (8, 16), (16, 4)))
    assert report.matrix_products == 1
    assert report.matrix_flops == report.flops == 2 * 8 * 16 * 4
    assert report.reported_flops == report.flops


def test_a_custom_call_counts_what_it_declares() -> None:
    said = "backend_config={bytes = 4096 : i64, flops = 12345 : i64}"
    text = (
        "HloModule jit_f\n\nENTRY %main (a: f32[3,8], w: f32[6,8,48]) -> f32[3,48] {\n"
        "  %a = f32[3,8]{1,0} parameter(0)\n  %w = f32[6,8,48]{2,1,0} parameter(1)\n"
        '  ROOT %y = f32[3,48]{1,0} custom-call(%a, %w), custom_call_target="my_matmul", '
    )
    report = analyse(f"{text}{said}\n}}\n")
    assert (report.flops, report.matrix_flops, report.bytes_accessed) == (12345, 12345, 4096)
    plain = analyse(f"{text}api_version=API_VERSION_TYPED_FFI\n}}\n")
    assert plain.flops == 2 * 3 * 48 * 8
    assert plain.bytes_accessed == 4 * (3 * 8 + 6 * 8 * 48 + 3 * 48)


def test_a_convolution_counts_its_window_and_input_features() -> None:
    def convolve(x: Any, kernel: Any) -> Any:
        numbers = ("NWC", "WIO", "NWC")
        return jax.lax.conv_general_dilated(x, kernel, (1,), "SAME", dimension_numbers=numbers)

    report = inspect_program(compiled(convolve, (2, 16, 4), (3, 4, 8)))
    assert report.matrix_flops == 2 * (2 * 16 * 8) * (3 * 4)


@pytest.mark.parametrize("layers", [2, 5])
def test_a_loop_counts_as_often_as_it_runs(layers: int) -> None:
    def scanned(x: Any, weights: Any) -> Any:
        return jax.lax.scan(lambda y, w: (jnp.tanh(y @ w), None), x, weights)[0]

    report = inspect_program(compiled(scanned, (4, 32), (layers, 32, 32)))
    assert list(report.loops.values()) == [layers]
    assert report.matrix_products == layers
    assert report.matrix_flops == layers * 2 * 4 * 32 * 32
    # Each turn reads its own layer and not all of them.
    assert report.bytes_accessed < layers * (6 * 32 * 32 * 4)


def test_rows_of_a_table_are_read_and_not_the_table() -> None:
    def look_up(table: Any, x: Any) -> Any:
        return table[x.astype(jnp.int32)] * 2

    report = inspect_program(compiled(look_up, (1000, 64), (3,)))
    assert report.bytes_accessed < 20 * 3 * 64 * 4


def test_a_program_of_ours_is_inspected_and_timed() -> None:
    servable = Servable(
        lambda w, *, x, mask: jnp.where(mask[..., None], x @ w, jnp.float32(0)).sum(1),
        np.ones((4, 4), np.float32),
        inputs={"x": "float32[length, 4]", "mask": "mask[length]"},
        limits={"length": 8, "batch": 2},
    )
    leaves = [jax.device_put(leaf) for leaf in servable.leaves]
    program = compile_program(servable, Bucket(("batch", "length"), (2, 8)), leaves)
    report = inspect_program(program)
    assert report.matrix_flops == 2 * 2 * 8 * 4 * 4
    assert json.loads(json.dumps(report.to_json(), allow_nan=False))["kernels"] == report.launches
    assert 0 < time_program(program, servable, least_s=0.0) < 30


def test_the_peak_of_this_machine_is_a_rate() -> None:
    assert 1e9 < matrix_peak() < 1e16


@given(st.data())
@settings(max_examples=200, deadline=None)
def test_damaged_text_never_raises(data: st.DataObject) -> None:
    place = data.draw(st.integers(0, len(OTHER)))
    length = data.draw(st.integers(0, 200))
    put = data.draw(st.text(alphabet='(){}[]%=," \n0a', max_size=5))
    text = OTHER[:place] + put + OTHER[place + length :]
    names = ("fused", "body", "dear", "main", "add", "half", "w", "branch")
    for _ in range(data.draw(st.integers(0, 2))):
        text = text.replace("%" + data.draw(st.sampled_from(names)), "%" + data.draw(st.sampled_from(names)))
    report = analyse(text)
    assert report.launches >= 0


@given(st.text(alphabet='(){}[]%=,"\n ENTRY0ab->', max_size=80))
def test_any_text_never_raises(text: str) -> None:
    assert parse_hlo(text) is not None
    assert analyse(text).launches >= 0
