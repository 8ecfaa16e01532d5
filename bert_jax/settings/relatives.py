# SPDX-License-Identifier: Apache-2.0
"""BERT's relatives: what stands before the logits of their classifiers, and the sizes that have names."""

from typing import Any, NamedTuple


class Block(NamedTuple):
    """The layers of a family between the encoder's vectors and a classifier's logits: at least dense and activation."""

    activation: str = "tanh"  # or one of `model.activation`; "" is no layers at all
    norm: bool = False  # after the activation
    dropout: bool = False  # before the dense layer, too
    of_tokens: bool = False  # whether tokens and spans pass through it, not sequences alone
    of_encoder: bool = True  # whether the bare encoder has it, as BERT has its pooler
    span_dropout: bool = False  # before the logits of spans
    # dense layers before the logits of words: one, with a norm, then the word table and a bias; or none, or two without
    # biases, then a table of its own and no bias
    word_layers: int = 1

    @property
    def has_own_words(self) -> bool:
        """Whether the table of a masked language model is not that of words."""
        return self.word_layers != 1


_AS_ROBERTA = ("roberta", "xlm-roberta", "camembert", "mpnet", "jina_embeddings_v3")
# The families by transformers' model_type. Source: the modeling files of transformers 5.
BLOCKS: dict[str, Block] = {
    "bert": Block(),
    **dict.fromkeys(_AS_ROBERTA, Block(dropout=True)),
    **dict.fromkeys(("jina_bert", "albert"), Block()),
    "distilbert": Block("relu", of_encoder=False, span_dropout=True),
    "electra": Block("gelu_exact", dropout=True, of_encoder=False),
    "deberta-v2": Block("gelu_exact", of_encoder=False),
    **dict.fromkeys(("nomic_bert", "gte"), Block(of_encoder=False)),
    "eurobert": Block("gelu_exact", of_encoder=False, word_layers=0),
    "ultrabert": Block("", of_encoder=False, word_layers=2),
    "modernbert": Block(
        "gelu_exact", norm=True, of_tokens=True, of_encoder=False, span_dropout=True
    ),
}


def _roberta(size: str, family: str = "roberta") -> tuple[str, dict[str, Any]]:
    return size, {
        "family": family,
        "position_offset": 2,
        "type_vocab_size": 1,
        "activation": "gelu_exact",
        "layer_norm_epsilon": 1e-5,
    }


def _mpnet(size: str) -> tuple[str, dict[str, Any]]:
    base, changes = _roberta(size, "mpnet")
    return base, changes | {"type_vocab_size": 0, "score_bias": "buckets"}


def _jina(size: str) -> tuple[str, dict[str, Any]]:
    return size, {
        "family": "jina_bert",
        "max_positions": 8192,
        "positions": "none",
        "score_bias": "alibi",
        "unbiased": "wide",
        "feed_forward": "gated",
        "activation": "gelu_exact",
        "attention_dropout_rate": 0.0,
    }


def _electra(size: str, **changes: int) -> tuple[str, dict[str, Any]]:
    return size, {"family": "electra", "activation": "gelu_exact", **changes}


def _albert(size: str, layers: int, hidden: int, heads: int) -> tuple[str, dict[str, Any]]:
    return size, {
        "family": "albert",
        "vocab_size": 30_000,
        "hidden_size": hidden,
        "num_layers": layers,
        "num_heads": heads,
        "intermediate_size": 4 * hidden,
        "layer_groups": 1,
        "embedding_size": 128,
        "hidden_dropout_rate": 0.0,
        "attention_dropout_rate": 0.0,
    }


def _deberta(size: str, **changes: int) -> tuple[str, dict[str, Any]]:
    return size, {
        "family": "deberta-v2",
        "type_vocab_size": 0,
        "positions": "none",
        "score_bias": "vectors",
        "activation": "gelu_exact",
        "layer_norm_epsilon": 1e-7,
        **changes,
    }


def _rotary(size: str, family: str, theta: float, **changes: Any) -> tuple[str, dict[str, Any]]:
    shape = {"positions": "rotary", "rotary_theta": theta, "type_vocab_size": 1}
    return size, {"family": family, "activation": "gelu_exact", **shape, **changes}


def _eurobert(
    layers: int, hidden: int, wide: int, heads: int, key_heads: int
) -> tuple[str, dict[str, Any]]:
    return "base", {
        "family": "eurobert",
        "vocab_size": 128_256,
        "hidden_size": hidden,
        "num_layers": layers,
        "num_heads": heads,
        "num_key_heads": key_heads,
        "intermediate_size": wide,
        "max_positions": 8192,
        "type_vocab_size": 0,
        "pooling": "late",
        "positions": "rotary",
        "rotary_theta": 250_000.0,
        "norm": "before_all",
        "norm_kind": "rms",
        "norm_bias": False,
        "unbiased": "layers",
        "feed_forward": "gated",
        "activation": "silu",
        "hidden_dropout_rate": 0.0,
        "attention_dropout_rate": 0.0,
        "layer_norm_epsilon": 1e-5,
    }


