# SPDX-License-Identifier: Apache-2.0
"""Encodes conversations as token ids with a model's own chat template.

Only the template may produce special tokens. A user's text is always encoded as plain text, even if
it spells a special token.
"""

import re
from collections.abc import Callable, Mapping, Sequence

from jinja2.sandbox import ImmutableSandboxedEnvironment

from kvcore_runtime.errors import InvalidMessages

Message = Mapping[str, str]
"""A turn of a conversation: `role` (system, user or assistant) and `content`."""

ROLES = ("system", "user", "assistant")
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' "
    "+ message['content'] + '<|im_end|>' + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
"""The template of models that come without one."""

_SHIELD = "\ue000"
"""A private-use character: marks where user text spells a special token, inside the template."""


class ChatTemplate:
    """A Jinja template, and the special tokens that it writes."""

    def __init__(self, source: str, special: Mapping[str, int]) -> None:
        """special: text to id of every special token of the vocabulary, at least one."""
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        self._template = environment.from_string(source)
        self._special = dict(special)
        longest_first = sorted(special, key=len, reverse=True)
        self._pattern = re.compile("(" + "|".join(map(re.escape, longest_first)) + ")")

    def render(self, messages: Sequence[Message]) -> str:
        """Render a conversation, up to the start of the answer. Raises InvalidMessages."""
        _check(messages)
        return self._template.render(messages=messages, add_generation_prompt=True)

    def encode(
        self, messages: Sequence[Message], encode_plain: Callable[[str], list[int]]
    ) -> list[int]:
        """Return the ids of a conversation, up to the start of the answer. Raises
        InvalidMessages.
        """
        _check(messages)
        shielded = [
            {**message, "content": self._shield(message["content"])} for message in messages
        ]
        text = self.render(shielded)
        ids: list[int] = []
        for part in self._pattern.split(text):
            if part in self._special:
                ids.append(self._special[part])
            elif part:
                ids += encode_plain(part.replace(_SHIELD, ""))
        return ids

    def _shield(self, content: str) -> str:
        """Split every special token's text in two, so that it is not recognised."""
        plain = content.replace(_SHIELD, "")
        return self._pattern.sub(lambda match: match[0][0] + _SHIELD + match[0][1:], plain)


def _check(messages: Sequence[Message]) -> None:
    if not messages:
        raise InvalidMessages(index=0, reason="a conversation needs at least one message")
    for index, message in enumerate(messages):
        if message.get("role") not in ROLES:
            raise InvalidMessages(
                index=index,
                reason=f"role is {message.get('role')!r}, expected one of {ROLES}",
                role=message.get("role"),
            )
        content = message.get("content")
        if not isinstance(content, str) or not content.strip():
            raise InvalidMessages(index=index, reason="content is empty or no string")
