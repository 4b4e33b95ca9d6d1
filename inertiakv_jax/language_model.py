"""A loaded model: everything that turns text into text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jax.sharding import Mesh

from inertiakv_jax.config import ModelConfig
from inertiakv_jax.typing import Model, Params


@dataclass(frozen=True)
class LanguageModel:
    """A decoder, its parameters and its tokenizer, as ``load`` returns them.

    Attributes:
        model: the decoder (``models.decoder.DecoderModel``); hashable, static under jit.
        params: its parameters, a nested dict of arrays on the default device or over ``mesh``.
        tokenizer: a fast tokenizer of transformers.
        config: sizes and constants of the decoder.
        eos_token_ids: tokens that end a text, in order of declaration; may be empty.
        name: what ``load`` was given.
        mesh: devices that share each step, as ``load`` was given it; None for one.
    """

    model: Model
    params: Params
    tokenizer: Any
    config: ModelConfig
    eos_token_ids: tuple[int, ...]
    name: str
    mesh: Mesh | None = None

    def chat_prompt(self, messages: Sequence[Mapping[str, str]]) -> str:
        """Render a chat with the model's own template, up to where its answer begins.

        The template writes the special tokens out, the first one included: encode the text with
        ``add_special_tokens=False``.

        Args:
            messages: dicts with "role" ("system", "user" or "assistant") and "content".

        Raises:
            ValueError: there are no messages, one of them is none, the model has no chat template,
                or its template refuses them.
        """
        if not messages:
            raise ValueError("messages is empty; a chat needs at least one message")
        for message in messages:  # a template shows what is missing as nothing
            if not isinstance(message, Mapping) or not all(
                isinstance(message.get(key), str) for key in ("role", "content")
            ):
                raise ValueError(
                    f'a message must have strings "role" and "content", got {message!r:.80}'
                )
        if not self.tokenizer.chat_template:
            raise ValueError(f"{self.name} has no chat template; give it plain text instead")
        from jinja2 import TemplateError

        try:
            return self.tokenizer.apply_chat_template(
                list(messages), tokenize=False, add_generation_prompt=True
            )
        except TemplateError as error:  # its own refusal (of a system message, say), or broken
            raise ValueError(f"the chat template of {self.name} fails: {error}") from error
