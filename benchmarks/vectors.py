# SPDX-License-Identifier: Apache-2.0
"""Exact search of vectors in a directory beside faiss's flat index: seconds of a batch of queries, and memory.

    python benchmarks/vectors.py make DIR 5000000 384     random vectors of length 1
    python benchmarks/vectors.py ours DIR 1,32,256
    python benchmarks/vectors.py faiss DIR 1,32,256       in an environment with faiss-cpu

    python benchmarks/vectors.py pairs dev-v1.1.json train.jsonl      SQuAD's questions of every other article
    python benchmarks/vectors.py recall dev-v1.1.json MODEL           recall@10 of the others, by precision

`ours` and `faiss` print a line of JSON: the seconds of each call, those of all cores, which say more on a machine with
other work, and the most memory that the process has had. Run them in turn. `Private` is what the process holds itself;
pages of mapped files are the system's, which takes them back.
"""

import json
import re
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

ROWS, CALLS, K = 65536, 3, 10


def make(directory, count, size):
    """Writes a directory of random vectors."""
    from bert_jax.data import vectors

    rng, shards = np.random.default_rng(0), []
    for number, first in enumerate(range(0, count, ROWS)):
        rows = min(ROWS, count - first)
        part = vectors.unit(rng.standard_normal((rows, size), dtype=np.float32))
        passages = [(str(first + row), "") for row in range(rows)]
        texts = vectors.write_texts(directory, f"texts-{number:05d}.parquet", passages)
        codes = vectors.write_codes(directory, f"vectors-{number:05d}.npy", part)
        ranges = [part.min(axis=0).tolist(), part.max(axis=0).tolist()]
        shards.append({"rows": rows, "vectors": codes, "texts": texts, "ranges": ranges})
    vectors.write_manifest(directory, {"options": {"precision": "float32"}}, shards)


def articles(path):
    """Returns, for each article of SQuAD's file, pairs of a paragraph and its questions."""
    articles = json.loads(Path(path).read_text("utf-8"))["data"]
    found = []
    for parts in (article["paragraphs"] for article in articles):
        found.append(
            [(part["context"], [each["question"] for each in part["qas"]]) for part in parts]
        )
    return found


def pairs(path, output):
    """Writes the pairs of every other article, to train on."""
    lines = [
        json.dumps({"anchor": question, "positive": text}) + "\n"
        for article in articles(path)[::2]
        for text, questions in article
        for question in questions
    ]
    Path(output).write_text("".join(lines))


def recall(path, model):
    """Prints how many of the other articles' questions find their paragraph among all, by precision and candidates."""
    import bert_jax

    bert, found = bert_jax.load_pretrained(model), articles(path)
    texts = [text for article in found for text, _ in article]
    places = {text: place for place, text in enumerate(texts)}
    asked = [
        (question, places[text])
        for article in found[1::2]
        for text, own in article
        for question in own
    ]
    queries = bert_jax.sentence_embeddings(bert, [question for question, _ in asked], kind="query")
    wanted = np.array([[place] for _, place in asked])
    exact = None
    with tempfile.TemporaryDirectory() as folder:
        corpus = Path(folder, "corpus.jsonl")
        corpus.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        for precision in ("float32", "float16", "int8", "ubinary"):
            bert_jax.write_vectors(bert, str(corpus), f"{folder}/{precision}", precision)
            opened = bert_jax.open_vectors(f"{folder}/{precision}")
            for candidates in (20, 100, 1000) if precision == "ubinary" else (0,):
                near = bert_jax.nearest_vectors(queries, opened, K, candidates).numbers
                exact = near if exact is None else exact
                same = np.mean([len({*one} & {*other}) / K for one, other in zip(near, exact)])
                found = (near == wanted).any(axis=1).mean()
                print(
                    f"{precision} {candidates}: recall@10 {found:.4f}, {same:.2%} of float32's first ten",
                    flush=True,
                )


def memory():
    """Returns the GB of memory that this process has had at most, and those that are its own now."""
    status = Path("/proc/self/status").read_text()
    found = dict(re.findall(r"(VmHWM|RssAnon):\s*(\d+) kB", status))
    return {"Most": int(found["VmHWM"]) / 1e6, "Private": int(found["RssAnon"]) / 1e6}


def measure(search, batches, size):
    """Prints the seconds of each call of a search, and those of all cores, for batches of queries."""
    seconds, of_cores = {}, {}
    for count in batches:
        queries = np.random.default_rng(count).standard_normal((count, size), dtype=np.float32)
        queries /= np.linalg.norm(queries, axis=1, keepdims=True)
        search(queries)  # compiles, and reads the disk
        seconds[count], of_cores[count] = [], []
        for _ in range(CALLS):
            began = time.perf_counter(), time.process_time()
            search(queries)
            seconds[count].append(round(time.perf_counter() - began[0], 3))
            of_cores[count].append(round(time.process_time() - began[1], 3))
    print(json.dumps({"seconds": seconds, "of cores": of_cores, "GB": memory()}), flush=True)


def main():
    """Does what is asked for."""
    what, directory, *rest = sys.argv[1:]
    if what in ("pairs", "recall"):
        {"pairs": pairs, "recall": recall}[what](directory, *rest)
        return
    directory = Path(directory)
    if what == "make":
        make(directory, *map(int, rest))
        return
    batches = [int(count) for count in rest[0].split(",")]
    if what == "ours":
        from bert_jax import nearest_vectors, open_vectors

        opened = open_vectors(directory, verify=False)
        measure(
            lambda queries: nearest_vectors(queries, opened, K).numbers,
            batches,
            opened.manifest["dimensions"],
        )
    else:
        import faiss  # pyright: ignore[reportMissingImports]

        paths = sorted(directory.glob("vectors-*.npy"))
        index = faiss.IndexFlatIP(np.load(paths[0], mmap_mode="r").shape[1])
        for path in paths:
            index.add(np.load(path))
        measure(lambda queries: index.search(queries, K)[1], batches, index.d)


if __name__ == "__main__":
    main()
