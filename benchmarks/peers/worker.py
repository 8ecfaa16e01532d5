# SPDX-License-Identifier: Apache-2.0
r"""What our own benchmark is compared with: transformers on torch, and ONNX Runtime. Nothing of bert_jax is used.

    python -m venv peers && peers/bin/pip install -r benchmarks/peers/requirements.txt
    python -m benchmarks.bench --what=train --config=configs/pretrain.py:base \
        --compare=transformers --peer_python=peers/bin/python

The benchmark starts this file with two others: the description of the work, and the batches. How they talk is written
in benchmarks/peer_workers.py. A mode is BACKEND:PRECISION: eager, compile (torch.compile) or onnx; float32 or
bfloat16, the latter by torch.autocast. All modes train one and the same model. With BACKEND:PRECISION:ATTENTION
scaled_dot_product_attention is held to one kernel: cudnn, flash, efficient or math. Then a mask without padding is left
out, since flash takes none; the mode fails where its kernel cannot run. With eager:PRECISION:unpadded a classifier
computes the tokens of a batch and no padding: one row of all tokens, and attention for each length by itself.
"""

import contextlib
import importlib.util
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from memory import most_memory
from torch.nn.attention import SDPBackend, sdpa_kernel

NO_LABEL = -100
ACTIVATIONS = {"gelu_tanh": "gelu_pytorch_tanh", "gelu_exact": "gelu"}
INPUTS = ("input_ids", "token_type_ids", "attention_mask")
KERNELS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}


def make_model(work: dict[str, Any]) -> torch.nn.Module:
    """Returns a random model of the described shape, with the heads of the work."""
    shape = work["model"]
    config = transformers.BertConfig(
        vocab_size=shape["vocab_size"],
        hidden_size=shape["hidden_size"],
        num_hidden_layers=shape["num_layers"],
        num_attention_heads=shape["num_heads"],
        intermediate_size=shape["intermediate_size"],
        max_position_embeddings=shape["max_positions"],
        type_vocab_size=shape["type_vocab_size"],
        hidden_act=ACTIVATIONS[shape["activation"]],
        hidden_dropout_prob=shape["hidden_dropout_rate"],
        attention_probs_dropout_prob=shape["attention_dropout_rate"],
        layer_norm_eps=shape["layer_norm_epsilon"],
        num_labels=work["num_classes"],
        attn_implementation="sdpa",  # the default where it can, and what KERNELS chooses among
    )
    if work["what"] == "train":
        return transformers.BertForPreTraining(config)
    return transformers.BertForSequenceClassification(config)


def load_batches(path: str, device: torch.device) -> list[dict[str, torch.Tensor]]:
    """Returns the batches in the order of their numbers."""
    batches: dict[int, dict[str, torch.Tensor]] = {}
    with np.load(path) as arrays:
        for key in arrays.files:
            number, _, name = key.partition("/")
            batches.setdefault(int(number), {})[name] = torch.from_numpy(
                arrays[key].astype(np.int64)
            ).to(device)
    return [batches[number] for number in sorted(batches)]


def without_full_mask(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Returns a batch without its mask if that masks nothing."""
    full = bool(batch["attention_mask"].all())
    return {name: array for name, array in batch.items() if not (full and name == "attention_mask")}


class Unpadded(torch.nn.Module):
    """A BertForSequenceClassification that computes no padding; it has the parameters of the given one."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(
        self,
        input_ids: torch.Tensor,
        token_type_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        labels: torch.Tensor | None = None,
    ) -> Any:
        """Returns the loss, if there are labels, and the logits of a batch [B, L]."""
        bert = self.model.bert
        real = attention_mask.bool()
        lengths = real.sum(dim=1)
        starts = lengths.cumsum(0) - lengths
        places = torch.arange(real.shape[1], device=real.device).expand(real.shape)[real]
        groups = [
            starts[lengths == length][:, None] + torch.arange(int(length), device=real.device)
            for length in lengths.unique()
        ]
        hidden = bert.embeddings(
            input_ids[real][None], token_type_ids[real][None], position_ids=places[None]
        )
        before, bert.config._attn_implementation = bert.config._attn_implementation, "unpadded"
        try:
            hidden = bert.encoder(hidden, attention_mask=None, groups=groups).last_hidden_state[0]
        finally:
            bert.config._attn_implementation = before
        pooled = bert.pooler.activation(bert.pooler.dense(hidden[starts]))
        logits = self.model.classifier(self.model.dropout(pooled))
        loss = None if labels is None else torch.nn.functional.cross_entropy(logits, labels)
        return transformers.modeling_outputs.SequenceClassifierOutput(loss=loss, logits=logits)


