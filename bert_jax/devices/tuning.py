# SPDX-License-Identifier: Apache-2.0
"""What a process may change about itself so that it computes sooner. Commands do; a program in Python may.

Importing the package, loading a model and computing with it change nothing of a process: no allocator, no setting of
JAX, no thread (docs/decisions/0016-tuning-a-process.md).
"""

import functools
import os

from bert_jax.devices.allocator import note_compilation, reuse_freed_memory
from bert_jax.devices.cores import give_threads_cores
from bert_jax.storage.urls import user_cache

# of compiled programs in our own directory; JAX removes those that were used least recently
_MOST_BYTES = 2 * 2**30


def settings_for_programs() -> dict[str, str | int | float]:
    """Returns the settings of JAX with which it keeps compiled programs in a directory of our own."""
    return {
        "jax_compilation_cache_dir": str(user_cache() / "compiled_programs"),
        "jax_compilation_cache_max_size": _MOST_BYTES,
        "jax_persistent_cache_min_compile_time_secs": 0.0,
    }


@functools.cache
def tune_process() -> None:
    """Tunes this process for inference, from now on: compiled programs, freed memory and threads.

    A call does three things. A second call does nothing, and neither does a call where the environment has
    BERT_JAX_KEEP=0.

    - Programs that JAX compiles are kept in `compiled_programs` of the cache directory (BERT_JAX_CACHE, or
      ~/.cache/bert_jax), 2 GiB at most, so a later process need not compile them. Where the user has set
      `jax_compilation_cache_dir`, nothing about programs is changed.
    - On a CPU under Linux with glibc, memory that is freed is kept for the next batch, up to a quarter of the
      machine's, half of it while a quarter is left for others. The address space grows by half of the machine's
      memory, which is not touched. Nothing is changed where MALLOC_*, GLIBC_TUNABLES or LD_PRELOAD is set. It gains
      most before JAX has computed anything.
    - On a CPU under Linux, each of XLA's threads has a core of its own during a request that follows a pause.

    docs/howto/use_models.md has what each gains.
    """
    if os.environ.get("BERT_JAX_KEEP") == "0":
        return
    import jax  # here: commands ask for the settings above before JAX starts
    from jax.experimental.compilation_cache import compilation_cache

    if reuse_freed_memory():
        jax.monitoring.register_event_duration_secs_listener(_hear)
    give_threads_cores()
    if not jax.config.values["jax_compilation_cache_dir"]:
        for name, value in settings_for_programs().items():
            jax.config.update(name, value)
        # a process that has compiled before has noted that it keeps nothing
        compilation_cache.reset_cache()


def _hear(event: str, duration_secs: float, **_: object) -> None:
    if event == "/jax/core/compile/backend_compile_duration":
        note_compilation()
