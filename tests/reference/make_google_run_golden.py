# SPDX-License-Identifier: Apache-2.0
"""Writes tests/golden/google_run.npz: Google's BERT pre-trained for 200 steps and fine-tuned for 100, without dropout.

    git clone https://github.com/google-research/bert /tmp/bert
    git -C /tmp/bert checkout eedf5716ce1268e56f0a50264a88cafad334ac61
    python -m pip install --constraint constraints.txt tensorflow-cpu==2.21.0 --editable .  # Python 3.11
    TF_ENABLE_ONEDNN_OPTS=0 python tests/reference/make_google_run_golden.py --reference=/tmp/bert --output=tests/golden

modeling.py, optimization.py, run_pretraining.py, run_classifier.py and tokenization.py run unchanged, on the stand-in
for TensorFlow 1 of make_google_goldens.py. Pre-training is `model_fn` in training mode on what `input_fn` reads.
Fine-tuning is `create_model` and `create_optimizer`, on what `file_based_input_fn` reads of the examples that
`file_based_convert_examples_to_features` made of text; `create_model` is told that it is not training, for else it
drops a tenth of the pooled output, whatever the settings are.

Order: Google's readers shuffle in training by a seed that cannot be given. They do not when they are told to evaluate,
so they are, and read files whose records are in the order in which our runs take them, for all epochs. The records of
pre-training are those of tests/golden/google_examples.tfrecord, byte for byte.

Word embeddings are looked up by one-hot products, as Google's code does on TPUs. Elsewhere it gathers rows, and the
gradient of the table is then a list of rows, one for each token: `tf.clip_by_global_norm` takes the norm of that list,
in which a word that occurs twice is not added up, and so clips by another norm. In pre-training the output layer
shares the table, and makes it one sum. What fine-tuning gives with gathered rows is `finetuning/losses_looked_up`.

Start: pre-training starts from Google's random parameters, rounded to multiples of 2 ** -11 for a smaller file, and
fine-tuning from where it ended and a classifier that is as random; both are given as a checkpoint of TensorFlow 1.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import make_google_goldens as google
import make_tfrecord_golden
import numpy as np
import tensorflow
import tensorflow.compat.v1 as tf

from bert_jax.batches.order import plan_epoch, train_rows

Arrays = dict[str, np.ndarray]

MODULES = ("modeling", "optimization", "run_pretraining", "tokenization", "run_classifier")
UNIT = 2.0**-11  # of the initial values, which are kept as int16
SETTINGS: dict[str, Any] = {
    "model": {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 256,
        "max_position_embeddings": 64,
        "type_vocab_size": 2,
        "hidden_act": "gelu",
        "initializer_range": 0.1,
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
    },
    "pretraining": {"num_steps": 200, "warmup_steps": 20, "batch_size": 8, "learning_rate": 1e-3, "data_seed": 0},
    "finetuning": {"num_steps": 100, "warmup_steps": 10, "batch_size": 8, "learning_rate": 5e-4, "data_seed": 0},
    "max_seq_length": 48,  # of fine-tuning, so that a few pairs are cut
    "labels": ["land", "water"],
}
NUM_PAIRS = 80


def prepare_stand_in() -> None:
    """Gives the stand-in for TensorFlow 1 what the readers need besides."""
    original = google.stand_in

    def stand_in() -> Any:
        module = original()
        module.contrib.data = SimpleNamespace(map_and_batch=tf.data.experimental.map_and_batch)
        return module

    google.stand_in = stand_in
    google.MODULES = MODULES


def read_batches(input_fn: Any, batch_size: int, count: int) -> list[Arrays]:
    """Returns the first batches of one of Google's readers."""
    with google.graph_session() as session:
        batch = tf.data.make_one_shot_iterator(input_fn({"batch_size": batch_size})).get_next()
        return [session.run(batch) for _ in range(count)]


def write_records(path: Path, records: list[bytes]) -> None:
    with tensorflow.io.TFRecordWriter(str(path)) as writer:
        for record in records:
            writer.write(record)


def write_checkpoint(prefix: Path, values: Arrays) -> str:
    """Writes variables as TensorFlow 1 does, and returns the prefix of the files."""
    with google.graph_session() as session:
        variables = [tf.get_variable(name, initializer=value) for name, value in values.items()]
        session.run(tf.global_variables_initializer())
        return tf.train.Saver(variables).save(session, str(prefix), write_meta_graph=False)


