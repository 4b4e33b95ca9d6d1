"""A tiny model whose attention a head of 64 features cannot wholly say, and text to train on."""

from cli.conftest import CONFIG
from weights.tiny_files import hf_tensors, write_folder

from inertiakv_jax.prose import planted_text

LENGTH = 128
WIDE = CONFIG | {"head_dim": 64}  # K * D = 128


def write_model(folder, seed=0):
    """A loadable folder; attention is far from uniform, so that there is something to learn."""
    tensors = hf_tensors(WIDE, seed)
    for name, array in tensors.items():
        array *= 0.5 if "q_proj" in name or "k_proj" in name else 0.3
    return write_folder(folder, WIDE, tensors)


def prose(words):
    """About so many words, some six tokens each."""
    return planted_text(words, 0, lambda text: len(text.split())).text
