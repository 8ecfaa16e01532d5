# SPDX-License-Identifier: Apache-2.0
"""BERT's relatives in transformers' format without transformers: the way out and back, and what is refused.

`tests/reference/test_live_family.py` compares their outputs with those of transformers.
"""

import dataclasses
import json
import math

import jax
import numpy as np
import pytest
from builders import assert_same, change_json
from hf_models import make_tokenizer, random_params
from read_models import load_hf
from safetensors.numpy import load_file, save_file

from bert_jax.batches.make import make_batch
from bert_jax.checkpoints.families import FAMILIES, class_of, name_of, table_of
from bert_jax.checkpoints.hf import save_hf
from bert_jax.checkpoints.names import flatten
from bert_jax.checkpoints.pretrained import Pretrained, save_pretrained
from bert_jax.checkpoints.warm_start import complete
from bert_jax.errors import InputError
from bert_jax.inference.features import encode_texts
from bert_jax.inference.pretrained import load_pretrained
from bert_jax.model.heads.pretraining import MASKED_LM, PRETRAINING
from bert_jax.model.heads.replaced import REPLACED
from bert_jax.model.heads.table import HEADS
from bert_jax.model.heads.tokens import TOKENS
from bert_jax.model.objective import TaskObjective, encode, parts_of
from bert_jax.model.shapes import abstract_params
from bert_jax.settings.model import ModelConfig, model_size
from bert_jax.settings.relatives import BLOCKS
from bert_jax.text.tokenizer import Tokenizer

SIZES = {"roberta": "roberta-base", "xlm-roberta": "xlm-roberta-base", "camembert": "camembert-base",
         "distilbert": "distilbert", "electra": "electra-small", "albert": "albert-base", "mpnet": "mpnet-base",
         "deberta-v2": "deberta-v3-base", "jina_bert": "jina-bert-base",
         "nomic_bert": "nomic-bert", "gte": "gte", "jina_embeddings_v3": "jina-embeddings-v3",
         "eurobert": "eurobert-210m", "ultrabert": "ultrabert-mini", "modernbert": "modernbert-mini"}  # fmt: skip

PADS = {"mpnet": 1}  # 0 in the others


def small(family: str, **changes) -> ModelConfig:
    """Returns a small model of a family, for a vocabulary whose padding has the id of `PADS`."""
    shape = {"vocab_size": 131, "hidden_size": 24, "num_heads": 3, "num_layers": 3, "intermediate_size": 20}
    shape |= {"max_positions": 30}
    if model_size(SIZES[family]).position_offset:
        shape["position_offset"] = PADS.get(family, 0) + 1
    shape |= {"embedding_size": 16} if family in ("electra", "albert") else {}
    return dataclasses.replace(model_size(SIZES[family]), **shape | changes)


@pytest.fixture
def out(tmp_path):
    return tmp_path / "out"


def tokenizer_of(family: str) -> Tokenizer:
    return make_tokenizer(131, pad_id=PADS.get(family, 0))


def bert_of(family: str, head: str, **changes) -> tuple:
    config = small(family, **changes)
    params = random_params(config, 3 if HEADS[head].has_labels else 1, parts=HEADS[head].parts_in(config))
    return config, params, tokenizer_of(family), head, ("a", "b", "c") if HEADS[head].has_labels else ()


# Vectors of texts are written as a bare encoder.
PAIRS = [
    (family, head)
    for family in SIZES
    for head in HEADS
    if class_of(HEADS[head], family) and head not in ("sentence_embedding", "token_embeddings")
]


def test_every_family_has_a_block_and_a_table_and_its_classes():
    assert set(FAMILIES) == set(BLOCKS) == {"bert", *SIZES}
    assert class_of(MASKED_LM, "xlm-roberta") == "XLMRobertaForMaskedLM" and class_of(PRETRAINING, "modernbert") == ""
    assert class_of(REPLACED, "electra") == "ElectraForPreTraining" and class_of(REPLACED, "bert") == ""
    assert class_of(TOKENS, "bert") == "BertForTokenClassification"
    for family in SIZES:
        names = {row.ours for row in table_of(family)}
        assert set(flatten(abstract_params(small(family)))) <= names
        assert len(names) == len(table_of(family))