def attend_unpadded(
    module: Any,
    query: Any,
    key: Any,
    value: Any,
    mask: Any,
    scaling: float,
    dropout: float,
    groups: Any,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Returns attention within each sequence, [1, tokens, heads, size]; `groups` are places of sequences by length."""
    out = torch.empty_like(query[0].transpose(0, 1))  # [tokens, heads, size]
    for places in groups:
        # [n, heads, length, size]
        parts = (array[0][:, places].transpose(0, 1) for array in (query, key, value))
        found = torch.nn.functional.scaled_dot_product_attention(
            *parts, dropout_p=dropout, scale=scaling
        )
        out = out.index_put(
            (places.reshape(-1),), found.transpose(1, 2).flatten(0, 1).to(out.dtype)
        )
    return out[None], None


transformers.AttentionInterface.register("unpadded", attend_unpadded)


class Work:
    """The model, its optimizer and the batches; `run(mode)` is one round."""

    def __init__(self, work: dict[str, Any], batches: str) -> None:
        self.work = work
        use_gpu = work["platform"] in ("gpu", "cuda") and torch.cuda.is_available()
        self.device = torch.device("cuda" if use_gpu else "cpu")
        torch.manual_seed(work["seed"])
        torch.set_num_threads(work["threads"])
        # TF32, as JAX does by default
        torch.set_float32_matmul_precision("high" if use_gpu else "highest")
        self.batches = load_batches(batches, self.device)
        self.unmasked = [without_full_mask(batch) for batch in self.batches]
        self.model = make_model(work).to(self.device)
        self.training = work["what"] != "infer"
        self.model.train(self.training)
        self.optimizer = self._make_optimizer() if self.training else None
        self._forward: dict[str, Callable[..., Any]] = {"eager": self.model}
        self._compiled_for = ""  # the attention that torch.compile has seen

    def _make_optimizer(self) -> torch.optim.Optimizer:
        """Returns torch's own AdamW in its fastest form, with weight decay where ours has it."""
        settings = self.work["optimizer"]
        named = list(self.model.named_parameters())
        free = [parameter for name, parameter in named if "LayerNorm" in name or "bias" in name]
        decayed = [
            parameter for name, parameter in named if not ("LayerNorm" in name or "bias" in name)
        ]
        groups = [
            {"params": decayed, "weight_decay": settings["weight_decay"]},
            {"params": free, "weight_decay": 0.0},
        ]
        betas = (settings["beta1"], settings["beta2"])
        return torch.optim.AdamW(
            groups, settings["learning_rate"], betas, settings["epsilon"], fused=True
        )

    def run(self, mode: str) -> dict[str, Any]:
        """Returns how long all batches took, once."""
        backend, precision, attention = (*mode.split(":"), "")[:3]
        if backend == "onnx":
            if "onnx" not in self._forward:
                self._forward["onnx"] = onnx_session(
                    self.model, self.batches[0], "logits", self.work["threads"]
                )
            session = self._forward["onnx"]
            round_of = lambda: [session(batch) for batch in self.batches]  # noqa: E731
        else:
            if backend == "compile" and "compile" not in self._forward:
                self._forward["compile"] = torch.compile(self.model)
                self._compiled_for = attention
            if backend == "compile" and attention != self._compiled_for:
                raise ValueError(
                    "torch.compile keeps the attention of its first mode; measure another by itself"
                )
            forward = self._forward[backend]
            if attention == "unpadded":
                forward, attention = Unpadded(self.model), ""
            round_of = lambda: self._round(forward, precision, attention)  # noqa: E731
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()  # else a mode has the peak of those before it
        started, cpu = time.perf_counter(), time.process_time()
        round_of()
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        done = {"seconds": time.perf_counter() - started, "cpu_seconds": time.process_time() - cpu}
        return done | self._memory()

    def _round(self, forward: Callable[..., Any], precision: str, attention: str) -> None:
        cast = torch.autocast(self.device.type, torch.bfloat16, enabled=precision == "bfloat16")
        held = sdpa_kernel([KERNELS[attention]]) if attention else contextlib.nullcontext()
        batches = self.unmasked if attention else self.batches
        if not self.training:
            with torch.inference_mode(), cast, held:
                for batch in batches:
                    inputs = {name: batch[name] for name in INPUTS if name in batch}
                    forward(**inputs).logits.float().cpu().numpy()
            return
        assert self.optimizer is not None
        for batch in batches:
            with cast, held:
                loss = forward(**batch).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(
                self.model.parameters(), self.work["optimizer"]["clip_norm"]
            )
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)

    def _memory(self) -> dict[str, Any]:
        if self.device.type == "cuda":
            return {
                "peak_memory_bytes": torch.cuda.max_memory_allocated(),
                "peak_memory_of": "device",
            }
        return {"peak_memory_bytes": most_memory(), "peak_memory_of": "process, resident"}


