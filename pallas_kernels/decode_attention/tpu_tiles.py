"""How the TPU kernel of decode attention cuts its work: by shape, and within what VMEM holds."""

import dataclasses

from jax.experimental import pallas as pl

LANES = 128
SUBLANES = 8
_FEWEST_BLOCK_BYTES = 512 * 1024  # of keys and values: smaller ones don't hide the start of a copy
_MOST_BLOCK_BYTES = 2 * 1024 * 1024  # larger ones only lengthen the first, which nothing hides
_BLOCKS_WANTED = 16
_FEWEST_BLOCK_SLOTS = 256  # fewer don't fill the time between a product's start and its result
# A TensorCore has 64 MiB (v5p) or 128 MiB (v5e, v6e); the rest is left to the program around.
_VMEM_BUDGET = 48 * 1024 * 1024
VMEM_SLACK = 4 * 1024 * 1024  # what the compiler needs for itself


@dataclasses.dataclass(frozen=True)
class Tiles:
    """How the work is cut. No effect on numbers beyond rounding, much on speed."""

    kv_heads: int
    """Of one block; divides K."""
    slots: int
    """Of one block; a multiple of 128. Need not divide S."""
    logits_in_vmem: bool = True
    """False: logits go to HBM and come back, for rows too long for VMEM."""

    def __post_init__(self):
        if self.kv_heads < 1:
            raise ValueError(f"kv_heads must be at least 1, got {self.kv_heads}")
        if self.slots < 1 or self.slots % LANES:
            raise ValueError(f"slots must be a multiple of {LANES}, got {self.slots}")


def choose_tiles(
    batch: int, num_kv_heads: int, group: int, slots: int, head_dim: int, itemsize: int
) -> Tiles:
    """Tiles for a shape, letters B, K, G, S, D; ``itemsize`` in bytes.

    >>> choose_tiles(batch=8, num_kv_heads=8, group=4, slots=16384, head_dim=128, itemsize=2)
    Tiles(kv_heads=8, slots=512, logits_in_vmem=True)
    """
    # One block of all kv heads writes the mass as it is wanted, [B, K, S]. A second block feeds
    # the second core that some generations have.
    fit = [heads for heads in range(num_kv_heads, 0, -1) if num_kv_heads % heads == 0]
    if batch % 2 and num_kv_heads % 2 == 0:
        fit = fit[1:]
    slot_bytes = 2 * head_dim * itemsize
    wanted = batch * num_kv_heads * slots * slot_bytes // _BLOCKS_WANTED
    block_bytes = min(max(wanted, _FEWEST_BLOCK_BYTES), _MOST_BLOCK_BYTES)
    widest = _MOST_BLOCK_BYTES // (_FEWEST_BLOCK_SLOTS * slot_bytes)
    fit = [heads for heads in fit if heads <= widest] or fit[-1:]

    def tiles(heads: int, logits_in_vmem: bool) -> Tiles:
        block = max(block_bytes // (heads * slot_bytes) // LANES * LANES, LANES)
        return Tiles(heads, min(block, round_up(slots, LANES)), logits_in_vmem)

    for heads in fit:
        chosen = tiles(heads, True)
        if vmem_bytes(chosen, group, slots, head_dim, itemsize) <= _VMEM_BUDGET:
            return chosen
    return tiles(fit[0], False)


def vmem_bytes(tiles: Tiles, group: int, slots: int, head_dim: int, itemsize: int) -> int:
    """Buffers and scratch of one grid step, the mass included."""
    rows = round_up(group, SUBLANES)
    block = tiles.kv_heads * tiles.slots
    streamed = 2 * 2 * block * head_dim * itemsize
    running = tiles.kv_heads * rows * (round_up(head_dim, LANES) + 2 * LANES) * 4
    if tiles.logits_in_vmem:
        packs = pl.cdiv(tiles.kv_heads, heads_per_pack(group))
        logits = packs * rows * round_up(slots, tiles.slots) * 4
        mass = 2 * sublanes(tiles.kv_heads) * round_up(slots, LANES) * 4
    else:
        logits, mass = 2 * block * rows * 4, 0
    valid = 2 * sublanes(tiles.kv_heads) * tiles.slots * 4
    return streamed + running + logits + mass + valid


def sublanes(rows: int) -> int:
    """Rows that an array of ``rows`` takes up: tiles of fewer than 8 are powers of two."""
    return round_up(rows, min(1 << (rows - 1).bit_length(), SUBLANES))


def heads_per_pack(group: int) -> int:
    """How many kv heads share the 8 sublanes of a register: a power of two."""
    return max(SUBLANES // (1 << (group - 1).bit_length()), 1)


def round_up(n: int, multiple: int) -> int:
    """The lowest multiple that is not below ``n``."""
    return -(-n // multiple) * multiple