LAYERS = ["full_attention", "sliding_attention", "full_attention", "sliding_attention", "full_attention"]


@pytest.mark.parametrize(
    ("family", "theirs", "ours"),
    [
        ("bert", {}, {}),
        ("roberta", {}, {"position_offset": 2, "max_positions": 510}),
        ("mpnet", {}, {"max_positions": 510, "layer_norm_epsilon": 1e-12}),
        ("jina_bert", {}, {"feed_forward": "plain", "unbiased": "none"}),
        ("jina_bert", {"alibi_starting_size": 9}, {"feed_forward": "gated", "unbiased": "wide"}),
        ("nomic_bert", {}, {"rotary_theta": 1000.0}),
        ("gte", {"rope_parameters": {"partial_rotary_factor": 2}}, "partial_rotary_factor is 2; it can be 1"),
        ("gte", {"rope_scaling": {"type": "ntk", "factor": 2.0}},
         {"rotary_theta": 320_000.0, "rotary_stretch": 2 ** (24 / 768)}),
        ("gte", {"rope_scaling": {"type": "dynamic"}, "max_position_embeddings": 9000},
         {"rotary_theta": 160_000.0, "max_positions": 8192}),
        ("jina_embeddings_v3", {"rope_parameters": {"rope_type": "linear", "factor": 4.0}},
         {"rotary_theta": 20_000.0, "rotary_stretch": 4.0}),
        ("eurobert", {"num_key_value_heads": None}, {"rotary_theta": 10_000.0, "num_key_heads": 0, "pooling": "late"}),
        ("ultrabert", {}, {"window": 128, "global_every": 3, "global_first": 2, "pooling": "cls"}),
        ("ultrabert", {"num_hidden_layers": 2}, {"global_every": 3, "global_first": 2}),
        ("ultrabert", {"num_hidden_layers": 4, "attention_windows": [0, 7, 7, 0], "rope_theta": [2.0, 4.0, 4.0, 2.0]},
         {"window": 7, "global_every": 3, "global_first": 0, "rotary_theta": 2.0, "local_rotary_theta": 4.0}),
        ("ultrabert", {"num_hidden_layers": 4, "attention_windows": [7, 7, 7, 7]},
         {"global_every": 5, "global_first": 4, "rotary_theta": 2_560_000.0, "local_rotary_theta": 10_000.0}),
        ("ultrabert", {"num_hidden_layers": 5, "layer_types": LAYERS[:4] + LAYERS[:1] * 2}, "every n-th layer"),
        ("ultrabert", {"sliding_window": 0}, "sliding_window is 0; it can be 1 or more"),
        ("electra", {}, {"embedding_size": 128}),
        ("electra", {"embedding_size": 256}, {"embedding_size": 0}),
        ("modernbert", {}, {"window": 64, "global_every": 3}),
        ("modernbert", {"num_hidden_layers": 5, "layer_types": LAYERS, "local_attention": 7},
         {"window": 3, "global_every": 2}),
        ("modernbert", {"num_hidden_layers": 2, "layer_types": ["full_attention"] * 2}, {"global_every": 1}),
        ("modernbert", {"layer_types": LAYERS[:2] * 11}, {"global_every": 2}),
        ("modernbert", {"num_hidden_layers": 6, "layer_types": LAYERS}, "every n-th layer"),
        ("modernbert", {"local_attention": 2}, {"window": 1}),
        ("modernbert", {"local_attention": 1}, "it can be 2 or more"),
        ("modernbert", {"local_attention": 1, "global_attn_every_n_layers": 1}, {"window": 0}),
        ("modernbert", {"hidden_activation": "silu", "position_embedding_type": "sans_pos"},
         {"head_activation": "gelu_exact"}),
        ("modernbert", {"rope_scaling": {"factor": 2}}, "it can be default"),
        ("modernbert", {"mlp_bias": True, "attention_bias": True}, "classifier_bias is not mlp_bias"),
    ],
)  # fmt: skip
def test_settings_of_a_family_are_read(family, theirs, ours):
    if isinstance(ours, str):
        with pytest.raises(InputError, match=ours):
            FAMILIES[family].read(theirs)
    else:
        found = FAMILIES[family].read(theirs)
        assert found == (found | ours if family in ("modernbert", "ultrabert") else ours)


