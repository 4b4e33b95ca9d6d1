"""The tiny random model as a LanguageModel; prompts are token ids."""

import functools

from core.tiny_model import CONFIG, MODEL, params, prompts

from inertiakv_jax import diagnostics, policies
from inertiakv_jax.language_model import LanguageModel

STEPS = 5
(PROMPT,) = prompts((60,))
PROMPT = PROMPT.tolist()  # budget at ratio 0.9: 6

POLICIES = {
    name: policies.by_name(name, 0.9)
    for name in (
        *("inertiakv", "lazy2", "score-free", "vnorm", "recency", "random", "tova", "h2o"),
        *("snapkv", "adakv-ea", "snapkv+inertiakv"),
    )
} | {"full": policies.full()}


@functools.cache
def lm():
    return LanguageModel(
        model=MODEL, params=params(), tokenizer=None, config=CONFIG, eos_token_ids=(), name="tiny"
    )


@functools.cache
def trace():
    """Of all POLICIES."""
    return diagnostics.trace(lm(), PROMPT, list(POLICIES.values()), steps=STEPS)


def run(name):
    """One of the trace's runs."""
    return next(run for run in trace().runs if run.name == name)