def placeholders(batch: Arrays) -> dict[str, Any]:
    """Returns a place for each array of a batch."""
    return {name: tf.placeholder(value.dtype, value.shape, name) for name, value in batch.items()}


def train(
    session: Any, features: dict[str, Any], loss: Any, train_op: Any, optimizer: Any, batches: list[Arrays]
) -> Arrays:
    """Returns the loss before and the rate of each training step, and the variables after the last."""
    session.run([tf.global_variables_initializer(), tf.local_variables_initializer()])
    losses, rates = [], []
    for batch in batches:
        fed = {features[name]: value for name, value in batch.items()}
        losses.append(session.run(loss, fed))
        rates.append(google.train_step(session, train_op, optimizer, fed))
    variables = tf.trainable_variables()
    last = {google.name_of(v): value for v, value in zip(variables, session.run(variables), strict=True)}
    return {"losses": np.array(losses), "rates": np.array(rates)} | {f"last/{name}": last[name] for name in last}


def rounded(values: Arrays) -> Arrays:
    """Returns the values in units of UNIT."""
    return {name: np.round(value / UNIT).astype(np.int16) for name, value in values.items()}


def random_values(build: Any, seed: int) -> Arrays:
    """Returns the values that the variables of a model start from."""
    with google.graph_session() as session:
        tf.set_random_seed(seed)
        build()
        session.run(tf.global_variables_initializer())
        variables = tf.trainable_variables()
        return {google.name_of(v): value for v, value in zip(variables, session.run(variables), strict=True)}


def pretrain(reference: SimpleNamespace, examples: Path, config: Any, folder: Path) -> Arrays:
    """Returns the trajectory of pre-training, its start in units of UNIT, and the order of the examples."""
    run = SETTINGS["pretraining"]
    records = list(tf.io.tf_record_iterator(str(examples)))
    places = np.arange(run["num_steps"] * run["batch_size"])
    order, _ = train_rows(0, places, len(places), len(records), run["data_seed"])
    write_records(folder / "ordered.tfrecord", [records[number] for number in order])
    input_fn = reference.run_pretraining.input_fn_builder(
        [str(folder / "ordered.tfrecord")],
        make_tfrecord_golden.MAX_SEQ_LENGTH,
        make_tfrecord_golden.MAX_PREDICTIONS,
        is_training=False,
    )
    batches = read_batches(input_fn, run["batch_size"], run["num_steps"])

    def build(init_checkpoint: str | None) -> tuple[Any, Any]:
        features = placeholders(batches[0])
        model_fn = reference.run_pretraining.model_fn_builder(
            bert_config=config,
            init_checkpoint=init_checkpoint,
            learning_rate=run["learning_rate"],
            num_train_steps=run["num_steps"],
            num_warmup_steps=run["warmup_steps"],
            use_tpu=False,
            use_one_hot_embeddings=True,
        )
        return features, model_fn(features, None, "train", None)

    first = rounded(random_values(lambda: build(None), seed=0))
    checkpoint = write_checkpoint(
        folder / "initial.ckpt", {name: value * np.float32(UNIT) for name, value in first.items()}
    )
    with google.graph_session() as session:
        with google.recorded_optimizer(reference) as method:
            features, spec = build(checkpoint)
        made = train(session, features, spec.loss, spec.train_op, method.call_args.args[0], batches)
    made |= {f"first/{name}": value for name, value in first.items()}
    return made | {"order": order.reshape(-1, run["batch_size"]).astype(np.uint16)}