def onnx_session(
    model: torch.nn.Module, batch: dict[str, torch.Tensor], output: str, threads: int
) -> Callable[..., Any]:
    """Returns a function that runs the exported model, with all of ONNX Runtime's own optimizations."""
    import onnxruntime

    class Output(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, input_ids: Any, token_type_ids: Any, attention_mask: Any) -> Any:
            found = self.model(
                input_ids=input_ids, token_type_ids=token_type_ids, attention_mask=attention_mask
            )
            return getattr(found, output)

    example = tuple(batch[name] for name in INPUTS)
    dynamic = tuple({0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC} for _ in INPUTS)
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "model.onnx")
        torch.onnx.export(
            Output().eval(),
            example,
            path,
            input_names=list(INPUTS),
            dynamo=True,
            dynamic_shapes=dynamic,
        )
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL
        session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    wanted = [one.name for one in session.get_inputs()]
    return lambda batch: session.run(None, {name: batch[name].numpy() for name in wanted})


def versions() -> dict[str, str]:
    """Returns the versions of the libraries there are."""
    names = ("torch", "transformers", "onnxruntime", "sentence-transformers")
    return {
        name: metadata.version(name)
        for name in names
        if importlib.util.find_spec(name.replace("-", "_"))
    }


def main(kind: Callable[..., Any] = Work) -> None:
    """Answers requests until there are no more."""
    answers, sys.stdout = sys.stdout, sys.stderr  # what a library prints is not an answer
    described, batches = sys.argv[1:]
    work = kind(json.loads(Path(described).read_text(encoding="utf-8")), batches)
    print(
        json.dumps({"ready": True, "versions": versions(), "device": str(work.device)}),
        file=answers,
        flush=True,
    )
    for line in sys.stdin:
        try:
            reply = work.run(json.loads(line)["run"])
        except Exception as error:  # noqa: BLE001 - whatever a mode lacks, the others go on
            words = str(error).strip().splitlines() or [""]
            reply = {"error": f"{type(error).__name__}: {words[0]}"[:300]}
        print(json.dumps(reply), file=answers, flush=True)


if __name__ == "__main__":
    main()