def _ultrabert(layers: int, hidden: int, wide: int) -> tuple[str, dict[str, Any]]:
    base, changes = _eurobert(layers, hidden, wide, hidden // 64, 0)
    return base, changes | {
        "family": "ultrabert",
        "vocab_size": 0,
        "max_positions": 32_768,
        "pooling": "cls",
        "rotary_theta": 2_560_000.0,
        "window": 128,
        "global_first": 2,
        "layer_norm_epsilon": 1e-6,
    }


def _modernbert(layers: int, hidden: int, wide: int) -> tuple[str, dict[str, Any]]:
    return "base", {
        "family": "modernbert",
        "hidden_size": hidden,
        "num_layers": layers,
        "num_heads": hidden // 64,
        "intermediate_size": wide,
        "max_positions": 8192,
        "type_vocab_size": 0,
        "positions": "rotary",
        "rotary_theta": 160_000.0,
        "window": 64,
        "norm": "before",
        "norm_bias": False,
        "dense_bias": False,
        "feed_forward": "gated",
        "activation": "gelu_exact",
        "hidden_dropout_rate": 0.0,
        "attention_dropout_rate": 0.0,
        "initializer": "depth",
        "layer_norm_epsilon": 1e-5,
    }


# Names -> the size of BERT to begin with, and the settings that change. Source: Liu et al. 2019; Sanh et al. 2019;
# Clark et al. 2020, discriminators; Lan et al. 2020, the second release; He et al. 2023; Song et al. 2020;
# Günther et al. 2023, "Jina Embeddings 2"; Nussbaum et al. 2024; Zhang et al. 2024; Sturua et al. 2024; Boizard et al.
# 2025; Warner et al. 2024. The small ones of ModernBERT and UltraBERT are ours.
RELATIVES: dict[str, tuple[str, dict[str, Any]]] = {
    "roberta-base": _roberta("base"),
    "roberta-large": _roberta("large"),
    "xlm-roberta-base": _roberta("base", "xlm-roberta"),
    "xlm-roberta-large": _roberta("large", "xlm-roberta"),
    "camembert-base": _roberta("base", "camembert"),
    "mpnet-base": _mpnet("base"),
    "jina-bert-small": _jina("small"),
    "jina-bert-base": _jina("base"),
    "distilbert": (
        "base",
        {"family": "distilbert", "num_layers": 6, "type_vocab_size": 0, "activation": "gelu_exact"},
    ),
    "electra-small": _electra("L12_H256", embedding_size=128),
    "electra-base": _electra("base"),
    "electra-large": _electra("large"),
    "albert-base": _albert("base", 12, 768, 12),
    "albert-large": _albert("large", 24, 1024, 16),
    "albert-xlarge": _albert("large", 24, 2048, 16),
    "albert-xxlarge": _albert("large", 12, 4096, 64),
    "deberta-v3-xsmall": _deberta("base", hidden_size=384, num_heads=6, intermediate_size=1536),
    "deberta-v3-small": _deberta("L6_H768"),
    "deberta-v3-base": _deberta("base"),
    "deberta-v3-large": _deberta("large"),
    "nomic-bert": _rotary(
        *("base", "nomic_bert", 1_000.0),
        max_positions=2048,
        type_vocab_size=2,
        activation="silu",
        feed_forward="gated",
        unbiased="layers",
        hidden_dropout_rate=0.0,
        attention_dropout_rate=0.0,
    ),
    "gte": _rotary(
        *("base", "gte", 160_000.0),
        max_positions=8192,
        feed_forward="gated",
        unbiased="wide",
        attention_dropout_rate=0.0,
    ),
    "jina-embeddings-v3": _rotary(
        *("large", "jina_embeddings_v3", 20_000.0), max_positions=8194, layer_norm_epsilon=1e-5
    ),
    "eurobert-210m": _eurobert(12, 768, 3072, 12, 0),
    "eurobert-610m": _eurobert(26, 1152, 4096, 18, 6),
    "eurobert-2.1b": _eurobert(32, 2304, 6144, 18, 6),
    "ultrabert-mini": _ultrabert(6, 256, 768),
    "modernbert-mini": _modernbert(4, 256, 384),
    "modernbert-small": _modernbert(4, 512, 768),
    "modernbert-base": _modernbert(22, 768, 1152),
    "modernbert-large": _modernbert(28, 1024, 2624),
}
