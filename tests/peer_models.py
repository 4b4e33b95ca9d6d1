"""Models of other libraries with our parameters."""

import functools

import numpy as np

from inertiakv_jax.models.hf_names import expected_tensors


def transformers_model(lm, torch):
    """transformers' Llama with our parameters."""
    import transformers

    config = lm.config
    assert (config.family, config.rope_scaling) == ("llama", None)
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_hidden_layers=config.num_layers,
            num_attention_heads=config.num_heads,
            num_key_value_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            rms_norm_eps=config.rms_norm_eps,
            rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
            max_position_embeddings=config.max_position_embeddings,
            tie_word_embeddings=config.tie_word_embeddings,
        )
    )
    tensors = {}
    for tensor in expected_tensors(config):
        array = np.asarray(functools.reduce(dict.__getitem__, tensor.path, lm.params))
        tensors[tensor.name] = torch.tensor(array.T if tensor.transpose else array)
    absent = model.load_state_dict(tensors, strict=False)
    assert absent.unexpected_keys == []
    assert set(absent.missing_keys) <= {"lm_head.weight"}  # tied to the embedding
    return model.eval()