def test_settings_of_a_family_are_written():
    written = {family: FAMILIES[family].write(small(family)) for family in SIZES}
    rates = dict.fromkeys(("seq_classif_dropout", "qa_dropout"), small("distilbert").hidden_dropout_rate)
    assert (written["roberta"], written["electra"]) == ({"max_position_embeddings": 31}, {"embedding_size": 16})
    assert written["distilbert"] == rates and FAMILIES["bert"].write(model_size("base")) == {}
    modern = FAMILIES["modernbert"]
    about = modern.write(small("modernbert", num_layers=5, window=3, global_every=2, rotary_theta=7.0))
    assert about["layer_types"] == LAYERS and about["rope_parameters"]["full_attention"]["rope_theta"] == 7.0
    assert (about["local_attention"], about["global_attn_every_n_layers"]) == (6, 2)
    assert modern.write(small("modernbert", window=0))["layer_types"] == ["full_attention"] * 3
    assert {name_of(family) for family in ("bert", "unknown", "roberta")} == {"BERT", "Roberta"}


def test_a_row_of_the_table_names_its_tensors_in_every_layer():
    rows = {row.ours: row for row in table_of("modernbert")}
    norm, key = rows["encoder/layers/mlp/norm/scale"], rows["encoder/layers/attention/key/kernel"]
    assert norm.names("hf", 2) == ["model.layers.1.attn_norm.weight", "model.final_norm.weight"]
    assert key.names("hf", 2) == ["model.layers.0.attn.Wqkv.weight", "model.layers.1.attn.Wqkv.weight"]
    assert key.piece == (1, 3) and norm.piece == (0, 1)
    assert key.is_flipped("hf") and not key.is_flipped("tf1") and not norm.is_flipped("hf")
    assert rows["classifier/kernel"].is_flipped("tf1") and rows["classifier/kernel"].names("hf", 0) == [
        "classifier.weight"
    ]
    assert rows["encoder/pooler/kernel"].names("tf1", 0) == ["bert/pooler/dense/kernel"]
    older = FAMILIES["ultrabert"].names_of_today
    assert [older("ultrabert.norm.weight"), older("cls.weight")] == [["model.norm.weight"], ["head.decoder.weight"]]
    roberta = FAMILIES["roberta"]
    assert roberta.names_in("RobertaForMaskedLM") == {} != roberta.names_in("RobertaForSequenceClassification")
    both = ["classifier.dense.weight", "classifier.out_proj.weight"]
    assert roberta.names_in("", both) == roberta.names_in("RobertaForSequenceClassification")
    assert roberta.names_in("", both[:1]) == {} == FAMILIES["modernbert"].names_in("", ["classifier.weight"])


@pytest.mark.parametrize(("family", "head"), PAIRS)
def test_export_then_import_is_the_identity(tmp_path, family, head):
    config, params, _, _, labels = model = bert_of(family, head)
    assert sorted(parts_of(params)) == sorted(HEADS[head].parts_in(config))
    own = family == "jina_bert"  # code of the model's own: a note on the way out, and one on the way back
    assert [note[:30] for note in save_hf(tmp_path / "out", *model)] == ["transformers has no such model"] * own
    about = json.loads((tmp_path / "out" / "config.json").read_text())
    assert about["model_type"] == ("bert" if own else family)
    assert about["architectures"] == [class_of(HEADS[head], family)] and ("auto_map" in about) == own
    loaded = load_hf(tmp_path / "out")
    assert (loaded.config, loaded.task, loaded.labels, len(loaded.notes)) == (config, head, labels, int(own))
    assert_same(loaded.params, params)


@pytest.mark.parametrize(
    ("family", "changes"),
    [("jina_bert", {"feed_forward": "plain", "unbiased": "none"})]
    + [("modernbert", changes) for changes in ({"num_layers": 1}, {"global_every": 2}, {"pooling": "mean"},
       {"norm_bias": True, "dense_bias": True}, {"rotary_theta": 5e5}, {"head_activation": "silu"})],
)  # fmt: skip
def test_options_of_a_family_come_back(out, family, changes):
    model = bert_of(family, "sequence_classification", **changes)
    save_hf(out, *model)
    loaded = load_hf(out)
    assert loaded.config == model[0]
    assert_same(loaded.params, model[1])


