"""What `bench` compares with: transformers, and kvpress on top of it, with the same weights."""

import dataclasses
import importlib.util
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import jax
import numpy as np

from inertiakv_jax.bench import Run, cpu_threads
from inertiakv_jax.config import ModelConfig
from inertiakv_jax.language_model import LanguageModel
from inertiakv_jax.models.hf_names import expected_tensors

NEEDS = {"transformers": ("torch",), "kvpress": ("torch", "kvpress")}
"""Peer -> packages, beyond this library's own, without which it is left out."""


def why_not(peer: str) -> str | None:
    """Why a peer cannot take part, or None."""
    missing = [name for name in NEEDS[peer] if importlib.util.find_spec(name) is None]
    if missing:
        return f"{' and '.join(missing)} not installed: pip install 'inertiakv-jax[peers]'"
    (device, *_) = jax.devices()
    if device.platform != "cpu":
        return f"runs on the CPU, and jax on {device.device_kind}: no comparison"
    return None


@dataclasses.dataclass(frozen=True)
class TorchContestant:
    """A model of transformers that decodes greedily, one forward a token, no text.

    Attributes:
      name: in tables.
      library: likewise.
      model: from ``torch_model``.
      decoding: makes the context that decode steps run in.
    """

    name: str
    library: str
    model: Any
    decoding: Callable[[], AbstractContextManager[None]] = nullcontext

    def __call__(self, prompt: Sequence[int], new_tokens: int) -> Run:
        """See ``bench.Contestant``."""
        import torch

        with torch.inference_mode():
            start = time.perf_counter()
            output = self.model(torch.tensor([list(prompt)]), use_cache=True, logits_to_keep=1)
            cache, token = output.past_key_values, output.logits[:, -1].argmax(-1)
            chosen = [int(token)]
            prefill_s = time.perf_counter() - start
            with self.decoding():
                start = time.perf_counter()
                token = self._step(cache, token, len(prompt))
                chosen.append(int(token))
                first_step_s = time.perf_counter() - start
                start = time.perf_counter()
                for index in range(new_tokens):
                    token = self._step(cache, token, len(prompt) + 1 + index)
                    chosen.append(int(token))
                decode_s = time.perf_counter() - start
        leaves = [leaf for layer in cache.layers for leaf in (layer.keys, layer.values)]
        held = leaves[0].shape[2]
        return Run(
            prefill_s=prefill_s,
            first_step_s=first_step_s,
            decode_s=decode_s,
            tokens=chosen,
            held_tokens=held,
            cache_slots=held,
            kv_bytes=sum(leaf.numel() * leaf.element_size() for leaf in leaves),
        )

    def _step(self, cache: Any, token: Any, position: int) -> Any:
        import torch

        # The place in the text, not in the cache: the two differ once something is evicted.
        output = self.model(
            token[:, None],
            past_key_values=cache,
            position_ids=torch.tensor([[position]]),
            use_cache=True,
            logits_to_keep=1,
        )
        return output.logits[:, -1].argmax(-1)


def transformers_contestant(model: Any) -> TorchContestant:
    """Hugging Face transformers with the cache it takes by default, which keeps everything."""
    return TorchContestant("transformers", "transformers", model)


def kvpress_contestant(model: Any, kept_tokens: int) -> TorchContestant:
    """NVIDIA kvpress with TOVA, evicting down to ``kept_tokens`` at every decode step."""
    from kvpress import DecodingPress, TOVAPress

    def decoding() -> AbstractContextManager[None]:
        press = DecodingPress(TOVAPress(), compression_interval=1, target_size=kept_tokens)
        return press(model)

    return TorchContestant("kvpress-tova", "kvpress", model, decoding)


def torch_model(lm: LanguageModel) -> Any:
    """Build the model of transformers that has the same weights, dtype and number of threads."""
    import torch
    import transformers

    torch.set_num_threads(cpu_threads())
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(hf_config(lm.config))
    model = model.to(getattr(torch, str(lm.model.dtype)))
    weights = {
        tensor.name: _to_torch(_at(lm.params, tensor.path), transpose=tensor.transpose)
        for tensor in expected_tensors(lm.config)
    }
    model.load_state_dict(weights, strict=False, assign=True)
    model.tie_weights()
    # A buffer, so in no checkpoint. It holds all of the scaling of long-context models too.
    rotary = model.model.rotary_emb
    rotary.inv_freq = torch.from_numpy(lm.config.rope_inverse_frequencies())
    left = [name for name, tensor in model.named_parameters() if tensor.is_meta]
    assert not left, f"parameters of transformers without a value: {left}"
    return model.eval()


def hf_config(config: ModelConfig) -> Any:
    """The configuration of transformers that ``config`` came from, but for rope scaling."""
    import transformers

    return transformers.AutoConfig.for_model(
        config.family,
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        rms_norm_eps=config.rms_norm_eps,
        max_position_embeddings=config.max_position_embeddings,
        tie_word_embeddings=config.tie_word_embeddings,
        attention_bias=config.attention_bias,
        mlp_bias=config.mlp_bias,
        sliding_window=None,
    )


def _at(params: Any, path: Sequence[str]) -> Any:
    for part in path:
        params = params[part]
    return params


def _to_torch(leaf: jax.Array, *, transpose: bool) -> Any:
    """A copy in torch's layout ([out, in] for a linear layer)."""
    import torch

    array = np.asarray(leaf)
    array = np.array(array.T if transpose else array, order="C")
    if array.dtype == jax.numpy.bfloat16:  # torch knows NumPy's own dtypes only
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)
