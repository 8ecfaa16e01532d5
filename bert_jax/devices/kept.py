# SPDX-License-Identifier: Apache-2.0
"""What a process keeps so that it computes sooner: compiled programs on disk, and on a CPU the memory that it frees.

The commands set it up before JAX starts; a program in Python gets it with the first model that it computes with
(docs/decisions/0043-kept-by-default.md).
"""

import contextlib
import functools
import os
from pathlib import Path

import jax
from jax.experimental.compilation_cache import compilation_cache

from bert_jax.devices.allocator import note_compilation, reuse_freed_memory
from bert_jax.storage.urls import user_cache

_MOST_BYTES = 2 * 2**30  # of compiled programs, where JAX_COMPILATION_CACHE_MAX_SIZE says nothing else


@functools.cache
def keep_for_inference() -> None:
    """Keeps compiled programs and freed memory from now on, once. What the user has chosen for JAX or glibc stays."""
    if os.environ.get("BERT_JAX_KEEP") == "0":
        return
    if reuse_freed_memory():
        jax.monitoring.register_event_duration_secs_listener(_hear)
    if not jax.config.values["jax_compilation_cache_dir"]:
        jax.config.update("jax_compilation_cache_dir", str(user_cache() / "compiled"))
        compilation_cache.reset_cache()  # of a process that has compiled before: JAX has found that it keeps none
    if "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS" not in os.environ:
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    drop_oldest(Path(jax.config.values["jax_compilation_cache_dir"]), _MOST_BYTES)


def _hear(event: str, duration_secs: float, **_: object) -> None:
    if event == "/jax/core/compile/backend_compile_duration":
        note_compilation()


def drop_oldest(directory: Path, most_bytes: int) -> None:
    """Deletes the oldest files of a directory of compiled programs until the rest has at most `most_bytes`."""
    if "JAX_COMPILATION_CACHE_MAX_SIZE" in os.environ or not directory.is_dir():
        return  # JAX does it, or the directory is in a bucket
    with contextlib.suppress(OSError):  # another process deletes the same
        entries = [(entry.stat(), entry.path) for entry in os.scandir(directory) if entry.is_file()]
        total = sum(stat.st_size for stat, _ in entries)
        for stat, path in sorted(entries, key=lambda entry: entry[0].st_mtime):
            if total <= most_bytes:
                break
            os.unlink(path)
            total -= stat.st_size
