"""What is to run: a model, a policy, rows of a length, and the slots that their caches have."""

import dataclasses

from inertiakv_jax import state as kv_state
from inertiakv_jax.config import ModelConfig
from inertiakv_jax.models.decoder import DecoderModel
from inertiakv_jax.policy import Policy
from inertiakv_jax.prefilling import in_chunks, whole_chunks


@dataclasses.dataclass(frozen=True)
class Workload:
    """A batch of equal rows, from their prompts to the last new token.

    Attributes:
      config: of the model.
      dtype: of parameters, activations, keys and values.
      quantization: of the parameters, see ``DecoderModel``.
      policy: how the cache is thinned out.
      batch: B, rows, a multiple of the mesh axis ``data``.
      context: tokens of a row at the end, prompt and new ones.
      new_tokens: how many of them are decoded.
    """

    config: ModelConfig
    dtype: str
    quantization: str | None
    policy: Policy
    batch: int
    context: int
    new_tokens: int

    def __post_init__(self):
        if self.batch < 1 or self.new_tokens < 1:
            raise ValueError(
                f"batch and new tokens must be at least 1, got {self.batch} and {self.new_tokens}"
            )
        longest = self.config.max_position_embeddings
        if not self.new_tokens < self.context <= longest:
            raise ValueError(
                f"the context must be more than the {self.new_tokens} new tokens and at most the "
                f"model's {longest} positions, got {self.context}"
            )
        if self.policy.scorer == "learned":
            raise ValueError(
                "the policy 'learned' needs weights of its own: plan 'inertiakv', which reads more"
            )
        if self.policy.prefill is not None:
            self.policy.prefill.check([self.prompt_tokens], self.model)

    @property
    def model(self) -> DecoderModel:
        """The decoder, without parameters."""
        return DecoderModel(self.config, self.dtype, self.quantization)

    @property
    def prompt_tokens(self) -> int:
        """T."""
        return self.context - self.new_tokens


@dataclasses.dataclass(frozen=True)
class Slots:
    """Capacities of the caches of a run.

    Attributes:
      full: of prefill: the whole prompt and, if nothing is evicted later, the new tokens.
      start: before decode step 1: ``full``, or less after a prefill-time method.
      kept: after step 1; None if decoding evicts nothing.
    """

    full: int
    start: int
    kept: int | None

    @property
    def decode(self) -> int:
        """While decoding."""
        return self.start if self.kept is None else self.kept


def slots_of(workload: Workload, parts: int = 1) -> Slots:
    """The slots that ``prefill`` and ``decode`` give the caches of ``workload``.

    ``parts`` is the size of axis ``context``, which divides the full cache into whole chunks.
    """
    policy, model, prompt = workload.policy, workload.model, workload.prompt_tokens
    new_tokens = 0 if policy.evicts else workload.new_tokens
    kept, most_kept = None, 0
    if policy.evicts:
        longest = workload.context if policy.ratio_of == "seen" else prompt
        most_kept = min(int(policy.budgets([longest], model)[0]), model.max_positions)
        kept = kv_state.slots_for(most_kept + 1, multiple=64)
    tokens = max(prompt + max(new_tokens, 1), most_kept + 1)
    full, _ = in_chunks(whole_chunks(tokens), parts)
    start = full
    if policy.prefill is not None:
        stay = int(policy.prefill.budgets([prompt], model)[0])
        thinned = kv_state.slots_for(stay + max(new_tokens, 1), multiple=64)
        start = min(max(thinned, kept or 0), full)
    return Slots(full, start, kept)
