# SPDX-License-Identifier: Apache-2.0
"""Writes tests/golden/hf_models.npz: tiny random BERTs of transformers, and what it computes with them.

    python -m pip install torch==2.13.0 transformers==5.23.0 numpy==2.4.6
    python tests/reference/make_hf_goldens.py --output=tests/golden/hf_models.npz

For every task a model of its own, with random parameters in place of the initial ones, whose biases would all be 0.
It was made with the CPU build of torch and Python 3.11.7, on one thread, in float32. The last row of the inputs is
as long as the model has positions, the others are padded; all but one have a segment B.
"""

import argparse
import json

import numpy as np
import torch
import transformers

SIZES = {
    "vocab_size": 43,
    "hidden_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "intermediate_size": 20,
    "max_position_embeddings": 22,
    "type_vocab_size": 2,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}


def labelled(*names: str) -> dict[str, dict]:
    """Returns the options that name classes."""
    return {"id2label": dict(enumerate(names)), "label2id": {name: index for index, name in enumerate(names)}}


MODELS = {  # name: class, and what differs from SIZES
    "pretraining_erf": ("BertForPreTraining", {}),
    "pretraining_tanh": ("BertForPreTraining", {"hidden_act": "gelu_new", "layer_norm_eps": 1e-7}),
    "masked_lm": ("BertForMaskedLM", {}),
    "next_sentence": ("BertForNextSentencePrediction", {}),
    "encoder": ("BertModel", {}),
    "sequence_classification": (
        "BertForSequenceClassification",
        labelled("contradiction", "entailment", "neutral"),
    ),
    "token_classification": (
        "BertForTokenClassification",
        labelled("O", "B-PER", "I-PER", "B-LOC", "I-LOC"),
    ),
    "multiple_choice": ("BertForMultipleChoice", {}),
    "question_answering": ("BertForQuestionAnswering", {}),
}
LENGTHS = ((22, 9), (5, 5), (13, 6), (22, 14))  # of every row, and of its sentence A; 5, 5 has no sentence B
IGNORED = -100  # the label of what is not to be predicted


def make_inputs() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(4)
    length = SIZES["max_position_embeddings"]
    inputs = {name: np.zeros((len(LENGTHS), length), np.int64) for name in ("input_ids", "attention_mask", "types")}
    inputs["labels"] = np.full((len(LENGTHS), length), IGNORED)
    for row, (stop, first) in enumerate(LENGTHS):
        inputs["input_ids"][row, :stop] = rng.integers(5, SIZES["vocab_size"], stop)
        inputs["attention_mask"][row, :stop] = 1
        inputs["types"][row, first:stop] = 1
        places = rng.choice(np.arange(1, stop), 3, replace=False)
        inputs["labels"][row, places] = rng.integers(5, SIZES["vocab_size"], 3)
    inputs["next_sentence_label"] = np.array([0, 1, 1, 0])
    return inputs


def run(name: str, inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Returns parameters, configuration and outputs of one model."""
    kind, changes = MODELS[name]
    torch.manual_seed(sorted(MODELS).index(name))
    config = transformers.BertConfig(**SIZES | changes)
    model = getattr(transformers, kind)(config).eval()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            parameter.normal_(1.0 if key.endswith("LayerNorm.weight") else 0.0, 0.2)
    tensors = {key: torch.from_numpy(value) for key, value in inputs.items()}
    feed = {
        "input_ids": tensors["input_ids"],
        "attention_mask": tensors["attention_mask"],
        "token_type_ids": tensors["types"],
    }
    if name == "multiple_choice":  # two questions of two choices
        feed = {key: value.reshape(2, 2, -1) for key, value in feed.items()}
    if name.startswith("pretraining"):
        feed |= {"labels": tensors["labels"], "next_sentence_label": tensors["next_sentence_label"]}
    output = model(**feed, output_hidden_states=True)
    results = {
        key: value.detach().numpy()
        for key, value in output.items()
        if key not in ("hidden_states", "last_hidden_state") and value is not None
    }
    results["hidden_states"] = np.stack([value.detach().numpy() for value in output.hidden_states])
    results["config"] = np.array(json.dumps({**config.to_dict(), "architectures": [kind]}))
    if name.startswith("pretraining"):
        inputs_alone = {key: feed[key] for key in ("input_ids", "attention_mask", "token_type_ids")}
        results["pooler_output"] = model.bert(**inputs_alone).pooler_output.detach().numpy()
        output.loss.backward()
        results |= pack("gradients", {key: value.grad.numpy() for key, value in model.named_parameters()})
    results |= pack("state", {key: value.detach().numpy() for key, value in model.named_parameters()})
    return {f"{name}/{key}": value for key, value in results.items()}


def pack(name: str, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Returns one array with all numbers and one with names and shapes as JSON: a file of many arrays is large."""
    shapes = {key: list(value.shape) for key, value in arrays.items()}
    return {
        name: np.concatenate([value.ravel() for value in arrays.values()]),
        f"{name}_shapes": np.array(json.dumps(shapes)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", required=True)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    inputs = make_inputs()
    arrays = {f"inputs/{key}": value for key, value in inputs.items()}
    for name in MODELS:
        arrays |= run(name, inputs)
    versions = {"torch": torch.__version__, "transformers": transformers.__version__, "numpy": np.__version__}
    np.savez_compressed(arguments.output, versions=np.array(json.dumps(versions)), **arrays)


if __name__ == "__main__":
    main()
