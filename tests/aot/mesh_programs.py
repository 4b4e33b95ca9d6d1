"""Steps of Llama-3.1-8B with parameters as ``load`` lays them on a mesh, for ``compile_ahead``."""

import jax
import jax.numpy as jnp
from aot.decode_programs import SHAPES
from jax.sharding import NamedSharding

import inertiakv_jax as ikv
from inertiakv_jax import state
from inertiakv_jax.attention import Execution
from inertiakv_jax.config import ModelConfig
from inertiakv_jax.decode_step import first_step, later_step
from inertiakv_jax.models.decoder import DecoderModel
from inertiakv_jax.models.partitioning import param_shardings
from inertiakv_jax.sharding import ROW, layout, on_mesh, state_shardings


def one_step(mesh, *, layers, batch, slots, kept_slots=None, rescore=True):
    """Step 1 if it leaves ``kept_slots``, else a later one, in place."""
    config = ModelConfig(
        "llama",
        **SHAPES["llama-3.1-8b"],
        num_layers=layers,
        max_position_embeddings=131072,
    )
    model, policy = DecoderModel(config, "bfloat16"), ikv.policies.lazy(4, 0.9)
    cut = layout(mesh, model)
    execution, knobs = Execution(None, cut), policy.knobs(model)

    def step(params, kv, token):
        options = {} if kept_slots else {"rescore": rescore}
        take = first_step if kept_slots else later_step
        kv, logits = take(
            model, params, kv, token, knobs, policy.ranking, execution=execution, **options
        )
        return on_mesh(kv, cut), jnp.argmax(logits, axis=-1)

    def placed(leaf, sharding):
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    params = jax.eval_shape(model.init, jax.random.key(0))
    params = jax.tree.map(placed, params, param_shardings(model, mesh))
    kv = jax.eval_shape(
        lambda: state.init(
            model, batch, slots, budget=jnp.full((batch,), slots - 1), kept_slots=kept_slots
        )
    )
    kv = jax.tree.map(placed, kv, state_shardings(kv, cut))
    token = placed(jax.ShapeDtypeStruct((batch,), jnp.int32), NamedSharding(cut, ROW))
    return step, (params, kv, token), () if kept_slots else (1,)
