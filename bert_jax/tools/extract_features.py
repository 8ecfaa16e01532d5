# SPDX-License-Identifier: Apache-2.0
"""Writes the encoder's vectors for every line of the input.

bert_jax extract_features --checkpoint=DIR --input=FILE --output=FILE.jsonl --layers=-1,-2,-3,-4
bert_jax extract_features --checkpoint=DIR --input=CORPUS --output=DIR/ --pooling=own --kind=passage --precision=int8

An output file that ends in .npz holds arrays: `vectors` [layers, all tokens, H], `starts` (where each text's tokens
begin, and where the last ones end) and `tokens`; with --pooling, `embeddings` [texts, H]. With --pooling, one that ends
in .parquet has the columns `text` and `embedding`. Any other file holds JSON
lines as Google's extract_features.py writes them. An input line is a text, or two texts separated by " ||| ".

An output that ends in / becomes a directory of vectors for `search`, of a corpus that need not fit in memory: shards,
ids, texts and a manifest. --input is then files of texts, JSON lines or tables, or BEIR's directory. All processes of a
job share the work, and a command that was stopped goes on.

A sparse model, with --pooling=own, gives words with their weights, largest first: JSON lines
{"linex_index": 0, "terms": {"door": 2.98, ...}}, or in .npz `ids`, `weights` and `starts`. --top_k keeps as many.
A model with a vector for each token gives those that count: {"linex_index": 0, "vectors": [[0.12, ...], ...]}, or in
.npz `vectors` [all of them, numbers] and `starts`.
"""

import itertools
import json
import sys
from collections.abc import Iterable, Iterator, Sequence, Sized
from pathlib import Path
from typing import TYPE_CHECKING, Any

from absl import flags

from bert_jax.data.sources.parquet import write_vectors
from bert_jax.data.vectors import PRECISIONS
from bert_jax.devices.allocator import reuse_freed_memory
from bert_jax.errors import InputError
from bert_jax.storage.files import JsonObject
from bert_jax.storage.places import to_place
from bert_jax.storage.writing import atomic_path, check_file
from bert_jax.tools import cli
from bert_jax.tools.lines import open_lines, read_input
from bert_jax.tools.shared_flags import (
    define_checkpoint,
    define_dtype,
    define_long_texts,
    define_text_column,
)

if TYPE_CHECKING:
    import numpy as np

    from bert_jax.checkpoints.pretrained import Pretrained
    from bert_jax.inference.features import TokenFeatures

CHECKPOINT = define_checkpoint()
INPUT = flags.DEFINE_string("input", "", "file with one text per line; - is standard input")
OUTPUT = flags.DEFINE_string(
    "output", "", "file to write the vectors to: .npz, .parquet or JSON lines; or a directory, DIR/"
)
LAYERS = flags.DEFINE_string(
    "layers", "-1,-2,-3,-4", "layers to extract; 0 is the embeddings, -1 the last layer"
)
POOLING = flags.DEFINE_enum(
    "pooling", "none", ["none", "own", "mean", "cls"],
    "how to make one vector per text: as the model was trained to, or from the first of --layers",
)  # fmt: skip
KIND = flags.DEFINE_enum(
    "kind",
    "",
    ["", "query", "passage"],
    "with --pooling=own: what the texts are, for the model's prompt of these",
)
TOP_K = flags.DEFINE_integer(
    "top_k", 0, "of a sparse model: the words of each text that are written; 0 is all of its own"
)
MAX_SEQ_LENGTH = flags.DEFINE_integer(
    "max_seq_length", 0, "maximum tokens per text; 0 takes as many as the model has positions for"
)
DTYPE = define_dtype()
LONG_TEXTS = define_long_texts()
TEXT_COLUMN = define_text_column()
PRECISION = flags.DEFINE_enum(
    "precision", "float32", PRECISIONS, "numbers or codes of vectors in a directory"
)
SHARD_ROWS = flags.DEFINE_integer(
    "shard_rows", 65536, "texts of a shard of a directory, which are in memory", lower_bound=1
)
join = cli.define_cluster_flags()

_PARQUET = ".parquet"


