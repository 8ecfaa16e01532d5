# SPDX-License-Identifier: Apache-2.0
"""Where every random key comes from: a seed and a purpose, so that equal seeds never give two purposes one key.

The order of the data is drawn by numpy (`data.pipeline`, `tasks.batches`), which shares no bits with these keys.
"""

import jax

# What a key is folded with first. A number stays for ever: another one is another result for every seed.
PURPOSES = {
    "parameters": 0,  # the initial ones, and those of a head that a model lacks
    "dropout": 1,  # then the step, then the microbatch
    "masking": 2,  # then the epoch, the sequence and the token
}


def root_key(seed: int, purpose: str) -> jax.Array:
    """Returns the root key of a purpose, one of `PURPOSES`.

    threefry whatever the default generator: its bits do not depend on vmap, shape or sharding.
    """
    return jax.random.fold_in(jax.random.key(seed, impl="threefry2x32"), PURPOSES[purpose])
