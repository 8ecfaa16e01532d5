# SPDX-License-Identifier: Apache-2.0
"""Writes tests/golden/google_model.npz and google_optimizer.npz by running Google's own BERT on TensorFlow.

    git clone https://github.com/google-research/bert /tmp/bert
    git -C /tmp/bert checkout eedf5716ce1268e56f0a50264a88cafad334ac61
    git clone /tmp/bert /tmp/bert_erf
    git -C /tmp/bert_erf checkout bee6030e31e42a9394ac567da170a89a98d2062f^
    python -m pip install tensorflow-cpu==2.21.0  # Python 3.11
    TF_ENABLE_ONEDNN_OPTS=0 python tests/reference/make_google_goldens.py --reference=/tmp/bert \
        --reference_erf=/tmp/bert_erf --output=tests/golden

modeling.py, optimization.py and run_pretraining.py run unchanged. `--reference` is the last commit, whose GELU is
the tanh form; `--reference_erf` is the last commit before bee6030, whose GELU is erf. They were written for
TensorFlow 1.11; the module `stand_in` below gives them `tensorflow.compat.v1` in graph mode and writes out the
three things that are gone from it: `tf.layers.dense`, `tf.contrib.layers.layer_norm` and a few names of the
estimator. It was made with TensorFlow 2.21.0, NumPy 2.4.6 and Python 3.11.7, on one thread of a CPU.

A training step runs in two: first Google's learning rate, then the update with that rate fed to it. In one run,
nothing in Google's graph says whether the rate is read before or after the step is counted: TensorFlow 2.21 counts
first or reads first as its settings are. Read first, the rate is what the comments of optimization.py describe.

Word embeddings are looked up by one-hot products, as Google's code does on TPUs. In pre-training a plain look-up
has the same gradient.
"""

import argparse
import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import tensorflow
import tensorflow.compat.v1 as tf

