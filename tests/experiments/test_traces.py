import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from servax.experiments.errors import ExperimentError, UnknownTrace
from servax.experiments.traces import NAMES, TEXT_LIMIT, Trace, load_texts, load_trace

ROWS = {
    "azure_llm_2023_conv": 19366,
    "azure_llm_2023_code": 8819,
    "mooncake_fast25_conversation": 12031,
    "mooncake_fast25_synthetic": 3993,
    "vidur_arxiv_summarization_lengths": 28257,
    "servegen_m-small_draw": 32300,
    "texts": 4438,
    "embed_lengths": 37913,
}


@pytest.mark.parametrize("name", NAMES)
def test_every_packaged_trace_loads(name: str) -> None:
    trace = load_trace(name)
    assert len(trace) == ROWS[name]
    assert trace.lengths.min() >= 1
    assert trace.lengths.max() <= trace.limit
    assert trace.limit & (trace.limit - 1) == 0
    if trace.arrivals_s is not None:
        assert (np.diff(trace.arrivals_s) >= 0).all()
    fit, test = trace.halves()
    assert len(fit) + len(test) == len(trace)
    assert np.concatenate([fit.lengths, test.lengths]).tolist() == trace.lengths.tolist()


def test_another_column_and_names_that_do_not_exist() -> None:
    assert load_trace("azure_llm_2023_conv", column="output_tokens").lengths.max() == 1000
    with pytest.raises(UnknownTrace, match="azure_llm_2023_conv"):
        load_trace("nope")
    with pytest.raises(UnknownTrace, match="has the columns arrival_s, prompt_tokens, output_tokens"):
        load_trace("azure_llm_2023_conv", column="words")


def test_texts_are_shuffled_by_seed_and_keep_their_licence() -> None:
    texts = load_texts(seed=1)
    assert [text.text for text in texts] == [text.text for text in load_texts(seed=1)]
    assert [text.text for text in texts] != [text.text for text in load_texts(seed=2)]
    assert all(text.licence.startswith("CC") for text in texts)
    lengths = [min(text.tokens, TEXT_LIMIT) for text in texts]
    assert load_trace("texts", seed=1).lengths.tolist() == lengths


@given(st.lists(st.integers(1, 500), min_size=1, max_size=20), st.floats(0.01, 3))
def test_scaled_lengths_stay_admissible(lengths: list[int], factor: float) -> None:
    scaled = Trace("t", np.array(lengths), 500).scaled(factor)
    assert scaled.lengths.min() >= 1
    assert scaled.lengths.max() <= scaled.limit


def test_another_rate_keeps_the_bursts() -> None:
    trace = Trace("t", np.array([1, 1, 1, 1]), 1, np.array([5.0, 5.0, 6.0, 9.0]))
    assert trace.at_rate(2.0, seed=0).arrivals_s == pytest.approx([0.0, 0.0, 0.5, 2.0])
    drawn = Trace("t", np.ones(1000, np.int64), 1).at_rate(50.0, seed=3)
    assert drawn.arrivals_s is not None
    assert drawn.arrivals_s[-1] == pytest.approx(20.0)
    for wrong in (0.0, -1.0):
        with pytest.raises(ExperimentError, match="above 0"):
            trace.at_rate(wrong, seed=0)
        with pytest.raises(ExperimentError, match="above 0"):
            trace.scaled(wrong)
