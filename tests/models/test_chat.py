"""Chat templates run in a sandbox and say what they do not take."""

import datetime

import pytest
from servax.models import BadMessages, ChatTemplate, CheckpointError, tiny

USER = [{"role": "user", "content": "hi"}]


def test_messages_become_a_prompt():
    chat = tiny().chat
    talk = [*USER, {"role": "assistant", "content": "yes"}]
    assert chat.render(talk, add_generation_prompt=False) == (
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nyes<|im_end|>\n"
    )
    assert chat.render(USER).endswith("<|im_end|>\n<|im_start|>assistant\n")


def test_parts_of_text_are_joined_and_other_fields_reach_the_template():
    chat = ChatTemplate(
        "{{ messages[0].content }}|{{ messages[0].name }}|{{ tools | tojson }}|{{ bos_token }}", bos_token="B"
    )
    parts = [{"type": "text", "text": "a<"}, {"type": "text", "text": "b"}]
    got = chat.render([{"role": "user", "content": parts, "name": "n"}], tools=[{"q": "'é'"}])
    assert got == 'a<b|n|[{"q": "\'é\'"}]|B'


def test_blocks_leave_no_blank_lines_and_loops_may_break():
    source = (
        "{% for m in messages %}\n  {% if loop.index > 1 %}\n    {% break %}\n  {% endif %}\n"
        "{{ m.content }}\n{% endfor %}\n"
    )
    assert ChatTemplate(source).render([*USER, *USER]) == "hi\n"


def test_the_date_is_todays():
    assert ChatTemplate("{{ strftime_now('%Y') }}").render(USER) == str(datetime.datetime.now().year)


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([], "at least one message"),
        ("hi", "must be a list"),
        ([{"content": "a"}], "with a role, got .* at index 0"),
        ([*USER, "b"], "at index 1"),
        ([{"role": "user", "content": 3}], "a text or a list of text parts, got int at index 0"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "of type text, got 'image_url' at index 0"),
    ],
)
def test_malformed_messages_are_named(messages, words):
    with pytest.raises(BadMessages, match=words):
        tiny().chat.render(messages)


def test_what_the_template_refuses_is_said():
    refusing = ChatTemplate("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(BadMessages, match="roles must alternate"):
        refusing.render(USER)


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ ''.__class__.__base__.__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ raise_exception.__globals__.json }}",
        "{% for i in range(999999999) %}{% endfor %}",
        "{{ messages[0].absent.deeper }}",
    ],
)
def test_templates_reach_nothing_but_their_variables(source):
    with pytest.raises(BadMessages, match="chat template takes"):
        ChatTemplate(source).render(USER)


def test_a_broken_template_is_named_at_load():
    with pytest.raises(CheckpointError, match=r"must be Jinja, got .* in line 2"):
        ChatTemplate("\n{% for %}")