MODULES = ("modeling", "optimization", "run_pretraining")
MODEL = {
    "vocab_size": 53,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": 24,
    "type_vocab_size": 2,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
LENGTHS = ((20, 11), (13, 6), (16, 16), (7, 3))  # of every row, and of its sentence A; rows have 20 positions
PREDICTIONS = (5, 3, 4, 0)  # of every row; rows have 5 places
INPUT_SEED = 7  # one for which the model predicts some of the words, not none and not all
TRAIN_STEPS = 8  # of the model, by model_fn in training mode
TRAIN_LEARNING_RATE = 1e-3  # small enough for a difference of rounding not to grow
LEARNING_RATE = 1e-2  # of the optimizer alone
NUM_STEPS = 30  # of the optimizer alone: where the schedule ends
RECORDED_STEPS = 32
SCHEDULES = {"warm": 6, "cold": 0}  # name: steps of warm-up
OPTIMIZER_SHAPES = {  # a few of BERT's variables, in sizes of their own
    "bert/embeddings/word_embeddings": (7, 4),
    "bert/embeddings/LayerNorm/beta": (4,),
    "bert/embeddings/LayerNorm/gamma": (4,),
    "bert/encoder/layer_0/intermediate/dense/kernel": (4, 6),
    "bert/encoder/layer_0/intermediate/dense/bias": (6,),
    "bert/encoder/layer_0/output/LayerNorm/beta": (4,),
    "bert/encoder/layer_0/output/LayerNorm/gamma": (4,),
    "cls/predictions/output_bias": (7,),
    "cls/seq_relationship/output_weights": (2, 4),
    "cls/seq_relationship/output_bias": (2,),
}

Arrays = dict[str, np.ndarray]


def dense(
    inputs: Any, units: int, activation: Any = None, kernel_initializer: Any = None, name: str | None = None
) -> Any:
    """Returns what tf.layers.dense of TensorFlow 1 makes of a matrix, its variables named as there."""
    with tf.variable_scope(name, default_name="dense"):
        kernel = tf.get_variable("kernel", [inputs.shape[-1], units], initializer=kernel_initializer)
        bias = tf.get_variable("bias", [units], initializer=tf.zeros_initializer())
        outputs = tf.nn.bias_add(tf.matmul(inputs, kernel), bias)
        return outputs if activation is None else activation(outputs)


def contrib_layer_norm(inputs: Any, begin_norm_axis: int, begin_params_axis: int, scope: str | None) -> Any:
    """Returns what tf.contrib.layers.layer_norm of TensorFlow 1 makes of the last axis."""
    assert begin_norm_axis == begin_params_axis == -1
    with tf.variable_scope(scope, default_name="LayerNorm"):
        beta = tf.get_variable("beta", [inputs.shape[-1]], initializer=tf.zeros_initializer())
        gamma = tf.get_variable("gamma", [inputs.shape[-1]], initializer=tf.ones_initializer())
        mean, variance = tf.nn.moments(inputs, [-1], keep_dims=True)
        return tf.nn.batch_normalization(inputs, mean, variance, offset=beta, scale=gamma, variance_epsilon=1e-12)


def stand_in() -> ModuleType:
    """Returns a module that serves as TensorFlow 1 for the reference."""
    module = ModuleType("tensorflow")
    module.__getattr__ = lambda name: getattr(tf, name)  # type: ignore[method-assign]
    module.layers = SimpleNamespace(dense=dense)  # type: ignore[attr-defined]
    module.flags = mock.MagicMock()  # type: ignore[attr-defined]
    module.logging = mock.MagicMock()  # type: ignore[attr-defined]
    module.estimator = SimpleNamespace(  # type: ignore[attr-defined]
        ModeKeys=SimpleNamespace(TRAIN="train", EVAL="eval")
    )
    module.contrib = SimpleNamespace(  # type: ignore[attr-defined]
        layers=SimpleNamespace(layer_norm=contrib_layer_norm), tpu=SimpleNamespace(TPUEstimatorSpec=SimpleNamespace)
    )
    return module


def import_reference(folder: str) -> SimpleNamespace:
    """Returns the modules of MODULES in a folder."""
    for name in MODULES:
        sys.modules.pop(name, None)
    with mock.patch.object(sys, "path", [folder, *sys.path]):
        try:
            sys.modules["tensorflow"] = stand_in()
            return SimpleNamespace(**{name: importlib.import_module(name) for name in MODULES})
        finally:
            sys.modules["tensorflow"] = tensorflow


@contextmanager
def recorded(owner: Any, name: str) -> Iterator[list[Any]]:
    """Yields a list that fills with whatever `owner.name(...)` returns."""
    made: list[Any] = []
    original = getattr(owner, name)

    def record(*args: Any, **options: Any) -> Any:
        made.append(original(*args, **options))
        return made[-1]

    with mock.patch.object(owner, name, record):
        yield made


@contextmanager
def recorded_optimizer(reference: SimpleNamespace) -> Iterator[mock.Mock]:
    """Yields a mock whose first argument, once called, is the optimizer that Google's create_optimizer uses."""
    kind = reference.optimization.AdamWeightDecayOptimizer
    with mock.patch.object(kind, "apply_gradients", autospec=True, side_effect=kind.apply_gradients) as method:
        yield method


@contextmanager
def graph_session() -> Iterator[Any]:
    """Yields a session of a new graph, on one thread."""
    one_thread = tf.ConfigProto(intra_op_parallelism_threads=1, inter_op_parallelism_threads=1)
    with tf.Graph().as_default(), tf.Session(config=one_thread) as session:
        yield session


def train_step(session: Any, train_op: Any, optimizer: Any, fed: dict[Any, np.ndarray]) -> np.ndarray:
    """Runs Google's training operation once; returns the learning rate that it used."""
    rate = session.run(optimizer.learning_rate)
    session.run(train_op, {**fed, optimizer.learning_rate: rate})
    return rate


def name_of(variable: Any) -> str:
    return variable.name.removesuffix(":0")


def make_inputs() -> Arrays:
    """Returns a batch with padding, both segments, rows with fewer predictions than places and one with none."""
    rng = np.random.default_rng(INPUT_SEED)
    shape, places = (len(LENGTHS), 20), (len(LENGTHS), 5)
    inputs = {name: np.zeros(shape, np.int32) for name in ("input_ids", "input_mask", "segment_ids")}
    inputs |= {name: np.zeros(places, np.int32) for name in ("masked_lm_positions", "masked_lm_ids")}
    inputs["masked_lm_weights"] = np.zeros(places, np.float32)
    inputs["next_sentence_labels"] = np.array([[0], [1], [1], [0]], np.int32)
    for row, ((length, first), count) in enumerate(zip(LENGTHS, PREDICTIONS, strict=True)):
        inputs["input_ids"][row, :length] = rng.integers(1, MODEL["vocab_size"], length)
        inputs["input_mask"][row, :length] = 1
        inputs["segment_ids"][row, first:length] = 1
        inputs["masked_lm_positions"][row, :count] = np.sort(rng.choice(np.arange(1, length), count, replace=False))
        inputs["masked_lm_ids"][row, :count] = rng.integers(1, MODEL["vocab_size"], count)
        inputs["masked_lm_weights"][row, :count] = 1
    return inputs


def random_variable(name: str, shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    """Returns values that leave nothing without effect: no bias of 0, no gamma of 1, no epsilon too small to see."""
    scale = 0.2 if len(shape) == 1 else 0.1 if name.endswith("embeddings") else 0.3
    mean = float(name.endswith("gamma"))
    return (mean + scale * rng.standard_normal(shape)).astype(np.float32)


def build_model(reference: SimpleNamespace, inputs: Arrays, mode: str) -> tuple[Any, Arrays]:
    """Returns what Google's model_fn makes, and the tensors it computes on the way, in the graph of this moment."""
    model_fn = reference.run_pretraining.model_fn_builder(
        bert_config=reference.modeling.BertConfig(**MODEL),
        init_checkpoint=None,
        learning_rate=TRAIN_LEARNING_RATE,
        num_train_steps=TRAIN_STEPS,
        num_warmup_steps=2,
        use_tpu=False,
        use_one_hot_embeddings=True,
    )
    with (
        recorded(reference.modeling, "BertModel") as models,
        recorded(reference.run_pretraining, "get_masked_lm_output") as masked,
        recorded(reference.run_pretraining, "get_next_sentence_output") as next_sentence,
    ):
        spec = model_fn({name: tf.constant(value) for name, value in inputs.items()}, None, mode, None)
    (model,), (masked,), (next_sentence,) = models, masked, next_sentence
    tensors = {
        "embedding_output": model.get_embedding_output(),
        "all_encoder_layers": tf.stack(model.get_all_encoder_layers()),
        "sequence_output": model.get_sequence_output(),
        "pooled_output": model.get_pooled_output(),
        "total_loss": spec.loss,
    }
    for part, outputs in (("masked_lm", masked), ("next_sentence", next_sentence)):
        names = (f"{part}_loss", f"{part}_example_loss", f"{part}_log_probs")
        tensors |= dict(zip(names, outputs, strict=True))
    return spec, tensors


def assign_all(session: Any, values: Arrays) -> None:
    """Initializes every variable, then gives the trainable ones their values."""
    session.run([tf.global_variables_initializer(), tf.local_variables_initializer()])
    for variable in tf.trainable_variables():
        variable.load(values[name_of(variable)], session)


def model_goldens(references: dict[str, SimpleNamespace]) -> Arrays:
    """Returns variables and inputs, and for each GELU the outputs, gradients and metrics."""
    inputs = make_inputs()
    goldens = {f"inputs/{name}": value for name, value in inputs.items()}
    values: Arrays = {}
    for gelu, reference in references.items():
        with graph_session() as session:
            spec, tensors = build_model(reference, inputs, "eval")
            variables = tf.trainable_variables()
            rng = np.random.default_rng(0)
            values = {name_of(v): random_variable(name_of(v), tuple(v.shape.as_list()), rng) for v in variables}
            gradients = tf.gradients(spec.loss, variables)
            metrics = {name: update for name, (_, update) in spec.eval_metrics[0](*spec.eval_metrics[1]).items()}
            assign_all(session, values)
            made = session.run(
                {
                    **tensors,
                    **{f"metrics/{name}": update for name, update in metrics.items()},
                    **{f"gradients/{name_of(v)}": tf.convert_to_tensor(g) for v, g in zip(variables, gradients)},
                }
            )
        goldens |= {f"{gelu}/{name}": value for name, value in made.items()}
    return goldens | {f"variables/{name}": value for name, value in values.items()}


def training_goldens(reference: SimpleNamespace, inputs: Arrays, values: Arrays) -> Arrays:
    """Returns the losses and the last variables of whole training steps, and which variables Google decays."""
    with graph_session() as session:
        with recorded_optimizer(reference) as method:
            spec, tensors = build_model(reference, inputs, "train")
        optimizer = method.call_args.args[0]
        assign_all(session, values)
        losses = []
        for _ in range(TRAIN_STEPS):
            losses.append(session.run(tensors["total_loss"]))
            train_step(session, spec.train_op, optimizer, {})
        names = [name_of(variable) for variable in tf.trainable_variables()]
        last = dict(zip(names, session.run(tf.trainable_variables())))
    decays = [bool(optimizer._do_use_weight_decay(name)) for name in names]
    return {
        "training/losses": np.array(losses),
        "decay/names": np.array(names),
        "decay/decays": np.array(decays),
        **{f"training/variables/{name}": value for name, value in last.items()},
    }


def optimizer_goldens(reference: SimpleNamespace) -> Arrays:
    """Returns traces of create_optimizer fed with given gradients, below and above the norm of the clipping."""
    rng = np.random.default_rng(2)
    initial = {name: random_variable(name, shape, rng) for name, shape in OPTIMIZER_SHAPES.items()}
    scales = 10 ** rng.uniform(-4, 1, RECORDED_STEPS)
    scales[7] = 0  # a gradient of exactly 0
    gradients = {
        name: np.stack([scale * rng.standard_normal(shape) for scale in scales]).astype(np.float32)
        for name, shape in OPTIMIZER_SHAPES.items()
    }
    goldens = {f"initial/{name}": value for name, value in initial.items()}
    goldens |= {f"gradients/{name}": value for name, value in gradients.items()}
    for schedule, warmup_steps in SCHEDULES.items():
        with graph_session() as session:
            variables = [tf.get_variable(name, shape) for name, shape in OPTIMIZER_SHAPES.items()]
            fed = [tf.placeholder(tf.float32, variable.shape) for variable in variables]
            loss = tf.add_n([tf.reduce_sum(variable * gradient) for variable, gradient in zip(variables, fed)])
            with recorded_optimizer(reference) as method:
                train_op = reference.optimization.create_optimizer(
                    loss, LEARNING_RATE, NUM_STEPS, warmup_steps, use_tpu=False
                )
            optimizer = method.call_args.args[0]
            assign_all(session, initial)
            rates, trace = [], []
            for step in range(RECORDED_STEPS):
                given = {place: gradients[name_of(v)][step] for place, v in zip(fed, variables)}
                rates.append(train_step(session, train_op, optimizer, given))
                trace.append(session.run(variables))
            goldens[f"{schedule}/learning_rate"] = np.array(rates)
            for number, name in enumerate(OPTIMIZER_SHAPES):
                goldens[f"{schedule}/parameters/{name}"] = np.stack([values[number] for values in trace])
            for variable in tf.global_variables():
                name, _, moment = name_of(variable).rpartition("/")
                if moment in ("adam_m", "adam_v"):
                    goldens[f"{schedule}/{moment}/{name}"] = session.run(variable)
    return goldens


def main() -> None:
    """Writes both files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--reference", required=True, help="google-research/bert at eedf571")
    parser.add_argument("--reference_erf", required=True, help="google-research/bert before bee6030, with GELU by erf")
    parser.add_argument("--output", type=Path, required=True, help="folder of the files written")
    flags = parser.parse_args()
    tf.disable_v2_behavior()
    references = {
        "gelu_tanh": import_reference(flags.reference),
        "gelu_exact": import_reference(flags.reference_erf),
    }
    made_with = np.array(
        "google-research/bert eedf571 (gelu_tanh, optimizer) and bee6030^ (gelu_exact), "
        f"TensorFlow {tensorflow.__version__}, NumPy {np.__version__}, Python {sys.version.split()[0]}"
    )
    model = model_goldens(references)
    variables = {
        name.removeprefix("variables/"): value for name, value in model.items() if name.startswith("variables/")
    }
    optimizer = optimizer_goldens(references["gelu_tanh"])
    optimizer |= training_goldens(references["gelu_tanh"], make_inputs(), variables)
    for name, goldens in (("google_model", model), ("google_optimizer", optimizer)):
        np.savez_compressed(flags.output / f"{name}.npz", made_with=made_with, **goldens)


if __name__ == "__main__":
    main()
