"""GGUF files: header checks by hand-made bytes, values by the gguf package and by literals."""

import contextlib
import dataclasses
import struct

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from weights.tiny_files import LLAMA, hf_tensors, write_folder, write_gguf

from inertiakv_jax.rope_scaling import RopeScaling
from inertiakv_jax.weights.gguf_config import gguf_config
from inertiakv_jax.weights.gguf_file import open_gguf
from inertiakv_jax.weights.gguf_model import gguf_source, unpermuted_rows
from inertiakv_jax.weights.load import load

U32, F32, STRING, ARRAY = 4, 6, 8, 9


# --- the header, byte by byte ---------------------------------------------------------------------


def text(value):
    raw = value if isinstance(value, bytes) else value.encode()
    return struct.pack("<Q", len(raw)) + raw


def key(name, kind, payload):
    return text(name) + struct.pack("<I", kind) + payload


def tensor(name="t", dims=(4,), kind=0, offset=0):
    return text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)


def header(*, keys=(), tensors=(), magic=b"GGUF", version=3, counts=None, data=b""):
    counts = counts or (len(tensors), len(keys))
    raw = magic + struct.pack("<I2Q", version, *counts) + b"".join(keys) + b"".join(tensors)
    return raw + bytes(-len(raw) % 32) + data


def opened(tmp_path, content):
    path = tmp_path / "x.gguf"
    path.write_bytes(content)
    return open_gguf(path)


def test_header_by_hand(tmp_path):
    file = opened(
        tmp_path,
        header(
            keys=[
                key("number", U32, struct.pack("<I", 7)),
                key("name", STRING, text("smol")),
                key("words", ARRAY, struct.pack("<IQ", STRING, 2) + text("a") + text("bc")),
                key("floats", ARRAY, struct.pack("<IQ2f", F32, 2, 0.5, -1.0)),
                key("flag", 7, b"\x01"),
            ],
            tensors=[tensor("a.weight", (3, 2)), tensor("b.weight", (4,), 1, 32)],
            data=bytes(40),
        ),
    )
    assert file.metadata == {
        "number": 7,
        "name": "smol",
        "words": ["a", "bc"],
        "floats": [0.5, -1.0],
        "flag": True,
    }
    a, b = file.tensors.values()
    assert (a.shape, a.quantization.name) == ((2, 3), "F32")
    assert (b.shape, b.quantization.name) == ((4,), "F16")
    assert b.offset - a.offset == 32


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"GGUF", "4 bytes are too few"),
        (header(magic=b"GGML", data=b"x"), "begins with b'GGML'"),
        (header(version=1), "version 1 is not supported"),
        (header(version=3 << 24), "version 50331648 is not supported.*little-endian"),
        (header(counts=(0, 5)), "truncated or corrupt"),
        (header(counts=(1 << 60, 0)), "truncated or corrupt"),
        (header(keys=[struct.pack("<Q", 1 << 50)]), "asks for 1125899906842624 bytes"),
        (header(keys=[key("k", 99, b"")]), "99 is no GGUF value type"),
        (header(keys=[key("k", STRING, text(b"\xff\xfe"))]), "not UTF-8"),
        (
            header(keys=[key("k", ARRAY, struct.pack("<IQ", STRING, 1 << 40))]),
            "announces 1099511627776 strings",
        ),
        (
            header(keys=[key("k", ARRAY, struct.pack("<IQ", F32, 1 << 40))]),
            "asks for 4398046511104 bytes",
        ),
        (header(keys=[key("k", ARRAY, struct.pack("<IQ", ARRAY, 1))]), "array of arrays"),
        (header(keys=[key("k", U32, b"1234")] * 2), "'k' appears twice"),
        (
            header(keys=[key("general.alignment", U32, struct.pack("<I", 24))]),
            "general.alignment 24 is not a power of two",
        ),
        (header(tensors=[tensor(dims=())]), "'t' has 0 dimensions"),
        (header(tensors=[tensor(dims=(1,) * 5)]), "'t' has 5 dimensions"),
        (header(tensors=[tensor(kind=77)]), "'t' has unknown quantisation type 77"),
        (header(tensors=[tensor(dims=(4, 0))]), r"'t': shape \(0, 4\)"),
        (header(tensors=[tensor(dims=(33,), kind=8)]), "'t'.*Q8_0.* multiples of 32"),
        (header(tensors=[tensor(offset=8)], data=bytes(64)), "'t': offset 8"),
        (header(tensors=[tensor()], data=bytes(15)), "'t': ends at byte .* truncated"),
        (header(tensors=[tensor(dims=(1 << 62, 1 << 62))], data=bytes(64)), "'t': ends at"),
        (header(tensors=[tensor(offset=1 << 62)], data=bytes(64)), "'t': ends at byte"),
        (header(tensors=[tensor(), tensor(offset=32)], data=bytes(64)), "'t' appears twice"),
        (
            header(tensors=[tensor("a", (16,)), tensor("b", (4,), 0, 32)], data=bytes(64)),
            "'a' and 'b' overlap",
        ),
    ],
)
def test_corrupt_headers(tmp_path, content, words):
    with pytest.raises(ValueError, match=rf"x\.gguf: .*{words}"):
        opened(tmp_path, content)


