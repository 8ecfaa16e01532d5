# SPDX-License-Identifier: Apache-2.0
"""One side of benchmarks/answers.py: bert_jax, torch or ONNX Runtime answers requests about texts.

    python benchmarks/peers/answers.py SIDE MODEL CLASSIFIER
    python benchmarks/peers/answers.py train MODEL FOLDER    # with train.tsv and dev.tsv, by transformers' Trainer

Reads lines {"work": "embed" or "classify", "texts": [...]} and answers each with seconds, CPU seconds and the most
memory so far; with "show" also the vectors of length 1 or the probabilities, in the order of the texts. torch is
sentence-transformers and transformers; ONNX Runtime runs their exported models, onnx-int8 those that it has quantized
dynamically. All take sets sorted by length, in batches of 32.
"""

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

from memory import most_memory

BATCH = 32
Answer = Callable[[Sequence[str]], Any]


def ours(model: str, classifier: str) -> dict[str, Callable[[], Answer]]:
    """Returns what makes each work's function: with bert_jax."""
    import bert_jax

    length = 0  # the model's own; version 0.2 does not read it
    if os.path.exists(f"{model}/sentence_bert_config.json"):
        with open(f"{model}/sentence_bert_config.json", encoding="utf-8") as file:
            length = json.load(file)["max_seq_length"]

    def embed() -> Answer:
        bert = bert_jax.load_pretrained(model)
        return lambda texts: bert_jax.sentence_embeddings(bert, list(texts), max_seq_length=length)

    def classify() -> Answer:
        predictor = bert_jax.load_predictor(classifier)
        return lambda texts: [list(one.probabilities.values()) for one in predictor(list(texts))]

    return {"embed": embed, "classify": classify}


def torch_side(model: str, classifier: str) -> dict[str, Callable[[], Answer]]:
    """Returns the same with sentence-transformers and transformers."""
    import torch

    torch.set_num_threads(len(os.sched_getaffinity(0)))

    def embed() -> Answer:
        from sentence_transformers import SentenceTransformer

        encoder = SentenceTransformer(model, device="cpu")
        settings = {"batch_size": BATCH, "show_progress_bar": False, "normalize_embeddings": True}
        return lambda texts: encoder.encode(list(texts), **settings)

    def classify() -> Answer:
        from transformers import AutoModelForSequenceClassification, AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(classifier)
        net = AutoModelForSequenceClassification.from_pretrained(
            classifier, dtype=torch.float32
        ).eval()

        def run(texts: Sequence[str]) -> Any:
            with torch.inference_mode():
                inputs = tokenizer(
                    list(texts), padding=True, truncation=True, max_length=512, return_tensors="pt"
                )
                return net(**inputs).logits.softmax(-1).numpy()

        return in_batches(run)

    return {"embed": embed, "classify": classify}


def onnx_side(
    model: str, classifier: str, file: str = "answers.onnx"
) -> dict[str, Callable[[], Answer]]:
    """Returns the same with ONNX Runtime and tokenizers; the models are exported by `export` below, once."""
    import numpy as np
    import onnxruntime
    from tokenizers import Tokenizer

    def make(directory: str) -> Callable[[Sequence[str]], tuple[Any, Any]]:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = len(os.sched_getaffinity(0))
        session = onnxruntime.InferenceSession(
            f"{directory}/{file}", options, providers=["CPUExecutionProvider"]
        )
        wanted = [one.name for one in session.get_inputs()]
        tokenizer = Tokenizer.from_file(f"{directory}/tokenizer.json")
        tokenizer.enable_padding()
        tokenizer.enable_truncation(512 if directory == classifier else 256)

        def run(texts: Sequence[str]) -> tuple[Any, Any]:
            rows = tokenizer.encode_batch(list(texts))
            ids = np.array([row.ids for row in rows], np.int64)
            mask = np.array([row.attention_mask for row in rows], np.int64)
            inputs = {
                "input_ids": ids,
                "attention_mask": mask,
                "token_type_ids": np.zeros_like(ids),
            }
            return session.run(None, {name: inputs[name] for name in wanted})[0], mask

        return run

    def embed() -> Answer:
        run = make(model)

        def vectors(texts: Sequence[str]) -> Any:
            hidden, mask = run(texts)
            mean = (hidden * mask[:, :, None]).sum(1) / mask.sum(1, keepdims=True)
            return mean / np.linalg.norm(mean, axis=1, keepdims=True)

        return in_batches(vectors)

    def classify() -> Answer:
        run = make(classifier)

        def probabilities(texts: Sequence[str]) -> Any:
            logits = run(texts)[0]
            raised = np.exp(logits - logits.max(axis=-1, keepdims=True))
            return raised / raised.sum(axis=-1, keepdims=True)

        return in_batches(probabilities)

    return {"embed": embed, "classify": classify}