@pytest.mark.parametrize("family", list(SIZES))
@pytest.mark.parametrize("head", ["encoder", "masked_lm"])
def test_names_that_a_trainer_put_before_are_read(out, family, head):
    """As PyTorch Lightning, DataParallel and torch.compile do; with the family's own prefix or without."""
    model = bert_of(family, head)
    save_hf(out, *model)
    weights = out / "model.safetensors"
    arrays = load_file(weights)
    own = f"{FAMILIES[family].base}."
    for prefix in ("model.module.", *([own, f"model.{own}"] if head == "encoder" else [])):
        save_file({prefix + name: array for name, array in arrays.items()}, weights)
        assert_same(load_hf(out).params, model[1])


def test_a_run_of_pretraining_is_written_as_its_masked_language_model(tmp_path):
    config = small("modernbert")
    params = random_params(config, parts=PRETRAINING.parts)
    notes = save_hf(tmp_path / "out", config, params, make_tokenizer(131), "pretraining", ())
    assert notes == [f"{part} is left out: ModernBertForMaskedLM has none" for part in ("pooler", "next_sentence")]
    assert load_hf(tmp_path / "out").task == "masked_lm"


@pytest.mark.parametrize("architectures", [["RobertaForSequenceClassification"], None])
def test_a_pooler_beside_a_classifier_of_roberta_is_idle(out, architectures):
    """Older versions of transformers kept the one that pre-training left."""
    model = bert_of("roberta", "sequence_classification")
    save_hf(out, *model)
    weights = out / "model.safetensors"
    pooler = {"weight": np.ones((24, 24), np.float32), "bias": np.ones(24, np.float32)}
    arrays = load_file(weights) | {f"roberta.pooler.dense.{name}": array for name, array in pooler.items()}
    save_file(arrays, weights, metadata={"format": "pt"})
    change_json(out / "config.json", architectures=architectures)
    assert_same(load_hf(out).params, model[1])


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("roberta", {"model_type": "deberta"}, "disentangled attention"),
        ("roberta", {"model_type": "gpt2"}, 'model_type is "gpt2"'),
        ("roberta", {"position_embedding_type": "relative_key"}, 'position_embedding_type is "relative_key"'),
        ("roberta", {"hidden_act": "gelu_new"}, r'hidden_act is "gelu_new", which this Roberta cannot compute'),
        ("roberta", {"pad_token_id": None}, "another kind of file"),
        ("roberta", {"is_decoder": True}, "is_decoder is true"),
        ("albert", {"num_hidden_groups": 2}, "num_layers 3 is not divisible by model.layer_groups 2"),
        ("electra", {"summary_type": "mean"}, 'summary_type is "mean"'),
        ("deberta-v2", {"pos_att_type": "p2p|c2p"}, "it can be c2p, p2c or both"),
        ("deberta-v2", {"embedding_size": 16}, "embedding_size is 16; it can be 24"),
        ("deberta-v2", {"position_buckets": 7}, "model.distance_buckets 7 is odd"),
        ("deberta-v2", {"max_relative_positions": 60, "position_buckets": 200}, "use 102 or more"),
        ("mpnet", {"pad_token_id": 0}, "pad_token_id is 0, which this MPNet cannot compute; it can be 1"),
        ("eurobert", {"head_dim": 16}, "head_dim is 16; it can be 8"),
        ("eurobert", {"num_key_value_heads": 2}, "num_heads 3 is not divisible by model.num_key_heads 2"),
        ("eurobert", {"rope_parameters": {"rope_type": "llama3"}}, 'rope_type "llama3"'),
        ("modernbert", {"decoder_bias": False}, "decoder_bias is false"),
        ("modernbert", {"classifier_activation": "mish"}, "classifier_activation is"),
    ],
)
def test_what_is_not_computed_is_refused_by_name(out, family, changes, message):
    save_hf(out, *bert_of(family, "masked_lm"))
    change_json(out / "config.json", **changes)
    with pytest.raises(InputError, match=message) as error:
        load_hf(out)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("roberta", {"positions": "none", "position_offset": 0}, "model.positions none has no counterpart"),
        ("roberta", {"position_offset": 2}, "position_offset 2 is not 1"),
        ("roberta", {"type_vocab_size": 0}, "model.type_vocab_size 0"),
        ("roberta", {"rotary_stretch": 2.0}, "model.rotary_stretch 2.0 has no counterpart"),
        ("roberta", {"head_activation": "silu"}, "model.head_activation silu has no counterpart"),
        ("distilbert", {"type_vocab_size": 2}, "model.type_vocab_size 2"),
        ("mpnet", {"score_bias": "none"}, "model.score_bias none has no counterpart"),
        ("jina_bert", {"unbiased": "none"}, "model.unbiased none has no counterpart in transformers' JinaBert"),
        ("jina_bert", {"feed_forward": "plain"}, "model.unbiased wide has no counterpart"),
        ("modernbert", {"activation": "silu"}, "model.activation silu has no counterpart .*; it has gelu_exact"),
    ],
)
def test_what_transformers_does_not_compute_is_not_written(out, family, changes, message):
    model = bert_of(family, "masked_lm", **changes)
    with pytest.raises(InputError, match=message):
        save_hf(out, *model)
    assert not out.exists()