def main() -> None:
    """Writes the vectors of every line of the input."""
    cli.check_given(CHECKPOINT, INPUT, OUTPUT)
    try:
        layers = [int(layer) for layer in LAYERS.value.split(",")]
    except ValueError:
        raise InputError(
            f"--layers {LAYERS.value!r} are not numbers; write like -1,-2,-3,-4"
        ) from None
    if KIND.value and POOLING.value != "own":
        raise InputError(f"--kind={KIND.value} is of --pooling=own; give that too, or leave it out")
    if TOP_K.value < 0 or (TOP_K.value and POOLING.value != "own"):
        raise InputError(
            f"--top_k={TOP_K.value} is of --pooling=own of a sparse model; give that, or leave it out"
        )
    if OUTPUT.value.endswith((_PARQUET, "/")) and POOLING.value == "none":
        raise InputError(
            f"--output={OUTPUT.value} holds a vector for each text; give --pooling too, or another output"
        )
    if OUTPUT.value.endswith("/"):
        _write_directory(layers)
        return
    if PRECISION.value != "float32":
        raise InputError(f"--precision={PRECISION.value} is of a directory; write --output=DIR/")
    check_file(OUTPUT.value, INPUT.value)
    texts = _read(INPUT.value)

    # before JAX starts its threads
    reuse_freed_memory()
    from bert_jax.inference import features

    bert = cli.load_model(CHECKPOINT.value, DTYPE.value)
    with atomic_path(to_place(OUTPUT.value)) as temporary:
        if POOLING.value != "none":
            if POOLING.value == "cls":
                print(
                    "note: the [CLS] vector of a model not trained to compare sentences says little",
                    file=sys.stderr,
                )
            is_own = POOLING.value == "own"
            if is_own:
                if bert.embedding is None:
                    raise InputError(
                        "--pooling=own is of models that were trained to embed texts; use mean"
                    )
                if bert.embedding.embedding.kind == "sparse":
                    _write_sparse(temporary, bert, texts)
                    return
                if bert.embedding.embedding.kind == "multi_vector":
                    _write_multi(temporary, bert, texts)
                    return
            vectors = features.sentence_embeddings(
                bert,
                texts,
                pooling="" if is_own else POOLING.value,
                layer=-1 if is_own else layers[0],
                max_seq_length=MAX_SEQ_LENGTH.value,
                long_texts=LONG_TEXTS.value,
                kind=KIND.value,
            )
            _write_pooled(temporary, texts, vectors)
            return
        token_vectors = features.token_features(
            bert, texts, layers, MAX_SEQ_LENGTH.value, LONG_TEXTS.value
        )
        if OUTPUT.value.endswith(".npz"):
            _write_npz(temporary, token_vectors, layers)
        else:
            _write_json(temporary, token_vectors, layers)


def _write_directory(layers: Sequence[int]) -> None:
    # before JAX starts its threads
    reuse_freed_memory()
    with join():
        from bert_jax.inference.vectors import write_vectors

        is_own = POOLING.value == "own"
        manifest = write_vectors(
            cli.load_model(CHECKPOINT.value, DTYPE.value),
            INPUT.value,
            OUTPUT.value.rstrip("/"),
            precision=PRECISION.value,
            kind=KIND.value,
            text_column=TEXT_COLUMN.value,
            shard_rows=SHARD_ROWS.value,
            pooling="" if is_own else POOLING.value,
            layer=-1 if is_own else layers[0],
            max_seq_length=MAX_SEQ_LENGTH.value,
            long_texts=LONG_TEXTS.value,
        )
    print(f"{manifest['rows']:,} vectors in {len(manifest['shards'])} shards", file=sys.stderr)


def _write_multi(path: Path, bert: "Pretrained", texts: Sequence[Any]) -> None:
    """Raises: InputError if the output is Parquet, which has a vector for each text."""
    import numpy as np

    from bert_jax.inference.late_interaction import multi_vectors

    if OUTPUT.value.endswith(_PARQUET):
        raise InputError(
            f"--output={OUTPUT.value} holds a vector for each text, and the model makes one for each token; write .npz"
        )
    found = multi_vectors(bert, texts, KIND.value, MAX_SEQ_LENGTH.value, LONG_TEXTS.value)
    if OUTPUT.value.endswith(".npz"):
        _write_arrays(path, vectors=np.concatenate(found), starts=_starts(found))
    else:
        _write_lines(path, ({"vectors": _rounded(vectors)} for vectors in found))


