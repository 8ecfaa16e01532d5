# SPDX-License-Identifier: Apache-2.0
"""transformers and ours on random models of BERT's relatives, with every head that transformers has for them."""

import json

import jax
import numpy as np
import pytest
from described import write_described
from hf_models import make_tokenizer
from older_layouts import CONFIGS, write_older
from read_models import load_hf

from bert_jax import load_pretrained
from bert_jax.batch import Batch
from bert_jax.batches.make import make_batch
from bert_jax.checkpoints.families import FAMILIES, class_of
from bert_jax.checkpoints.hf import save_hf
from bert_jax.errors import InputError
from bert_jax.model.heads.embedding import Embeddings
from bert_jax.model.heads.table import HEADS
from bert_jax.model.objective import encode, forward

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
safetensors = pytest.importorskip("safetensors.torch")

pytestmark = [pytest.mark.reference, pytest.mark.slow]

transformers.utils.logging.disable_progress_bar()

ATOL = 1e-5
VOCAB_SIZE = 150
SHAPE = {"vocab_size": VOCAB_SIZE, "hidden_size": 24, "num_hidden_layers": 3, "num_attention_heads": 3}
TYPED = SHAPE | {"intermediate_size": 50, "max_position_embeddings": 40, "type_vocab_size": 1, "pad_token_id": 0}
MODERN = SHAPE | {"intermediate_size": 37, "max_position_embeddings": 40, "num_hidden_layers": 5, "local_attention": 8}
MODERN |= {"pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 3, "cls_token_id": 2, "sep_token_id": 3}
DEBERTA = SHAPE | {"intermediate_size": 50, "max_position_embeddings": 40, "pad_token_id": 0, "legacy": False}
DEBERTA |= {"relative_attention": True, "pos_att_type": ["p2c", "c2p"]}
DEBERTA_V3 = DEBERTA | {"position_buckets": 8, "max_relative_positions": 30, "share_att_key": True}
DEBERTA_V3 |= {"norm_rel_ebd": "layer_norm", "position_biased_input": False}
MPNET = SHAPE | {"intermediate_size": 50, "max_position_embeddings": 42, "layer_norm_eps": 1e-5}
EURO = SHAPE | {
    "intermediate_size": 50,
    "max_position_embeddings": 40,
    "pad_token_id": 0,
    "bos_token_id": 2,
    "eos_token_id": 3,
    "mask_token_id": 4,
    "rope_parameters": {"rope_type": "default", "rope_theta": 77.0},
}
LOCAL = {"sliding_window": 3, "prediction_head_size": 24, "rope_parameters": {
    kind: {"rope_type": "default", "rope_theta": theta}
    for kind, theta in (("full_attention", 77.0), ("sliding_attention", 9.0))
}}  # fmt: skip
CASES = {  # a name -> family, what is not the same in its configuration
    "roberta": ("roberta", TYPED | {"layer_norm_eps": 1e-5}),
    "xlm-roberta": ("xlm-roberta", TYPED),
    "camembert": ("camembert", TYPED | {"type_vocab_size": 2}),
    "distilbert": ("distilbert", {"vocab_size": VOCAB_SIZE, "dim": 24, "n_layers": 3, "n_heads": 3, "hidden_dim": 50,
                                  "max_position_embeddings": 40, "pad_token_id": 0, "seq_classif_dropout": 0.1}),
    "distilbert-relu": ("distilbert", {"vocab_size": VOCAB_SIZE, "dim": 24, "n_layers": 2, "n_heads": 2,
                                       "hidden_dim": 31, "max_position_embeddings": 40, "activation": "relu",
                                       "pad_token_id": 0, "seq_classif_dropout": 0.1}),
    "electra": ("electra", TYPED | {"embedding_size": 16, "type_vocab_size": 2}),
    "electra-wide": ("electra", TYPED | {"embedding_size": 24}),
    "albert": ("albert", TYPED | {"embedding_size": 16, "type_vocab_size": 2, "bos_token_id": 2, "eos_token_id": 3}),
    "albert-groups": ("albert", TYPED | {"embedding_size": 24, "num_hidden_layers": 4, "num_hidden_groups": 2}),
    "mpnet": ("mpnet", MPNET),
    "mpnet-far": ("mpnet", MPNET | {"max_position_embeddings": 302, "num_hidden_layers": 2}),
    "deberta": ("deberta-v2", DEBERTA_V3),
    "deberta-far": ("deberta-v2", DEBERTA_V3 | {"max_position_embeddings": 300, "num_hidden_layers": 2}),
    "deberta-own": ("deberta-v2", DEBERTA | {"position_buckets": 8, "max_relative_positions": 30,
                                             "type_vocab_size": 2}),
    "deberta-c2p": ("deberta-v2", DEBERTA | {"pos_att_type": "c2p", "max_relative_positions": 10,
                                             "share_att_key": True}),
    "deberta-p2c": ("deberta-v2", DEBERTA | {"pos_att_type": "p2c"}),
    "nomic": ("nomic_bert", TYPED | {"type_vocab_size": 2}),
    "nomic-theta": ("nomic_bert", TYPED | {"rope_parameters": {"rope_type": "default", "rope_theta": 77.0},
                                           "hidden_act": "gelu"}),
    "gte": ("gte", TYPED),
    "gte-types": ("gte", TYPED | {"type_vocab_size": 2}),
    "gte-no-types": ("gte", TYPED | {"type_vocab_size": 0, "layer_norm_eps": 1e-5}),
    "gte-linear": ("gte", TYPED | {"rope_parameters": {"rope_type": "linear", "factor": 3.0, "rope_theta": 90.0}}),
    "jina3": ("jina_embeddings_v3", TYPED | {"max_position_embeddings": 300}),
    "eurobert": ("eurobert", EURO),
    "eurobert-mean": ("eurobert", EURO | {"num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-3,
                                          "classifier_pooling": "mean"}),
    "eurobert-bos": ("eurobert", EURO | {"num_key_value_heads": 1, "classifier_pooling": "bos", "hidden_act": "gelu"}),
    "ultrabert": ("ultrabert", EURO | LOCAL | {"num_hidden_layers": 5}),
    "ultrabert-mean": ("ultrabert", EURO | LOCAL | {
        "num_attention_heads": 4, "num_key_value_heads": 2, "classifier_pooling": "mean", "prediction_head_size": 16,
        "num_hidden_layers": 4, "layer_types": ["full_attention", "sliding_attention"] * 2, "rms_norm_eps": 1e-3}),
    "modernbert": ("modernbert", MODERN),
    "modernbert-mean": ("modernbert", MODERN | {"classifier_pooling": "mean", "global_attn_every_n_layers": 2,
                                                "local_attention": 2}),
    "modernbert-biases": ("modernbert", MODERN | {"norm_bias": True, "attention_bias": True, "mlp_bias": True,
                                                  "classifier_bias": True}),
    "modernbert-silu": ("modernbert", MODERN | {"hidden_activation": "silu", "classifier_activation": "silu",
                                                "position_embedding_type": "sans_pos"}),
    "modernbert-relu": ("modernbert", MODERN | {"hidden_activation": "relu", "classifier_activation": "gelu"}),
    "modernbert-head": ("modernbert", MODERN | {"classifier_activation": "gelu_new"}),
}  # fmt: skip
# models of vectors are written as bare encoders or masked language models
TASKS = [name for name, head in HEADS.items() if not isinstance(head, Embeddings)]
PAIRS = [(name, head) for name, (family, _) in CASES.items() for head in TASKS if class_of(HEADS[head], family)]


def random_model(name, head, seed):
    """Returns a random model of transformers, biases and norms too."""
    family, changes = CASES[name]
    kind = getattr(transformers, class_of(HEADS[head], family))
    torch.manual_seed(seed)
    config = kind.config_class(**changes)
    if HEADS[head].has_labels:
        config.id2label = {0: "no", 1: "yes", 2: "perhaps"}
        config.label2id = {label: index for index, label in config.id2label.items()}
        config.problem_type = HEADS[head].problem_types[-1] if HEADS[head].problem_types else None
    model = kind(config).eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            is_norm = "norm" in parameter_name.lower() and parameter_name.endswith("weight")
            parameter.normal_(1.0 if is_norm else 0.0, 0.15)
    return model


def random_inputs(length, rng, typed, rows=4, pad=0):
    stops = [length, *rng.integers(3, length + 1, rows - 1)]
    ids = rng.integers(5, VOCAB_SIZE, (rows, length))
    mask = (np.arange(length) < np.array(stops)[:, None]).astype(np.int64)
    inputs = {"input_ids": np.where(mask, ids, pad), "attention_mask": mask}
    types = (np.arange(length) >= rng.integers(1, length, (rows, 1))).astype(np.int64) * mask
    return inputs | ({"token_type_ids": types} if typed else {})


def as_batch(inputs):
    rows, length = inputs["input_ids"].shape
    return Batch(
        token_ids=inputs["input_ids"].astype(np.int32),
        type_ids=inputs.get("token_type_ids", np.zeros((rows, length))).astype(np.int32),
        sequence_ids=inputs["attention_mask"].astype(np.int32),
        cls_positions=np.zeros((rows, 1), np.int32),
        sequence_weights=np.ones((rows, 1), np.float32),
        mlm_positions=np.broadcast_to(np.arange(length, dtype=np.int32), (rows, length)),
    )


def logits_of(found, head, real):
    """Returns our logits of the real tokens or of the sequences, as those of transformers' output are compared."""
    found = np.asarray(found)
    if found.ndim == 3 and found.shape[1] == real.shape[1]:
        return found[real]
    return found[:, 0]


def theirs_of(output, head, real):
    if "start_logits" in output:
        return torch.stack([output.start_logits, output.end_logits], -1)[real].numpy()
    logits = output["logits"].numpy()
    if head == "multiple_choice":
        return logits.reshape(-1, 1)
    if head == "replaced_tokens":
        return logits[real][:, None]
    return logits[real] if logits.ndim == 3 else logits


def assert_same(loaded, theirs, head, seed):
    config = loaded.config
    rng = np.random.default_rng(seed)
    inputs = random_inputs(config.max_positions, rng, config.type_vocab_size > 1, pad=loaded.tokenizer.pad_id)
    feed = {name: torch.from_numpy(value) for name, value in inputs.items()}
    feed = {name: value[None] for name, value in feed.items()} if head == "multiple_choice" else feed
    with torch.no_grad():
        expected = theirs(**feed, output_hidden_states=True)
    batch, real = as_batch(inputs), inputs["attention_mask"] > 0
    found = jax.jit(lambda params: encode(config, params, batch, layers=True))(loaded.params)
    assert len(expected.hidden_states) == len(found.layers)
    for ours, layer in zip(found.layers, expected.hidden_states, strict=True):
        layer = layer.numpy().reshape(ours.shape)
        np.testing.assert_allclose(np.asarray(ours)[real], layer[real], atol=ATOL, rtol=1e-5)
    if head == "encoder":
        last = expected.last_hidden_state.numpy()
        np.testing.assert_allclose(np.asarray(found.hidden)[real], last[real], atol=ATOL, rtol=1e-5)
        if "pooler_output" in expected:
            np.testing.assert_allclose(found.pooled[:, 0], expected.pooler_output.numpy(), atol=ATOL)
        return
    found = jax.jit(lambda params: forward(config, params, batch, HEADS[head]))(loaded.params)
    if head == "pretraining":
        order = found.next_sentence_logits[:, 0]
        np.testing.assert_allclose(order, expected.sop_logits.numpy(), atol=ATOL, rtol=1e-5)
        found, expected = found.mlm_logits, {"logits": expected.prediction_logits}
    logits = logits_of(found, head, real)
    np.testing.assert_allclose(logits[..., :VOCAB_SIZE], theirs_of(expected, head, real), atol=ATOL, rtol=1e-5)


@pytest.mark.parametrize(("name", "head"), PAIRS)
def test_a_relative_is_computed_and_written_again(tmp_path, name, head):
    """From transformers to ours and back: the same outputs, the same tensors, and nothing is missing or left over."""
    theirs = random_model(name, head, seed=len(name) + len(head))
    theirs.save_pretrained(tmp_path / "theirs")
    make_tokenizer(VOCAB_SIZE, pad_id=theirs.config.pad_token_id).save(tmp_path / "theirs")
    loaded = load_hf(tmp_path / "theirs")
    assert (loaded.task, loaded.notes) == (head, ())
    assert loaded.labels == (("no", "yes", "perhaps") if HEADS[head].has_labels else ())
    assert_same(loaded, theirs, head, seed=1)

    assert save_hf(tmp_path / "out", *loaded[:5]) == []
    kind = getattr(transformers, class_of(HEADS[head], loaded.config.family))
    again, info = kind.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(info[name] for name in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs")), info
    before, after = theirs.state_dict(), again.eval().state_dict()
    assert before.keys() == after.keys() and all(torch.equal(before[key], after[key]) for key in before)
    assert again.config.model_type == loaded.config.family
    assert_same(loaded, again, head, seed=2)
    third = load_hf(tmp_path / "out")
    assert third.config == loaded.config
    jax.tree.map(np.testing.assert_array_equal, third.params, loaded.params)


def test_debertas_older_masked_language_model_is_told_by_its_names(tmp_path):
    """Whatever `legacy` says; what the published files have besides is said; two masked language models are refused."""
    CASES["legacy"] = ("deberta-v2", DEBERTA_V3 | {"legacy": True})
    theirs = random_model("legacy", "masked_lm", seed=3)
    del CASES["legacy"]
    theirs.half().save_pretrained(tmp_path)
    make_tokenizer(VOCAB_SIZE).save(tmp_path)
    loaded = load_hf(tmp_path)
    assert (loaded.task, loaded.notes) == ("masked_lm", ())
    assert_same(loaded, theirs.float(), "masked_lm", seed=1)
    save_hf(tmp_path / "out", *loaded[:5])
    again = transformers.AutoModelForMaskedLM.from_pretrained(tmp_path / "out").eval()
    assert not again.config.legacy
    assert_same(loaded, again, "masked_lm", seed=2)

    tensors = safetensors.load_file(tmp_path / "model.safetensors")
    idle = {"mask_predictions.dense": torch.ones(2, 2), "deberta.embeddings.position_embeddings": torch.ones(40, 24)}
    idle = {f"{name}.weight": tensor for name, tensor in idle.items()}
    safetensors.save_file(tensors | idle, tmp_path / "model.safetensors")
    assert [("replaced tokens" in note, "positions" in note) for note in load_hf(tmp_path).notes] == [
        (True, False),
        (False, True),
    ]
    safetensors.save_file(
        tensors | {"lm_predictions.lm_head.bias": torch.ones(VOCAB_SIZE)}, tmp_path / "model.safetensors"
    )
    with pytest.raises(InputError, match=r"no place for: cls\.predictions"):
        load_hf(tmp_path)


@pytest.mark.parametrize(
    ("family", "kind"),
    [
        ("roberta", "roberta"),
        ("xlm-roberta", "xlmr"),
        ("mpnet", "mpnet"),
        ("eurobert", "llama"),
        ("modernbert", "modernbert"),
    ],
)
def test_texts_give_the_same_logits_with_a_tokenizer_of_its_own(tmp_path, family, kind):
    """From transformers to ours and back, pairs of texts too: ids, positions, types and logits."""
    directory = write_described(tmp_path / "theirs", kind)
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    names = {"bos_token_id": "cls", "eos_token_id": "sep", "cls_token_id": "cls", "sep_token_id": "sep"}
    ids = {name: getattr(tokenizer, f"{token}_token_id") for name, token in names.items()}
    shape = CASES[family][1] | ids | {"vocab_size": len(tokenizer), "pad_token_id": tokenizer.pad_token_id}
    shape["max_position_embeddings"] = 90
    theirs = getattr(transformers, class_of(HEADS["masked_lm"], family))(
        transformers.AutoConfig.for_model(family, **shape)
    )
    theirs.eval().save_pretrained(directory)
    bert = load_pretrained(directory)
    save_hf(tmp_path / "back", bert.config, bert.params, bert.tokenizer, bert.task, bert.labels)
    again = transformers.AutoModelForMaskedLM.from_pretrained(tmp_path / "back").eval()
    assert type(again) is type(theirs)
    for texts in (["The tower isn't 1.5", "naïve é 東京"], [("The wanter", "lows 2.1"), ("é", "The jumper")]):
        batch = make_batch(bert.tokenizer, texts, bert.config.max_positions)
        length = batch.token_ids.shape[1]
        places = np.broadcast_to(np.arange(length, dtype=np.int32), batch.token_ids.shape)
        found = forward(bert.config, bert.params, batch._replace(mlm_positions=places), HEADS["masked_lm"])
        pairs = list(zip(*texts)) if isinstance(texts[0], tuple) else [texts]
        for model, reader in (
            (theirs, tokenizer),
            (again, transformers.AutoTokenizer.from_pretrained(tmp_path / "back")),
        ):
            inputs = reader(*map(list, pairs), return_tensors="pt", padding=True)
            real = inputs["attention_mask"].numpy() > 0
            np.testing.assert_array_equal(batch.token_ids[:, : real.shape[1]][real], inputs["input_ids"].numpy()[real])
            with torch.no_grad():
                expected = model(**inputs).logits.numpy()[real]
            ours = np.asarray(found)[:, : real.shape[1], : len(tokenizer)][real]
            np.testing.assert_allclose(ours, expected, atol=ATOL, rtol=1e-5)


TODAY = {
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 20,
    "vocab_size": 131,
}


@pytest.mark.parametrize("family", ["nomic_bert", "gte", "jina_embeddings_v3"])
def test_an_older_layout_is_read_as_transformers_reads_it(tmp_path, family):
    """Which knows the older names of tensors, with today's settings."""
    write_older(tmp_path / "older", family)
    loaded = load_hf(tmp_path / "older")
    settings = TODAY | {"model_type": family, "layer_norm_eps": 1e-6, "rope_theta": 90.0, "pad_token_id": 0}
    settings |= {"type_vocab_size": CONFIGS[family]["type_vocab_size"], "max_position_embeddings": 64}
    (tmp_path / "older" / "config.json").write_text(json.dumps(settings))
    theirs = transformers.AutoModel.from_pretrained(tmp_path / "older").eval()
    inputs = random_inputs(64, np.random.default_rng(0), settings["type_vocab_size"] > 1)
    inputs["input_ids"] %= 131
    with torch.no_grad():
        expected = theirs(**{name: torch.from_numpy(value) for name, value in inputs.items()}).last_hidden_state
    found = jax.jit(lambda params: encode(loaded.config, params, as_batch(inputs)).hidden)(loaded.params)
    real = inputs["attention_mask"] > 0
    np.testing.assert_allclose(np.asarray(found)[real], expected.numpy()[real], atol=ATOL, rtol=1e-5)


def test_every_family_is_here():
    has_none = {"bert", "jina_bert"}  # the latter has no class in transformers
    assert {family for family, _ in CASES.values()} == set(FAMILIES) - has_none