@pytest.mark.parametrize("family", ["roberta", "electra", "mpnet", "jina_bert", "ultrabert", "modernbert"])
def test_a_model_of_ours_is_saved_and_loaded_and_encodes(tmp_path, family):
    bert = Pretrained(*bert_of(family, "token_classification", num_layers=2, unroll=1))
    save_pretrained(bert, tmp_path / "model")
    loaded = load_pretrained(tmp_path / "model")
    assert loaded.config == bert.config
    assert_same(loaded.params, bert.params)
    pairs = [("abc", "word3"), ("word4", "abc")]  # with types or without
    apart = encode_texts(loaded, pairs).hidden  # of parameters that are prepared, each layer's apart
    batch = make_batch(bert.tokenizer, pairs, bert.config.max_positions)
    stacked = jax.jit(lambda params: encode(bert.config, params, batch).hidden)(bert.params)
    np.testing.assert_allclose(stacked[:, : apart.shape[1]], apart, atol=2e-5)


def test_a_classifier_of_modernbert_starts_from_the_block_of_its_masked_language_model(out):
    save_hf(out, *bert_of("modernbert", "masked_lm"))
    start = load_pretrained(out)
    whole = complete(start, TaskObjective(start.config, HEADS["sequence_classification"], 3), seed=0)
    assert whole.notes == ("it has no classifier, which starts at random", "its mlm is not used")
    pooler, mlm = whole.params["encoder"]["pooler"], start.params["mlm"]
    assert_same(pooler["kernel"], mlm["transform"]["kernel"])
    assert_same(pooler["norm"]["scale"], mlm["norm"]["scale"])


def test_a_table_that_eurobert_shares_is_copied(out):
    save_hf(out, *bert_of("eurobert", "masked_lm"))
    weights = out / "model.safetensors"
    arrays = load_file(weights)
    del arrays["lm_head.weight"]
    save_file(arrays, weights)
    assert "has no mlm" in str(load_hf(out).notes)
    change_json(out / "config.json", tie_word_embeddings=True)
    loaded = load_hf(out)
    assert loaded.task == "masked_lm" and "shares the table of words" in str(loaded.notes)
    table = loaded.params["encoder"]["embeddings"]["word"]["embedding"]
    assert_same(loaded.params["mlm"]["words"]["embedding"], table)


def test_sizes_of_albert_have_its_numbers_of_parameters():
    """Source: Lan et al. 2020, table 1."""
    for size, millions in (("base", 12), ("large", 18), ("xlarge", 60), ("xxlarge", 235)):
        params = abstract_params(model_size(f"albert-{size}"))["encoder"]
        found = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(params)) / 1e6
        assert abs(found - millions) < 0.06 * millions
