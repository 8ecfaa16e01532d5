# SPDX-License-Identifier: Apache-2.0
"""The peer of benchmarks/search_models.py: sentence-transformers trains a kind of search model, and scores with it."""

import tempfile
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import sentence_transformers as library
import torch
from datasets import Dataset
from sentence_transformers.base.modules.dense import Dense
from sentence_transformers.base.modules.normalize import Normalize
from sentence_transformers.base.modules.transformer import Transformer
from sentence_transformers.cross_encoder import losses as cross_losses
from sentence_transformers.multi_vector_encoder import losses as token_losses
from sentence_transformers.multi_vector_encoder.modules.multi_vector_mask import MultiVectorMask
from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss
from sentence_transformers.sparse_encoder import losses as sparse_losses
from sentence_transformers.sparse_encoder.modules import SpladePooling
from transformers import TrainerCallback
from worker import Work, main


class Kind(NamedTuple):
    """How a kind is made and trained."""

    model: Callable[[str, int], Any]
    loss: Callable[[Any], Any]
    trainer: Any
    arguments: Any


def dense(start: str, length: int) -> Any:
    """Returns mean vectors."""
    model = library.SentenceTransformer(start, device="cpu")
    model.max_seq_length = length
    return model


def sparse(start: str, length: int) -> Any:
    """Returns a masked language model with SPLADE's pooling."""
    first = Transformer(start, transformer_task="fill-mask", max_seq_length=length)
    return library.SparseEncoder(modules=[first, SpladePooling()], device="cpu")


def multi_vector(start: str, length: int) -> Any:
    """Returns vectors of 128 numbers for each token, all of which count."""
    first = Transformer(start, max_seq_length=length)
    projection = Dense(
        first.get_embedding_dimension(),
        128,
        bias=False,
        activation_function=torch.nn.Identity(),
        module_input_name="token_embeddings",
        module_output_name="token_embeddings",
    )
    unit = Normalize("token_embeddings", "token_embeddings")
    modules = [first, projection, MultiVectorMask(skiplist_words=[]), unit]
    return library.MultiVectorEncoder(modules=modules, device="cpu")


def reranker(start: str, length: int) -> Any:
    """Returns one number for a pair, as it is."""
    return library.CrossEncoder(
        start, num_labels=1, max_length=length, device="cpu", activation_fn=torch.nn.Identity()
    )


def splade(model: Any) -> Any:
    """Returns the loss with the weights of FLOPS that ours has."""
    base = sparse_losses.SparseMultipleNegativesRankingLoss(model)
    return sparse_losses.SpladeLoss(
        model, base, document_regularizer_weight=3e-5, query_regularizer_weight=5e-5
    )


KINDS = {
    "dense": Kind(
        dense,
        lambda model: MultipleNegativesRankingLoss(model, scale=20),
        library.SentenceTransformerTrainer,
        library.SentenceTransformerTrainingArguments,
    ),
    "sparse": Kind(
        sparse, splade, library.SparseEncoderTrainer, library.SparseEncoderTrainingArguments
    ),
    "multi_vector": Kind(
        multi_vector,
        token_losses.MultiVectorMultipleNegativesRankingLoss,
        library.MultiVectorEncoderTrainer,
        library.MultiVectorEncoderTrainingArguments,
    ),
    "reranker": Kind(
        reranker,
        cross_losses.ListNetLoss,
        library.CrossEncoderTrainer,
        library.CrossEncoderTrainingArguments,
    ),
}


class SearchModel(Work):
    """A search model of sentence-transformers; `run` trains it and keeps the scores of what is searched."""

    def __init__(self, work: dict[str, Any], batches: str) -> None:
        self.work, self.device = work, torch.device("cpu")
        torch.set_num_threads(work["threads"])

    def run(self, mode: str) -> dict[str, Any]:
        work, kind = self.work, KINDS[mode]
        torch.manual_seed(work["seed"])
        model = kind.model(work["start"], work["max_seq_length"])
        for part in model.modules():
            if isinstance(part, torch.nn.Dropout):
                part.p = 0.0
        started, used = time.perf_counter(), time.process_time()
        rate = self._train(model, kind, mode == "reranker")
        spent = {
            "seconds": time.perf_counter() - started,
            "cpu_seconds": time.process_time() - used,
            "pairs_per_second": rate,
        }
        model.eval()
        np.save(work["scores"], self._scores(model, mode))
        return spent

    def _scores(self, model: Any, mode: str) -> np.ndarray:
        work = self.work
        if mode == "reranker":
            pairs = [(question, text) for question, texts in work["candidates"] for text in texts]
            return np.reshape(model.predict(pairs), (len(work["candidates"]), -1))
        with torch.no_grad():
            # vectors of tokens are a list of tensors in any case
            options = {} if mode == "multi_vector" else {"convert_to_tensor": True}
            queries = model.encode_query(work["questions"], **options)
            passages = model.encode_document(work["passages"], **options)
            if mode == "dense":  # as the loss and ours compare them
                queries, passages = (torch.nn.functional.normalize(x) for x in (queries, passages))
                return (queries @ passages.T).numpy()
            found = model.similarity(queries, passages)
            return (found.to_dense() if found.is_sparse else found).numpy()

    def _train(self, model: Any, kind: Kind, is_reranker: bool) -> float:
        """Trains as its own trainer does, and returns the pairs a second from the end of the first step on."""
        work, ends = self.work, []
        rows = work["rows"]
        if is_reranker:
            data = {
                "query": [row[0] for row in rows],
                "docs": [row[1:] for row in rows],
                "labels": [[1.0] + [0.0] * (len(row) - 2) for row in rows],
            }
        else:
            names = ("query", "positive", "negative")
            data = {name: [row[place] for row in rows] for place, name in enumerate(names)}
        seen = type(
            "Ends",
            (TrainerCallback,),
            {"on_step_end": lambda *_, **__: ends.append(time.perf_counter())},
        )
        with tempfile.TemporaryDirectory() as folder:
            options = kind.arguments(
                folder,
                num_train_epochs=1,
                per_device_train_batch_size=work["batch_size"],
                learning_rate=work["learning_rate"],
                warmup_steps=0.1,
                weight_decay=0.0,
                use_cpu=True,
                batch_sampler="batch_sampler" if is_reranker else "no_duplicates",
                seed=work["seed"],
                save_strategy="no",
                logging_strategy="no",
                report_to=[],
                disable_tqdm=True,
            )
            kind.trainer(
                model,
                options,
                train_dataset=Dataset.from_dict(data),
                loss=kind.loss(model),
                callbacks=[seen()],
            ).train()
        passages = len(rows[0]) - 1 if is_reranker else 1
        return passages * (len(rows) - work["batch_size"]) / (ends[-1] - ends[0])


if __name__ == "__main__":
    main(SearchModel)
