r"""An adapter for lm-evaluation-harness: its tasks, with a KV cache that is thinned out.

lm-eval finds models only in its own package, so this module registers one and hands over:

    python -m inertiakv_jax.eval.lm_eval_model --model inertiakv \
        --model_args model=smollm2-135m,policy=lazy4,ratio=0.9 --tasks gsm8k

Of several devices, ``mesh=data=2+model=4``: lm-eval would split the arguments at a comma.
Requests of type generate_until and loglikelihood are answered; a continuation is scored token by
token, each after the cache was thinned out by the steps before it. Needs the extra 'lm-eval'.
"""

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from inertiakv_jax import policies
from inertiakv_jax.decode_step import step
from inertiakv_jax.eval import continuation
from inertiakv_jax.language_model import LanguageModel
from inertiakv_jax.policy import Policy
from inertiakv_jax.prefilling import prefill
from inertiakv_jax.prompt_input import filled_up
from inertiakv_jax.sharding import layout, make_mesh, on_mesh
from inertiakv_jax.state import KVState

NAME = "inertiakv"
CHUNK = 16
"""Steps of one program while a continuation is scored."""


def loglikelihoods(
    lm: LanguageModel,
    context: Sequence[int],
    continuations: Sequence[Sequence[int]],
    policy: Policy,
) -> list[tuple[float, bool]]:
    """Score continuations of one context, which is read once.

    Args:
      lm: the model; on a mesh the context is repeated until axis "data" divides its rows.
      context: token ids, at least one.
      continuations: token ids of each, at least one.
      policy: thins out the cache from the second token of a continuation on.

    Returns:
      Of each, the sum of log probabilities (natural, float32) of its tokens, and whether each of
      them is the most likely one.

    Raises:
      ValueError: an empty context or continuation, or more tokens than the model has positions.
    """
    if not context or not all(continuations):
        raise ValueError("a context and each continuation need at least one token")
    longest = max(map(len, continuations))
    room = lm.model.max_positions - len(context)
    # Whole chunks are decoded, whatever the continuation's length.
    new_tokens = min(1 + -(-longest // CHUNK) * CHUNK, max(room, longest))
    tokens, lengths = filled_up(
        np.asarray([context], np.int32), np.asarray([len(context)]), lm.mesh
    )
    state, logits = prefill(
        *(lm.model, lm.params, tokens, lengths, policy),
        max_new_tokens=max(new_tokens, 1),
        mesh=lm.mesh,
    )
    found = []
    for ids in continuations:
        rows = [logits[:1], *_following_logits(lm, state, ids, policy)]
        targets = jnp.asarray(ids, jnp.int32)
        log_probability, greedy = _score(jnp.concatenate(rows)[: len(ids)], targets)
        found.append((float(log_probability), bool(greedy)))
    return found


def _following_logits(
    lm: LanguageModel, state: KVState, ids: Sequence[int], policy: Policy
) -> Iterator[Array]:
    """[n, V] logits after each token but the last, some at the end for padding."""
    given = list(ids[:-1])
    steps = functools.partial(_steps, lm.model, lm.params, policy=policy, mesh=lm.mesh)
    if given and state.kept_slots is not None:
        first = jnp.asarray(given[:1], jnp.int32)
        state, logits = _first_step(lm.model, lm.params, state, first, policy=policy, mesh=lm.mesh)
        yield logits
        given = given[1:]
    for start in range(0, len(given), CHUNK):
        part = given[start : start + CHUNK]
        room = lm.model.max_positions - int(state.next_position[0])
        size = CHUNK if room >= CHUNK else len(part)
        padded = jnp.asarray(part + part[-1:] * (size - len(part)), jnp.int32)
        state, logits = steps(state, padded)
        yield logits


@functools.partial(jax.jit, static_argnames=("model", "policy", "mesh"))
def _first_step(model, params, state, token, *, policy, mesh):
    state, logits = _step(model, params, state, token[0], policy, mesh)
    return state, logits[None]


@functools.partial(jax.jit, static_argnames=("model", "policy", "mesh"))
def _steps(model, params, state, tokens, *, policy, mesh):
    def take(state, token):
        return _step(model, params, state, token, policy, mesh)

    return jax.lax.scan(take, state, tokens)


def _step(model, params, state, token, policy, mesh) -> tuple[KVState, Array]:
    """One token for all rows, which are copies; the logits [V] after it."""
    tokens = jnp.full_like(state.next_position, token)
    state, logits = step(model, params, state, tokens, policy, mesh=mesh)
    return on_mesh(state, layout(mesh, model)), logits[0]


@jax.jit
def _score(logits: Array, targets: Array) -> tuple[Array, Array]:
    chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), targets[:, None], axis=1)
    return chosen.sum(), (jnp.argmax(logits, axis=1) == targets).all()


