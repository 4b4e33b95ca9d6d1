"""Decode attention on NVIDIA GPUs: which of the two kernels, and for which GPU.

| GPU | default | why |
|---|---|---|
| Hopper (9.0) | Mosaic GPU; Triton for what it refuses | it is what JAX goes on with |
| Ampere, Ada, Blackwell | Triton | the Mosaic kernel uses wgmma, which only Hopper has |

On Hopper both compile, read the same bytes and leave the same partial results. Neither was timed,
so what decides is the rest: Mosaic copies by TMA, without addresses in registers, and keeps more
bytes in flight (192 KiB an SM, Triton 128); its CPU interpreter simulates the copies and barriers
that a kernel can get wrong, where Triton's only does the arithmetic; and Pallas-Triton is
deprecated since jax 0.11. The Mosaic kernel refuses float32, a head_dim other than 64, 128 and 256,
S that is no multiple of 8 (caches of this library are multiples of 64), and G of 9 and more that is
none. Triton does not read dead slots at all: where most slots are dead it should be the better one
on Hopper, too.

Both modules are imported where they are used: each needs a part of JAX that a version may lack.
"""

import dataclasses
import re
from types import ModuleType
from typing import Any

import jax
from jax import Array

KERNELS = ("mosaic", "triton")
_AMPERE_CORES = 108  # A100; assumed where the GPU is not known


@dataclasses.dataclass(frozen=True)
class Target:
    """The GPU that is compiled for."""

    hopper: bool
    """Compute capability 9.0, which has wgmma."""
    cores: int
    """Streaming multiprocessors."""


def decode_attention(
    query: Array,
    keys: Array,
    values: Array,
    valid: Array,
    *,
    scale: float,
    soft_cap: float | None,
    return_mass: bool,
    kernel: str | None = None,
    tiles: Any = None,
    target: Target | None = None,
    interpret: bool = False,
) -> tuple[Array, Array | None]:
    """Attend and score; see ``api.decode_attention`` for the mathematics and the shapes.

    Args:
      query: [B, N, D], D a multiple of 16.
      keys: [B, K, S, D].
      values: [B, K, S, D].
      valid: [B, S] or [B, K, S] bool.
      scale: of the logits.
      soft_cap: of the logits, or None.
      return_mass: False switches that output off.
      kernel: one of ``KERNELS``; None takes the default of the table above.
      tiles: ``Tiles`` of that kernel's module; None chooses by shape and target.
      target: the GPU; None finds it out, see ``find_target``.
      interpret: run on the CPU.

    Returns:
      output: [B, N, D], dtype of ``query``.
      mass: [B, K, S] float32, or None.

    Raises:
      ValueError: ``kernel`` is unknown, or a named one refuses the shape or dtype (while tracing).
    """
    if kernel not in (None, *KERNELS):
        raise ValueError(f"kernel must be None or one of {', '.join(KERNELS)}, got {kernel!r}")
    target = find_target(keys) if target is None else target
    batch, num_kv_heads, slots, head_dim = keys.shape
    group = query.shape[1] // num_kv_heads
    module = _module(choose_kernel(group, keys, target) if kernel is None else kernel)
    if tiles is None:
        tiles = module.choose_tiles(
            batch, num_kv_heads, group, slots, head_dim, keys.dtype.itemsize, cores=target.cores
        )
    return module.decode_attention(
        query,
        keys,
        values,
        valid,
        scale=scale,
        soft_cap=soft_cap,
        return_mass=return_mass,
        tiles=tiles,
        interpret=interpret,
    )


def choose_kernel(group: int, keys: Array | jax.ShapeDtypeStruct, target: Target) -> str:
    """The default kernel for G query heads on keys [B, K, S, D], one of ``KERNELS``."""
    if target.hopper and _module("mosaic").why_not(group, keys) is None:
        return "mosaic"
    return "triton"


def find_target(array: Array) -> Target:
    """The GPU that the program around is compiled for, as far as it can be told while tracing.

    In this order: the mesh in use (``jax.shard_map``, ``jax.set_mesh``) or that ``array`` lies on;
    ``jax.default_device``; the first GPU of this process. Compiling ahead of time therefore needs
    one of the first two, as Pallas itself does. If none is a GPU, what runs on any from Ampere on.
    """
    meshes = (jax.sharding.get_abstract_mesh(), jax.typeof(array).sharding.mesh)
    default = jax.config.jax_default_device  # pyright: ignore
    devices = [*(mesh.abstract_device for mesh in meshes), default]
    for device in devices:
        known = isinstance(device, jax.Device | jax.sharding.AbstractDevice)  # not a mere "cuda"
        if known and device.platform in ("gpu", "cuda"):
            return _target(device)
    try:
        return _target(jax.local_devices(backend="gpu")[0])
    except RuntimeError:  # no such backend
        return Target(hopper=False, cores=_AMPERE_CORES)


def _target(device: Any) -> Target:
    """Of a device, or of the abstract one of a mesh, which has a name but no capability."""
    hopper = re.search(r"\bG?H\d{2,3}\b", device.device_kind) is not None  # H100, H20, GH200
    abstract = isinstance(device, jax.sharding.AbstractDevice)
    cores = device.num_cores if abstract else device.core_count
    return Target(hopper, cores or _AMPERE_CORES)


def _module(kernel: str) -> ModuleType:
    if kernel == "mosaic":
        from inertiakv_jax.pallas_kernels.decode_attention import gpu_mosaic

        return gpu_mosaic
    from inertiakv_jax.pallas_kernels.decode_attention import gpu_triton

    return gpu_triton
