# SPDX-License-Identifier: Apache-2.0
"""Random keys: each follows from a seed and a purpose, so that no two purposes share a key.

The order of the data is drawn by NumPy (`data.pipeline`, `tasks.batches`), independently of these keys.
"""

import jax

# The number that is folded into the seed's key. Never change one: every seed would then give other results.
PURPOSES = {
    "parameters": 0,  # initial parameters, and those of heads that a loaded model lacks
    "dropout": 1,  # further folded with the step and the microbatch
    "masking": 2,  # further folded with the epoch, the sequence and the token
}


def root_key(seed: int, purpose: str) -> jax.Array:
    """Returns the root key of a purpose, one of `PURPOSES`.

    Always threefry, whatever JAX's default generator: its bits do not depend on vmap, shape or sharding.
    """
    return jax.random.fold_in(jax.random.key(seed, impl="threefry2x32"), PURPOSES[purpose])