def test_a_file_cut_anywhere_is_refused(tmp_path):
    whole = write_gguf(tmp_path / "whole.gguf").read_bytes()
    # Every cut within the first kilobyte, then some up to the last byte of the last tensor.
    for length in [*range(0, 1024, 7), *range(1024, len(whole) - 32, 9973)]:
        with pytest.raises(ValueError, match=r"truncated|too few"):
            opened(tmp_path, whole[:length])


def test_flipped_bytes_of_the_header_never_end_in_another_error(tmp_path):
    whole = bytearray(write_gguf(tmp_path / "whole.gguf").read_bytes())
    rng = np.random.default_rng(0)
    for position in [*range(64), *rng.integers(64, 12_000, 200)]:
        changed = bytearray(whole)
        changed[position] ^= 0xFF
        # A letter of a token may become another one, so not every change is an error.
        with contextlib.suppress(ValueError):
            file = opened(tmp_path, bytes(changed))
            gguf_source(file, gguf_config(file))


# --- values ---------------------------------------------------------------------------------------


def test_unpermuted_rows_by_hand():
    # Two heads of dimension 6: halves (a b c)(d e f) lie in the file as a d b e c f.
    assert unpermuted_rows(12, 2).tolist() == [0, 3, 1, 4, 2, 5, 6, 9, 7, 10, 8, 11]


def test_query_rows_come_back_in_order(tmp_path):
    # Head dimension 16 in the file: row 1 is the partner of row 0, so it belongs at row 8.
    tensors = hf_tensors(LLAMA)
    rows = np.arange(64, dtype=np.float32)[:, None] * np.ones((1, 32), np.float32)
    tensors["model.layers.0.self_attn.q_proj.weight"] = rows
    path = write_gguf(tmp_path / "m.gguf", tensors)
    stored = [t for t in gguf.GGUFReader(path).tensors if t.name == "blk.0.attn_q.weight"]
    assert stored[0].data[:6, 0].tolist() == [0, 8, 1, 9, 2, 10]
    kernel = load(path).params["layers_0"]["attention"]["q_proj"]["kernel"]
    np.testing.assert_array_equal(kernel[0], np.arange(64))


def test_gguf_equals_the_same_model_as_safetensors(tmp_path):
    tensors = hf_tensors(LLAMA)
    folder = load(write_folder(tmp_path, LLAMA, tensors))
    file = load(write_gguf(tmp_path / "m.gguf", tensors))
    jax.tree.map(np.testing.assert_array_equal, file.params, folder.params)
    assert file.config.family == folder.config.family
    assert file.config.tie_word_embeddings
    assert file.config.rms_norm_eps == np.float32(1e-5)
    assert file.tokenizer("a  12 the").input_ids == file.tokenizer.encode("a  12 the")


def test_lm_head_in_the_file_means_untied(tmp_path):
    tensors = hf_tensors(LLAMA | {"tie_word_embeddings": False})
    model = load(write_gguf(tmp_path / "m.gguf", tensors))
    assert not model.config.tie_word_embeddings
    np.testing.assert_array_equal(model.params["lm_head"]["kernel"], tensors["lm_head.weight"].T)


def test_qwen2_has_biases_and_is_not_permuted(tmp_path):
    tensors = hf_tensors(LLAMA)
    for layer in range(2):
        for part, size in (("q", 64), ("k", 32), ("v", 32)):
            name = f"model.layers.{layer}.self_attn.{part}_proj.bias"
            tensors[name] = np.arange(size, dtype=np.float32)
    path = write_gguf(tmp_path / "m.gguf", tensors, arch="qwen2")
    model = load(path, dtype="bfloat16")
    assert model.config.family == "qwen2"
    attention = model.params["layers_1"]["attention"]
    np.testing.assert_array_equal(attention["q_proj"]["bias"], np.arange(64).astype(jnp.bfloat16))
    np.testing.assert_array_equal(
        attention["k_proj"]["kernel"],
        tensors["model.layers.1.self_attn.k_proj.weight"].T.astype(jnp.bfloat16),
    )