@functools.cache
def adapter() -> type:
    """Register the model with lm-eval and return its class.

    Raises:
      ValueError: lm-eval is not installed.
    """
    try:
        import lm_eval.models  # noqa: F401  # lm-eval's own models, which a full registry leaves out
        from lm_eval.api.model import TemplateLM
        from lm_eval.api.registry import register_model
    except ImportError as error:
        raise ValueError("this needs lm-eval: pip install 'inertiakv-jax[lm-eval]'") from error

    @register_model(NAME)
    class InertiaKV(TemplateLM):
        """lm-eval's view of a model and a policy."""

        def __init__(
            self,
            model: str = "smollm2-135m",
            policy: str = "full",
            ratio: float | None = None,
            dtype: str = "float32",
            batch_size: int | str = 1,
            max_gen_toks: int = 256,
            mesh: str | None = None,
            lm: LanguageModel | None = None,
            device: str | None = None,
            max_batch_size: int | None = None,
            **options: Any,
        ):
            super().__init__()
            from inertiakv_jax.weights.load import load

            self.policy = policies.by_name(policy, ratio=ratio, **options)
            devices = None if mesh is None else make_mesh(mesh.replace("+", ","))
            self.lm = load(model, dtype=dtype, mesh=devices) if lm is None else lm
            self.tokenizer = self.lm.tokenizer
            self.batch_size = 1 if batch_size == "auto" else int(batch_size)
            self.max_gen_toks = max_gen_toks

        @property
        def tokenizer_name(self) -> str:
            return self.lm.name.replace("/", "__")

        @property
        def eot_token_id(self) -> int:
            return self.lm.eos_token_ids[0]

        @property
        def prefix_token_id(self) -> int:
            first = self.tokenizer.bos_token_id
            return self.eot_token_id if first is None else first

        def tok_encode(
            self, string: str, add_special_tokens: bool | None = None, **_: Any
        ) -> list[int]:
            if add_special_tokens is None:  # a chat template has written the first one already
                first = self.tokenizer.bos_token
                add_special_tokens = not (first and string.startswith(first))
            return self.tokenizer(string, add_special_tokens=add_special_tokens)["input_ids"]

        def apply_chat_template(
            self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
        ) -> str:
            return self.tokenizer.apply_chat_template(
                chat_history,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=not add_generation_prompt,
            )

        def _loglikelihood_tokens(
            self, requests: list, disable_tqdm: bool = False, **_: Any
        ) -> list[tuple[float, bool]]:
            return _scored(self.lm, requests, self.policy)

        def loglikelihood_rolling(self, requests: list, disable_tqdm: bool = False) -> list[float]:
            raise NotImplementedError(
                "loglikelihood_rolling scores a text from its first token on: there is no prompt "
                "whose cache could be thinned out"
            )

        def generate_until(self, requests: list, disable_tqdm: bool = False) -> list[str]:
            return _generated(self, [request.args for request in requests])

    return InertiaKV


def _scored(lm: LanguageModel, requests: list, policy: Policy) -> list[tuple[float, bool]]:
    """Requests of (texts, context ids, continuation ids), each context read once."""
    most = lm.model.max_positions
    of_context: dict[tuple[int, ...], list[int]] = {}
    for index, (_, context, ids) in enumerate(requests):
        # As lm-eval's own models: a context that is too long loses its beginning.
        kept = tuple(context[-max(most - len(ids), 1) :])
        of_context.setdefault(kept, []).append(index)
    found: list[tuple[float, bool]] = [(0.0, False)] * len(requests)
    for context, indices in of_context.items():
        scores = loglikelihoods(lm, context, [requests[i][2] for i in indices], policy)
        for index, score in zip(indices, scores, strict=True):
            found[index] = score
    return found


def _generated(model: Any, arguments: Sequence[tuple[str, dict[str, Any]]]) -> list[str]:
    """Answers to (context, generation arguments), decoded in batches of about one length."""
    rows = [
        (index, model.tok_encode(context), *_stops(options, model.max_gen_toks))
        for index, (context, options) in enumerate(arguments)
    ]
    rows.sort(key=lambda row: (row[2], row[3], len(row[1])))
    found = [""] * len(rows)
    while rows:
        _, _, stop, new_tokens = rows[0]
        batch = [row for row in rows[: model.batch_size] if row[2:] == (stop, new_tokens)]
        del rows[: len(batch)]
        room = model.lm.model.max_positions - new_tokens
        request = continuation.Request(
            max_new_tokens=new_tokens,
            stop_tokens=tuple(model.lm.eos_token_ids),
            stop=stop,
            rows=tuple(row[0] for row in batch),
        )
        prompts = [row[1][-room:] for row in batch]
        (answers,) = continuation.answers(model.lm, prompts, [model.policy], request)
        for row, text in zip(batch, answers.texts, strict=True):
            found[row[0]] = text
    return found


def _stops(options: dict[str, Any], max_gen_toks: int) -> tuple[tuple[str, ...], int]:
    """Texts that end an answer, and its length, of a request's generation arguments."""
    if options.get("do_sample") and options.get("temperature", 1.0) > 0:
        raise ValueError(f"answers are decoded greedily, got {options}")
    until = options.get("until") or []
    until = [until] if isinstance(until, str) else until
    new_tokens = options.get("max_gen_toks", options.get("max_new_tokens", max_gen_toks))
    return tuple(text for text in until if text), int(new_tokens)


def main() -> None:
    """lm-eval's own command line, with the model known."""
    adapter()
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()


if __name__ == "__main__":
    main()