def int8_side(model: str, classifier: str) -> dict[str, Callable[[], Answer]]:
    """Returns the same with ONNX Runtime's products of 8 bits."""
    return onnx_side(model, classifier, "answers_int8.onnx")


def in_batches(run: Answer) -> Answer:
    """Returns a function that takes any number of texts, sorted by length, BATCH at a time."""

    def answer(texts: Sequence[str]) -> Any:
        order = sorted(range(len(texts)), key=lambda number: -len(texts[number]))
        found: list[Any] = [None] * len(texts)
        for start in range(0, len(order), BATCH):
            part = order[start : start + BATCH]
            for number, one in zip(part, run([texts[n] for n in part])):
                found[number] = one
        return found

    return answer


def export(model: str, classifier: str) -> None:
    """Writes answers.onnx and answers_int8.onnx beside both models, if they are missing."""
    import onnx
    import torch
    from onnxruntime.quantization import QuantType, quantize_dynamic
    from transformers import AutoModel, AutoModelForSequenceClassification

    for directory, kind in ((model, AutoModel), (classifier, AutoModelForSequenceClassification)):
        if os.path.exists(f"{directory}/answers_int8.onnx"):
            continue
        net = kind.from_pretrained(directory, dtype=torch.float32).eval()
        net.config.return_dict = False
        ids = torch.ones(2, 16, dtype=torch.int64)
        # a tensor given twice would become one input, and the ids be read as the mask
        mask = torch.ones_like(ids)
        names = ["input_ids", "attention_mask", "token_type_ids"]
        dynamic = tuple({0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC} for _ in names)
        with tempfile.TemporaryDirectory(dir=directory) as folder:  # whole or not at all
            torch.onnx.export(
                net, (ids, mask, ids * 0), f"{folder}/answers.onnx", input_names=names, dynamo=True,
                dynamic_shapes=dynamic, external_data=False,
            )  # fmt: skip
            exported = onnx.load(f"{folder}/answers.onnx")
            del exported.graph.value_info[:]  # shapes that the exporter noted, some of them wrong
            place = f"{folder}/answers_int8.onnx"
            quantize_dynamic(exported, place, weight_type=QuantType.QInt8)
            for name in ("answers.onnx", "answers_int8.onnx"):
                os.replace(f"{folder}/{name}", f"{directory}/{name}")


def train(model: str, folder: str) -> None:
    """Fine-tunes a classifier as transformers' Trainer does by default, and evaluates after each epoch."""
    import torch
    import transformers

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    splits = {}
    for name in ("train", "dev"):
        with open(f"{folder}/{name}.tsv", encoding="utf-8") as file:
            texts, labels = zip(*(line.rstrip("\n").split("\t") for line in file.readlines()[1:]))
        tokens = tokenizer(list(texts), truncation=True, max_length=128)["input_ids"]
        splits[name] = [
            {"input_ids": ids, "labels": int(label)} for ids, label in zip(tokens, labels)
        ]
    with tempfile.TemporaryDirectory() as place:
        options = transformers.TrainingArguments(
            place, num_train_epochs=3, per_device_train_batch_size=32, learning_rate=5e-5, warmup_steps=0.1,
            use_cpu=True, eval_strategy="epoch", save_strategy="no", report_to=[], disable_tqdm=True,
        )  # fmt: skip
        net = transformers.AutoModelForSequenceClassification.from_pretrained(
            model, dtype=torch.float32
        )
        collator = transformers.DataCollatorWithPadding(tokenizer)
        data = {"train_dataset": splits["train"], "eval_dataset": splits["dev"]}
        transformers.Trainer(net, options, data_collator=collator, **data).train()


def main() -> None:
    """Answers requests until there are no more."""
    answers, sys.stdout = sys.stdout, sys.stderr
    side, model, classifier = sys.argv[1:]
    if side in ("export", "train"):
        (export if side == "export" else train)(model, classifier)
        return
    kinds = {"bert_jax": ours, "torch": torch_side, "onnx": onnx_side, "onnx-int8": int8_side}
    makers = kinds[side](model, classifier)
    ready: dict[str, Answer] = {}
    for line in sys.stdin:
        request = json.loads(line)
        name = request["work"]
        started, cpu = time.perf_counter(), time.process_time()
        if name not in ready:
            ready[name] = makers[name]()
        found = ready[name](request["texts"])
        reply: dict[str, Any] = {
            "seconds": time.perf_counter() - started,
            "cpu_seconds": time.process_time() - cpu,
        }
        reply["memory"] = most_memory()
        if request.get("show"):
            reply["answers"] = [[float(value) for value in one] for one in found]
        print(json.dumps(reply), file=answers, flush=True)


if __name__ == "__main__":
    main()