def _write_sparse(path: Path, bert: "Pretrained", texts: Sequence[Any]) -> None:
    """Raises: InputError if the output is Parquet, whose vectors are dense."""
    import numpy as np

    from bert_jax.inference.sparse import terms_of_texts

    if OUTPUT.value.endswith(_PARQUET):
        raise InputError(
            f"--output={OUTPUT.value} holds dense vectors, and the model makes sparse ones; give .npz or .jsonl"
        )
    found = terms_of_texts(
        *(bert, texts, KIND.value, TOP_K.value, MAX_SEQ_LENGTH.value, LONG_TEXTS.value)
    )
    if OUTPUT.value.endswith(".npz"):
        ids, weights = zip(*found)
        _write_arrays(
            path, ids=np.concatenate(ids), weights=np.concatenate(weights), starts=_starts(ids)
        )
    else:
        terms = (dict(zip(bert.tokenizer.tokens(ids), _rounded(weights))) for ids, weights in found)
        _write_lines(path, ({"terms": each} for each in terms))


def _read(path: str) -> list[Any]:
    with open_lines(path) as stream:
        lines = [line for _, line in read_input(stream, path)]
    if not lines:
        raise InputError(f"input {path} is empty; write a text a line")
    parts = [line.rsplit(" ||| ", 1) for line in lines]  # at the last one, as Google's tool does
    return [tuple(part) if len(part) == 2 else part[0] for part in parts]


def _write_json(path: Path, features: "Iterator[TokenFeatures]", layers: Sequence[int]) -> None:
    def of_tokens(text: "TokenFeatures") -> Iterator[JsonObject]:
        # [tokens, layers, H]
        for token, vectors in zip(text.tokens, _rounded(text.layers.swapaxes(0, 1))):
            yield {
                "token": token,
                "layers": [
                    {"index": layer, "values": vector} for layer, vector in zip(layers, vectors)
                ],
            }

    _write_lines(path, ({"features": list(of_tokens(text))} for text in features))


def _write_npz(path: Path, features: "Iterator[TokenFeatures]", layers: Sequence[int]) -> None:
    import numpy as np

    texts = list(features)
    _write_arrays(
        path,
        vectors=np.concatenate([text.layers for text in texts], axis=1),
        starts=_starts([text.tokens for text in texts]),
        tokens=np.array([token for text in texts for token in text.tokens]),
        layers=np.array(layers),
    )


def _write_pooled(path: Path, texts: Sequence[Any], vectors: "np.ndarray") -> None:
    if OUTPUT.value.endswith(_PARQUET):
        write_vectors(
            str(path),
            [text if isinstance(text, str) else " ||| ".join(text) for text in texts],
            vectors,
        )
    elif OUTPUT.value.endswith(".npz"):
        _write_arrays(path, embeddings=vectors)
    else:
        _write_lines(path, ({"values": _rounded(vector)} for vector in vectors))


def _write_lines(path: Path, records: Iterable[JsonObject]) -> None:
    """Writes JSON lines with the number of each, whose name is as Google's tool spells it."""
    with open(path, "w", encoding="utf-8") as stream:
        for number, record in enumerate(records):
            stream.write(json.dumps({"linex_index": number} | record, ensure_ascii=False) + "\n")


def _write_arrays(path: Path, **arrays: "np.ndarray") -> None:
    import numpy as np

    with open(path, "wb") as stream:
        np.savez(stream, **arrays)  # type: ignore[arg-type]


def _starts(parts: Sequence[Sized]) -> "np.ndarray":
    """Returns where each part begins when they are joined, and where the last one ends."""
    import numpy as np

    return np.array([0, *itertools.accumulate(map(len, parts))])


def _rounded(vectors: "np.ndarray") -> Any:
    """Returns numbers for JSON: six digits, as Google's tool writes."""
    return vectors.astype("float64").round(6).tolist()


if __name__ == "__main__":
    cli.run(main)
