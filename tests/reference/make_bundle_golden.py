# SPDX-License-Identifier: Apache-2.0
"""Writes checkpoints with TensorFlow, what it reads in them, and what Google's BERT computes with a real one.

    git clone https://github.com/google-research/bert /tmp/bert
    git -C /tmp/bert checkout eedf5716ce1268e56f0a50264a88cafad334ac61
    python -m pip install tensorflow-cpu==2.21.0  # Python 3.11
    TF_ENABLE_ONEDNN_OPTS=0 python tests/reference/make_bundle_golden.py --bert=/tmp/bert \
        --checkpoint=DIR --output=tests/golden

DIR is tests/test_checkpoint of CyberZHG/keras-bert at 2d3590d: a BERT of 2 layers and its Adam slots, as
run_pretraining.py wrote them. Made are

- bundle_kinds: a checkpoint with tensors of every kind of number, scalars and empty ones among them;
- bundle_parts: one of two data files, in which there are strings and a partitioned variable as well;
- bundle.npz: the numbers of both, of bfloat16 the bits;
- google_tiny_checkpoint.npz: inputs, and what modeling.py and run_pretraining.py make of them with DIR.

It was made with TensorFlow 2.21.0, NumPy 2.4.6 and Python 3.11.7, on one thread of a CPU.
"""

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow
import tensorflow.compat.v1 as tf
from make_google_goldens import graph_session, import_reference, name_of

LENGTHS = ((16, 9), (11, 5), (5, 5))  # of every row, and of its sentence A; rows have 16 positions, all there are
NAMES = {  # of tensors, by their kind: what is sorted, shared and cut off in the index depends on them
    "float32": "bert/encoder/layer_0/output/dense/kernel",
    "float64": "bert/encoder/layer_0/output/dense/bias",
    "float16": "bert/encoder/layer_1/output/dense/kernel",
    "bfloat16": "bert/encoder/layer_10/output/dense/kernel",
    "int8": "bert/embeddings/word_embeddings",
    "int16": "über/Wörter",
    "int32": "cls/predictions/output_bias",
    "int64": "global_step",
    "uint8": "a",
    "uint16": "ab",
    "uint32": "b",
    "uint64": "z",
    "bool": "x/bool",
    "complex64": "x/complex",
    "complex128": "x/complexer",
}

Arrays = dict[str, np.ndarray]


def make_tensors() -> Arrays:
    """Returns a tensor of each kind, and in three kinds a scalar, an empty one and the numbers that are none."""
    rng = np.random.default_rng(0)
    tensors = {}
    for kind, name in NAMES.items():
        dtype = tf.as_dtype(kind).as_numpy_dtype
        tensors[name] = rng.integers(0, 2 if kind == "bool" else 100, (2, 3)).astype(dtype)
    for kind in ("float32", "bfloat16", "int64"):
        dtype = tf.as_dtype(kind).as_numpy_dtype
        tensors[f"of {kind}/scalar"] = np.array(7, dtype)
        tensors[f"of {kind}/empty"] = np.zeros((3, 0, 2), dtype)
        values = [-1, 0, 1] if kind == "int64" else [np.nan, np.inf, -np.inf, -0.0, 1e-40]
        tensors[f"of {kind}/extremes"] = np.array(values, dtype)
    return tensors


def save(prefix: Path, tensors: dict[str, Any]) -> None:
    """Writes a checkpoint with the operation that a Saver uses, tensors in the order of their names as there."""
    names = sorted(tensors)
    values = [tensorflow.constant(tensors[name]) for name in names]
    tensorflow.raw_ops.SaveV2(
        prefix=str(prefix), tensor_names=names, shape_and_slices=[""] * len(names), tensors=values
    )


def save_in_parts(prefix: Path, tensors: Arrays) -> None:
    """Writes a checkpoint of two data files: half of the tensors, and the other half with strings and parts."""
    names = sorted(tensors)
    table = tensorflow.reshape(tensorflow.range(8, dtype=tensorflow.float32), (4, 2))
    with tempfile.TemporaryDirectory() as folder:
        first, second = Path(folder, "first"), Path(folder, "second")
        save(first, {name: tensors[name] for name in names[::2]})
        others = [tensorflow.constant(tensors[name]) for name in names[1::2]]
        tensorflow.raw_ops.SaveV2(
            prefix=str(second),
            tensor_names=[*names[1::2], "strings", "table", "table"],
            shape_and_slices=[""] * len(others) + ["", "4 2 0,2:-", "4 2 2,2:-"],
            tensors=[*others, tensorflow.constant(["a", "bc"]), table[:2], table[2:]],
        )
        tensorflow.raw_ops.MergeV2Checkpoints(
            checkpoint_prefixes=[str(first), str(second)], destination_prefix=str(prefix)
        )


