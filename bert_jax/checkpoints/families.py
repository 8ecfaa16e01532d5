# SPDX-License-Identifier: Apache-2.0
"""BERT and its relatives in transformers' files: one table of names for each family, and its settings.

Source: google-research/bert modeling.py, run_pretraining.py, run_classifier.py, run_squad.py; the configuration and
modeling files of transformers 5.23. A difference in names alone is a row; a difference in
computation is an option of `ModelConfig`, or refused.
"""

# ruff: noqa: RUF012 - the tables of a family are read and never changed

import functools
import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from bert_jax.errors import InputError, shown
from bert_jax.model.heads.base import Head
from bert_jax.settings.model import ModelConfig, model_size
from bert_jax.storage.files import JsonObject


class Parameter(NamedTuple):
    """One parameter. `{i}` stands for the number of the layer, `{next}` for one more."""

    ours: str
    # after "|" the name in the last layer; "#1/3" at the end is the second third of the rows of a tensor
    hf: str
    tf1: str
    kind: str

    def name(self, form: str, layer: int, is_last: bool = False) -> str:
        """Returns its name in a format, in one of the layers if it is in any."""
        pattern, _, last = (self.hf if form == "hf" else self.tf1).partition("#")[0].partition("|")
        return last if last and is_last else pattern.format(i=layer, next=layer + 1)

    def names(self, form: str, layers: int) -> list[str]:
        """Returns its names in a format, one for each of the layers; 0 is a parameter outside of layers."""
        return [self.name(form, layer, layer == layers - 1) for layer in range(max(1, layers))]

    @property
    def piece(self) -> tuple[int, int]:
        """The number of this part of a tensor, and how many there are."""
        number, _, count = (self.hf.partition("#")[2] or "0/1").partition("/")
        return int(number), int(count)

    def is_flipped(self, form: str) -> bool:
        """Returns whether the matrix is [out, in] there; ours are [in, out]."""
        return self.kind == "head" or (self.kind == "kernel" and form == "hf")


# The leaves of a module: our names, Hugging Face's and Google's. Kinds: "same"; "vocab", whose rows end in
# padding here; "kernel", a matrix that PyTorch keeps [out, in]; "head", one that Google keeps [out, in] as well.
_LEAVES: dict[str, tuple[tuple[str, str, str, str], ...]] = {
    "words": (("/embedding", ".weight", "", "vocab"),),
    "table": (("/embedding", ".weight", "", "same"),),
    "dense": (("/kernel", ".weight", "/kernel", "kernel"), ("/bias", ".bias", "/bias", "same")),
    "norm": (("/scale", ".weight", "/gamma", "same"), ("/bias", ".bias", "/beta", "same")),
    "head": (
        ("/kernel", ".weight", "output_weights", "head"),
        ("/bias", ".bias", "output_bias", "same"),
    ),
    "bias": (("", "", "", "vocab"),),
}

# Our name, Hugging Face's, and Google's unless it is Hugging Face's with slashes in place of dots.
_MODULES: tuple[tuple[str, ...], ...] = (
    ("words", "encoder/embeddings/word", "bert.embeddings.word_embeddings"),
    ("table", "encoder/embeddings/position", "bert.embeddings.position_embeddings"),
    ("table", "encoder/embeddings/type", "bert.embeddings.token_type_embeddings"),
    ("norm", "encoder/embeddings/norm", "bert.embeddings.LayerNorm"),
    ("dense", "encoder/layers/attention/query", "bert.encoder.layer.{i}.attention.self.query"),
    ("dense", "encoder/layers/attention/key", "bert.encoder.layer.{i}.attention.self.key"),
    ("dense", "encoder/layers/attention/value", "bert.encoder.layer.{i}.attention.self.value"),
    ("dense", "encoder/layers/attention/output", "bert.encoder.layer.{i}.attention.output.dense"),
    ("norm", "encoder/layers/attention/norm", "bert.encoder.layer.{i}.attention.output.LayerNorm"),
    ("dense", "encoder/layers/mlp/intermediate", "bert.encoder.layer.{i}.intermediate.dense"),
    ("dense", "encoder/layers/mlp/output", "bert.encoder.layer.{i}.output.dense"),
    ("norm", "encoder/layers/mlp/norm", "bert.encoder.layer.{i}.output.LayerNorm"),
    ("dense", "encoder/pooler", "bert.pooler.dense"),
    ("dense", "mlm/transform", "cls.predictions.transform.dense"),
    ("norm", "mlm/norm", "cls.predictions.transform.LayerNorm"),
    ("head", "next_sentence", "cls.seq_relationship", "cls/seq_relationship/"),
    ("head", "classifier", "classifier", ""),
    ("head", "span", "qa_outputs", "cls/squad/"),
    ("bias", "mlm/output_bias", "cls.predictions.bias", "cls/predictions/output_bias"),
)
# Parameters that BERT lacks; in families that lack them too, no parameter has such a name.
_MORE: tuple[tuple[str, ...], ...] = (
    ("dense", "encoder/embeddings/project", "bert.embeddings_project"),
    ("table", "encoder/score_bias", "bert.encoder.relative_attention_bias"),
    ("table", "encoder/distances", "bert.encoder.rel_embeddings"),
    ("norm", "encoder/distances/norm", "bert.encoder.LayerNorm"),
    (
        "dense",
        "encoder/layers/attention/distance_key",
        "bert.encoder.layer.{i}.attention.self.pos_key_proj",
    ),
    (
        "dense",
        "encoder/layers/attention/distance_query",
        "bert.encoder.layer.{i}.attention.self.pos_query_proj",
    ),
    ("dense", "encoder/layers/mlp/gate", "bert.encoder.layer.{i}.gate.dense"),
    ("norm", "encoder/pooler/norm", "bert.pooler.norm"),
    ("dense", "mlm/second", "head.linear2"),
    ("words", "mlm/words", "lm_head"),
    ("dense", "discriminator/transform", "discriminator_predictions.dense"),
    ("dense", "discriminator/output", "discriminator_predictions.dense_prediction"),
)

# Our settings and transformers', where both mean the same and have the same default.
SETTINGS = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "intermediate_size": "intermediate_size",
    "max_positions": "max_position_embeddings",
    "type_vocab_size": "type_vocab_size",
    "hidden_dropout_rate": "hidden_dropout_prob",
    "attention_dropout_rate": "attention_probs_dropout_prob",
    "initializer_stddev": "initializer_range",
    "layer_norm_epsilon": "layer_norm_eps",
}


def _without(table: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in table.items() if name not in names}


