"""The programs of a run, as functions of arrays that lie over a mesh."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from inertiakv_jax import decode_step, prefilling
from inertiakv_jax.attention import Execution
from inertiakv_jax.models.partitioning import param_shardings
from inertiakv_jax.plan.sizes import empty_state
from inertiakv_jax.plan.workload import Slots, Workload
from inertiakv_jax.policy import EVERY_STEP, Policy
from inertiakv_jax.prompt_thinning import observing_of
from inertiakv_jax.sampling import sample
from inertiakv_jax.sharding import CONTEXT, ROW, SLOTS, layout, on_mesh, state_shardings
from inertiakv_jax.state import SHARED

PREFILL, STEP_1, EVICTION, DECODE_STEP = "prefill", "step 1", "eviction", "decode step"


@dataclasses.dataclass(frozen=True)
class Program:
    """One of them."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]  # trees of jax.ShapeDtypeStruct with shardings
    donated: tuple[int, ...] = ()
    out_shardings: Any = None

    def lower(self) -> jax.stages.Lowered:
        """Trace it for its mesh."""
        options = {} if self.out_shardings is None else {"out_shardings": self.out_shardings}
        jitted = jax.jit(self.function, donate_argnums=self.donated, **options)
        return jitted.lower(*self.arguments)


def programs(workload: Workload, slots: Slots, mesh: Mesh) -> dict[str, Program]:
    """By name: prefill, step 1 in two where decoding evicts, and a later decode step."""
    found = {PREFILL: prefill(workload, slots, mesh)}
    if slots.kept is not None:
        found[STEP_1] = step(workload, mesh, slots.start, kept_slots=slots.kept)
        found[EVICTION] = eviction(workload, mesh, slots.start, slots.kept)
    found[DECODE_STEP] = step(workload, mesh, slots.decode)
    return found


def prefill(workload: Workload, slots: Slots, mesh: Mesh) -> Program:
    """Read the prompts, chunk by chunk."""
    model, batch = workload.model, workload.batch
    cut = layout(mesh, model)
    _, chunk = prefilling.in_chunks(slots.full, cut.shape[CONTEXT])
    observing = observing_of(workload.policy)

    def run(params, tokens, lengths):
        return prefilling.read_chunks(
            model, params, tokens, lengths, chunk=chunk, observing=observing, mesh=cut
        )

    # Laid out as step 1 takes it, whose slots devices may divide.
    state = empty_state(model, batch, SHARED, slots.full, kept_slots=slots.full)
    shardings = dataclasses.replace(state_shardings(state, cut), kept_slots=None)
    arguments = (
        _params(workload, mesh),
        _array(mesh, SLOTS, (batch, slots.full)),
        _array(mesh, ROW, (batch,)),
    )
    return Program(run, arguments, out_shardings=(shardings, None, None))


def step(workload: Workload, mesh: Mesh, slots: int, *, kept_slots: int | None = None) -> Program:
    """One decode step and its most likely token, in place; with ``kept_slots`` step 1's first part.

    Of a policy that scores some steps, one that does.
    """
    model, batch = workload.model, workload.batch
    policy, cut = _compilable(workload.policy), layout(mesh, model)

    def run(params, state, token):
        if kept_slots is None:
            state, logits = decode_step.step(model, params, state, token, policy, mesh=mesh)
        else:
            knobs, execution = policy.knobs(model), Execution(None, cut)
            state, logits = decode_step.attend_to_prompt(
                model, params, state, token, knobs, policy.ranking, execution=execution
            )
        return on_mesh(state, cut), sample(logits, None, None, state.step)

    state = empty_state(model, batch, policy.retention, slots, kept_slots)
    arguments = (
        _params(workload, mesh),
        _placed(state, state_shardings(state, cut)),
        _array(mesh, ROW, (batch,)),
    )
    return Program(run, arguments, donated=(1,))


def eviction(workload: Workload, mesh: Mesh, slots: int, kept_slots: int) -> Program:
    """Step 1's second part: choose what stays, and gather it into a small cache."""
    model, policy = workload.model, _compilable(workload.policy)
    cut = layout(mesh, model)

    def run(state):
        knobs = policy.knobs(model)
        return on_mesh(decode_step.evict_to_budget(state, knobs, model.sliding_windows), cut)

    state = empty_state(model, workload.batch, policy.retention, slots, kept_slots)
    return Program(run, (_placed(state, state_shardings(state, cut)),))


def _compilable(policy: Policy) -> Policy:
    """The policy with one kind of step, and no numbers that are tied to the count of layers."""
    if isinstance(policy.layer_weights, tuple):
        policy = dataclasses.replace(policy, layer_weights="uniform")
    if policy.scores_some_steps:
        policy = dataclasses.replace(policy, refresh=EVERY_STEP)
    return policy


def _params(workload: Workload, mesh: Mesh) -> Any:
    model = workload.model
    shapes = jax.eval_shape(model.init, jax.random.key(0))
    return _placed(shapes, param_shardings(model, mesh))


def _placed(shapes: Any, shardings: Any) -> Any:
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        shapes,
        shardings,
    )


def _array(mesh: Mesh, spec: P, shape: tuple[int, ...]) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, "int32", sharding=NamedSharding(mesh, spec))