def read(prefix: Path) -> Arrays:
    """Returns what TensorFlow reads: tensors by their names, the bits of bfloat16."""
    reader = tensorflow.train.load_checkpoint(str(prefix))
    tensors = {name: reader.get_tensor(name) for name in reader.get_variable_to_shape_map() if name != "strings"}
    return {name: value.view(np.uint16) if value.dtype.name == "bfloat16" else value for name, value in tensors.items()}


def run_google(folder: str, checkpoint: Path) -> Arrays:
    """Returns inputs and what Google's code computes of them, dropout off."""
    reference = import_reference(folder)
    config = reference.modeling.BertConfig.from_json_file(str(checkpoint / "bert_config.json"))
    rng = np.random.default_rng(5)
    length = config.max_position_embeddings
    inputs = {name: np.zeros((len(LENGTHS), length), np.int32) for name in ("input_ids", "input_mask", "segment_ids")}
    for row, (stop, first) in enumerate(LENGTHS):
        inputs["input_ids"][row, :stop] = rng.integers(1, config.vocab_size, stop)
        inputs["input_mask"][row, :stop] = 1
        inputs["segment_ids"][row, first:stop] = 1
    inputs["masked_lm_positions"] = np.array([[1, 8, 15], [2, 3, 10], [0, 4, 0]], np.int32)
    with graph_session() as session:
        fed = {name: tf.constant(value) for name, value in inputs.items()}
        model = reference.modeling.BertModel(
            config=config,
            is_training=False,
            input_ids=fed["input_ids"],
            input_mask=fed["input_mask"],
            token_type_ids=fed["segment_ids"],
            use_one_hot_embeddings=False,
        )
        labels = tf.zeros_like(fed["masked_lm_positions"])
        masked = reference.run_pretraining.get_masked_lm_output(
            config,
            model.get_sequence_output(),
            model.get_embedding_table(),
            fed["masked_lm_positions"],
            labels,
            tf.cast(labels, tf.float32),
        )
        next_sentence = reference.run_pretraining.get_next_sentence_output(
            config, model.get_pooled_output(), tf.zeros((len(LENGTHS), 1), tf.int32)
        )
        tf.train.Saver(tf.trainable_variables()).restore(session, str(checkpoint / "bert_model.ckpt"))
        outputs = session.run(
            {
                "embedding_output": model.get_embedding_output(),
                "all_encoder_layers": tf.stack(model.get_all_encoder_layers()),
                "pooled_output": model.get_pooled_output(),
                "masked_lm_log_probs": masked[2],
                "next_sentence_log_probs": next_sentence[2],
            }
        )
        names = [name_of(variable) for variable in tf.trainable_variables()]
    return {**{f"inputs/{name}": value for name, value in inputs.items()}, **outputs, "variables": np.array(names)}


def main() -> None:
    """Writes all files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bert", required=True, help="google-research/bert at eedf571")
    parser.add_argument("--checkpoint", type=Path, required=True, help="folder of the small checkpoint")
    parser.add_argument("--output", type=Path, required=True, help="folder of the files written")
    flags = parser.parse_args()
    versions = f"TensorFlow {tensorflow.__version__}, NumPy {np.__version__}, Python {sys.version.split()[0]}"
    tensors = make_tensors()
    save(flags.output / "bundle_kinds", tensors)
    save_in_parts(flags.output / "bundle_parts", tensors)
    goldens = {
        f"{name}/{tensor}": value
        for name in ("bundle_kinds", "bundle_parts")
        for tensor, value in read(flags.output / name).items()
    }
    np.savez_compressed(flags.output / "bundle.npz", made_with=np.array(versions), **goldens)
    tf.disable_v2_behavior()
    made_with = np.array(f"google-research/bert eedf571, keras-bert 2d3590d tests/test_checkpoint, {versions}")
    np.savez_compressed(
        flags.output / "google_tiny_checkpoint.npz", made_with=made_with, **run_google(flags.bert, flags.checkpoint)
    )


if __name__ == "__main__":
    main()