_DISTIL_SETTINGS = _without(SETTINGS, "type_vocab_size", "layer_norm_epsilon") | {
    "hidden_size": "dim",
    "num_layers": "n_layers",
    "num_heads": "n_heads",
    "intermediate_size": "hidden_dim",
    "hidden_dropout_rate": "dropout",
    "attention_dropout_rate": "attention_dropout",
}
_MODERN_SETTINGS = _without(SETTINGS, "type_vocab_size") | {
    "layer_norm_epsilon": "norm_eps",
    "hidden_dropout_rate": "mlp_dropout",
    "attention_dropout_rate": "attention_dropout",
    "norm_bias": "norm_bias",
    "dense_bias": "mlp_bias",
    "pooling": "classifier_pooling",
}

# Hugging Face's "gelu" is erf, where Google's is tanh.
_EXACT = {"gelu": "gelu_exact", "gelu_python": "gelu_exact"}
_OTHERS = {"silu": "silu", "swish": "silu", "relu": "relu"}
_TANH = {"gelu_new": "gelu_tanh", "gelu_fast": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh"}
NAMES_OF_ACTIVATIONS = {
    "gelu_exact": "gelu",
    "gelu_tanh": "gelu_new",
    "relu": "relu",
    "silu": "silu",
}

# The options of `ModelConfig` that a config.json does not mention, with the values of BERT.
_FIXED: dict[str, Any] = {
    name: getattr(ModelConfig, name)
    for name in (
        "pooling",
        "positions",
        "position_offset",
        "score_bias",
        "rotary_stretch",
        "window",
        "global_first",
        "num_key_heads",
        "norm",
        "norm_kind",
        "norm_bias",
        "dense_bias",
        "unbiased",
        "feed_forward",
        "layer_groups",
        "prediction_size",
        "embedding_size",
        "head_activation",
    )
}


_NOTHING: dict[str, Any] = {}
_ENDS = {"bos_token_id": "cls_id", "eos_token_id": "sep_id"}
_ABSOLUTE = (("position_embedding_type", (None, "absolute")),)


class Family:
    """A family as transformers has it: BERT, and what others have in place of what it has."""

    prefix = "Bert"  # of its classes
    usual = "base"  # the model size with the family's defaults
    base = "bert"  # prefix of the encoder's tensors, in a model with a head
    settings: dict[str, str] = SETTINGS
    fixed: dict[str, Any] = _FIXED  # our options that no setting of theirs changes
    # our module -> theirs, where it is not BERT's name with another base
    modules: dict[str, str] = _NOTHING
    # End of a class -> {name of a module there: its name in the table}.
    renamed: dict[str, dict[str, str]] = _NOTHING
    # copies of others
    tied: tuple[str, str] = ("cls.predictions.decoder.weight", "cls.predictions.decoder.bias")
    # their settings with the id of a token -> the tokenizer's attribute
    token_ids: dict[str, str] = _NOTHING
    activation = "hidden_act"  # the name of the setting
    usual_activation = "gelu"
    activations: dict[str, str] = _EXACT  # theirs -> ours
    # options, and the values that can be computed
    refused: tuple[tuple[str, tuple[Any, ...]], ...] = ()
    # ends of BERT's classes that it has not, and those that it has and most families have not
    lacks: tuple[str, ...] = ()
    has: tuple[str, ...] = ()
    can_lack_types = False
    # The layout that remote code had before transformers had the family: its settings, the prefix of its classes, and
    # patterns of its tensors' names; "|" parts the names of the parts of a tensor.
    older_settings: dict[str, str] = _NOTHING
    older_prefix = ""
    older: tuple[tuple[str, str], ...] = ()
    model_type = ""  # in config.json, if it is not the family's name
    # our module -> theirs, where a gated feed-forward block has names of its own
    gated: dict[str, str] = _NOTHING
    # parts of names of tensors that cannot be computed, and what they are
    foreign: dict[str, str] = {
        "lora_": "a part of an adapter (LoRA) inside the model; load one into which it is merged"
    }

    # beginnings of names of tensors that no class of theirs reads, and what they are
    unread: dict[str, str] = _NOTHING

    def fixed_for(self, config: ModelConfig) -> dict[str, Any]:
        """Returns the options that no setting of theirs changes, for a model of the family."""
        return self.fixed

    def read(self, settings: JsonObject) -> dict[str, Any]:
        """Returns our settings that follow from theirs, beyond `settings`."""
        return {}

    def write(self, config: ModelConfig) -> JsonObject:
        """Returns their settings that follow from ours, beyond `settings`."""
        return {}

    def notes(self, settings: JsonObject) -> list[str]:
        """Returns lines that the user should see."""
        return []

    def unread_by(self, config: ModelConfig) -> dict[str, str]:
        """Returns `unread` for a model of the family."""
        return self.unread

    def names_of_today(self, name: str) -> list[str]:
        """Returns today's names of a tensor, several if it holds several."""
        names = [name]
        for pattern, new in self.older:
            if re.search(pattern, name):
                names = [re.sub(pattern, each, one) for one in names for each in new.split("|")]
        return names

    def names_in(self, kind: str, names: Sequence[str] = ()) -> dict[str, str]:
        """Returns the entry of `renamed` for a class; for an unknown class, that whose own modules are all there."""
        if kind:
            return self.renamed.get(kind.removeprefix(self.prefix), _NOTHING)
        modules = {name.rpartition(".")[0] for name in names}
        matching = (
            entry
            for entry in self.renamed.values()
            if entry.keys() <= modules and "classifier" not in entry
        )
        return next(matching, _NOTHING)


class Bert(Family):
    """BERT itself, with Google's tanh and the erf of PyTorch."""

    activations = _EXACT | _TANH
    refused = _ABSOLUTE


class Roberta(Family):
    """Liu et al. 2019: no types, positions after padding's id."""

    prefix = "Roberta"
    base = "roberta"
    fixed = _without(_FIXED, "position_offset")
    modules = {
        "mlm/transform": "lm_head.dense",
        "mlm/norm": "lm_head.layer_norm",
        "mlm/output_bias": "lm_head.bias",
    }
    renamed = {
        "ForSequenceClassification": {
            "classifier.dense": "roberta.pooler.dense",
            "classifier.out_proj": "classifier",
        }
    }
    tied = ("lm_head.decoder.weight", "lm_head.decoder.bias")
    token_ids = _ENDS
    refused = _ABSOLUTE

    def read(self, settings: JsonObject) -> dict[str, Any]:
        # Positions count from the one after padding's id, and the rows before it belong to none.
        pad = settings.get("pad_token_id", 1)
        rows = settings.get("max_position_embeddings", 512)
        return {"position_offset": pad + 1, "max_positions": rows - pad - 1}

    def write(self, config: ModelConfig) -> JsonObject:
        return {"max_position_embeddings": config.max_positions + config.position_offset}


class XlmRoberta(Roberta):
    """Conneau et al. 2019."""

    prefix = "XLMRoberta"


class Camembert(Roberta):
    """Martin et al. 2019."""

    prefix = "Camembert"


_ALBERT = "albert.encoder.albert_layer_groups.{i}.albert_layers.0."
_DEBERTA = "deberta.encoder.layer.{i}.attention.self."
# DeBERTa's names of what is multiplied with vectors of distances
_TERMS = {
    "queries": ["c2p"],
    "keys": ["p2c"],
    "both": ["c2p", "p2c"],
}
_DISTIL = "distilbert.transformer.layer.{i}."
_MODERN = "model.layers.{i}."
_MPNET = "mpnet.encoder.layer.{i}.attention."
_UNBIASED = {"gated": "wide", "plain": "none"}  # of jina's two forms of feed-forward blocks
_JINA = "bert.encoder.layer.{i}."
_JINA_CODE = "jinaai/jina-bert-implementation--"


class DistilBert(Family):
    """Sanh et al. 2019: no types and no pooler."""

    prefix = "DistilBert"
    usual = "distilbert"
    base = "distilbert"
    settings = _DISTIL_SETTINGS
    fixed = _FIXED | {"type_vocab_size": 0, "layer_norm_epsilon": 1e-12}
    modules = {
        "encoder/layers/attention/query": _DISTIL + "attention.q_lin",
        "encoder/layers/attention/key": _DISTIL + "attention.k_lin",
        "encoder/layers/attention/value": _DISTIL + "attention.v_lin",
        "encoder/layers/attention/output": _DISTIL + "attention.out_lin",
        "encoder/layers/attention/norm": _DISTIL + "sa_layer_norm",
        "encoder/layers/mlp/intermediate": _DISTIL + "ffn.lin1",
        "encoder/layers/mlp/output": _DISTIL + "ffn.lin2",
        "encoder/layers/mlp/norm": _DISTIL + "output_layer_norm",
        "encoder/pooler": "pre_classifier",
        "mlm/transform": "vocab_transform",
        "mlm/norm": "vocab_layer_norm",
        "mlm/output_bias": "vocab_projector.bias",
    }
    tied = ("vocab_projector.weight", "")
    activation = "activation"
    activations = _EXACT | _TANH | {"relu": "relu"}

    def write(self, config: ModelConfig) -> JsonObject:
        return dict.fromkeys(("seq_classif_dropout", "qa_dropout"), config.hidden_dropout_rate)


class Electra(Family):
    """Clark et al. 2020: tables may be narrower than layers."""

    prefix = "Electra"
    usual = "electra-small"
    base = "electra"
    settings = SETTINGS | {"embedding_size": "embedding_size"}
    fixed = _without(_FIXED, "embedding_size")
    modules = {
        "encoder/pooler": "sequence_summary.summary",
        "mlm/transform": "generator_predictions.dense",
        "mlm/norm": "generator_predictions.LayerNorm",
        "mlm/output_bias": "generator_lm_head.bias",
    }
    renamed = {
        "ForSequenceClassification": {
            "classifier.dense": "sequence_summary.summary",
            "classifier.out_proj": "classifier",
        }
    }
    tied = ("generator_lm_head.weight", "")
    refused = (
        *_ABSOLUTE,
        ("summary_type", (None, "first")),
        ("summary_use_proj", (None, True)),
        ("summary_activation", (None, "gelu")),
    )

    def read(self, settings: JsonObject) -> dict[str, Any]:
        # 0 is our width of the tables where it is that of the layers, and there is no dense layer between.
        width = settings.get("embedding_size", 128)
        return {"embedding_size": 0 if width == settings.get("hidden_size", 256) else width}

    def write(self, config: ModelConfig) -> JsonObject:
        return {"embedding_size": config.embedding_width}


class Albert(Family):
    """Lan et al. 2020: layers share their parameters, and tables are narrow; the order of sentences is predicted."""

    prefix = "Albert"
    usual = "albert-xxlarge"
    base = "albert"
    settings = SETTINGS | {
        "embedding_size": "embedding_size",
        "layer_groups": "num_hidden_groups",
    }
    fixed = _without(_FIXED, "layer_groups", "embedding_size")
    modules = {
        "encoder/embeddings/project": "albert.encoder.embedding_hidden_mapping_in",
        "encoder/layers/attention/query": _ALBERT + "attention.query",
        "encoder/layers/attention/key": _ALBERT + "attention.key",
        "encoder/layers/attention/value": _ALBERT + "attention.value",
        "encoder/layers/attention/output": _ALBERT + "attention.dense",
        "encoder/layers/attention/norm": _ALBERT + "attention.LayerNorm",
        "encoder/layers/mlp/intermediate": _ALBERT + "ffn",
        "encoder/layers/mlp/output": _ALBERT + "ffn_output",
        "encoder/layers/mlp/norm": _ALBERT + "full_layer_layer_norm",
        "encoder/pooler": "albert.pooler",
        "mlm/transform": "predictions.dense",
        "mlm/norm": "predictions.LayerNorm",
        "mlm/output_bias": "predictions.bias",
        "next_sentence": "sop_classifier.classifier",
    }
    tied = ("predictions.decoder.weight", "predictions.decoder.bias")
    token_ids = _ENDS
    activations = _EXACT | _TANH | {"relu": "relu"}
    usual_activation = "gelu_new"
    refused = (*_ABSOLUTE, ("inner_group_num", (None, 1)))
    has = ("ForPreTraining",)

    def fixed_for(self, config: ModelConfig) -> dict[str, Any]:
        return self.fixed | {"embedding_size": config.embedding_width}

    def write(self, config: ModelConfig) -> JsonObject:
        return {
            "num_hidden_groups": config.num_stacked,
            "inner_group_num": 1,
            "classifier_dropout_prob": config.hidden_dropout_rate,
        }


class DebertaV2(Family):
    """He et al. 2021, "DeBERTa", the second version, and 2023, "DeBERTaV3": distances have vectors, which make scores.

    Which of its two masked language models a file has is told by its names, and not by `legacy`, whose default is the
    one that no published model has.
    """

    prefix = "DebertaV2"
    usual = "deberta-v3-base"
    base = "deberta"
    fixed = {
        name: value for name, value in _FIXED.items() if name not in ("positions", "score_bias")
    } | {"score_bias": "vectors"}
    modules = {
        "encoder/layers/attention/query": _DEBERTA + "query_proj",
        "encoder/layers/attention/key": _DEBERTA + "key_proj",
        "encoder/layers/attention/value": _DEBERTA + "value_proj",
        "encoder/pooler": "pooler_of_sequences.dense",
        "mlm/transform": "lm_predictions.lm_head.dense",
        "mlm/norm": "lm_predictions.lm_head.LayerNorm",
        "mlm/output_bias": "lm_predictions.lm_head.bias",
    }
    renamed = {
        kind: {"pooler.dense": "pooler_of_sequences.dense"}
        for kind in ("ForSequenceClassification", "ForMultipleChoice")
    }
    activations = _EXACT | _TANH | {"relu": "relu", "silu": "silu"}
    can_lack_types = True
    refused = (
        ("relative_attention", (True,)),
        ("pooler_hidden_act", (None, "gelu")),
        ("conv_kernel_size", (None, 0)),
    )
    unread = {
        "mask_predictions.": "the head that told replaced tokens (mask_predictions), as in the published DeBERTaV3",
        "deberta.embeddings.position_embeddings.": (
            "a table of positions that only the decoder of pre-training read (position_embeddings), as in the "
            "published DeBERTaV3"
        ),
    }
    # what its class takes if config.json does not say it
    _USUAL = {
        "hidden_size": 1536,
        "num_layers": 24,
        "num_heads": 24,
        "intermediate_size": 6144,
        "vocab_size": 128_100,
    }

    def read(self, settings: JsonObject) -> dict[str, Any]:
        """Raises: InputError if widths differ, or if no term of scores is named that can be computed."""
        usual = {ours: settings.get(SETTINGS[ours], value) for ours, value in self._USUAL.items()}
        width = usual["hidden_size"]
        for name, only in (
            ("embedding_size", width),
            ("pooler_hidden_size", width),
            ("attention_head_size", width // usual["num_heads"]),
        ):
            if settings.get(name) not in (None, only):
                raise InputError(f"{name} is {shown(settings[name])}; it can be {only}")
        named = settings.get("pos_att_type") or []
        if isinstance(named, str):
            named = [part.strip() for part in named.lower().split("|")]
        terms = [ours for ours, theirs in _TERMS.items() if sorted(named) == theirs]
        if not terms:
            raise InputError(f"pos_att_type is {shown(named)}; it can be c2p, p2c or both")
        most = settings.get("max_relative_positions", -1)
        norm = settings.get("norm_rel_ebd", "none").lower()
        return usual | {
            "positions": "learned" if settings.get("position_biased_input", True) else "none",
            "distance_terms": terms[0],
            "distance_buckets": max(0, settings.get("position_buckets", -1)),
            "farthest_distance": most if most > 0 else settings.get("max_position_embeddings", 512),
            "distance_norm": "layer_norm" in norm.split("|"),
            "distance_shared": settings.get("share_att_key", False),
        }

    def write(self, config: ModelConfig) -> JsonObject:
        return {
            "relative_attention": True,
            "pos_att_type": _TERMS[config.distance_terms],
            "position_buckets": config.distance_buckets or -1,
            "max_relative_positions": config.farthest_distance,
            "norm_rel_ebd": "layer_norm" if config.distance_norm else "none",
            "share_att_key": config.distance_shared,
            "position_biased_input": config.positions == "learned",
            "pooler_hidden_size": config.hidden_size,
            "pooler_hidden_act": "gelu",
            "legacy": False,
        }

    def unread_by(self, config: ModelConfig) -> dict[str, str]:
        read = ["deberta.embeddings.position_embeddings."] if config.positions == "learned" else []
        return _without(self.unread, *read)

    def names_in(self, kind: str, names: Sequence[str] = ()) -> dict[str, str]:
        begins = {name.partition(".")[0] for name in names}
        if "cls" in begins and "lm_predictions" not in begins:  # with both it is refused
            return {
                "cls.predictions.transform.dense": "lm_predictions.lm_head.dense",
                "cls.predictions.transform.LayerNorm": "lm_predictions.lm_head.LayerNorm",
                "cls.predictions": "lm_predictions.lm_head",
            }
        return super().names_in(kind, names)


class MPNet(Roberta):
    """Song et al. 2020: a bias of scores by distance, no types, and padding's id is always 1."""

    prefix = "MPNet"
    usual = "mpnet-base"
    base = "mpnet"
    settings = _without(SETTINGS, "type_vocab_size")
    fixed = _FIXED | {"type_vocab_size": 0, "position_offset": 2, "score_bias": "buckets"}
    modules = Roberta.modules | {
        "encoder/layers/attention/query": _MPNET + "attn.q",
        "encoder/layers/attention/key": _MPNET + "attn.k",
        "encoder/layers/attention/value": _MPNET + "attn.v",
        "encoder/layers/attention/output": _MPNET + "attn.o",
        "encoder/layers/attention/norm": _MPNET + "LayerNorm",
    }
    renamed = {
        "ForSequenceClassification": {
            "classifier.dense": "mpnet.pooler.dense",
            "classifier.out_proj": "classifier",
        }
    }
    # its code has these numbers, whatever config.json says
    refused = (("relative_attention_num_buckets", (None, 32)), ("pad_token_id", (None, 1)))

    def read(self, settings: JsonObject) -> dict[str, Any]:
        rows = settings.get("max_position_embeddings", 512)
        usual = 1e-12
        epsilon = settings.get("layer_norm_eps", usual)
        return {"max_positions": rows - 2, "layer_norm_epsilon": epsilon}


class JinaBert(Family):
    """Günther et al. 2023: BERT with ALiBi; MosaicBERT (Portes et al. 2023), hence DNABERT-2, with one more name.

    In config.json it is a "bert" with code of its own.
    """

    prefix = "JinaBert"
    usual = "jina-bert-base"
    model_type = "bert"
    fixed = _FIXED | {"positions": "none", "score_bias": "alibi"}
    gated = {
        "encoder/layers/mlp/intermediate": _JINA + "mlp.gated_layers#0/2",
        "encoder/layers/mlp/gate": _JINA + "mlp.gated_layers#1/2",
        "encoder/layers/mlp/output": _JINA + "mlp.wo",
        "encoder/layers/mlp/norm": _JINA + "mlp.layernorm",
    }
    refused = (
        ("position_embedding_type", (None, "alibi", "absolute")),
        ("feed_forward_type", (None, "original", "geglu")),
    )
    older_prefix = "Bert"
    older = ((r"\bself\.Wqkv\.", "self.query.|self.key.|self.value."),)
    foreign = Family.foreign | {
        ".layer_norm_q.": "a norm of queries (qk-post-norm, as in jina-embeddings-v2-base-code)"
    }

    def fixed_for(self, config: ModelConfig) -> dict[str, Any]:
        form = config.feed_forward
        return self.fixed | {"feed_forward": form, "unbiased": _UNBIASED[form]}

    def read(self, settings: JsonObject) -> dict[str, Any]:
        usual = "geglu" if _is_mosaic(settings) else "original"
        form = "gated" if settings.get("feed_forward_type", usual) == "geglu" else "plain"
        return {"feed_forward": form, "unbiased": _UNBIASED[form]}

    def write(self, config: ModelConfig) -> JsonObject:
        classes = {
            f"AutoModel{end}": f"{_JINA_CODE}modeling_bert.JinaBert{end or 'Model'}"
            for end in ("", "ForMaskedLM", "ForSequenceClassification")
        }
        return {
            "position_embedding_type": "alibi",
            "feed_forward_type": "geglu" if config.feed_forward == "gated" else "original",
            "auto_map": {"AutoConfig": f"{_JINA_CODE}configuration_bert.JinaBertConfig", **classes},
        }


def _is_mosaic(settings: JsonObject) -> bool:
    """Returns whether a config.json is of MosaicBERT's code, which has ALiBi and gates and no settings for them."""
    return "alibi_starting_size" in settings or "bert_layers." in str(settings.get("auto_map"))


class Rotary(Family):
    """BERT with rotary positions: norm after sums, and no table of positions."""

    fixed = _without(_FIXED, "rotary_stretch") | {"positions": "rotary"}
    refused = (
        ("rotary_emb_fraction", (None, 1)),
        ("rotary_emb_interleaved", (None, False)),
        ("use_rms_norm", (None, False)),
    )
    older_settings = {"rotary_emb_base": "rope_theta"}
    theta = 10_000.0  # unless the settings name one
    trained = 8192  # tokens, beyond which angles that depend on the row begin

    def rope(self, settings: JsonObject) -> JsonObject:
        """Returns the settings of angles, as version 5 of transformers or older code writes them."""
        rope = {"rope_theta": settings.get("rope_theta")}
        for name in ("rope_scaling", "rope_parameters"):
            rope |= settings.get(name) or {}
        kind = rope.get("rope_type", rope.get("type", "default"))
        kind = "dynamic" if settings.get("rotary_scaling_factor") else kind
        return rope | {"rope_type": kind, "rope_theta": rope["rope_theta"] or self.theta}

    def read(self, settings: JsonObject) -> dict[str, Any]:
        """The angles, where they do not depend on the rows of a batch; else as many tokens as have the plain angles.

        Raises: InputError if angles or heads have another form.
        """
        usual = model_size(self.usual)
        rope = self.rope(settings)
        width, heads = (
            settings.get(self.settings[name], getattr(usual, name))
            for name in ("hidden_size", "num_heads")
        )
        for name, of, only in (
            ("head_dim", settings, width // heads),
            ("partial_rotary_factor", rope, 1),
        ):
            if of.get(name) not in (None, only):
                raise InputError(f"{name} is {shown(of[name])}; it can be {only}")
        kind = rope["rope_type"]
        theta = rope["rope_theta"]
        factor = rope.get("factor", 1.0)
        if kind == "linear":
            return {"rotary_theta": theta, "rotary_stretch": factor}
        if kind == "ntk" and rope.get("mixed_b") is None:
            # Source: TEI's rotary.rs, and the code that came with Alibaba's models.
            return {"rotary_theta": theta * factor, "rotary_stretch": factor ** (2 * heads / width)}
        if kind == "dynamic":
            most = settings.get("max_position_embeddings", usual.max_positions)
            return {"rotary_theta": theta, "max_positions": min(most, self.trained)}
        if kind != "default":
            names = "default, linear, or ntk without mixed_b"
            raise InputError(f"its angles have the rope_type {shown(kind)}; it can be {names}")
        return {"rotary_theta": theta}

    def notes(self, settings: JsonObject) -> list[str]:
        most = self.read(settings).get("max_positions")
        if most is None:
            return []
        return [
            f"beyond {most} tokens its angles would depend on the longest row of a batch (dynamic); it has "
            f"{most} positions here"
        ]

    def write(self, config: ModelConfig) -> JsonObject:
        rope: JsonObject = {"rope_type": "default", "rope_theta": config.rotary_theta}
        if config.rotary_stretch != 1:
            rope |= {"rope_type": "linear", "factor": config.rotary_stretch}
        return {"rope_parameters": rope}


def _rotary_modules(base: str, wide: str, narrow: str, gate: str = "") -> dict[str, str]:
    layer = base + ".layers.{i}."
    gates = {"encoder/layers/mlp/gate": f"{layer}mlp.{gate}"} if gate else {}
    attention = {
        f"encoder/layers/attention/{name}": f"{layer}self_attn.{name[0]}_proj"
        for name in ("query", "key", "value", "output")
    }
    return {
        **attention,
        **gates,
        "encoder/layers/attention/norm": layer + "post_attention_layernorm",
        "encoder/layers/mlp/intermediate": f"{layer}mlp.{wide}",
        "encoder/layers/mlp/output": f"{layer}mlp.{narrow}",
        "encoder/layers/mlp/norm": layer + "post_mlp_layernorm",
    }


_OLDER_QKV = "self_attn.q_proj.|self_attn.k_proj.|self_attn.v_proj."
_OLDER_LAYERS = (
    (r"encoder\.layers\.", "layers."),
    (r"\bemb_ln\.", "embeddings.LayerNorm."),
    (r"\bnorm1\.", "post_attention_layernorm."),
    (r"\bnorm2\.", "post_mlp_layernorm."),
)


class NomicBert(Rotary):
    """Nussbaum et al. 2024; before, its code had the settings of GPT-2."""

    prefix = "NomicBert"
    usual = "nomic-bert"
    base = "nomic_bert"
    fixed = Rotary.fixed | {"feed_forward": "gated", "unbiased": "layers"}
    modules = _rotary_modules("nomic_bert", "gate_proj", "down_proj", "up_proj") | {
        "mlm/norm": "cls.predictions.transform.layer_norm"
    }
    activations = _EXACT | _TANH | _OTHERS
    usual_activation = "silu"
    theta = 1_000.0
    trained = 2048
    lacks = ("ForQuestionAnswering", "ForMultipleChoice")
    refused = (
        *Rotary.refused,
        ("num_experts", (None, 0)),
        ("moe_every_n_layers", (None, 0)),
        ("activation_function", (None, "swiglu", "geglu")),
        ("prenorm", (None, False)),
        ("parallel_block", (None, False)),
        ("causal", (None, False)),
    )
    older_settings = Rotary.older_settings | {
        "n_embd": "hidden_size",
        "n_layer": "num_hidden_layers",
        "n_head": "num_attention_heads",
        "n_inner": "intermediate_size",
        "n_positions": "max_position_embeddings",
        "layer_norm_epsilon": "layer_norm_eps",
        "resid_pdrop": "hidden_dropout_prob",
        "attn_pdrop": "attention_probs_dropout_prob",
    }
    older = (
        (r"^bert\.", "nomic_bert."),
        *_OLDER_LAYERS,
        (r"\battn\.Wqkv\.", _OLDER_QKV),
        (r"\battn\.out_proj\.", "self_attn.o_proj."),
        (r"\bfc11\.", "up_proj."),
        (r"\bfc12\.", "gate_proj."),
        (r"\bfc2\.", "down_proj."),
    )


class Gte(Rotary):
    """Zhang et al. 2024, "mGTE"; before, its model_type was "new"."""

    prefix = "Gte"
    usual = "gte"
    base = "gte"
    fixed = Rotary.fixed | {"feed_forward": "gated", "unbiased": "wide"}
    modules = _rotary_modules("gte", "gate_proj", "down_proj", "up_proj") | {
        "mlm/transform": "lm_head.dense",
        "mlm/norm": "lm_head.layer_norm",
        "mlm/output_bias": "lm_head.decoder.bias",
    }
    tied = ("lm_head.decoder.weight", "")
    theta = 160_000.0
    can_lack_types = True
    lacks = ("ForQuestionAnswering", "ForMultipleChoice")
    refused = (
        *Rotary.refused,
        ("logn_attention_scale", (None, False)),
        ("layer_norm_type", (None, "layer_norm")),
        ("position_embedding_type", (None, "rope")),
    )
    older_prefix = "New"
    older = (
        (r"^new\.", "gte."),
        (r"encoder\.layer\.", "layers."),
        (r"\battention\.qkv_proj\.", _OLDER_QKV),
        (r"\battention\.([qkvo])_proj\.", r"self_attn.\1_proj."),
        (r"\bup_gate_proj\.", "up_proj.|gate_proj."),
        (r"\battn_ln\.", "post_attention_layernorm."),
        (r"\bmlp_ln\.", "post_mlp_layernorm."),
        (r"^lm_head\.norm\.", "lm_head.layer_norm."),
    )


class JinaEmbeddingsV3(Rotary):
    """Sturua et al. 2024: XLM-R with rotary positions, whose model_type it had before."""

    prefix = "JinaEmbeddingsV3"
    usual = "jina-embeddings-v3"
    base = "roberta"
    modules = _rotary_modules("roberta", "fc1", "fc2") | Roberta.modules
    renamed = Roberta.renamed
    tied = Roberta.tied
    token_ids = _ENDS
    theta = 20_000.0
    lacks = ("ForMultipleChoice",)
    refused = (*Rotary.refused, ("position_embedding_type", (None, "rotary", "absolute")))
    older_prefix = "XLMRoberta"
    older = (
        *_OLDER_LAYERS,
        (r"\bmixer\.Wqkv\.", _OLDER_QKV),
        (r"\bmixer\.out_proj\.", "self_attn.o_proj."),
    )


class EuroBert(Rotary):
    """Boizard et al. 2025: Llama's layers, that see both sides; the masked head is a table of its own."""

    prefix = "EuroBert"
    usual = "eurobert-210m"
    base = "model"
    settings = _without(SETTINGS, "type_vocab_size", "hidden_dropout_rate") | {
        "attention_dropout_rate": "attention_dropout",
        "layer_norm_epsilon": "rms_norm_eps",
    }
    fixed = _without(Rotary.fixed, "num_key_heads", "pooling") | {
        "type_vocab_size": 0,
        "norm": "before_all",
        "norm_kind": "rms",
        "norm_bias": False,
        "unbiased": "layers",
        "feed_forward": "gated",
    }
    modules = _rotary_modules("model", "gate_proj", "down_proj", "up_proj") | {
        "encoder/embeddings/word": "model.embed_tokens",
        # the norm before the next layer is the one after this layer, and the last is the final one
        "encoder/embeddings/norm": "model.layers.0.input_layernorm",
        "encoder/layers/mlp/norm": "model.layers.{next}.input_layernorm|model.norm",
        "encoder/pooler": "dense",
    }
    tied = ("", "")
    token_ids = _ENDS | {"mask_token_id": "mask_id"}
    activations = NomicBert.activations
    usual_activation = "silu"
    lacks = ("ForQuestionAnswering", "ForMultipleChoice")
    refused = (
        ("attention_bias", (None, False)),
        ("mlp_bias", (None, False)),
        *((name, (None, "late", "mean", "bos")) for name in ("classifier_pooling", "clf_pooling")),
    )

    def read(self, settings: JsonObject) -> dict[str, Any]:
        heads = settings.get("num_attention_heads", model_size(self.usual).num_heads)
        of_keys = settings.get("num_key_value_heads") or heads
        pooling = settings.get("classifier_pooling") or settings.get("clf_pooling") or "late"
        return super().read(settings) | {
            "num_key_heads": 0 if of_keys == heads else of_keys,
            "pooling": "cls" if pooling == "bos" else pooling,
        }

    def write(self, config: ModelConfig) -> JsonObject:
        return super().write(config) | {
            "num_key_value_heads": config.num_key_heads or config.num_heads,
            "head_dim": config.head_size,
            "classifier_pooling": "bos" if config.pooling == "cls" else config.pooling,
        }


class UltraBert(EuroBert):
    """EuroBERT's layers, most of them with windows; two dense layers before words, and none before classes."""

    prefix = "Ultrabert"
    usual = "ultrabert-mini"
    settings = EuroBert.settings | {"window": "sliding_window", "pooling": "classifier_pooling"}
    fixed = _without(EuroBert.fixed, "window", "global_first", "prediction_size") | {
        "rotary_stretch": 1.0
    }
    modules = EuroBert.modules | {
        "mlm/transform": "head.linear1",
        "mlm/words": "head.decoder",
    }
    token_ids = _ENDS
    lacks = ("ForMultipleChoice",)
    refused = (
        ("attention_bias", (None, False)),
        ("mlp_bias", (None, False)),
        ("classifier_pooling", (None, "cls", "mean")),
    )
    older = ((r"^ultrabert\.", "model."), (r"^cls\.", "head.decoder."))

    def read(self, settings: JsonObject) -> dict[str, Any]:
        """Layers, windows and angles, as transformers or the code that came with the models writes them.

        Raises: InputError if layers have another order, or angles another form.
        """
        windows = settings.get("attention_windows")
        layers = settings.get("num_hidden_layers", 6)
        window = settings.get("sliding_window", 128)
        types = settings.get("layer_types") or _types(layers, 3, 2)
        if windows:
            window = next(filter(None, windows), window)
            types = ["sliding_attention" if each else "full_attention" for each in windows]
        orders = ((every, first) for every in (3, *range(1, layers + 2)) for first in range(every))
        order = next((each for each in orders if types == _types(layers, *each)), None)
        if order is None:
            raise InputError(f"layer_types is {shown(types)}; every n-th layer can see all")
        if window < 1 and "sliding_attention" in types:
            raise InputError(f"sliding_window is {shown(window)}; it can be 1 or more")
        older = dict(zip(types, settings.get("rope_theta") or ()))
        width = settings.get("prediction_head_size", 768)
        return super().read(settings) | {
            "window": window,
            "global_every": order[0],
            "global_first": order[1],
            "prediction_size": 0 if width == settings.get("hidden_size") else width,
            "pooling": settings.get("classifier_pooling") or "cls",
            **_thetas(
                settings,
                older.get("full_attention", 2_560_000.0),
                older.get("sliding_attention", 10_000.0),
            ),
        }

    def write(self, config: ModelConfig) -> JsonObject:
        every, first = (config.global_every, config.global_first) if config.window else (1, 0)
        return super().write(config) | {
            "layer_types": _types(config.num_layers, every, first),
            "rope_parameters": _ropes(config),
            "classifier_pooling": config.pooling,
            "classifier_dropout": config.hidden_dropout_rate,
            "prediction_head_size": config.prediction_size or config.hidden_size,
        }


class ModernBert(Family):
    """Warner et al. 2024: rotary positions, local layers, norms before blocks."""

    prefix = "ModernBert"
    usual = "modernbert-base"
    base = "model"
    settings = _MODERN_SETTINGS
    fixed = _without(_FIXED, "pooling", "window", "norm_bias", "dense_bias", "head_activation") | {
        "positions": "rotary",
        "norm": "before",
        "feed_forward": "gated",
        "type_vocab_size": 0,
    }
    modules = {
        "encoder/embeddings/word": "model.embeddings.tok_embeddings",
        "encoder/embeddings/norm": "model.embeddings.norm",
        "encoder/layers/attention/query": _MODERN + "attn.Wqkv#0/3",
        "encoder/layers/attention/key": _MODERN + "attn.Wqkv#1/3",
        "encoder/layers/attention/value": _MODERN + "attn.Wqkv#2/3",
        "encoder/layers/attention/output": _MODERN + "attn.Wo",
        "encoder/layers/attention/norm": _MODERN + "mlp_norm",
        "encoder/layers/mlp/intermediate": _MODERN + "mlp.Wi#0/2",
        "encoder/layers/mlp/gate": _MODERN + "mlp.Wi#1/2",
        "encoder/layers/mlp/output": _MODERN + "mlp.Wo",
        # The norm before the next layer's attention is the one after this layer, and so is the final one.
        "encoder/layers/mlp/norm": "model.layers.{next}.attn_norm|model.final_norm",
        "encoder/pooler": "head.dense",
        "encoder/pooler/norm": "head.norm",
        "mlm/transform": "head.dense",
        "mlm/norm": "head.norm",
        "mlm/output_bias": "decoder.bias",
    }
    renamed = {"ForQuestionAnswering": {"classifier": "qa_outputs"}}
    tied = ("decoder.weight", "")
    token_ids = _ENDS | {"cls_token_id": "cls_id", "sep_token_id": "sep_id"}
    activation = "hidden_activation"
    activations = _EXACT | _TANH | _OTHERS
    refused = (("classifier_activation", (None, *activations)), ("decoder_bias", (None, True)))

    def fixed_for(self, config: ModelConfig) -> dict[str, Any]:
        is_usual = config.head_activation == "usual"
        return self.fixed | ({"activation": "gelu_exact"} if is_usual else {})

    def read(self, settings: JsonObject) -> dict[str, Any]:
        """Layers, windows and angles, as version 5 of transformers or older versions write them.

        Raises: InputError if layers have another order, or angles another form.
        """
        layers = settings.get("num_hidden_layers", 22)
        local = settings.get("local_attention", 128)
        every = settings.get("global_attn_every_n_layers", 3)
        types = settings.get("layer_types")
        if types is not None:
            counts = (every, *range(1, layers + 1)) if len(types) == layers else ()
            every = next((count for count in counts if types == _types(layers, count)), 0)
            if not every:
                raise InputError(
                    f"layer_types is {shown(types)}; every n-th layer can see all, from the first on"
                )
        if local < 2 and min(every, layers) > 1:
            raise InputError(
                f"local_attention is {local}, so that a token sees itself alone; it can be 2 or more"
            )
        older = settings.get("global_rope_theta")
        usual = 160_000.0 if older is None else older
        # null was the angle of global layers
        thetas = _thetas(settings, usual, settings.get("local_rope_theta", 10_000.0))
        for name in ("attention_bias", "classifier_bias"):
            if bool(settings.get(name, False)) != bool(settings.get("mlp_bias", False)):
                raise InputError(f"{name} is not mlp_bias; it can be the same for all dense layers")
        inner, heads = (
            self.activations[settings.get(name) or "gelu"]
            for name in (self.activation, "classifier_activation")
        )
        heads = "usual" if inner == heads == "gelu_exact" else heads
        return thetas | {"window": local // 2, "global_every": every, "head_activation": heads}

    def write(self, config: ModelConfig) -> JsonObject:
        every = config.global_every if config.window else 1
        return {
            "embedding_dropout": config.hidden_dropout_rate,
            "attention_bias": config.dense_bias,
            "classifier_bias": config.dense_bias,
            "classifier_activation": NAMES_OF_ACTIVATIONS.get(config.head_activation, "gelu"),
            "decoder_bias": True,
            "local_attention": 2 * config.window,
            "global_attn_every_n_layers": every,
            "layer_types": _types(config.num_layers, every),
            "rope_parameters": _ropes(config),
            "global_rope_theta": config.rotary_theta,  # this and the next for older versions
            "local_rope_theta": config.local_rotary_theta,
        }


def _types(layers: int, every: int, first: int = 0) -> list[str]:
    """Returns the kinds of layers as transformers lists them: every n-th, from `first` on, sees all."""
    return [
        "full_attention" if layer % every == first else "sliding_attention"
        for layer in range(layers)
    ]


def _thetas(settings: JsonObject, full: Any, local: Any) -> dict[str, Any]:
    """Returns our settings of angles; `full` and `local` are theirs where rope_parameters says nothing, if not None.

    Raises: InputError if angles have another form.
    """
    ropes = settings.get("rope_parameters") or {}
    thetas = {}
    for ours, kind, usual in (
        ("rotary_theta", "full_attention", full),
        ("local_rotary_theta", "sliding_attention", local),
    ):
        rope = ropes.get(kind) or {}
        form = rope.get("rope_type", rope.get("type", "default"))
        if form != "default" or settings.get("rope_scaling"):
            raise InputError(f"rope_parameters has the rope_type {shown(form)}; it can be default")
        given = (rope.get("rope_theta"), usual, thetas.get("rotary_theta"))
        thetas[ours] = next(theta for theta in given if theta is not None)
    return thetas


def _ropes(config: ModelConfig) -> JsonObject:
    """Returns the settings of angles by the kind of layers."""
    thetas = {
        "full_attention": config.rotary_theta,
        "sliding_attention": config.local_rotary_theta,
    }
    return {kind: {"rope_type": "default", "rope_theta": theta} for kind, theta in thetas.items()}


FAMILIES: dict[str, Family] = {
    "bert": Bert(),
    "roberta": Roberta(),
    "xlm-roberta": XlmRoberta(),
    "camembert": Camembert(),
    "distilbert": DistilBert(),
    "electra": Electra(),
    "albert": Albert(),
    "deberta-v2": DebertaV2(),
    "mpnet": MPNet(),
    "jina_bert": JinaBert(),
    "nomic_bert": NomicBert(),
    "gte": Gte(),
    "jina_embeddings_v3": JinaEmbeddingsV3(),
    "eurobert": EuroBert(),
    "ultrabert": UltraBert(),
    "modernbert": ModernBert(),
}

# The classes that each family has; BERT's have more.
_SHARED = (
    "Model",
    "ForMaskedLM",
    "ForSequenceClassification",
    "ForTokenClassification",
    "ForQuestionAnswering",
    "ForMultipleChoice",
)


@functools.cache
def table_of(family: str, feed_forward: str = "plain") -> tuple[Parameter, ...]:
    """Returns the names of every parameter that a model of the family may have."""
    modules = _MODULES if family == "bert" else (*_MODULES, *_MORE)
    return tuple(_rows(FAMILIES[family], modules, feed_forward == "gated"))


def _rows(
    family: Family, modules: tuple[tuple[str, ...], ...], is_gated: bool
) -> Iterator[Parameter]:
    names = family.modules | (family.gated if is_gated else {})
    for leaves, ours, bert, *differs in modules:
        tf1 = differs[0] if differs else bert.replace("layer.{i}", "layer_{i}").replace(".", "/")
        base = f"{family.base}.{bert.removeprefix('bert.')}" if bert.startswith("bert.") else bert
        module, number, piece = names.get(ours, base).partition("#")
        for our_leaf, hf_leaf, tf1_leaf, kind in _LEAVES[leaves]:
            hf = "|".join(name + hf_leaf for name in module.split("|"))
            yield Parameter(ours + our_leaf, hf + number + piece, tf1 + tf1_leaf, kind)


def class_of(head: Head, family: str) -> str:
    """Returns the class of a model with this head in transformers; "" if there is none."""
    if head.family:
        return head.architecture if head.family == family else ""
    end = head.architecture.removeprefix("Bert")
    if end in FAMILIES[family].lacks:
        return ""
    known = (*_SHARED, *FAMILIES[family].has)
    return FAMILIES[family].prefix + end if end in known or (family == "bert" and end) else ""


def check_expressible(config: ModelConfig) -> None:
    """Raises: InputError, with its name, if an option of the model is not computed by its family in transformers."""
    spec = FAMILIES[config.family]
    where = f"transformers' {spec.prefix}"
    needs_types = not (spec.can_lack_types or "type_vocab_size" in spec.fixed)
    if not config.type_vocab_size and needs_types:
        raise InputError(f"model.type_vocab_size 0 has no counterpart in {where}; it has 1 or more")
    for name, value in spec.fixed_for(config).items():
        if getattr(config, name) != value:
            raise InputError(
                f"model.{name} {getattr(config, name)} has no counterpart in {where}; it has {value}"
            )
    if config.activation not in spec.activations.values():
        raise InputError(f"model.activation {config.activation} has no counterpart in {where}")


def of_today(settings: JsonObject) -> JsonObject:
    """Returns the content of a config.json as transformers writes it today, where code of its own wrote it before."""
    name = settings.get("model_type")
    is_older = name == "new" or "n_embd" in settings
    if name == "xlm-roberta" and settings.get("position_embedding_type") == "rotary":
        name = "jina_embeddings_v3"
        is_older = True
    if settings.get("position_embedding_type") == "alibi" or _is_mosaic(settings):
        name = "jina_bert" if name == "bert" else name
    name = "gte" if name == "new" else name
    family = FAMILIES.get(str(name))
    if family is None or not family.older:
        return settings
    gate = {"swiglu": "silu", "geglu": "gelu"}.get(str(settings.get("activation_function")))
    today = {family.older_settings.get(key, key): value for key, value in settings.items()}
    today |= {family.activation: gate} if gate else {}
    today |= {"rope_theta": today.get("rope_theta", 10_000.0)} if is_older else {}  # its code's own
    classes = settings.get("architectures")
    if family.older_prefix and isinstance(classes, list):
        today["architectures"] = [
            re.sub(f"^{family.older_prefix}", family.prefix, str(each)) for each in classes
        ]
    return today | ({"model_type": name} if name else {})


def name_of(family: str) -> str:
    """Returns the name of a family's models for messages, given the family in a file; an unknown one is a BERT."""
    return FAMILIES[family].prefix if family in FAMILIES and family != "bert" else "BERT"
