"""Tensors to bytes and back, and events out of bytes that are cut anywhere."""

import itertools
import json

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst
from servax.server.client.errors import BadAnswer
from servax.server.client.events import Deltas, EventReader
from servax.server.client.tensors import decode_outputs, encode_input
from servax.server.datatypes import DATATYPES
from servax.server.errors import BadTensor, ModelError


def there_and_back(array):
    entry, raw = encode_input("x", array)
    head = json.dumps({"outputs": [entry]}).encode()
    return decode_outputs(head + raw, len(head))[1]["x"]


@given(st.data())
def test_every_datatype_survives_bit_for_bit(data):
    dtype = data.draw(st.sampled_from(list(DATATYPES.values())))
    shape = data.draw(npst.array_shapes(min_dims=1, max_dims=3, min_side=0, max_side=4))
    count = int(np.prod(shape)) * dtype.itemsize
    raw = data.draw(st.binary(min_size=count, max_size=count))
    if dtype == np.bool_:
        raw = bytes(byte & 1 for byte in raw)
    array = np.frombuffer(raw, dtype).reshape(shape)
    back = there_and_back(array)
    assert (back.dtype, back.shape, back.tobytes()) == (array.dtype, array.shape, array.tobytes())


def test_layout_and_byte_order_do_not_matter():
    array = np.arange(12, dtype=">f4").reshape(3, 4)
    np.testing.assert_array_equal(there_and_back(array.T), array.T)
    np.testing.assert_array_equal(there_and_back(array[::2, ::-1]), array[::2, ::-1])


def test_texts_survive():
    texts = ["", "a cat", "\u2028 \U0001f638", "x" * 300]
    assert there_and_back(texts).tolist() == texts
    assert there_and_back(np.array([texts[:2], texts[2:]], object)).shape == (2, 2)


@pytest.mark.parametrize("value", [3.0, [[1], [1, 2]], [object()], np.zeros(2, np.complex64)])
def test_what_is_no_tensor_is_refused_before_it_is_sent(value):
    with pytest.raises(BadTensor):
        encode_input("x", value)


def test_outputs_in_json_are_read_too():
    outputs = [
        {"name": "y", "datatype": "BF16", "shape": [1, 2], "data": [1.5, 2.0]},
        {"name": "t", "datatype": "BYTES", "shape": [1], "data": ["hi"]},
    ]
    _, found = decode_outputs(json.dumps({"outputs": outputs}).encode(), None)
    assert found["y"].dtype == ml_dtypes.bfloat16
    assert found["y"].tolist() == [[1.5, 2.0]]
    assert found["t"].tolist() == ["hi"]


@given(st.binary(max_size=60))
def test_junk_is_no_answer(junk):
    with pytest.raises(BadAnswer):
        decode_outputs(junk, None)


def test_an_answer_with_bytes_left_over_is_none():
    entry, raw = encode_input("y", np.zeros((1, 2), np.float32))
    head = json.dumps({"outputs": [entry]}).encode()
    for body in (head + raw + b"x", head + raw[:-1]):
        with pytest.raises(BadAnswer):
            decode_outputs(body, len(head))


def cut(data: bytes, places: list[int]) -> list[bytes]:
    edges = [0, *sorted(place % (len(data) + 1) for place in places), len(data)]
    return [data[a:b] for a, b in itertools.pairwise(edges)]


@given(
    st.lists(st.text(max_size=20), max_size=5),
    st.lists(st.integers(0, 10_000), max_size=8),
    st.sampled_from(["\n", "\r\n"]),
)
def test_events_are_the_same_wherever_the_bytes_are_cut(texts, places, end):
    lines = [f"data: {json.dumps({'text': one}, ensure_ascii=False)}{end}{end}" for one in texts]
    body = f": a comment{end}{end}" + "".join(lines)
    reader = EventReader()
    found = [
        data for part in cut(body.encode("utf-8", "surrogatepass"), places) for data in reader.feed(part)
    ]
    assert [json.loads(one.decode("utf-8", "surrogatepass"))["text"] for one in found] == texts


def test_lines_of_one_event_are_joined():
    assert EventReader().feed(b"data: a\ndata:b\n\n\n\n") == [b"a\nb"]


def test_deltas_of_both_kinds_and_what_comes_with_them():
    deltas = Deltas()
    events = [
        {"choices": [{"delta": {"role": "assistant", "content": ""}}]},
        {"choices": [{"delta": {"content": "hel"}}]},
        {"choices": [{"text": "lo", "finish_reason": "length"}]},
        {"choices": [], "usage": {"prompt_tokens": 2, "completion_tokens": 3}},
    ]
    body = b"".join(b"data: " + json.dumps(one).encode() + b"\n\n" for one in events)
    assert deltas.feed(body) == ["hel", "lo"]
    assert not deltas.done
    assert deltas.feed(b"data: [DONE]\n\n") == []
    assert (deltas.done, deltas.text, deltas.finish_reason) == (True, "hello", "length")
    assert deltas.usage is not None
    assert deltas.usage.completion_tokens == 3


def test_an_error_in_the_middle_of_a_stream_is_raised():
    with pytest.raises(ModelError, match="broke"):
        Deltas().feed(b'data: {"error": {"message": "it broke", "code": "model"}}\n\n')
    with pytest.raises(BadAnswer):
        Deltas().feed(b"data: {}\n\n")
