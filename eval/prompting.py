"""From an example to token ids: chat template, answer prefix, and what a long prompt loses."""

import dataclasses
from typing import Any

from inertiakv_jax.eval.tasks.task import Example, Truncation
from inertiakv_jax.language_model import LanguageModel

_TRIES = 8
"""Cuts until a prompt fits: text cut by tokens may have some more once it is encoded again."""


@dataclasses.dataclass(frozen=True)
class Prompting:
    """How a model is asked.

    Attributes:
      lm: gives the tokenizer and the chat template.
      chat: False leaves the chat template out everywhere.
      max_prompt_tokens: longest prompt of tasks that cut their middle, counted before the chat
        template as in the official scripts; None is what the model has room for.
    """

    lm: LanguageModel
    chat: bool = True
    max_prompt_tokens: int | None = None

    @property
    def uses_template(self) -> bool:
        """Whether there is a chat template, and it is wanted."""
        return self.chat and bool(self.lm.tokenizer.chat_template)

    @property
    def template_tokens(self) -> int:
        """Tokens that the chat template adds to a prompt."""
        if not self.uses_template:
            return 0
        return len(self._wrapped_ids("x", "")) - self.count_tokens("x")

    def count_tokens(self, text: str) -> int:
        """Length of a text, without special tokens."""
        return len(self._ids(text, special=False))

    def encode(self, example: Example) -> list[int]:
        """Token ids of the prompt, up to where the answer begins.

        Raises:
          ValueError: prompt and answer exceed the model's positions and the task does not say
            what may be cut.
        """
        room = self.lm.model.max_positions - example.max_new_tokens
        prompt = example.prompt
        if example.truncation is not None:
            limit = room - self.template_tokens if example.chat else room
            limit = min(limit, self.max_prompt_tokens or limit)
            prompt = shortened(self.lm.tokenizer, prompt, limit, example.truncation)
        ids = self._example_ids(example, prompt)
        for _ in range(_TRIES):
            if len(ids) <= room:
                return ids
            if example.truncation is None:
                break
            limit -= len(ids) - room
            prompt = shortened(self.lm.tokenizer, example.prompt, limit, example.truncation)
            ids = self._example_ids(example, prompt)
        raise ValueError(
            f"{example.key}: a prompt of {len(ids)} tokens and {example.max_new_tokens} new ones "
            f"exceed the model's {self.lm.model.max_positions} positions"
        )

    def _example_ids(self, example: Example, prompt: str) -> list[int]:
        if example.chat and self.uses_template:
            return self._wrapped_ids(prompt, example.answer_prefix)
        return self._ids(prompt + example.answer_prefix, special=True)

    def _wrapped_ids(self, prompt: str, prefix: str) -> list[int]:
        text = self.lm.chat_prompt([{"role": "user", "content": prompt}]) + prefix
        return self._ids(text, special=False)  # the template has written them out

    def _ids(self, text: str, *, special: bool) -> list[int]:
        return list(self.lm.tokenizer(text, add_special_tokens=special)["input_ids"])


def shortened(tokenizer: Any, prompt: str, limit: int, truncation: Truncation) -> str:
    """Cut the middle out of a prompt of more than ``limit`` tokens.

    "halves" decodes the first and last ``limit // 2`` tokens on their own, as LongBench does;
    "ends" decodes what is left in one go, as LongBench-v2 does.

    Raises:
      ValueError: ``limit`` below 2.
    """
    if limit < 2:
        raise ValueError(f"no room for a prompt: {limit} tokens are left for it")
    ids = list(tokenizer(prompt)["input_ids"])
    if len(ids) <= limit:
        return prompt
    half = limit // 2
    if truncation == "halves":
        parts = ids[:half], ids[-half:]
    else:
        parts = (ids[:half] + ids[half - limit :],)
    return "".join(tokenizer.decode(part, skip_special_tokens=True) for part in parts)
