# SPDX-License-Identifier: Apache-2.0
"""Writes tests/golden/hf_models.npz: tiny random BERTs of transformers, and what it computes with them.

    python -m pip install torch==2.13.0 transformers==5.23.0 numpy==2.4.6
    python tests/reference/make_hf_goldens.py --output=tests/golden/hf_models.npz

For every task a model of its own, with random parameters in place of the initial ones, whose biases would all be 0.
It was made on one thread of a CPU with Python 3.11.7, in float32. The last row of the inputs is
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
GRADIENTS = [name for name in MODELS if name != "encoder"]  # which has no loss
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
    # Drawn after all others, which are as they were before there were these.
    inputs["classes"] = rng.integers(0, 3, len(LENGTHS))
    inputs["tags"] = np.where(inputs["attention_mask"] > 0, rng.integers(0, 5, (len(LENGTHS), length)), IGNORED)
    inputs["spans"] = np.sort(rng.integers(0, [[stop] for stop, _ in LENGTHS], (len(LENGTHS), 2)), axis=1)
    return inputs


def labels_of(name: str, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Returns what a model is to say, under the names of its arguments; nothing for the bare encoder.

    Of two questions of two choices the second and the first are right.
    """
    if name.startswith("pretraining"):
        return {"labels": tensors["labels"], "next_sentence_label": tensors["next_sentence_label"]}
    if name == "question_answering":
        return {"start_positions": tensors["spans"][:, 0], "end_positions": tensors["spans"][:, 1]}
    labels = {
        "masked_lm": tensors["labels"],
        "next_sentence": tensors["next_sentence_label"],
        "sequence_classification": tensors["classes"],
        "token_classification": tensors["tags"],
        "multiple_choice": torch.tensor([1, 0]),
    }
    return {"labels": labels[name]} if name in labels else {}


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
    output = model(**feed, **labels_of(name, tensors), output_hidden_states=True)
    results = {
        key: value.detach().numpy()
        for key, value in output.items()
        if key not in ("hidden_states", "last_hidden_state") and value is not None
    }
    results["hidden_states"] = np.stack([value.detach().numpy() for value in output.hidden_states])
    results["config"] = np.array(json.dumps({**config.to_dict(), "architectures": [kind]}))
    if name.startswith("pretraining"):
        results["pooler_output"] = model.bert(**feed).pooler_output.detach().numpy()
    if name in GRADIENTS:
        loss = span_loss(output, tensors) if name == "question_answering" else output.loss
        loss.backward()
        results["loss"] = loss.detach().numpy()
        results |= pack("gradients", {key: value.grad.numpy() for key, value in model.named_parameters()})
    results |= pack("state", {key: value.detach().numpy() for key, value in model.named_parameters()})
    return {f"{name}/{key}": value for key, value in results.items()}


def span_loss(output: transformers.utils.ModelOutput, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    """Returns the loss over the real tokens. That of transformers counts padding as places an answer could be at."""
    padding = tensors["attention_mask"] == 0
    logits = [values.masked_fill(padding, -1e9) for values in (output.start_logits, output.end_logits)]
    return sum(torch.nn.functional.cross_entropy(logits[i], tensors["spans"][:, i]) for i in range(2)) / 2


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
