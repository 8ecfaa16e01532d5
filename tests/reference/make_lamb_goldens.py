# SPDX-License-Identifier: Apache-2.0
"""Writes tests/golden/albert_lamb.npz: traces of ALBERT's LAMB optimizer, run on TensorFlow.

    git clone https://github.com/google-research/albert /tmp/albert
    git -C /tmp/albert checkout b772393d3dae115b493258ce8e37c17b2cc62100
    python -m pip install tensorflow-cpu==2.21.0  # Python 3.11
    TF_ENABLE_ONEDNN_OPTS=0 python tests/reference/make_lamb_goldens.py --albert=/tmp/albert --output=tests/golden

lamb_optimizer.py runs unchanged, in graph mode, on one thread. It has no bias correction. Every layer is a variable of
its own, as BERT names them, so each has its own trust ratio. Two traces, with weight decay for all but
"LayerNorm", "layer_norm" and "bias" in both:

    decayed   exclude_from_layer_adaptation is not given: the trust ratio is for what weight decay applies to
    all       the trust ratio is for every variable. An empty list would not do: to ALBERT it is not a list at all,
              and means the first trace; so the list has an expression that no name matches

Some variables start at exactly 0 and some have no gradient, at all times or at one step, in one layer and not in
the others: the cases where a norm is 0.
"""

import argparse
import importlib
import sys
from pathlib import Path
from unittest import mock

import numpy as np
import tensorflow
import tensorflow.compat.v1 as tf

NUM_LAYERS, NUM_STEPS, WARMUP_STEPS = 3, 12, 3
LEARNING_RATE, WEIGHT_DECAY = 2e-2, 0.1
NEVER_DECAYED = ["LayerNorm", "layer_norm", "bias"]
TRACES = {"decayed": None, "all": ["(?!)"]}  # exclude_from_layer_adaptation
SHAPES = {
    "bert/embeddings/word_embeddings": (7, 4),
    "bert/embeddings/position_embeddings": (5, 4),
    "bert/embeddings/LayerNorm/gamma": (4,),
    "bert/embeddings/LayerNorm/beta": (4,),
    **{
        f"bert/encoder/layer_{layer}/{name}": shape
        for layer in range(NUM_LAYERS)
        for name, shape in {
            "attention/self/query/kernel": (4, 4),
            "attention/self/query/bias": (4,),
            "attention/output/LayerNorm/gamma": (4,),
            "attention/output/LayerNorm/beta": (4,),
            "intermediate/dense/kernel": (4, 6),
            "intermediate/dense/bias": (6,),
        }.items()
    },
    "cls/predictions/output_bias": (7,),
    "cls/seq_relationship/output_weights": (2, 4),
    "cls/seq_relationship/output_bias": (2,),
}
STARTS_AT_0 = (
    "bert/embeddings/position_embeddings",
    "bert/encoder/layer_1/attention/self/query/kernel",
    "bert/encoder/layer_0/attention/self/query/bias",
    "cls/predictions/output_bias",
)
WITHOUT_GRADIENT = (
    "bert/encoder/layer_2/intermediate/dense/kernel",  # weight decay alone moves it
    "bert/encoder/layer_0/attention/output/LayerNorm/gamma",  # nothing moves it
    "cls/seq_relationship/output_bias",
)
STILL_STEP = 4  # no variable has a gradient


def learning_rates() -> np.ndarray:
    """Returns Google's schedule: linear warm-up from 0, then linear decay that has run from step 0."""
    steps = np.arange(NUM_STEPS)
    warming, decaying = steps / WARMUP_STEPS, 1 - steps / NUM_STEPS
    return (LEARNING_RATE * np.where(steps < WARMUP_STEPS, warming, decaying)).astype(np.float32)


def make_inputs() -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Returns the first values of the variables, and their gradients [steps, ...], whose scales span decades."""
    rng = np.random.default_rng(0)
    scales = 10 ** rng.uniform(-3, 1, NUM_STEPS)
    scales[STILL_STEP] = 0
    initial, gradients = {}, {}
    for name, shape in SHAPES.items():
        size = 10 ** rng.uniform(-2, 1)  # so that every variable has another trust ratio
        initial[name] = (0 if name in STARTS_AT_0 else size) * rng.standard_normal(shape).astype(np.float32)
        gradients[name] = np.stack([scale * rng.standard_normal(shape) for scale in scales]).astype(np.float32)
        if name in WITHOUT_GRADIENT:
            gradients[name][:] = 0
    return {name: value.astype(np.float32) for name, value in initial.items()}, gradients


def trace(optimizer_class: type, excluded: list[str] | None) -> dict[str, np.ndarray]:
    """Returns each variable after every step, [steps, ...]."""
    initial, gradients = make_inputs()
    one_thread = tf.ConfigProto(intra_op_parallelism_threads=1, inter_op_parallelism_threads=1)
    with tf.Graph().as_default(), tf.Session(config=one_thread) as session:
        variables = [tf.get_variable(name, initializer=value) for name, value in initial.items()]
        given = [tf.placeholder(tf.float32, variable.shape) for variable in variables]
        rate = tf.placeholder(tf.float32, ())
        optimizer = optimizer_class(
            learning_rate=rate,
            weight_decay_rate=WEIGHT_DECAY,
            exclude_from_weight_decay=NEVER_DECAYED,
            exclude_from_layer_adaptation=excluded,
        )
        train_op = optimizer.apply_gradients(zip(given, variables))
        session.run(tf.global_variables_initializer())
        after = []
        for step, value in enumerate(learning_rates()):
            fed = dict(zip(given, (gradients[name][step] for name in SHAPES)))
            session.run(train_op, {**fed, rate: value})
            after.append(session.run(variables))
    return {name: np.stack([values[place] for values in after]) for place, name in enumerate(SHAPES)}


def main() -> None:
    """Writes the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--albert", required=True, help="google-research/albert at b772393")
    parser.add_argument("--output", type=Path, required=True, help="folder of the file written")
    flags = parser.parse_args()
    tf.disable_v2_behavior()
    with mock.patch.object(sys, "path", [flags.albert, *sys.path]):
        reference = importlib.import_module("lamb_optimizer")
    initial, gradients = make_inputs()
    goldens = {f"initial/{name}": value for name, value in initial.items()}
    goldens |= {f"gradients/{name}": value for name, value in gradients.items()}
    for kind, excluded in TRACES.items():
        made = trace(reference.LAMBOptimizer, excluded)
        goldens |= {f"{kind}/{name}": value for name, value in made.items()}
    versions = f"TensorFlow {tensorflow.__version__}, NumPy {np.__version__}, Python {sys.version.split()[0]}"
    np.savez_compressed(
        flags.output / "albert_lamb.npz",
        made_with=np.array(f"google-research/albert b772393 lamb_optimizer.py, {versions}"),
        learning_rates=learning_rates(),
        **goldens,
    )


if __name__ == "__main__":
    main()
