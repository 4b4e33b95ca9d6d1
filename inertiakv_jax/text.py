"""Prompts to token ids, and tokens back to text as they come in."""

from collections.abc import Mapping, Sequence, Sized
from dataclasses import replace
from typing import Any

import numpy as np

from inertiakv_jax.language_model import LanguageModel
from inertiakv_jax.policy import Policy
from inertiakv_jax.prefill_method import KVZIP

Prompt = str | Sequence[Mapping[str, str]] | Sequence[int] | np.ndarray
"""A text, a chat (dicts with "role" and "content"), or token ids taken as they are."""


def encode_prompts(
    lm: LanguageModel, prompts: Sequence[Prompt], answer_prefix: str = ""
) -> list[list[int]]:
    """Token ids of each prompt; see ``stream`` for what a prompt may be.

    Raises:
      ValueError: a bare string for the batch, an empty batch or prompt, ids outside the
        vocabulary, or a chat for a model without a template.
    """
    if isinstance(prompts, str):
        raise ValueError("prompts must be a list of prompts, got one string; write [prompt]")
    if not isinstance(prompts, Sized) or isinstance(prompts, Mapping):
        raise ValueError(f"prompts must be a list of prompts, got a {type(prompts).__name__}")
    if any(isinstance(prompt, Mapping) for prompt in prompts):
        raise ValueError("prompts must be a list of prompts, got one chat; write [chat]")
    if len(prompts) == 0:
        raise ValueError("the batch is empty: give at least one prompt")
    rows = []
    for index, prompt in enumerate(prompts):
        try:
            ids = _encode(lm, prompt, answer_prefix)
        except ValueError as error:
            raise ValueError(f"prompt {index}: {error}") from error
        if not ids:
            raise ValueError(f"prompt {index} is empty")
        vocabulary = lm.config.vocab_size
        if min(ids) < 0 or max(ids) >= vocabulary:
            raise ValueError(
                f"prompt {index} has token ids {min(ids)} .. {max(ids)}, outside the vocabulary "
                f"0 .. {vocabulary - 1}"
            )
        rows.append(ids)
    return rows


def _encode(lm: LanguageModel, prompt: Prompt, answer_prefix: str) -> list[int]:
    if isinstance(prompt, str):
        if not prompt:
            return []
        _check_unicode(prompt + answer_prefix)
        return list(lm.tokenizer(prompt + answer_prefix)["input_ids"])
    if not isinstance(prompt, Sized) or isinstance(prompt, bytes):
        raise ValueError(f"expected a text, a chat or a list of token ids, got {prompt!r:.80}")
    if len(prompt) and isinstance(prompt[0], Mapping):
        text = lm.chat_prompt(prompt) + answer_prefix  # pyright: ignore[reportArgumentType]
        _check_unicode(text)
        return list(lm.tokenizer(text, add_special_tokens=False)["input_ids"])
    array = np.asarray(prompt)
    if array.ndim != 1 or (array.size and not np.issubdtype(array.dtype, np.integer)):
        raise ValueError(f"token ids must be a flat list of integers, got {prompt!r:.80}")
    ids = array.tolist()
    if ids and answer_prefix:
        _check_unicode(answer_prefix)
        ids += lm.tokenizer(answer_prefix, add_special_tokens=False)["input_ids"]
    return ids


def with_repetition(policy: Policy, lm: LanguageModel) -> Policy:
    """``policy`` with the token ids by which KVzip asks this model to repeat the prompt.

    They end as the model's chat template ends a question, or with a line break if it has none.
    Any other policy comes back as it is. Source of the wording: KVzip, arXiv 2505.23416.
    """
    method = policy.prefill
    if method is None or method.scorer != KVZIP or method.repeat_first:
        return policy

    def encode(text: str) -> tuple[int, ...]:
        return tuple(lm.tokenizer(text, add_special_tokens=False)["input_ids"])

    suffix = "\n"
    if lm.tokenizer.chat_template:
        mark = "\n##mark##"
        suffix = lm.chat_prompt([{"role": "user", "content": f"text{mark}"}]).partition(mark)[2]
    requests = replace(
        method,
        repeat_first=encode("\n\nRepeat the previous context exactly."),
        repeat_next=encode("\n\nRepeat the part of the previous context exactly, starting with"),
        repeat_suffix=encode(suffix),
    )
    return replace(policy, prefill=requests)


def _check_unicode(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"the text is not valid Unicode: {error}") from error


class RowText:
    """The text of one row as its tokens come in."""

    def __init__(self, tokenizer: Any, stop: Sequence[str]):
        self.tokens: list[int] = []
        self.text = ""
        self.done = False
        self._tokenizer = tokenizer
        self._stop = stop
        self._shown = 0

    def push(self, tokens: Sequence[int], *, end: bool = False) -> str:
        """Add tokens and return the text that is certain by now.

        Held back until more comes, or ``end``: the bytes of a character not yet complete, and
        what may be the beginning of a stop string.
        """
        if not self.done:
            self.tokens.extend(tokens)
            self.text = self._decoded()
            if any(s in self.text for s in self._stop):
                self._end_at_stop(len(tokens))
        certain = len(self.text) if end or self.done else self._certain_length()
        new = self.text[self._shown : certain]
        self._shown = max(self._shown, certain)
        return new

    def _end_at_stop(self, new: int) -> None:
        """Cut text and tokens where the first of the new tokens completes a stop string.

        What follows depends on how many tokens came at once, and is none of the answer.
        """
        tokens = self.tokens
        for count in range(len(tokens) - new + 1, len(tokens) + 1):
            self.tokens = tokens[:count]
            self.text = self._decoded()
            found = [place for s in self._stop if (place := self.text.find(s)) >= 0]
            if found:
                self.text = self.text[: min(found)]
                self.done = True
                return

    def _decoded(self) -> str:
        return self._tokenizer.decode(self.tokens, skip_special_tokens=True)

    def _certain_length(self) -> int:
        text = self.text.rstrip("\ufffd")  # what the tokenizer shows for an incomplete character
        held = max(
            (size for s in self._stop for size in range(1, len(s)) if text.endswith(s[:size])),
            default=0,
        )
        return len(text) - held
