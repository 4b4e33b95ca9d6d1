"""The whole decode loop of real models, for ``compile_ahead``."""

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import inertiakv_jax as ikv
from inertiakv_jax import decoding, state
from inertiakv_jax.attention import Execution
from inertiakv_jax.config import ModelConfig
from inertiakv_jax.decode_step import step_kinds
from inertiakv_jax.models.decoder import DecoderModel
from inertiakv_jax.sharding import CACHE, ROW, SHARING, SLOTS, layout

STEPS = 8
COLUMNS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")  # split by output features
ROWS = ("o_proj", "down_proj")  # split by input features


# Real models' shapes; layers are few, for each compiles to the same program.
SHAPES = {
    "llama-3.1-8b": {
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_heads": 32,
        "num_kv_heads": 8,
        "head_dim": 128,
    },
    "smollm2-135m": {
        "vocab_size": 49152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_heads": 9,
        "num_kv_heads": 3,
        "head_dim": 64,
    },
}


def decode_loop(mesh, *, shapes, policy, layers, batch, slots, implementation):
    """``STEPS`` steps in place over a cache of ``slots``."""
    config = ModelConfig(
        "llama",
        **SHAPES[shapes],
        num_layers=layers,
        rope_theta=500000.0,
        max_position_embeddings=131072,
    )
    model = DecoderModel(config, "bfloat16")
    chosen = ikv.policies.by_name(policy)
    mesh = layout(mesh, model)
    execution = Execution(implementation, mesh)

    def loop(params, kv, token, knobs, limit):
        choice = decoding._Choice(None, None, jnp.zeros((0,), jnp.int32))
        return decoding._decode_loop(
            model,
            params,
            kv,
            token,
            knobs,
            choice,
            limit,
            steps=STEPS,
            bodies=step_kinds(chosen),
            ranking=chosen.ranking,
            execution=execution,
        )

    def placed(leaf, spec=None):
        sharding = NamedSharding(mesh, P() if spec is None else spec)
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    params = jax.tree_util.tree_map_with_path(
        lambda path, leaf: placed(leaf, _parameter_spec(jax.tree_util.keystr(path))),
        jax.eval_shape(model.init, jax.random.key(0)),
    )
    kv = jax.eval_shape(
        lambda: state.init(model, batch, slots, budget=jnp.full((batch,), slots - 1))
    )
    by_rank = {0: P(), 1: ROW, 2: SLOTS, 4: CACHE}
    kv = jax.tree.map(lambda leaf: placed(leaf, by_rank[leaf.ndim]), kv)
    knobs = jax.tree.map(placed, jax.eval_shape(lambda: chosen.knobs(model)))
    token = placed(jax.ShapeDtypeStruct((batch,), jnp.int32), ROW)
    limit = placed(jax.ShapeDtypeStruct((), jnp.int32))
    return loop, (params, kv, token, knobs, limit), (1,)


def _parameter_spec(path: str) -> P:
    if any(name in path for name in COLUMNS):
        return P(None, SHARING)
    if any(name in path for name in ROWS):
        return P(SHARING, None)
    return P()
