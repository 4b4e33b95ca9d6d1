"""Decode attention on a TPU: keys and values stream through VMEM once, block by block.

The grid runs over rows, blocks of kv heads, and blocks of slots, the last one in order. A block of
keys gives logits [G, slots] per kv head, which enter an online softmax (running maximum, sum and
weighted values in VMEM). The mass needs the final maximum and sum of the row: its logits wait in
VMEM, so that all the mass adds to the traffic with HBM is its own 4 bytes a slot and kv head.

Two things follow from how XLA lays out arrays on a TPU, in tiles of 8 x 128 of the last two axes.
  * With D a multiple of 128, S should be a multiple of 8: of other caches XLA keeps S outermost,
    and copies them whole before the kernel.
  * With any other D, S is kept as the last axis, for D would be padded. The kernel then reads
    blocks [D, slots]; the transpose outside costs nothing, for it only names that layout.

float16 is refused: Mosaic takes no such argument.

Compiled ahead of time for v5e, v5p and v6e, numbers checked in interpret mode; never run on a TPU.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.typing import DTypeLike

from inertiakv_jax.numerics import MASK_VALUE
from inertiakv_jax.pallas_kernels.decode_attention.tpu_tiles import (
    LANES,
    SUBLANES,
    VMEM_SLACK,
    Tiles,
    choose_tiles,
    heads_per_pack,
    round_up,
    vmem_bytes,
)

_LOG2_E = 1.4426950408889634  # a TPU has 2**x; taking it into the scale saves a product per logit


@dataclasses.dataclass(frozen=True)
class _Spec:
    """What the kernel knows while it is traced."""

    scale: float
    soft_cap: float | None
    slots: int  # S
    tiles: Tiles
    slots_last: bool  # blocks are [D, slots], not [slots, D]
    group: int  # G
    mass: bool

    @property
    def packs(self) -> list[range]:
        """The kv heads of a block whose logits share registers while they wait."""
        heads, step = self.tiles.kv_heads, heads_per_pack(self.group)
        return [range(i, min(i + step, heads)) for i in range(0, heads, step)]


def refusal(dtype: DTypeLike) -> str | None:
    """Why keys and values of a dtype cannot be taken; None where they can.

    >>> refusal("bfloat16") is None, refusal("float16")
    (True, 'the TPU kernel takes float32 or bfloat16, got float16')
    """
    # Mosaic takes no float16 argument, and to pass its bits as int16 XLA copies them all.
    if jnp.dtype(dtype).name in ("float32", "bfloat16"):
        return None
    return f"the TPU kernel takes float32 or bfloat16, got {jnp.dtype(dtype).name}"


def decode_attention(
    query: Array,
    keys: Array,
    values: Array,
    valid: Array,
    *,
    scale: float,
    soft_cap: float | None,
    return_mass: bool,
    tiles: Tiles | None = None,
    interpret: bool | pltpu.InterpretParams = False,
) -> tuple[Array, Array | None]:
    """Attend and score; see ``api.decode_attention`` for the mathematics and the shapes.

    Args:
      query: [B, N, D].
      keys: [B, K, S, D].
      values: [B, K, S, D].
      valid: [B, S] or [B, K, S] bool.
      scale: of the logits.
      soft_cap: of the logits, or None.
      return_mass: False switches that output off.
      tiles: None chooses by shape.
      interpret: run on the CPU; ``InterpretParams`` also simulates the memory spaces.

    Returns:
      output: [B, N, D], dtype of ``query``.
      mass: [B, K, S] float32, or None.

    Raises:
      ValueError: ``refusal`` of the dtype, or ``tiles.kv_heads`` does not divide K (while tracing).
    """
    refused = refusal(keys.dtype)
    if refused is not None:
        raise ValueError(refused)
    batch, num_heads, head_dim = query.shape
    num_kv_heads, slots = keys.shape[1:3]
    group = num_heads // num_kv_heads
    itemsize = keys.dtype.itemsize
    if tiles is None:
        tiles = choose_tiles(batch, num_kv_heads, group, slots, head_dim, itemsize)
    if num_kv_heads % tiles.kv_heads:
        raise ValueError(f"{tiles.kv_heads=} must divide {num_kv_heads=}")
    spec = _Spec(
        scale=scale,
        soft_cap=soft_cap,
        slots=slots,
        tiles=tiles,
        slots_last=head_dim % LANES != 0,
        group=group,
        mass=return_mass,
    )
    # A head's group fills whole sublanes, so that no operation has to shift rows.
    rows = round_up(group, SUBLANES)
    grouped = query.reshape(batch, num_kv_heads, group, head_dim)
    grouped = jnp.pad(grouped, ((0, 0), (0, 0), (0, rows - group), (0, 0)))
    if spec.slots_last:
        keys, values = keys.swapaxes(2, 3), values.swapaxes(2, 3)
    head_blocks = num_kv_heads // tiles.kv_heads
    valid = valid.astype(jnp.int32).reshape(
        batch, *((1, 1) if valid.ndim == 2 else (head_blocks, tiles.kv_heads)), slots
    )
    output, *rest = _call(spec, grouped, keys, values, valid, interpret)
    output = output[:, :, :group].reshape(query.shape).astype(query.dtype)
    if not return_mass:
        return output, None
    if tiles.logits_in_vmem:
        return output, rest[0].reshape(batch, num_kv_heads, slots)
    logits, top, inverse = rest
    probabilities = jnp.exp2(logits - top[:, :, :group, :1]) * inverse[:, :, :group, :1]
    return output, jnp.sum(probabilities, axis=2)


def _call(spec: _Spec, query, keys, values, valid, interpret):
    batch, num_kv_heads, rows, head_dim = query.shape
    heads, block = spec.tiles.kv_heads, spec.tiles.slots
    head_blocks = num_kv_heads // heads
    grid = (batch, head_blocks, pl.cdiv(spec.slots, block))

    def whole(*shape):
        return pl.BlockSpec((1, heads, *shape), lambda b, h, s: (b, h, 0, 0))

    if spec.slots_last:
        streamed = pl.BlockSpec((1, heads, head_dim, block), lambda b, h, s: (b, h, 0, s))
    else:
        streamed = pl.BlockSpec((1, heads, block, head_dim), lambda b, h, s: (b, h, s, 0))
    per_head = valid.shape[1] * valid.shape[2] > 1
    masks = pl.BlockSpec(
        (1, 1, valid.shape[2], block), lambda b, h, s: (b, h if per_head else 0, 0, s)
    )
    f32 = jnp.float32
    struct = jax.ShapeDtypeStruct
    out_specs = [whole(rows, head_dim)]
    out_shape = [struct(query.shape, query.dtype)]
    scratch = [(heads, rows, LANES), (heads, rows, LANES), (heads, rows, head_dim)]
    if spec.mass and spec.tiles.logits_in_vmem:
        out_specs += [pl.BlockSpec((1, 1, heads, spec.slots), lambda b, h, s: (b, h, 0, 0))]
        out_shape += [struct((batch, head_blocks, heads, spec.slots), f32)]
        scratch += [(len(spec.packs), rows, round_up(spec.slots, block))]
    elif spec.mass:
        out_specs += [pl.BlockSpec((1, heads, spec.group, block), lambda b, h, s: (b, h, 0, s))]
        out_shape += [struct((batch, num_kv_heads, spec.group, spec.slots), f32)]
        out_specs += [whole(rows, LANES)] * 2
        out_shape += [struct((batch, num_kv_heads, rows, LANES), f32)] * 2
    itemsize = keys.dtype.itemsize
    vmem = vmem_bytes(spec.tiles, spec.group, spec.slots, head_dim, itemsize) + VMEM_SLACK
    return pl.pallas_call(
        functools.partial(_kernel, spec),
        grid=grid,
        in_specs=[whole(rows, head_dim), streamed, streamed, masks],
        out_specs=out_specs,
        out_shape=out_shape,
        scratch_shapes=[pltpu.VMEM(shape, f32) for shape in scratch],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary"),
            vmem_limit_bytes=max(vmem, 16 * 1024 * 1024),
        ),
        cost_estimate=pl.CostEstimate(
            flops=4 * batch * num_kv_heads * spec.group * spec.slots * head_dim,
            transcendentals=(1 + spec.mass) * batch * num_kv_heads * spec.group * spec.slots,
            bytes_accessed=(keys.size + values.size) * itemsize
            + valid.size * 4
            + sum(x.size * x.dtype.itemsize for x in (query, *out_shape)),
        ),
        interpret=interpret,
        name="decode_attention",
    )(query, keys, values, valid)


def _kernel(spec: _Spec, query, keys, values, valid, output, *rest):
    # query, output  [1, heads, rows, D], rows = G rounded up
    # keys, values   [1, heads, slots, D] or [1, heads, D, slots]
    # valid          [1, 1, heads or 1, slots] int32
    # mass           [1, 1, heads, S], or logits [1, heads, G, slots], top and inverse
    # scratch        top, total [heads, rows, 128]; sums [heads, rows, D]; logits [packs, rows, S']
    in_vmem = spec.tiles.logits_in_vmem
    outputs = (1 if in_vmem else 3) if spec.mass else 0
    mass, (top, total, sums, *logits) = rest[:outputs], rest[outputs:]
    step = pl.program_id(2)

    @pl.when(step == 0)
    def _():
        top[...] = jnp.full_like(top, MASK_VALUE)
        total[...] = jnp.zeros_like(total)
        sums[...] = jnp.zeros_like(sums)

    masks = [_live_slots(spec, valid, head, step) for head in range(valid.shape[2])]
    for pack, heads in enumerate(spec.packs):
        waiting = []
        for head in heads:
            live = masks[head if len(masks) > 1 else 0]
            waiting += [_attend(spec, query, keys, values, live, top, total, sums, head)]
            if spec.mass and not in_vmem:
                mass[0][0, head] = waiting[-1][: spec.group]
        if spec.mass and in_vmem:
            start = pl.multiple_of(step * spec.tiles.slots, LANES)
            logits[0][pack, :, pl.ds(start, spec.tiles.slots)] = _pack(spec, waiting)

    @pl.when(step == pl.num_programs(2) - 1)
    def _():
        _normalise(spec, output, top, total, sums)
        if spec.mass and in_vmem:
            _write_mass(spec, mass[0], top, total, logits[0])
        elif spec.mass:
            mass[1][0], mass[2][0] = top[...], total[...]


def _live_slots(spec: _Spec, valid, head: int, step) -> tuple[Array, Array]:
    """The mask of a block, to apply to logits [rows, slots] and to a block of values."""
    live = valid[0, 0, pl.ds(head, 1), :]
    if spec.slots % spec.tiles.slots:
        # Beyond the end a block holds whatever was in VMEM before.
        slot = step * spec.tiles.slots + jax.lax.broadcasted_iota(jnp.int32, live.shape, 1)
        live = jnp.where(slot < spec.slots, live, 0)
    return live, live if spec.slots_last else live.reshape(spec.tiles.slots, 1)


def _attend(spec: _Spec, query, keys, values, live, top, total, sums, head: int) -> Array:
    """Take one block of one kv head into the online softmax; return its logits, to the base 2."""
    q, k, v = query[0, head], keys[0, head], values[0, head]
    block = spec.tiles.slots
    dot = functools.partial(
        jax.lax.dot_general,
        precision=jax.lax.Precision.HIGHEST if k.dtype == jnp.float32 else None,
        preferred_element_type=jnp.float32,
    )
    depth, slots = (0, 1) if spec.slots_last else (1, 0)
    logits = dot(q, k, (((1,), (depth,)), ((), ())))
    if spec.soft_cap is None:
        logits = logits * (spec.scale * _LOG2_E)
    else:
        logits = jnp.tanh(logits * (spec.scale / spec.soft_cap)) * (spec.soft_cap * _LOG2_E)
    logits = jnp.where(live[0] != 0, logits, MASK_VALUE)
    # Maximum and sum fill 128 lanes each, the same value in all and partial sums: thus they meet
    # the logits without being spread, and the sum is only reduced at the end.
    new_top = jnp.maximum(top[head], jnp.max(logits, axis=1, keepdims=True))
    weights = jnp.exp2(logits - _widen(new_top, block))
    decay = jnp.exp2(top[head] - new_top)
    # A weight of 0 does not hide a NaN in a dead slot.
    v = jnp.where(live[1] != 0, v, jnp.zeros_like(v))
    add = dot(weights.astype(v.dtype), v, (((1,), (slots,)), ((), ())))
    sums[head] = _widen(decay, add.shape[1]) * sums[head] + add
    parts = [weights[:, i : i + LANES] for i in range(0, block, LANES)]
    total[head] = decay * total[head] + sum(parts[1:], parts[0])
    top[head] = new_top
    return logits


def _normalise(spec: _Spec, output, top, total, sums) -> None:
    """Write the output; leave 1 / sum in ``total``, or 0 where there is nothing to sum."""
    for head in range(spec.tiles.kv_heads):
        held = top[head] > MASK_VALUE
        weight = jnp.where(held, jnp.sum(total[head], axis=1, keepdims=True), 1.0)
        inverse = jnp.where(held, 1.0 / weight, 0.0)
        output[0, head] = (sums[head] * _widen(inverse, sums.shape[2])).astype(output.dtype)
        # Rows beyond G belong to no query head.
        total[head] = jnp.where(_row(inverse) < spec.group, inverse, 0.0)


def _write_mass(spec: _Spec, mass, top, total, logits) -> None:
    """Turn the logits of all slots into the mass."""
    block = spec.tiles.slots
    # Packed like the logits.
    for pack, heads in enumerate(spec.packs):
        top[pack] = _pack(spec, [top[head] for head in heads])
        total[pack] = _pack(spec, [total[head] for head in heads])

    def write(start, size):
        for pack, heads in enumerate(spec.packs):
            for i in range(0, size, LANES):
                width = min(LANES, size - i)
                lanes = pl.ds(start + i, width)
                p = jnp.exp2(logits[pack, :, lanes] - top[pack][:, :width])
                p = p * total[pack][:, :width]
                for head, row in zip(heads, _sum_rows(spec, p), strict=False):
                    mass[0, 0, pl.ds(head, 1), lanes] = row

    def body(i, _):
        write(pl.multiple_of(i * block, LANES), block)

    whole_blocks = spec.slots // block
    if whole_blocks:  # the body is traced even for no trip, and does not fit fewer slots
        jax.lax.fori_loop(0, whole_blocks, body, None)
    write(whole_blocks * block, spec.slots % block)


def _pack(spec: _Spec, parts: list[Array]) -> Array:
    """[8, n] of several heads' [8, n] whose first G rows count; one head's as it is."""
    each = SUBLANES // heads_per_pack(spec.group)
    packed = parts[0]
    for i, part in enumerate(parts[1:], start=1):
        packed = jnp.where(_row(part) < i * each, packed, pltpu.roll(part, i * each, axis=0))
    return packed


def _sum_rows(spec: _Spec, p: Array) -> list[Array]:
    """[1, n] for each head of a pack: the sum of its rows, of which those beyond G are 0."""
    count = heads_per_pack(spec.group)
    if count == 1:
        return [jnp.sum(p, axis=0, keepdims=True)]
    each, shift = SUBLANES // count, 1
    while shift < each:
        p = p + pltpu.roll(p, shift, axis=0)
        shift *= 2
    last_rows = range(each - 1, SUBLANES, each)
    return [p[row : row + 1] for row in last_rows]


def _row(x: Array) -> Array:
    return jax.lax.broadcasted_iota(jnp.int32, x.shape, 0)


def _widen(x: Array, width: int) -> Array:
    """[rows, width] of [rows, 128] whose lanes are all the same."""
    return jnp.concatenate([x] * pl.cdiv(width, LANES), axis=1)[:, :width]
