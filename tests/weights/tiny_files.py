"""Tiny checkpoints of every kind that ``load`` reads, written by other hands than its own."""

import json
import struct

import gguf
import numpy as np

# V, H, I, L, N, K, D; N * D differs from H, so that no two axes can be confused.
SIZES = {
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_act": "silu",
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
    **SIZES,
}
CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MERGES = ["Ġ t", "h e", "Ġt he", "i n", "Ġ Ġ", "1 2"]


def byte_alphabet():
    """The 256 characters that stand for bytes in byte-level BPE, in byte order (GPT-2's table)."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    spare = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(spare)) for byte in range(256)]


def tiny_vocabulary():
    """Tokens and GGUF token types: 3 control tokens, 256 bytes, the merged tokens, padding."""
    tokens = CONTROL + byte_alphabet() + [merge.replace(" ", "") for merge in MERGES]
    types = [3] * len(CONTROL) + [1] * (len(tokens) - len(CONTROL))
    padding = [f"[PAD{i}]" for i in range(SIZES["vocab_size"] - len(tokens))]
    return tokens + padding, types + [5] * len(padding)


def hf_tensors(config, seed=0):
    """Random float32 tensors by Hugging Face name for ``config`` (a config.json dict)."""
    rng = np.random.default_rng(seed)
    hidden, vocabulary = config["hidden_size"], config["vocab_size"]
    queries = config["num_attention_heads"] * config["head_dim"]
    keys = config["num_key_value_heads"] * config["head_dim"]
    shapes = {"model.embed_tokens.weight": (vocabulary, hidden), "model.norm.weight": (hidden,)}
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        shapes |= {
            prefix + "input_layernorm.weight": (hidden,),
            prefix + "self_attn.q_proj.weight": (queries, hidden),
            prefix + "self_attn.k_proj.weight": (keys, hidden),
            prefix + "self_attn.v_proj.weight": (keys, hidden),
            prefix + "self_attn.o_proj.weight": (hidden, queries),
            prefix + "post_attention_layernorm.weight": (hidden,),
        }
        shapes |= {prefix + name: shape for name, shape in _mlp_shapes(config).items()}
        if config["model_type"] in ("qwen3", "qwen3_moe", "gemma3_text"):
            shapes[prefix + "self_attn.q_norm.weight"] = (config["head_dim"],)
            shapes[prefix + "self_attn.k_norm.weight"] = (config["head_dim"],)
        if config["model_type"] in ("gemma2", "gemma3_text"):
            shapes[prefix + "pre_feedforward_layernorm.weight"] = (hidden,)
            shapes[prefix + "post_feedforward_layernorm.weight"] = (hidden,)
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (vocabulary, hidden)
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


def _mlp_shapes(config):
    hidden, width = config["hidden_size"], config["intermediate_size"]
    parts = [("mlp.", width)]
    shapes = {}
    if config["model_type"] == "qwen3_moe":
        experts = range(config["num_experts"])
        parts = [(f"mlp.experts.{expert}.", config["moe_intermediate_size"]) for expert in experts]
        shapes["mlp.gate.weight"] = (len(experts), hidden)
    for part, inner in parts:
        shapes |= {
            part + "gate_proj.weight": (inner, hidden),
            part + "up_proj.weight": (inner, hidden),
            part + "down_proj.weight": (hidden, inner),
        }
    return shapes


def safetensors_bytes(tensors, dtypes=None):
    """A safetensors file put together by hand; ``dtypes`` overrides the dtype name of a tensor."""
    header, data = {}, b""
    for name, array in tensors.items():
        raw = array.tobytes()
        dtype = (dtypes or {}).get(name, {"float32": "F32", "float16": "F16"}[str(array.dtype)])
        header[name] = {
            "dtype": dtype,
            "shape": list(array.shape),
            "data_offsets": [len(data), len(data) + len(raw)],
        }
        data += raw
    return with_header(header, data)


def with_header(header, data):
    """Bytes of a safetensors file with this header (a dict, or bytes as they are)."""
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(raw)) + raw + data


def write_tokenizer_json(folder, pre_tokenizer=None):
    """A tokenizer.json over ``tiny_vocabulary`` and its tokenizer_config.json."""
    tokens, _ = tiny_vocabulary()
    byte_level = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": True,
    }
    content = {
        "version": "1.0",
        "added_tokens": [
            {
                "id": index,
                "content": token,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": True,
            }
            for index, token in enumerate(CONTROL)
        ],
        "normalizer": None,
        "pre_tokenizer": pre_tokenizer or byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "vocab": {token: index for index, token in enumerate(tokens)},
            "merges": MERGES,
        },
    }
    (folder / "tokenizer.json").write_text(json.dumps(content))
    # GPT2Tokenizer: what SmolLM2's own folder names, although its rules are not GPT-2's.
    settings = {"tokenizer_class": "GPT2Tokenizer", "eos_token": CONTROL[2]}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def write_folder(folder, config=LLAMA, tensors=None):
    """A loadable folder: config.json, model.safetensors and a tokenizer."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    tensors = hf_tensors(config) if tensors is None else tensors
    (folder / "model.safetensors").write_bytes(safetensors_bytes(tensors))
    write_tokenizer_json(folder)
    return folder


