# SPDX-License-Identifier: Apache-2.0
"""Attention of long rows and of windows on TPUs, by the splash kernels that come with JAX. They know no dropout.

A program of a kernel holds a block of scores, softmax is online, and blocks outside a window are skipped. The kernels
take a row's heads one after the other, [N, L, D], so queries, keys and values are turned before and after.
"""

import math

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu import splash_attention as splash

# The library offers its backward pass through its own derivative alone, which keeps what it likes. Ours keeps what the
# kernels of all platforms keep (`fused_attention`).
from jax.experimental.pallas.ops.tpu.splash_attention.splash_attention_kernel import (
    DEFAULT_MASK_VALUE,
    SplashAttentionKernel,
    _splash_attention_bwd,
)

from bert_jax.model.attention_kernels import AttentionShape
from bert_jax.model.fused_attention_tpu import LONGEST_ROW

_LANES = 128  # columns of a tile: lengths and blocks are multiples
# Queries and keys of a block where all of a row are seen; the keys of the backward pass, which adds up the gradients of
# queries once for each block of keys; and both where a window skips blocks, of which small ones waste less.
_QUERIES = 512
_KEYS = 512
_KEYS_BACKWARD = 2048


def fits(shape: AttentionShape, array: jax.Array) -> bool:
    """Returns whether the kernels support these shapes, and `fused_attention_tpu` does not."""
    rows, size, _ = array.shape
    known = isinstance(rows, int) and isinstance(size, int)
    supported = not shape.drops and shape.precision == "default" and shape.head_size % 64 == 0
    return known and supported and size % _LANES == 0 and bool(shape.window or size > LONGEST_ROW)


def forward(
    shape: AttentionShape, interpret: bool, *arrays: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Returns the context [B, L, H], and the logarithms [B, N, L] of the sums of the raised scores of each query.

    Arrays: query, key, value, sequence ids, and keys of dropout, which are not read.
    """
    query, key, value, ids, _ = arrays
    kernel = _kernel(shape, query.shape[1], interpret, save_residuals=True)
    with jax.named_scope(_flops(shape, query, products=2, kernels=1)):
        context, (logarithms,) = jax.vmap(kernel)(
            _heads(shape, _scaled(shape, query)),
            _heads(shape, key),
            _heads(shape, value),
            splash.SegmentIds(jnp.abs(ids), ids),
        )
    return _rows(context), logarithms


def backward(
    shape: AttentionShape,
    interpret: bool,
    gradient: jax.Array,
    context: jax.Array,
    logarithms: jax.Array,
    *arrays: jax.Array,
) -> tuple[jax.Array, ...]:
    """Returns the gradients of query, key and value. `context` and `logarithms` are the results of `forward`."""
    query, key, value, ids, _ = arrays
    kernel = _kernel(shape, query.shape[1], interpret, save_residuals=False)
    masks = (kernel.dq_mask_info, kernel.dkv_mask_info)

    def of_row(gradient, context, logarithms, query, key, value, ids):
        kept = (
            query,
            key,
            value,
            splash.SegmentIds(jnp.abs(ids), ids),
            None,
            context,
            logarithms,
            *masks,
        )
        return _splash_attention_bwd(
            save_residuals=False,
            mask_value=DEFAULT_MASK_VALUE,
            is_mqa=False,
            block_sizes=kernel.kwargs["block_sizes"],
            residual_checkpoint_name=None,
            mask_function=kernel.kwargs["mask_function"],
            attn_logits_soft_cap=None,
            interpret=interpret,
            res=kept,
            do=gradient,
        )[3:6]

    products, kernels = (7, 2) if shape.window else (5, 1)
    with jax.named_scope(_flops(shape, query, products, kernels)):
        of_query, of_key, of_value = jax.vmap(of_row)(
            _heads(shape, gradient),
            _heads(shape, context),
            logarithms,
            _heads(shape, _scaled(shape, query)),
            _heads(shape, key),
            _heads(shape, value),
            ids,
        )
    return _scaled(shape, _rows(of_query)), _rows(of_key), _rows(of_value)


def _kernel(
    shape: AttentionShape, size: int, interpret: bool, save_residuals: bool
) -> SplashAttentionKernel:
    """Returns the library's kernel, made for one head: it takes the same mask for any number of them."""
    places, (before, after) = (size, size), _sides(shape)
    mask = splash.FullMask(places)
    if before is not None or after is not None:
        mask = splash.LocalMask(places, (before, after), offset=0)
    return splash.make_splash_mha_single_device(
        splash.MultiHeadMask([mask]),
        block_sizes=_blocks(shape, size),
        save_residuals=save_residuals,
        interpret=interpret,
    )


def _sides(shape: AttentionShape) -> tuple[int | None, int | None]:
    """Returns the tokens before and after it that a query sees; None is all."""
    width = shape.window or None
    return width, 0 if shape.causal else width


def _blocks(shape: AttentionShape, size: int) -> splash.BlockSizes:
    queries, keys, keys_backward = (
        math.gcd(size, _LANES if shape.window else most)
        for most in (_QUERIES, _KEYS, _KEYS_BACKWARD)
    )
    # In a window gradients of queries have a kernel, or each block of keys would write some for all queries.
    apart = bool(shape.window)
    return splash.BlockSizes(
        block_q=queries,
        block_kv=keys,
        block_q_dkv=queries,
        block_kv_dkv=keys_backward,
        block_kv_dkv_compute=keys,
        block_q_dq=queries if apart else None,
        block_kv_dq=keys if apart else None,
        use_fused_bwd_kernel=not apart,
    )


def _flops(shape: AttentionShape, query: jax.Array, products: int, kernels: int) -> str:
    """Returns the name by which a plan knows the FLOPs of each kernel (`hlo.flops`), since its text shows none."""
    rows, size, hidden = query.shape
    blocks, (before, after) = _blocks(shape, size), _sides(shape)
    scores = 0
    for start in range(0, size, blocks.block_q):
        first = 0 if before is None else max(0, start - before)
        last = size - 1 if after is None else min(size, start + blocks.block_q + after) - 1
        of_keys = last // blocks.block_kv - first // blocks.block_kv + 1
        scores += blocks.block_q * of_keys * blocks.block_kv
    return f"kernel_flops_{products * 2 * rows * hidden * scores // kernels}"


def _scaled(shape: AttentionShape, query: jax.Array) -> jax.Array:
    return (query.astype(jnp.float32) * shape.head_size**-0.5).astype(query.dtype)


def _heads(shape: AttentionShape, array: jax.Array) -> jax.Array:
    """Returns [B, N, L, D] of [B, L, H]."""
    return array.reshape(*array.shape[:2], shape.num_heads, shape.head_size).swapaxes(1, 2)


def _rows(heads: jax.Array) -> jax.Array:
    """Returns [B, L, H] of [B, N, L, D]."""
    turned = heads.swapaxes(1, 2)
    return turned.reshape(*turned.shape[:2], -1)
