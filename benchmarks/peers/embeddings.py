# SPDX-License-Identifier: Apache-2.0
"""The peer of benchmarks/embeddings.py: sentence-transformers trains, and embeds by torch or by ONNX Runtime.

No release of optimum-onnx takes the transformers that sentence-transformers 6.2 needs, so what its ONNX backend does is
written out: ONNX Runtime computes the last layer, and all else is its own.
"""

import tempfile
import time
from typing import Any

import numpy as np
import torch
from sentence_transformers import (
    SentenceTransformer,
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
)
from sentence_transformers.sentence_transformer.losses import (
    CoSENTLoss,
    MultipleNegativesRankingLoss,
)
from transformers import TrainerCallback
from transformers.modeling_outputs import BaseModelOutput
from worker import INPUTS, Work, main, onnx_session


class OnnxModel(torch.nn.Module):
    """The last layer of a model by ONNX Runtime."""

    def __init__(self, model: torch.nn.Module, threads: int) -> None:
        super().__init__()
        self.config = model.config
        example = {name: torch.ones((2, 8), dtype=torch.int64) for name in INPUTS}
        self.compute = onnx_session(model, example, "last_hidden_state", threads)

    def forward(self, **inputs: Any) -> BaseModelOutput:
        return BaseModelOutput(last_hidden_state=torch.from_numpy(self.compute(inputs)[0]))


class Embedding(Work):
    """A model of sentence-transformers; `run` trains it, or embeds all texts and keeps their vectors."""

    def __init__(self, work: dict[str, Any], batches: str) -> None:
        use_gpu = work.get("platform") == "gpu" and torch.cuda.is_available()
        self.work, self.device, self.models = work, torch.device("cuda" if use_gpu else "cpu"), {}
        torch.set_num_threads(work["threads"])

    def run(self, mode: str) -> dict[str, Any]:
        name = "eager:float32" if mode == "train" else mode
        if name not in self.models:
            precision = {"dtype": getattr(torch, name.partition(":")[2])}
            model = SentenceTransformer(
                self.work["start"], device=str(self.device), model_kwargs=precision
            )
            self.models[name] = model
            model.max_seq_length = self.work["max_seq_length"]
            if name.startswith("onnx"):
                model[0].model = OnnxModel(model[0].model, self.work["threads"])
        started = time.perf_counter()
        if mode == "train":
            rate = self._train(self.models[name])
            return {"seconds": time.perf_counter() - started, "pairs_per_second": rate}
        size = self.work.get("texts_at_once", 32)
        vectors = self.models[name].encode(self.work["texts"], batch_size=size)
        np.save(self.work["vectors"], vectors.astype(np.float32))
        return {"done": True}

    def _train(self, model: SentenceTransformer) -> float:
        """Trains as its own trainer does, and returns the pairs a second from the end of the first step on."""
        from datasets import Dataset  # embedding alone does not need it

        work, ends = self.work, []
        graded, data = "score" in work["pairs"], Dataset.from_dict(work["pairs"])
        seen = type(
            "Ends",
            (TrainerCallback,),
            {"on_step_end": lambda *_, **__: ends.append(time.perf_counter())},
        )
        loss = (CoSENTLoss if graded else MultipleNegativesRankingLoss)(
            model, scale=1 / work["temperature"]
        )
        with tempfile.TemporaryDirectory() as folder:
            options = SentenceTransformerTrainingArguments(
                folder, num_train_epochs=work["epochs"], per_device_train_batch_size=work["batch_size"],
                learning_rate=work["learning_rate"], warmup_steps=work["warmup_rate"], weight_decay=0.0, use_cpu=True,
                batch_sampler="batch_sampler" if graded else "no_duplicates", seed=work["seed"],
                save_strategy="no", logging_strategy="no", report_to=[], disable_tqdm=True,
            )  # fmt: skip
            SentenceTransformerTrainer(
                model, options, train_dataset=data, loss=loss, callbacks=[seen()]
            ).train()
        model.eval()
        return (work["epochs"] * len(data) - work["batch_size"]) / (ends[-1] - ends[0])


if __name__ == "__main__":
    main(Embedding)