def gguf_name(name, arch="llama"):
    """GGUF's name of a Hugging Face tensor."""
    gemma = {
        "post_attention_layernorm": "post_attention_norm",
        "pre_feedforward_layernorm": "ffn_norm",
        "post_feedforward_layernorm": "post_ffw_norm",
    }
    for ours, theirs in {
        "mlp.gate.": "ffn_gate_inp.",
        "model.layers.": "blk.",
        "model.embed_tokens": "token_embd",
        "model.norm": "output_norm",
        "lm_head": "output",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
        "self_attn.o_proj": "attn_output",
        "self_attn.": "attn_",
        "mlp.": "ffn_",
        "_proj": "",
        **(gemma if arch.startswith("gemma") else {}),
    }.items():
        name = name.replace(ours, theirs)
    return name


def interleaved(weight, num_heads):
    """Rows in the order of GGUF files of architecture llama: halves of a head become pairs."""
    half = weight.shape[0] // num_heads // 2
    rest = weight.shape[1:]
    return weight.reshape(num_heads, 2, half, *rest).swapaxes(1, 2).reshape(weight.shape)


def write_gguf(path, tensors=None, *, metadata=None, arch="llama", drop=(), raw=None, packed=None):
    """A GGUF file of ``LLAMA``'s sizes, written by the gguf package.

    ``metadata`` replaces or adds keys, ``drop`` leaves keys out, ``raw`` adds tensors as they are,
    ``packed`` pairs of bytes and quantisation type.
    """
    config = LLAMA
    tokens, types = tiny_vocabulary()
    keys = {
        f"{arch}.block_count": config["num_hidden_layers"],
        f"{arch}.context_length": config["max_position_embeddings"],
        f"{arch}.embedding_length": config["hidden_size"],
        f"{arch}.feed_forward_length": config["intermediate_size"],
        f"{arch}.attention.head_count": config["num_attention_heads"],
        f"{arch}.attention.head_count_kv": config["num_key_value_heads"],
        f"{arch}.attention.key_length": config["head_dim"],
        f"{arch}.attention.value_length": config["head_dim"],
        f"{arch}.rope.dimension_count": config["head_dim"],
        f"{arch}.rope.freq_base": config["rope_theta"],
        f"{arch}.attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": MERGES,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.chat_template": "{% for m in messages %}<{{ m.role }}>{{ m.content }}"
        "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}",
    } | (metadata or {})
    writer = gguf.GGUFWriter(str(path), arch)
    for key, value in keys.items():
        if key not in drop:
            _add(writer, key, value)
    for name, array in (hf_tensors(config) if tensors is None else tensors).items():
        if arch.startswith("gemma") and name.endswith("norm.weight"):
            array = array + 1
        if arch == "llama" and ".q_proj." in name:
            array = interleaved(array, config["num_attention_heads"])
        if arch == "llama" and ".k_proj." in name:
            array = interleaved(array, config["num_key_value_heads"])
        writer.add_tensor(gguf_name(name, arch), array)
    for name, array in (raw or {}).items():
        writer.add_tensor(name, array)
    for name, (array, kind) in (packed or {}).items():
        writer.add_tensor(name, array, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add(writer, key, value):
    add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32}
    if isinstance(value, str):
        writer.add_string(key, value)
    elif isinstance(value, list):
        writer.add_array(key, value)
    else:
        add[type(value)](key, value)
