"""How arrays lie over a mesh of devices: one table."""

from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

DATA = "data"
"""Mesh axis over which batch rows are split."""
MODEL = "model"
"""Mesh axis over which heads are split: kv heads, and with each its group of query heads."""

TOKEN_HEADS = P(DATA, None, MODEL, None)  # [B, 1, heads, D], one token's queries, keys or values
CACHE = P(DATA, MODEL, None, None)  # [B, K, S, D]
ROW = P(DATA)  # [B]
HEADS = P(MODEL)  # [N or K, ...]
HEAD_ROW = P(DATA, MODEL)  # [B, K]
SLOTS = P(DATA, None)  # [B, S]
HEAD_SLOTS = P(DATA, MODEL, None)  # [B, K, S]
PARTIAL_SCORES = P(MODEL, DATA, None)  # [devices of MODEL, B, S], each its own heads' part
SCALAR = P()


def ranking_spec(ndim: int) -> tuple[P, P]:
    """Of an array over slots, and of one without: [B, S], [E, B, S] or [E, B, K, S], by rank."""
    slots = {2: SLOTS, 3: P(None, *SLOTS), 4: P(None, *HEAD_SLOTS)}[ndim]
    return slots, P(*slots[:-1])


def check_mesh(mesh: Mesh | None, batch: int, num_kv_heads: int) -> None:
    """Raise ValueError unless ``mesh`` has both axes, and they divide B and K."""
    if mesh is None:
        return
    if set(mesh.axis_names) != {DATA, MODEL}:
        raise ValueError(f"the mesh must have axes {DATA!r} and {MODEL!r}, got {mesh.axis_names}")
    for size, axis, name in ((batch, DATA, "batch"), (num_kv_heads, MODEL, "num_kv_heads")):
        if size % mesh.shape[axis]:
            raise ValueError(
                f"{name}={size} must be divisible by mesh axis {axis!r}, {mesh.shape[axis]}"
            )


def model_devices(mesh: Mesh | None) -> int:
    """Devices that the heads of one row are split over."""
    return 1 if mesh is None else mesh.shape[MODEL]