def test_llama_biases_are_permuted_too(tmp_path):
    tensors = hf_tensors(LLAMA)
    for layer in range(2):
        for part, size in (("q", 64), ("k", 32), ("v", 32), ("o", 32)):
            name = f"model.layers.{layer}.self_attn.{part}_proj.bias"
            tensors[name] = np.arange(size, dtype=np.float32)
    attention = load(write_gguf(tmp_path / "m.gguf", tensors)).params["layers_0"]["attention"]
    for part, size in (("q", 64), ("k", 32), ("v", 32), ("o", 32)):
        np.testing.assert_array_equal(attention[f"{part}_proj"]["bias"], np.arange(size))


QWEN3 = LLAMA | {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}
GEMMA = LLAMA | {"hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 16}
GEMMA3 = GEMMA | {
    "model_type": "gemma3_text",
    "architectures": ["Gemma3ForCausalLM"],
    "sliding_window": 64,
    "rope_theta": 1e6,
    "rope_scaling": {"rope_type": "linear", "factor": 8.0},
}
GEMMA2 = GEMMA | {
    "model_type": "gemma2",
    "architectures": ["Gemma2ForCausalLM"],
    "sliding_window": 64,
    "attn_logit_softcapping": 40.0,
}


@pytest.mark.parametrize(
    ("arch", "config", "metadata"),
    [
        ("qwen3", QWEN3, {}),
        (
            "gemma3",
            GEMMA3,
            {
                "gemma3.attention.sliding_window": 64,
                "gemma3.rope.freq_base": 1e6,
                "gemma3.rope.scaling.type": "linear",
                "gemma3.rope.scaling.factor": 8.0,
            },
        ),
        (
            "gemma2",
            GEMMA2 | {"final_logit_softcapping": None},
            {
                "gemma2.attention.sliding_window": 64,
                "gemma2.attn_logit_softcapping": 40.0,
                "gemma2.final_logit_softcapping": 0.0,
            },
        ),
    ],
)
def test_families_equal_the_same_model_as_safetensors(tmp_path, arch, config, metadata):
    tensors = hf_tensors(config)
    folder = load(write_folder(tmp_path, config, tensors))
    file = load(write_gguf(tmp_path / "m.gguf", tensors, arch=arch, metadata=metadata))
    # Norms of Gemma are stored as 1 + w: one float32 rounding.
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6 if arch != "qwen3" else 0.0),
        file.params,
        folder.params,
    )
    rounded = {"rms_norm_eps": file.config.rms_norm_eps, "eos_token_ids": file.eos_token_ids}
    assert file.config == dataclasses.replace(folder.config, **rounded)


def test_experts_equal_the_same_model_as_safetensors(tmp_path):
    config = LLAMA | {
        "model_type": "qwen3_moe",
        "architectures": ["Qwen3MoeForCausalLM"],
        "num_experts": 3,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "norm_topk_prob": True,
    }
    tensors = hf_tensors(config)
    folder = load(write_folder(tmp_path, config, tensors))
    packed = {}
    for layer in range(2):
        for part in ("gate", "up", "down"):
            name = "model.layers.{}.mlp.experts.{}.{}_proj.weight"
            matrices = [tensors.pop(name.format(layer, expert, part)) for expert in range(3)]
            kind = gguf.GGMLQuantizationType.Q8_0
            stacked = gguf.quants.quantize(np.stack(matrices), kind)
            packed[f"blk.{layer}.ffn_{part}_exps.weight"] = (stacked, kind)
    metadata = {
        "qwen3moe.expert_count": 3,
        "qwen3moe.expert_used_count": 2,
        "qwen3moe.expert_feed_forward_length": 32,
    }
    path = tmp_path / "m.gguf"
    file = load(write_gguf(path, tensors, arch="qwen3moe", metadata=metadata, packed=packed))
    assert file.config.experts == folder.config.experts
    up = file.params["layers_1"]["mlp"]["up_proj"]["kernel"]
    assert up.shape == (3, 32, 32)
    stored = {t.name: t for t in gguf.GGUFReader(path).tensors}["blk.1.ffn_up_exps.weight"]
    expected = gguf.quants.dequantize(stored.data, stored.tensor_type)  # [X, out, in]
    np.testing.assert_array_equal(up, expected.swapaxes(1, 2))
    # Q8_0 keeps seven bits of the largest of 32 numbers.
    np.testing.assert_allclose(up, folder.params["layers_1"]["mlp"]["up_proj"]["kernel"], atol=0.02)
    router = file.params["layers_0"]["mlp"]["router"]["kernel"]
    np.testing.assert_array_equal(router, folder.params["layers_0"]["mlp"]["router"]["kernel"])


