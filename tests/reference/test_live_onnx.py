# SPDX-License-Identifier: Apache-2.0
"""The recipe of docs/howto/serve.md, run as it stands: a model exported by torch and computed by onnxruntime."""

import re

import numpy as np
import pytest
from builders import tiny_model
from hf_models import make_tokenizer, random_params

from bert_jax import load_predictor
from bert_jax.checkpoints.hf import save_hf
from bert_jax.model.heads.multilabel import MULTILABEL
from bert_jax.model.heads.sequence import SEQUENCES
from bert_jax.model.heads.tokens import TOKENS

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
for package in ("onnx", "onnxscript", "onnxruntime"):
    pytest.importorskip(package)
# torch.onnx warns of itself.
pytestmark = [pytest.mark.reference, pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

TEXTS = ["word1 word2 abc", "word3", "a b c d e f word4 word5"]


@pytest.mark.parametrize("activation", ["gelu_tanh", "gelu_exact"])
@pytest.mark.parametrize("head", [SEQUENCES, MULTILABEL, TOKENS], ids=lambda head: head.name)
def test_onnxruntime_computes_what_we_do(tmp_path, repository, monkeypatch, head, activation):
    config = tiny_model(activation=activation)
    params = random_params(config, 3, parts=head.parts)
    save_hf(tmp_path / "served", config, params, make_tokenizer(203), head.name, ("a", "b", "c"))
    page = (repository / "docs" / "howto" / "serve.md").read_text("utf-8")
    program = "\n".join(re.findall(r"^```py\n(.*?)^```$", page, re.MULTILINE | re.DOTALL))
    kind = head.architecture.removeprefix("Bert")
    program = program.replace("ForSequenceClassification", kind).replace('["a charming journey"]', repr(TEXTS))
    monkeypatch.chdir(tmp_path)
    names: dict = {}
    exec(program, names)

    with torch.no_grad():
        theirs = names["model"](**names["tokenizer"](TEXTS, padding=True, return_tensors="pt")).logits.numpy()
    np.testing.assert_allclose(names["logits"], theirs, atol=1e-4)
    if head is not TOKENS:  # where words are cut in another way; the logits of tokens were compared above
        for row, said in zip(names["logits"], load_predictor(tmp_path / "served")(TEXTS)):
            shares = 1 / (1 + np.exp(-row)) if head is MULTILABEL else np.exp(row) / np.exp(row).sum()
            np.testing.assert_allclose(list(said.probabilities.values()), shares, atol=1e-4)
