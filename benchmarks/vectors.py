# SPDX-License-Identifier: Apache-2.0
"""Exact search of vectors in a directory beside faiss's flat index: seconds of a batch of queries, and memory.

    python benchmarks/vectors.py make DIR 5000000 384     random vectors of length 1
    python benchmarks/vectors.py ours DIR 1,32,256
    python benchmarks/vectors.py faiss DIR 1,32,256       in an environment with faiss-cpu

`ours` and `faiss` print a line of JSON: the seconds of each call, and the most memory that the process has had. Run them
in turn. `Private` is what the process holds itself; pages of mapped files are the system's, which takes them back.
"""

import json
import sys
import time
from pathlib import Path

import numpy as np

ROWS, CALLS, K = 65536, 5, 10


def make(directory, count, size):
    from bert_jax.data import vectors

    rng, shards, texts = np.random.default_rng(0), [], {"name": "texts-00000.parquet"}
    low, high = np.zeros(size), np.zeros(size)
    for number, first in enumerate(range(0, count, ROWS)):
        rows = min(ROWS, count - first)
        part = vectors.unit(rng.standard_normal((rows, size), dtype=np.float32))
        low, high = np.minimum(low, part.min(axis=0)), np.maximum(high, part.max(axis=0))
        texts = vectors.write_texts(directory, number, [(str(n), "") for n in range(first, first + rows)])
        codes = vectors.write_codes(directory, f"vectors-{number:05d}.npy", part)
        shards.append({"rows": rows, "vectors": codes, "texts": texts})
    vectors.write_manifest(directory, {"options": {"precision": "float32"}}, shards, np.stack([low, high]))


def memory():
    lines = Path("/proc/self/status").read_text().splitlines()
    found = {name: int(rest.split()[0]) / 1e6 for name, _, rest in (line.partition(":") for line in lines) if "kB" in rest}
    return {"Most": found["VmHWM"], "Private": found["RssAnon"]}


def measure(search, batches, size):
    seconds = {}
    for count in batches:
        queries = np.random.default_rng(count).standard_normal((count, size), dtype=np.float32)
        queries /= np.linalg.norm(queries, axis=1, keepdims=True)
        seconds[count] = []
        for call in range(CALLS + 1):
            began = time.perf_counter()
            found = search(queries)
            if call:  # the first compiles, and reads the disk
                seconds[count].append(round(time.perf_counter() - began, 3))
        print(count, found[0][:3].tolist(), file=sys.stderr)
    print(json.dumps({"seconds": seconds, "GB": memory()}), flush=True)


def main():
    what, directory, *rest = sys.argv[1:]
    directory = Path(directory)
    if what == "make":
        make(directory, *map(int, rest))
        return
    batches = [int(count) for count in rest[0].split(",")]
    if what == "ours":
        from bert_jax import nearest_vectors, open_vectors

        opened = open_vectors(directory, verify=False)
        measure(lambda queries: nearest_vectors(queries, opened, K).numbers, batches, opened.manifest["dimensions"])
    else:
        import faiss

        paths = sorted(directory.glob("vectors-*.npy"))
        index = faiss.IndexFlatIP(np.load(paths[0], mmap_mode="r").shape[1])
        for path in paths:
            index.add(np.load(path))
        measure(lambda queries: index.search(queries, K)[1], batches, index.d)


if __name__ == "__main__":
    main()
