"""The default language model in a process: the public client, one that leaves, SIGTERM, a second start."""

import json
import signal
from typing import Any

import httpx
import openai
import pytest

# One text at a time: what does not let go of its place is noticed by the next request.
SMALL = ("smollm2", "--max-batch", "1", "--max-length", "256", "--generation-prefill-chunk", "16")
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
ENDLESS = {"model": "smollm2", "prompt": "Once", "max_tokens": 250, "ignore_eos": True, "stream": True}


def ask(url: str) -> tuple[str, str]:
    """The same answer as a stream and whole."""
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        options: Any = {"model": "smollm2", "messages": QUESTION, "temperature": 0.0, "max_tokens": 16}
        chunks = list(client.chat.completions.create(**options, stream=True))
        streamed = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        whole = client.chat.completions.create(**options).choices[0].message.content
        assert chunks[-1].choices[0].finish_reason == "stop"
        text = client.completions.create(
            model="smollm2", prompt="The capital of France is", temperature=0.0, max_tokens=12, stop=["."]
        )
        assert text.choices[0].text == " Paris"
        return streamed, whole


def leave(url: str, after: int) -> None:
    """Begins a long text and goes away."""
    with httpx.stream("POST", f"{url}/v1/completions", json=ENDLESS, timeout=60) as events:
        for seen, _ in enumerate(events.iter_lines()):
            if seen == 2 * after:
                return


@pytest.mark.timeout(600)
def test_smollm2_from_the_command_line(serving: Any) -> None:
    with serving(*SMALL) as first:
        assert set(first.seen_before_ready) == {(200, 503)}
        answer, again = ask(first.url)
        assert answer == again == "The capital of France is Paris."
        leave(first.url, after=3)
        assert ask(first.url)[0] == answer
        metrics = first.metrics()
        made = metrics['servax_compiles_total{phase="warmup"}']
        assert metrics['servax_compiles_total{phase="request"}'] == 0
        left = 'model="smollm2",outcome="cancelled",reason="cancelled",route="completions"'
        assert metrics[f"servax_requests_total{{{left}}}"] == 1
        assert metrics['servax_rows{model="smollm2",state="running"}'] == 0
        assert "KV pool" in first.log.read_text()
    with serving(*SMALL, "--drain-s", "0.5") as second:
        metrics = second.metrics()
        assert metrics['servax_compiles_total{phase="warmup"}'] == 0
        assert metrics['servax_program_loads_total{phase="warmup",source="store"}'] == made > 0
        assert ask(second.url) == (answer, answer)
        with httpx.stream("POST", f"{second.url}/v1/completions", json=ENDLESS, timeout=60) as events:
            lines = (line.removeprefix("data: ") for line in events.iter_lines() if line)
            next(lines)
            second.process.send_signal(signal.SIGTERM)
            last = list(lines)[-1]
        assert json.loads(last)["error"]["code"] == "closed"
        assert second.process.wait(60) == 0
