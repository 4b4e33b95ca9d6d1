"""How arrays lie over a mesh of devices: one table.

A caller's mesh has the axes ``data``, ``model``, ``expert`` and ``context``, or some of them. For a
model, ``layout`` cuts it anew, the devices in the same order: those that share a row (``model`` and
``expert``) become ``heads`` x ``group`` x ``spare``, of which each is as large as the heads allow.

    8 devices, 8 kv heads, 32 query heads    heads 8             one kv head and its group each
    8 devices, 2 kv heads, 16 query heads    heads 2, group 4    four copies of a kv head, each with
                                                                 two of its eight query heads
    8 devices, 3 kv heads,  9 query heads    spare 8             attention repeated by every device

So every array of attention is divided evenly, whatever the sizes, and what cannot be is repeated.
"""

import math
from typing import Any

import jax
import numpy as np
from jax import Array
from jax.core import Tracer
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from inertiakv_jax.distributed import mesh_devices
from inertiakv_jax.state import KVState
from inertiakv_jax.typing import Model

DATA = "data"
"""Axis of a caller's mesh: batch rows."""
CONTEXT = "context"
"""The slots of the full cache: prefill and decode step 1."""
EXPERT = "expert"
"""Experts of a mixture; the devices of ``model``, for all else."""
MODEL = "model"
"""Heads, and the width of MLP and vocabulary."""
MESH_AXES = (DATA, CONTEXT, EXPERT, MODEL)

HEADS = "heads"
"""Axis of a layout: kv heads, and with each its query heads."""
GROUP = "group"
"""Query heads of one kv head, which each of these devices has a copy of."""
SPARE = "spare"
"""Devices that neither divides: each does what the others do."""
HEAD_PARTS = (HEADS, GROUP)
SHARING = (HEADS, GROUP, SPARE)
"""All devices that share a row."""

TOKENS = P(DATA, CONTEXT)  # [B, C], of a prompt
TOKEN_QUERIES = P(DATA, None, HEADS, GROUP, None)  # [B, C, K, G, D]
TOKEN_HEADS = P(DATA, None, HEADS, None)  # [B, C, K, D], keys or values
CACHE = P(DATA, HEADS, None, None)  # [B, K, S, D]
FULL_CACHE = P(DATA, HEADS, CONTEXT, None)  # [B, K, S, D], of prefill and decode step 1
ROW = P(DATA)  # [B]
HEAD_ROW = P(DATA, HEADS)  # [B, K]
SLOTS = P(DATA, None)  # [B, S]
HEAD_SLOTS = P(DATA, HEADS, None)  # [B, K, S]
FULL_HEAD_SLOTS = P(DATA, HEADS, CONTEXT)  # [B, K, S], of prefill
KV_HEADS = P(HEADS)  # [K, ...]
QUERY_HEADS = P(HEADS, GROUP)  # [K, G, ...]
PARTIAL_SCORES = P(HEAD_PARTS, DATA, None)  # [heads * group, B, S], each its own heads' part
PARTIAL_HEAD_SCORES = P(GROUP, DATA, HEADS, None)  # [group, B, K, S], likewise
SCALAR = P()


def parse_mesh_sizes(text: str) -> dict[str, int]:
    """The size of each of ``MESH_AXES`` in a text like "data=4,model=2"; 1 where it is not named.

    Raises:
      ValueError: no text, not of this form, or an axis that is unknown or named twice.
    """
    if not isinstance(text, str):
        raise ValueError(f"mesh must be a text like data=4,model=2, got {text!r}")
    sizes: dict[str, int] = {}
    for part in text.split(","):
        axis, _, size = (piece.strip() for piece in part.partition("="))
        if axis not in MESH_AXES:
            raise ValueError(
                f"mesh {text!r}: unknown axis {axis!r}; expected some of {', '.join(MESH_AXES)}, "
                "like data=4,model=2"
            )
        if axis in sizes:
            raise ValueError(f"mesh {text!r}: {axis} is named twice")
        if not size.isdecimal() or int(size) < 1:
            raise ValueError(
                f"mesh {text!r}: {axis} must be an integer of at least 1, got {size!r}"
            )
        sizes[axis] = int(size)
    return dict.fromkeys(MESH_AXES, 1) | sizes


