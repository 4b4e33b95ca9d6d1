"""A decoder-only transformer in NumPy (Llama, Qwen2, Mistral without a window), token by token.

Shape letters: T prompt tokens, N query heads, K kv heads, G = N // K, D head_dim, H hidden size,
V vocabulary. Arithmetic runs in the dtype of the parameters; see `cast`.

Every layer has a cache of three lists that grow by one entry per token: its absolute position, its
rotated key [K, D] and its value [K, D].
"""

from dataclasses import dataclass, field

import numpy as np


@dataclass
class LayerCache:
    """The tokens that one layer holds; entry i of each list belongs to the same token."""

    positions: list[int] = field(default_factory=list)  # absolute position
    keys: list[np.ndarray] = field(default_factory=list)  # [K, D], rotated by the position
    values: list[np.ndarray] = field(default_factory=list)  # [K, D]

    def insert(self, position, key, value):
        self.positions.append(position)
        self.keys.append(key)
        self.values.append(value)

    def drop(self, position):
        i = self.positions.index(position)
        del self.positions[i], self.keys[i], self.values[i]


def cast(tree, dtype):
    """Returns the nested dict of arrays with every array as NumPy ``dtype``."""
    if isinstance(tree, dict):
        return {name: cast(child, dtype) for name, child in tree.items()}
    return np.asarray(tree).astype(dtype, copy=False)


def linear(x, p):
    y = x @ p["kernel"]  # [in] @ [in, out], or [T, in] @ [in, out]
    return y + p["bias"] if "bias" in p else y


def rms_norm(x, p, eps):
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + x.dtype.type(eps)) * p["scale"]


def softmax(x):
    e = np.exp(x - np.max(x, axis=-1, keepdims=True))
    return e / np.sum(e, axis=-1, keepdims=True)


def swiglu(x, p):
    gate = linear(x, p["gate_proj"])
    return linear(gate / (1 + np.exp(-gate)) * linear(x, p["up_proj"]), p["down_proj"])


def inverse_frequencies(config):
    """Rotation speed of each of the D / 2 pairs, [D / 2] float64, radians per position."""
    d = config.head_dim
    speeds = [config.rope_theta ** (-2 * i / d) for i in range(d // 2)]
    scaling = config.rope_scaling
    if scaling is None:
        return np.array(speeds)
    if scaling.rope_type != "llama3":
        raise ValueError(f"rope_type: expected llama3 or no scaling, got {scaling.rope_type!r}")
    return np.array([_llama3(speed, scaling) for speed in speeds])


def _llama3(speed, scaling):
    """Llama 3.1: slow pairs are slowed by ``factor``, fast ones kept, those between blended."""
    turns = scaling.original_max_position_embeddings * speed / (2 * np.pi)  # over the old context
    if turns < scaling.low_freq_factor:
        return speed / scaling.factor
    if turns > scaling.high_freq_factor:
        return speed
    span = scaling.high_freq_factor - scaling.low_freq_factor
    kept = (turns - scaling.low_freq_factor) / span
    return (1 - kept) * speed / scaling.factor + kept * speed


def rotate(x, position, speeds):
    """Rotates pair (x[i], x[i + D / 2]) by ``position * speeds[i]``.

    ``x`` is [heads, D] at one position, or [T, heads, D] at positions [T, 1, 1].
    """
    cos = np.cos(position * speeds).astype(x.dtype)
    sin = np.sin(position * speeds).astype(x.dtype)
    first, second = np.split(x, 2, axis=-1)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def unembed(params, hidden):
    if "lm_head" in params:
        return linear(hidden, params["lm_head"])
    return hidden @ params["embed"]["embedding"].T  # tied


def step(params, config, caches, token, position):
    """Runs one token through the model, against and into the caches.

    Args:
      params: the library's parameter tree, as NumPy arrays.
      config: has the fields of ``ModelConfig``.
      caches: one LayerCache per layer; each gets the token's key and value before it attends.
      token: its id.
      position: its absolute position.

    Returns:
      logits: [V].
      probabilities: per layer [N, number held], the last entry being the token itself.
    """
    speeds = inverse_frequencies(config)
    group = config.num_heads // config.num_kv_heads
    x = params["embed"]["embedding"][token]
    probabilities = []
    for layer, cache in enumerate(caches):
        p = params[f"layers_{layer}"]
        h = rms_norm(x, p["input_norm"], config.rms_norm_eps)
        q = linear(h, p["attention"]["q_proj"]).reshape(config.num_heads, config.head_dim)
        k = linear(h, p["attention"]["k_proj"]).reshape(config.num_kv_heads, config.head_dim)
        v = linear(h, p["attention"]["v_proj"]).reshape(config.num_kv_heads, config.head_dim)
        cache.insert(position, rotate(k, position, speeds), v)

        q = rotate(q, position, speeds)
        keys, values = np.stack(cache.keys), np.stack(cache.values)  # [held, K, D]
        heads, outputs = [], []
        for n in range(config.num_heads):  # query head n reads kv head n // G
            attention = softmax(keys[:, n // group] @ q[n] / np.sqrt(x.dtype.type(len(q[n]))))
            heads.append(attention)
            outputs.append(attention @ values[:, n // group])
        probabilities.append(np.stack(heads))

        x = x + linear(np.concatenate(outputs), p["attention"]["o_proj"])
        x = x + swiglu(rms_norm(x, p["post_attention_norm"], config.rms_norm_eps), p["mlp"])
    return unembed(params, rms_norm(x, params["final_norm"], config.rms_norm_eps)), probabilities


def prefill(params, config, tokens):
    """Runs a prompt through the model, a layer for all tokens at once; equals T calls of `step`.

    Returns:
      caches: one LayerCache per layer, holding positions 0 to T - 1.
      logits: [V], of the last token.
    """
    speeds = inverse_frequencies(config)
    group = config.num_heads // config.num_kv_heads
    length = len(tokens)
    positions = np.arange(length)[:, None, None]
    x = params["embed"]["embedding"][np.asarray(tokens)]  # [T, H]
    later = np.triu(np.ones((length, length), bool), 1)  # [query, key]: key after query
    caches = [LayerCache() for _ in range(config.num_layers)]
    for layer, cache in enumerate(caches):
        p = params[f"layers_{layer}"]
        h = rms_norm(x, p["input_norm"], config.rms_norm_eps)
        q = linear(h, p["attention"]["q_proj"]).reshape(length, config.num_heads, -1)
        k = linear(h, p["attention"]["k_proj"]).reshape(length, config.num_kv_heads, -1)
        v = linear(h, p["attention"]["v_proj"]).reshape(length, config.num_kv_heads, -1)
        q, k = rotate(q, positions, speeds), rotate(k, positions, speeds)
        for position in range(length):
            cache.insert(position, k[position], v[position])

        keys = np.stack(cache.keys)  # [T, K, D]
        outputs = []
        for n in range(config.num_heads):
            logits = q[:, n] @ keys[:, n // group].T / np.sqrt(x.dtype.type(config.head_dim))
            logits[later] = -np.inf
            outputs.append(softmax(logits) @ v[:, n // group])

        x = x + linear(np.concatenate(outputs, axis=-1), p["attention"]["o_proj"])
        x = x + swiglu(rms_norm(x, p["post_attention_norm"], config.rms_norm_eps), p["mlp"])
    return caches, unembed(params, rms_norm(x[-1], params["final_norm"], config.rms_norm_eps))
