"""Chat messages to a prompt, by the model's own Jinja template, which runs in a sandbox."""

import datetime
import json
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from jinja2 import TemplateError, TemplateSyntaxError, pass_context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from .errors import BadMessages, CheckpointError


def _refuse(message: str) -> NoReturn:
    raise TemplateError(message)


def _to_json(value: Any, indent: int | None = None, **options: Any) -> str:
    # Jinja's own filter writes for HTML: it would turn quotes of a tool's schema into entities.
    return json.dumps(value, ensure_ascii=False, indent=indent, **options)


@pass_context
def _now(_: Any, layout: str) -> str:
    return datetime.datetime.now().strftime(layout)


class ChatTemplate:
    """A model's chat template.

    Attributes:
        source: the template's text.
        marks: what `bos_token` and `eos_token` stand for in it.
    """

    def __init__(self, source: str, *, bos_token: str = "", eos_token: str = "") -> None:
        """Compile the template.

        Raises:
            CheckpointError: it is no Jinja.
        """
        # The options under which Hugging Face templates are written.
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = _now
        try:
            self._template = environment.from_string(source)
        except TemplateSyntaxError as error:
            raise CheckpointError(
                f"a chat template must be Jinja, got {error} in line {error.lineno}: correct chat_template"
            ) from error
        self.source = source
        self.marks = {"bos_token": bos_token, "eos_token": eos_token}

    def render(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True, **variables: Any
    ) -> str:
        """The prompt for these messages, marks included: tokenize it with `encode_rendered`.

        Args:
            messages: each with `role` and `content`, a text or a list of `{"type": "text", "text": ...}`.
            add_generation_prompt: begin the assistant's answer.
            variables: further ones that the template knows, such as `tools`.

        Raises:
            BadMessages: a message is malformed, or the template refuses this conversation.
        """
        if isinstance(messages, str | bytes | Mapping) or not messages:
            raise BadMessages(
                f"messages must be a list of at least one message, got {messages!r}: send "
                '[{"role": "user", "content": "..."}]'
            )
        plain = [_plain(i, message) for i, message in enumerate(messages)]
        given = {**self.marks, **variables, "add_generation_prompt": add_generation_prompt}
        try:
            return str(self._template.render({**given, "messages": plain}))
        except (TemplateError, TypeError, ValueError, ArithmeticError, LookupError) as error:
            raise BadMessages(
                f"messages must be what the model's chat template takes, got {error}: change roles or order"
            ) from error


def _plain(i: int, message: Any) -> dict[str, Any]:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise BadMessages(
            f"each message must be an object with a role, got {message!r} at index {i}: add one"
        )
    content = message.get("content")
    if isinstance(content, list):
        content = "".join(_text(i, part) for part in content)
    if content is not None and not isinstance(content, str):
        raise BadMessages(
            f"content must be a text or a list of text parts, got {type(content).__name__} at index {i}: "
            "send text"
        )
    return {**message, "content": content if content is not None else ""}


def _text(i: int, part: Any) -> str:
    if isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    raise BadMessages(f"a part of content must be of type text, got {kind!r} at index {i}: send text only")