def make_mesh(text: str, devices: list[Any] | None = None) -> Mesh:
    """A mesh from its sizes, as on the command line.

    Args:
      text: like "data=4,model=2"; axes are ``data``, ``model``, ``expert`` and ``context``, what is
        not named has size 1.
      devices: to lay it over, of which it may need fewer; None takes this process' own or, if they
        are too few, those of a group of processes (``distributed.mesh_devices``).

    Raises:
      ValueError: as ``parse_mesh_sizes``; more devices than there are, or parts of processes and
        groups.

    Example:
      >>> make_mesh("data=1").shape["model"]
      1
    """
    sizes = parse_mesh_sizes(text)
    needed = math.prod(sizes.values())
    devices = mesh_devices(needed) if devices is None else devices
    if needed > len(devices):
        raise ValueError(
            f"mesh {text!r} needs {needed} devices, but there are {len(devices)} "
            f"({devices[0].device_kind})"
        )
    axis_types = (AxisType.Auto,) * len(sizes)
    shape = tuple(sizes.values())
    return jax.make_mesh(shape, MESH_AXES, axis_types=axis_types, devices=devices[:needed])


def layout(mesh: Mesh | AbstractMesh | None, model: Model) -> Any:
    """The mesh that the table above is about, for the heads of ``model``.

    None and what is a layout already come back.

    Raises:
      ValueError: it is no mesh, or has another axis than a caller's.
    """
    check_mesh(mesh)
    if mesh is None or HEADS in mesh.axis_names:
        return mesh
    sizes = mesh_sizes(mesh)
    sharing = sizes[EXPERT] * sizes[MODEL]
    heads = math.gcd(sharing, model.num_kv_heads)
    group = math.gcd(sharing // heads, model.num_heads // model.num_kv_heads)
    shape = (sizes[DATA], sizes[CONTEXT], heads, group, sharing // heads // group)
    return _cut(mesh, shape, (DATA, CONTEXT, *SHARING))


def expert_layout(
    mesh: Mesh | AbstractMesh, num_experts: int, width: int
) -> tuple[Any, str | None, str | None]:
    """How the weights of a mixture's experts are split.

    Without an axis ``expert`` the devices of ``model`` divide the experts instead of their width.

    Returns:
      The same devices in the same order with the axes ``MESH_AXES``, and of these the one over
      which the experts are split, and the one for their width; None where it does not divide them.
    """
    sizes = mesh_sizes(mesh)
    if sizes[EXPERT] == 1:
        sizes |= {EXPERT: sizes[MODEL], MODEL: 1}
    return (
        _cut(mesh, tuple(sizes.values()), MESH_AXES),
        EXPERT if num_experts % sizes[EXPERT] == 0 else None,
        MODEL if width % sizes[MODEL] == 0 else None,
    )


def mesh_sizes(mesh: Mesh | AbstractMesh) -> dict[str, int]:
    """Size of each of ``MESH_AXES``, 1 for those that a caller's mesh lacks."""
    unknown = set(mesh.axis_names) - set(MESH_AXES)
    if unknown:
        raise ValueError(
            f"the mesh has unknown axes {sorted(unknown)}; expected some of {', '.join(MESH_AXES)}"
        )
    return {axis: mesh.shape.get(axis, 1) for axis in MESH_AXES}


def _cut(mesh: Mesh | AbstractMesh, shape: tuple[int, ...], axes: tuple[str, ...]) -> Any:
    if isinstance(mesh, AbstractMesh):
        return AbstractMesh(shape, axes)
    order = [mesh.axis_names.index(axis) for axis in MESH_AXES if axis in mesh.axis_names]
    return Mesh(np.transpose(mesh.devices, order).reshape(shape), axes)


def repeats(mesh: Mesh, model: Model) -> str | None:
    """A sentence about devices that do what others do, because heads are too few; or None."""
    cut = layout(mesh, model).shape
    sharing = cut[HEADS] * cut[GROUP] * cut[SPARE]
    said = []
    if cut[GROUP] > 1:
        said.append(f"{cut[GROUP]} devices have a copy of each kv head")
    if cut[SPARE] > 1:
        said.append(f"{cut[SPARE]} devices compute the same attention")
    if not said:
        return None
    return (
        f"{sharing} devices share {model.num_kv_heads} kv heads and {model.num_heads} query heads: "
        + ", ".join(said)
    )


def check_mesh(mesh: Any) -> None:
    """Raise ValueError unless it is a mesh or None."""
    if mesh is not None and not isinstance(mesh, Mesh | AbstractMesh):
        hint = f"; write make_mesh({mesh!r})" if isinstance(mesh, str) else ""
        raise ValueError(f"mesh must be a Mesh or None, got {mesh!r}{hint}")


def check_batch(mesh: Mesh | None, batch: int) -> None:
    """Raise ValueError unless axis ``data`` divides the rows."""
    check_mesh(mesh)
    rows = 1 if mesh is None else mesh.shape.get(DATA, 1)
    if batch % rows:
        raise ValueError(
            f"a batch of {batch} must be divisible by mesh axis {DATA!r}, {rows}; "
            "generate() adds rows by itself"
        )


def missing_rows(mesh: Mesh | None, batch: int) -> int:
    """Rows to add to a batch until axis ``data`` divides it."""
    return 0 if mesh is None else -batch % mesh.shape.get(DATA, 1)


def head_parts(cut: Mesh | None) -> int:
    """Devices of a layout that share the heads of a row, each with its own part."""
    return 1 if cut is None else cut.shape[HEADS] * cut.shape[GROUP]


def group_parts(cut: Mesh | None) -> int:
    """Devices of a layout that share the query heads of a kv head."""
    return 1 if cut is None else cut.shape[GROUP]


def ranking_spec(ndim: int) -> tuple[P, P]:
    """Of an array over slots, and of one without: [B, S], [E, B, S] or [E, B, K, S], by rank."""
    slots = {2: SLOTS, 3: P(None, *SLOTS), 4: P(None, *HEAD_SLOTS)}[ndim]
    return slots, P(*slots[:-1])


def state_shardings(state: KVState, cut: Mesh) -> KVState:
    """How a state lies on a layout: a ``NamedSharding`` for every array of it.

    The cache is a full one, whose slots axis ``context`` divides, up to decode step 1.
    """
    slots, rankings = ranking_spec(state.valid.ndim)
    whole = state.kept_slots is not None

    def cache(leaf) -> P:
        return FULL_CACHE if whole and leaf.shape[2] == state.num_slots else CACHE

    by_field: dict[str, Any] = {
        "keys": tuple(map(cache, state.keys)),
        "values": tuple(map(cache, state.values)),
        "scores": slots,
        "valid": slots,
        "positions": slots,
        "budget": rankings,
        **dict.fromkeys(("next_position", "row", "finished", "finite"), ROW),
        "step": SCALAR,
    }
    specs = KVState(**by_field, kept_slots=state.kept_slots)
    return jax.tree.map(
        lambda spec: NamedSharding(cut, spec), specs, is_leaf=lambda leaf: isinstance(leaf, P)
    )


def place(state: KVState, cut: Mesh | None) -> KVState:
    """Put a state's arrays onto the devices of a layout; None leaves them where they are.

    Where the devices belong to several processes, what is not on them yet must be the same on each.
    """
    if cut is None:
        return state
    shardings = state_shardings(state, cut)
    if cut.is_multi_process:
        return jax.tree.map(_place_on_processes, state, shardings)
    return jax.device_put(state, shardings)


def _place_on_processes(leaf: Array, sharding: NamedSharding) -> Array:
    """``device_put``, which across processes copies what lies there already.

    And has them compare what is not, before anything else.
    """
    if isinstance(leaf, Tracer):
        return jax.device_put(leaf, sharding)
    if leaf.is_fully_addressable:
        host = np.asarray(leaf)
        return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])
    if leaf.sharding.is_equivalent_to(sharding, leaf.ndim):
        return leaf
    return jax.device_put(leaf, sharding)


def on_mesh(state: KVState, cut: Mesh | None) -> KVState:
    """Have a compiled function lay ``state`` out so; None leaves that to the compiler."""
    if cut is None:
        return state
    return jax.lax.with_sharding_constraint(state, state_shardings(state, cut))