@pytest.mark.parametrize(
    ("arch", "layers", "expected"),
    # 27B models divide by sqrt(H / N) = sqrt(32 / 4), the others by sqrt(D).
    [("gemma3", 62, 8.0), ("gemma2", 46, 8.0), ("gemma3", 26, 16.0), ("gemma2", 62, 16.0)],
)
def test_scale_of_gemma_queries(tmp_path, arch, layers, expected):
    metadata = {f"{arch}.block_count": layers, f"{arch}.attention.sliding_window": 64}
    assert config_of(tmp_path, arch=arch, metadata=metadata).query_scale_dim == expected


def test_q8_0_block_by_hand(tmp_path):
    # One block: a float16 scale and 32 signed bytes.
    path = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(str(path), "llama")
    row = struct.pack("<e32b", 0.25, *range(-16, 16))
    block = np.frombuffer(row * 2, np.uint8).reshape(2, 34)
    writer.add_tensor("output.weight", block, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    source = gguf_source(open_gguf(path), None)
    [(rows, values)] = source.blocks("lm_head.weight")
    assert rows == slice(0, 2)
    np.testing.assert_array_equal(values, [np.arange(-16, 16) / 4] * 2)


@pytest.mark.parametrize("name", ["Q4_0", "Q4_1", "Q5_0", "Q8_0", "BF16", "F16"])
def test_quantised_tensor_equals_the_gguf_package(tmp_path, name):
    kind = gguf.GGMLQuantizationType[name]
    tensors = hf_tensors(LLAMA)
    up = "model.layers.0.mlp.up_proj.weight"
    packed = gguf.quants.quantize(tensors[up], kind)
    del tensors[up]
    path = tmp_path / "m.gguf"
    writer_tensors = {"blk.0.ffn_up.weight": packed}
    if name == "F16":
        write_gguf(path, tensors, raw=writer_tensors)
    else:
        write_gguf(path, tensors, packed={"blk.0.ffn_up.weight": (packed, kind)})
    kernel = load(path).params["layers_0"]["mlp"]["up_proj"]["kernel"]
    np.testing.assert_array_equal(kernel.T, gguf.quants.dequantize(packed, kind))


# --- config ---------------------------------------------------------------------------------------


def config_of(tmp_path, **options):
    return gguf_config(open_gguf(write_gguf(tmp_path / "m.gguf", **options)))


def test_config(tmp_path):
    config = config_of(tmp_path, metadata={"tokenizer.ggml.eot_token_id": 0})
    assert (config.vocab_size, config.hidden_size, config.intermediate_size) == (300, 32, 64)
    assert (config.num_layers, config.num_heads, config.num_kv_heads) == (2, 4, 2)
    assert (config.head_dim, config.max_position_embeddings) == (16, 128)
    assert (config.rope_theta, config.rope_scaling) == (10000.0, None)
    assert (config.bos_token_id, config.eos_token_ids) == (1, (2, 0))


def test_every_token_that_ends_a_turn_is_an_eos(tmp_path):
    # <|endoftext|> is 0, <|im_end|> is 2; only the latter is named as eos.
    assert load(write_gguf(tmp_path / "m.gguf")).eos_token_ids == (2, 0)


def test_linear_rope_scaling_in_both_spellings(tmp_path):
    new = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}
    assert config_of(tmp_path, metadata=new).rope_scaling == RopeScaling("linear", 4.0)
    old = {"llama.rope.scale_linear": 2.0}
    assert config_of(tmp_path, metadata=old).rope_scaling == RopeScaling("linear", 2.0)
    none = {"llama.rope.scaling.type": "none"}
    assert config_of(tmp_path, metadata=none).rope_scaling is None