def make_pairs() -> list[tuple[str, str, str]]:
    """Returns a label and two sentences each, both from documents about the sea and rivers, or both from others."""
    rng = np.random.default_rng(0)
    documents = [document.splitlines() for document in make_tfrecord_golden.TEXT.strip().split("\n\n")]
    about = {"water": [0, 2, 5], "land": [1, 3, 4]}
    pairs = []
    for label, numbers in about.items():
        sentences = [sentence for number in numbers for sentence in documents[number]]
        pairs += [(label, *rng.choice(sentences, 2, replace=False)) for _ in range(NUM_PAIRS // 2)]
    return [pairs[index] for index in rng.permutation(NUM_PAIRS)]


def finetune(reference: SimpleNamespace, vocab: Path, config: Any, last: Arrays, folder: Path) -> Arrays:
    """Returns the trajectory of fine-tuning, its classifier's start, its examples and the order of them."""
    run, classifier, length = SETTINGS["finetuning"], reference.run_classifier, SETTINGS["max_seq_length"]
    pairs = make_pairs()
    examples = [classifier.InputExample(None, one, other, label) for label, one, other in pairs]
    tokenizer = reference.tokenization.FullTokenizer(str(vocab), do_lower_case=True)
    rows = [classifier.convert_single_example(99, each, SETTINGS["labels"], length, tokenizer) for each in examples]
    lengths = np.array([sum(row.input_mask) for row in rows])
    epochs = range(run["num_steps"] * run["batch_size"] // len(rows))
    order = np.stack([batch for e in epochs for batch in plan_epoch(lengths, run["batch_size"], run["data_seed"], e)])
    ordered = [examples[number] for number in order.ravel()]
    file = str(folder / "finetuning.tfrecord")
    classifier.file_based_convert_examples_to_features(ordered, SETTINGS["labels"], length, tokenizer, file)
    input_fn = classifier.file_based_input_fn_builder(file, length, is_training=False, drop_remainder=True)
    batches = read_batches(input_fn, run["batch_size"], run["num_steps"])

    def build(one_hot: bool) -> tuple[Any, Any]:
        features = placeholders(batches[0])
        inputs = (features[name] for name in ("input_ids", "input_mask", "segment_ids", "label_ids"))
        return features, classifier.create_model(config, False, *inputs, len(SETTINGS["labels"]), one_hot)[0]

    values = random_values(lambda: build(True), seed=1)
    first = rounded({name: values[name] for name in ("output_weights", "output_bias")})
    start = last | {name: value * np.float32(UNIT) for name, value in first.items()}
    checkpoint = write_checkpoint(folder / "classifier.ckpt", start)

    def run_once(one_hot: bool) -> Arrays:
        with google.graph_session() as session:
            with google.recorded_optimizer(reference) as method:
                features, loss = build(one_hot)
                variables = tf.trainable_variables()
                known, _ = reference.modeling.get_assignment_map_from_checkpoint(variables, checkpoint)
                assert len(known) == len(variables)
                tf.train.init_from_checkpoint(checkpoint, known)
                train_op = reference.optimization.create_optimizer(
                    loss, run["learning_rate"], run["num_steps"], run["warmup_steps"], use_tpu=False
                )
            return train(session, features, loss, train_op, method.call_args.args[0], batches)

    made = run_once(one_hot=True) | {f"first/{name}": value for name, value in first.items()}
    made["losses_looked_up"] = run_once(one_hot=False)["losses"]
    return made | {"pairs": np.array(pairs), "lengths": lengths, "order": order.astype(np.uint16)}


def main() -> None:
    """Writes the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--reference", required=True, help="google-research/bert at eedf571")
    parser.add_argument("--output", type=Path, required=True, help="folder of tests/golden")
    flags = parser.parse_args()
    tf.disable_v2_behavior()
    prepare_stand_in()
    reference = google.import_reference(flags.reference)
    vocab = make_tfrecord_golden.make_vocab()
    SETTINGS["model"]["vocab_size"] = len(vocab)
    config = reference.modeling.BertConfig.from_dict(SETTINGS["model"])
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "vocab.txt").write_text("".join(f"{token}\n" for token in vocab), encoding="utf-8")
        pretraining = pretrain(reference, flags.output / "google_examples.tfrecord", config, folder)
        last = {key.removeprefix("last/"): value for key, value in pretraining.items() if key.startswith("last/")}
        finetuning = finetune(reference, folder / "vocab.txt", config, last, folder)
    versions = f"TensorFlow {tensorflow.__version__}, NumPy {np.__version__}, Python {sys.version.split()[0]}"
    np.savez_compressed(
        flags.output / "google_run.npz",
        made_with=np.array(f"google-research/bert eedf571, {versions}, one thread of a CPU"),
        settings=np.array(json.dumps(SETTINGS | {"unit": UNIT})),
        **{f"pretraining/{key}": value for key, value in pretraining.items()},
        **{f"finetuning/{key}": value for key, value in finetuning.items()},
    )


if __name__ == "__main__":
    main()
