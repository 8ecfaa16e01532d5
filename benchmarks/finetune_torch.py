# SPDX-License-Identifier: Apache-2.0
r"""Fine-tunes a BERT of Hugging Face's with transformers and torch: what our own fine-tuning is compared with.

    pip install -r benchmarks/requirements-torch.txt  # in an environment of its own
    python benchmarks/finetune_torch.py --model=DIR --task=mrpc --data=glue/MRPC --seed=0 --output=mrpc.json

The settings are the paper's: Adam without bias correction, weight decay 0.01 on all but biases and layer norm,
gradients clipped at norm 1, linear warm-up over a tenth of the steps and Google's decay, dropout 0.1, batches of 32,
3 epochs (SQuAD 2), 128 tokens (SQuAD 384 in windows 128 apart). Batches are of like lengths, and padded to their
longest. The development set is scored after each epoch. Nothing of bert_jax is used.
"""

import argparse
import json
import math
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch_tasks import NO_LABEL, TASKS, Row, find_labels, make_rows, score

CHUNK = 50  # batches whose rows are sorted by length together


# Training


class PaperAdam(torch.optim.Optimizer):
    """Adam with weight decay as in Google's code: decay beside the ratio, and no bias correction unless asked for."""

    def __init__(self, groups: list[dict[str, Any]], correct_bias: bool):
        super().__init__(groups, {"lr": 0.0, "betas": (0.9, 0.999), "eps": 1e-6, "correct_bias": correct_bias})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            (beta1, beta2), rate = group["betas"], group["lr"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state.update(step=0, mean=torch.zeros_like(parameter), square=torch.zeros_like(parameter))
                state["step"] += 1
                mean, square = state["mean"], state["square"]
                mean.mul_(beta1).add_(parameter.grad, alpha=1 - beta1)
                square.mul_(beta2).addcmul_(parameter.grad, parameter.grad, value=1 - beta2)
                one = 1 - beta1 ** state["step"] if group["correct_bias"] else 1.0
                two = 1 - beta2 ** state["step"] if group["correct_bias"] else 1.0
                update = (mean / one).div_((square / two).sqrt_().add_(group["eps"]))
                parameter.add_(update.add_(parameter, alpha=group["weight_decay"]), alpha=-rate)


def make_optimizer(model: torch.nn.Module, correct_bias: bool) -> PaperAdam:
    """Returns the optimizer of all parameters; biases and those of layer norm do not decay."""
    named = list(model.named_parameters())
    free = [parameter for name, parameter in named if re.search(r"LayerNorm|bias", name)]
    decayed = [parameter for name, parameter in named if not re.search(r"LayerNorm|bias", name)]
    groups = [{"params": decayed, "weight_decay": 0.01}, {"params": free, "weight_decay": 0.0}]
    return PaperAdam(groups, correct_bias)


def rate_at(step: int, num_steps: int, peak: float) -> float:
    """Returns the learning rate of a step, the first being 0; after the warm-up it falls on a line from step 0."""
    warmup = int(num_steps * 0.1)
    return peak * step / warmup if step < warmup else peak * (1 - step / num_steps)


def train_batches(lengths: list[int], size: int, rng: np.random.Generator) -> Iterator[np.ndarray]:
    """Yields the rows of an epoch's batches: a permutation is cut into chunks, and these, by length, into batches."""
    order = rng.permutation(len(lengths))
    batches = []
    for start in range(0, len(order), CHUNK * size):
        chunk = order[start : start + CHUNK * size]
        chunk = chunk[np.argsort(np.take(lengths, chunk), kind="stable")]
        batches += [chunk[first : first + size] for first in range(0, len(chunk), size)]
    for number in rng.permutation(len(batches)):
        yield batches[number]


def collate(rows: list[Row]) -> dict[str, torch.Tensor]:
    """Returns a batch as long as its longest row."""
    length = max(len(row["input_ids"]) for row in rows)

    def padded(values: list[list[int]], filler: int) -> torch.Tensor:
        return torch.tensor([value + [filler] * (length - len(value)) for value in values])

    batch = {name: padded([row[name] for row in rows], 0) for name in ("input_ids", "token_type_ids")}
    batch["attention_mask"] = padded([[1] * len(row["input_ids"]) for row in rows], 0)
    for name in ("labels", "start_positions", "end_positions"):
        if name in rows[0]:
            values = [row[name] for row in rows]
            batch[name] = padded(values, NO_LABEL) if isinstance(values[0], list) else torch.tensor(values)
    return batch


@torch.no_grad()
def predict(model: torch.nn.Module, rows: list[Row], size: int = 32) -> list[np.ndarray]:
    """Returns the logits of each row without padding: [classes], [L, classes], or [2, L] of starts and ends."""
    model.eval()
    outputs: list[np.ndarray] = [np.empty(0)] * len(rows)
    order = np.argsort([len(row["input_ids"]) for row in rows], kind="stable")
    for start in range(0, len(order), size):
        chosen = order[start : start + size]
        batch = collate([rows[number] for number in chosen])
        inputs = {name: batch[name] for name in ("input_ids", "token_type_ids", "attention_mask")}
        output = model(**inputs)
        spans = "start_positions" in batch
        logits = torch.stack([output.start_logits, output.end_logits], 1) if spans else output.logits
        for number, value in zip(chosen, logits.numpy()):
            length = len(rows[number]["input_ids"])
            outputs[number] = value[:, :length] if spans else value[:length] if value.ndim == 2 else value
    return outputs


# A run


def parse_flags() -> argparse.Namespace:
    """Returns the command line's flags."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="directory with config.json, model.safetensors and a tokenizer")
    parser.add_argument("--task", required=True, choices=sorted(TASKS))
    parser.add_argument("--data", required=True, type=Path, help="folder of the task's files")
    parser.add_argument("--output", required=True, type=Path, help="JSON file to write")
    parser.add_argument("--seed", type=int, default=0, help="of the head, the order and dropout")
    parser.add_argument("--learning_rate", type=float, default=5e-5)
    parser.add_argument("--epochs", type=int, default=0, help="0 takes the task's")
    parser.add_argument("--batch_size", type=int, default=32)
    parser.add_argument("--correct_bias", action="store_true", help="Adam as in its paper, not as in Google's code")
    parser.add_argument("--threads", type=int, default=1, help="of torch")
    parser.add_argument("--limit", type=int, default=0, help="examples of each part; 0 takes all")
    return parser.parse_args()


def main() -> None:
    """Trains, scores after each epoch, prints and writes one JSON object."""
    flags = parse_flags()
    torch.set_num_threads(flags.threads)
    torch.manual_seed(flags.seed)
    rng = np.random.default_rng(flags.seed)
    task, epochs = TASKS[flags.task], flags.epochs or TASKS[flags.task].epochs
    train, dev = (task.read(flags.data, file)[: flags.limit or None] for file in task.files)
    labels = find_labels(task, [*train, *dev])
    tokenizer = transformers.AutoTokenizer.from_pretrained(flags.model)
    train_rows, dev_rows = (make_rows(part, task, tokenizer, labels) for part in (train, dev))

    sizes = {} if task.kind == "spans" else {"num_labels": len(labels) or 1}
    dropout = {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1}
    model = task.model.from_pretrained(flags.model, **sizes, **dropout, dtype=torch.float32)
    optimizer = make_optimizer(model, flags.correct_bias)
    lengths = [len(row["input_ids"]) for row in train_rows]
    num_steps = epochs * math.ceil(len(train_rows) / flags.batch_size)
    step, seconds, history = 0, 0.0, []
    for epoch in range(1, epochs + 1):
        started, losses = time.perf_counter(), []
        model.train()
        for chosen in train_batches(lengths, flags.batch_size, rng):
            for group in optimizer.param_groups:
                group["lr"] = rate_at(step, num_steps, flags.learning_rate)
            loss = model(**collate([train_rows[number] for number in chosen])).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            step += 1
        seconds += time.perf_counter() - started
        metrics = score(task, labels, dev, dev_rows, predict(model, dev_rows))
        history.append({"epoch": epoch, "loss": float(np.mean(losses))} | metrics)
        print(json.dumps(history[-1]), flush=True)
    best = max(history, key=lambda record: record[task.metric])
    result = {
        "task": flags.task,
        "seed": flags.seed,
        "learning_rate": flags.learning_rate,
        "epochs": epochs,
        "batch_size": flags.batch_size,
        "correct_bias": flags.correct_bias,
        "examples": [len(train), len(dev)],
        "steps": num_steps,
        "metric": task.metric,
        "best": best[task.metric],
        "best_epoch": best["epoch"],
        "history": history,
        "seconds_of_training": round(seconds, 1),
        "device": "cpu",
        "threads": torch.get_num_threads(),
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
    }
    flags.output.parent.mkdir(parents=True, exist_ok=True)
    flags.output.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