def test_yarn_rope_scaling(tmp_path):
    yarn = {
        "llama.rope.scaling.type": "yarn",
        "llama.rope.scaling.factor": 4.0,
        "llama.rope.scaling.original_context_length": 64,
    }
    config = config_of(tmp_path, metadata=yarn)
    assert config.rope_scaling.original_max_position_embeddings == 64
    assert config.rope_scaling.attention_factor == pytest.approx(1.1386294)
    assert config.max_position_embeddings == 256


def llama31_divisors(head_dim=16, factor=8.0):
    """As llama.cpp's converter computes them (generate_extra_tensors), scalar by scalar."""
    divisors = []
    for i in range(0, head_dim, 2):
        wavelength = 2 * np.pi * 10000.0 ** (i / head_dim)
        if wavelength < 8192 / 4.0:
            divisors.append(1.0)
        elif wavelength > 8192 / 1.0:
            divisors.append(factor)
        else:
            smooth = (8192 / wavelength - 1.0) / (4.0 - 1.0)
            divisors.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(divisors, np.float32)


def test_rope_freqs_tensor_is_llama3_scaling(tmp_path):
    raw = {"rope_freqs.weight": llama31_divisors()}
    scaling = config_of(tmp_path, raw=raw).rope_scaling
    assert scaling == RopeScaling("llama3", 8.0, 1.0, 4.0, 8192)


def test_rope_freqs_of_ones_mean_no_scaling(tmp_path):
    assert (
        config_of(tmp_path, raw={"rope_freqs.weight": np.ones(8, np.float32)}).rope_scaling is None
    )


@pytest.mark.parametrize(
    ("factors", "words"),
    [
        (np.linspace(1, 3, 8), "does not hold the llama3 scaling"),
        (np.full(8, np.nan), "does not hold the llama3 scaling"),
        (np.ones(4), r"shape \(4,\), expected \(8,\)"),
    ],
)
def test_other_rope_freqs_are_refused_by_name(tmp_path, factors, words):
    with pytest.raises(ValueError, match=rf"m\.gguf: tensor 'rope_freqs.weight'.*{words}"):
        config_of(tmp_path, raw={"rope_freqs.weight": factors.astype(np.float32)})


@pytest.mark.parametrize(
    ("metadata", "words"),
    [
        ({"llama.rope.scaling.type": "longrope", "llama.rope.scaling.factor": 4.0}, "'longrope'"),
        ({"llama.rope.scaling.attn_factor": 1.5}, "llama.rope.scaling.attn_factor 1.5"),
        ({"llama.expert_count": 8}, "llama.expert_count 8 is not supported"),
        ({"llama.expert_weights_scale": 2.5}, "llama.expert_weights_scale 2.5 is not supported"),
        ({"llama.attention.sliding_window": 64}, "llama.attention.sliding_window 64"),
        ({"llama.attention.value_length": 8}, "llama.attention.value_length 8"),
        ({"llama.rope.dimension_count": 8}, "llama.rope.dimension_count 8"),
        ({"llama.attention.causal": False}, "llama.attention.causal False"),
        ({"split.count": 2}, "split.count"),
        ({"llama.attention.head_count_kv": 3}, "num_kv_heads"),
        ({"llama.attention.head_count": [4, 4]}, "num_attention_heads"),
    ],
)
def test_metadata_refused_by_name(tmp_path, metadata, words):
    with pytest.raises(ValueError, match=rf"m\.gguf: .*{words}"):
        config_of(tmp_path, metadata=metadata)


def test_missing_metadata_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"m\.gguf: .*num_hidden_layers .*None"):
        config_of(tmp_path, drop=["llama.block_count"])


def test_unsupported_architecture(tmp_path):
    with pytest.raises(ValueError, match="'gemma' is not supported; supported: llama, qwen2"):
        load(write_gguf(tmp_path / "m.gguf", arch="gemma"))


def test_unknown_missing_and_extra_tensors(tmp_path):
    path = write_gguf(tmp_path / "a.gguf", raw={"blk.0.attn_q_norm.weight": np.ones(4, np.float32)})
    with pytest.raises(ValueError, match=r"a\.gguf: 1 tensors have no place .*attn_q_norm"):
        load(path)
    tensors = hf_tensors(LLAMA)
    del tensors["model.layers.1.input_layernorm.weight"]
    with pytest.raises(ValueError, match=r"missing: model\.layers\.1\.input_layernorm"):
        load(write_gguf(tmp_path / "b.gguf", tensors))
