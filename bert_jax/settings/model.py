# SPDX-License-Identifier: Apache-2.0
"""The settings of a model: its shape, its precision and the sizes that have names."""

import dataclasses
from dataclasses import dataclass
from typing import Any

from bert_jax.errors import InputError
from bert_jax.settings.relatives import BLOCKS, RELATIVES, Block
from bert_jax.settings.rules import (
    ABOVE_0,
    Rules,
    Section,
    choice,
    nearest_multiples,
    setting,
    suggest,
)

# dropout compares 16 random bits with the rate; at higher rates it would drop everything
MOST_DROPOUT = 0.9999
# Layers that `ModelConfig.unroll` = 0 unrolls: what one core compiles within five minutes. A CPU has no such bound.
MOST_UNROLLED = {"tpu": 12, "gpu": 24}
# along any axis of a parameter: far larger than any model in use, and JAX can still index it
MOST_ROWS = 2**24


def _count(default: int, least: int = 1) -> Any:
    """Returns the field of a size of the model."""
    return setting(default, "model", least=least, most=MOST_ROWS)


@dataclass(frozen=True)
class ModelConfig(Section):
    """The shape of a BERT, or of a relative: each option has BERT's value by default.

    Source: Devlin et al. 2018, section 3; google-research/bert modeling.py.
    """

    # number of tokens; 0 takes the size of the data's tokenizer
    vocab_size: int = _count(0, least=0)
    hidden_size: int = _count(768)
    num_layers: int = _count(12)
    num_heads: int = _count(12)
    # of keys and values, each for a run of the heads of queries; 0 is num_heads
    num_key_heads: int = _count(0, least=0)
    intermediate_size: int = _count(3072)
    max_positions: int = _count(512)
    type_vocab_size: int = _count(2, least=0)
    # whose heads the model has, one of `BLOCKS`: what stands before a classifier's logits, and names elsewhere
    family: str = choice(*BLOCKS, affects="model")
    # what a classifier of sequences reads: "cls", the first token; "mean"; or "late", the mean of what the layers
    # before the logits make of each token
    pooling: str = choice("cls", "mean", "late", affects="model")
    # "learned", "none", or "rotary": queries and keys are turned
    positions: str = choice("learned", "none", "rotary", affects="model")
    # first row of the learned table that is used; 2 for RoBERTa
    position_offset: int = _count(0, least=0)
    # "buckets": to scores is added a learned number for each head and distance, in 32 buckets, the same in all layers;
    # "alibi": each token of distance takes a fixed number from them, another for each head; "vectors": distances have
    # vectors, with which queries and keys are multiplied too; kernels lack all three, so attention=fused is computed
    # without
    score_bias: str = choice("none", "buckets", "alibi", "vectors", affects="model")
    # with "vectors", what is multiplied with them: "queries", "keys" or both
    distance_terms: str = choice("both", "queries", "keys", affects="model")
    # vectors of distances to each side: half of them are of single distances, and half of ranges that grow up to
    # farthest_distance; 0 gives each distance up to that one its own
    distance_buckets: int = _count(256, least=0)
    # tokens; those that are farther away share the last vector
    farthest_distance: int = _count(512)
    distance_norm: bool = setting(True, "model")  # layer norm of the vectors
    # whether vectors pass through the dense layers of queries and keys, and not through others
    distance_shared: bool = setting(True, "model")
    # base of the wavelengths of rotary positions
    rotary_theta: float = setting(10_000.0, "model", least=1, most=1e12)
    # the same in local layers
    local_rotary_theta: float = setting(10_000.0, "model", least=1, most=1e12)
    # the wavelengths of rotary positions are so many times as long as their base makes them
    rotary_stretch: float = setting(1.0, "model", least=ABOVE_0, most=1e6)
    # tokens to each side that a local layer sees; 0 makes every layer global
    window: int = _count(0, least=0)
    global_every: int = _count(3)  # with a window, layers 0, n, 2 n, ... are global
    global_first: int = _count(0, least=0)  # the first of them, in place of 0
    # "after" each sum, or "before" each block but the first, and after the last: the sums are then not normalized;
    # "before_all", before the first too, with a sum that begins with what is not normalized
    norm: str = choice("after", "before", "before_all", affects="model")
    # "layer" norm, or "rms": the mean is not taken off
    norm_kind: str = choice("layer", "rms", affects="model")
    norm_bias: bool = setting(True, "model")  # of all layer norms
    dense_bias: bool = setting(True, "model")  # of all dense layers but classifiers
    # with dense_bias, what has no bias all the same: "layers", or "wide", the first products of feed-forward blocks
    unbiased: str = choice("none", "layers", "wide", affects="model")
    # or "gated": the activation is multiplied by a second product
    feed_forward: str = choice("plain", "gated", affects="model")
    # groups of consecutive layers that share their parameters; 0 gives each layer its own
    layer_groups: int = _count(0, least=0)
    # with two dense layers before the logits of words, the width of the first, if not hidden_size
    prediction_size: int = _count(0, least=0)
    # width of the tables, if not hidden_size; a dense layer follows
    embedding_size: int = _count(0, least=0)
    # "gelu_tanh", as in Google's released code, "gelu_exact" (erf), as in its first version, "relu" or "silu"
    activation: str = choice("gelu_tanh", "gelu_exact", "relu", "silu", affects="model")
    # the same in heads; "usual" is `activation` before the logits of words, and the family's own before classifiers
    head_activation: str = choice(
        "usual", "gelu_tanh", "gelu_exact", "relu", "silu", affects="model"
    )
    hidden_dropout_rate: float = setting(0.1, most=MOST_DROPOUT)
    attention_dropout_rate: float = setting(0.1, most=MOST_DROPOUT)
    initializer_stddev: float = 0.02
    # "same" for all matrices, or "depth": 1 / sqrt(2 num_layers) of it for the last matrix of a block, and 1 / sqrt(H)
    # for classifiers
    initializer: str = choice("same", "depth")
    layer_norm_epsilon: float = setting(1e-12, "model", least=ABOVE_0, most=1)
    # the embedding table is padded with zero rows to a multiple of this
    vocab_multiple: int = _count(128)
    # "float32" or "bfloat16", the type of activations and matrix products. Parameters, norms, softmax and losses stay
    # float32. "auto", for runs alone, is bfloat16 on TPUs and on NVIDIA GPUs from Ampere on.
    # "float64", for functions alone, tells derivatives from differences; it needs jax_enable_x64.
    compute_dtype: str = choice("float32", "bfloat16", "auto", "float64")
    # "default" multiplies float32 matrices in one bfloat16 pass on TPUs and in TF32 on recent GPUs. "highest" uses
    # float32 throughout, several times as slow there. On a CPU both use float32.
    matmul_precision: str = choice("default", "highest")
    # "float32" or "bfloat16", the type of the gradients that devices sum. "bfloat16" halves the communication; each
    # gradient is rounded once.
    gradient_dtype: str = choice("float32", "bfloat16")
    # "plain" or "fused"; "fused" uses a kernel on TPUs and on NVIDIA GPUs (Ampere or newer) that does not store the
    # attention scores, and computes the same function without the kernel elsewhere. Either way, rows of more than 1,024
    # tokens, and local layers of rows longer than three windows, are computed in blocks: no whole scores are stored.
    # "auto", for runs alone, is fused where compute_dtype=auto is bfloat16.
    attention: str = choice("plain", "fused", "auto")
    # what the backward pass recomputes: "none", "dots" (all but matmuls) or "full". "auto", for runs alone, is the
    # least that fits into the memory of a device.
    remat: str = choice("none", "dots", "full", "auto", affects="work")
    # Layers per iteration of the scan. Unrolling all layers moves fewer bytes, but takes longer to compile.
    # 0 takes all, on a TPU up to 12 layers and on a GPU up to 24; for more, and with rematerialization, it takes 1.
    unroll: int = setting(0, "work")
    # the paper's left-to-right model: a token sees only itself and earlier ones, and predicts the next
    causal: bool = False

    @staticmethod
    def of(size: str) -> "ModelConfig":
        """Returns the model of a released size: "base", "large", "modernbert-base", ... without its vocabulary.

        Raises: InputError with the names there are.
        """
        return model_size(size)

    def layers_at_once(self, platform: str) -> int:
        """Returns the layers per iteration of the scan on "cpu", "gpu" or "tpu": `unroll`, or what 0 stands for.

        With rematerialization that is 1: XLA may merge what unrolled layers recompute with the first computation.
        """
        if self.unroll:
            return min(self.unroll, self.num_layers)
        fast_enough = platform == "cpu" or self.num_layers <= MOST_UNROLLED.get(platform, 1)
        return self.num_layers if fast_enough and self.remat == "none" else 1

    def computing_in(self, dtype: str) -> "ModelConfig":
        """Returns this model with another compute dtype, without what that dtype does not allow."""
        gradients = self.gradient_dtype if dtype == "bfloat16" else "float32"
        precision = self.matmul_precision if dtype == "float32" else "default"
        return dataclasses.replace(
            self, compute_dtype=dtype, gradient_dtype=gradients, matmul_precision=precision
        )

    @property
    def wide_dtype(self) -> str:
        """The type of norms, softmax and losses."""
        return "float64" if self.compute_dtype == "float64" else "float32"

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the word embedding table."""
        return -(-self.vocab_size // self.vocab_multiple) * self.vocab_multiple

    @property
    def head_size(self) -> int:
        return self.hidden_size // self.num_heads

    @property
    def key_size(self) -> int:
        """Columns of keys and of values."""
        return (self.num_key_heads or self.num_heads) * self.head_size

    @property
    def embedding_width(self) -> int:
        """Columns of the embedding tables."""
        return self.embedding_size or self.hidden_size

    @property
    def widens_embeddings(self) -> bool:
        """Whether a dense layer follows the tables: where they are narrower, and always in ALBERT."""
        is_wide = self.embedding_width == self.hidden_size
        return bool(self.embedding_size) and (not is_wide or self.layer_groups > 0)

    @property
    def num_stacked(self) -> int:
        """Layers that have parameters of their own: the length of stacks of parameters."""
        return self.layer_groups or self.num_layers

    @property
    def block(self) -> Block:
        """What stands before a classifier's logits."""
        block = BLOCKS[self.family]
        is_usual = self.head_activation == "usual"
        return block if is_usual else block._replace(activation=self.head_activation)

    @property
    def words_activation(self) -> str:
        """The activation before the logits of words."""
        return self.activation if self.head_activation == "usual" else self.head_activation

    @property
    def word_sizes(self) -> dict[str, int]:
        """The widths of two dense layers before the logits of words."""
        return {"transform": self.prediction_size or self.hidden_size, "second": self.hidden_size}

    @property
    def layer_bias(self) -> bool:
        """Whether dense layers of the layers have a bias, as far as there is no narrower rule."""
        return self.dense_bias and self.unbiased != "layers"

    @property
    def wide_bias(self) -> bool:
        """Whether the first products of a feed-forward block have a bias."""
        return self.layer_bias and self.unbiased != "wide"

    @property
    def has_kernels(self) -> bool:
        """Whether attention is that of kernels, where there are any."""
        return self.attention == "fused" and self.score_bias == "none"

    @property
    def distance_products(self) -> tuple[str, ...]:
        """What vectors of distances become: keys, with which queries are multiplied, queries, or both."""
        if self.score_bias != "vectors":
            return ()
        return {"queries": ("key",), "keys": ("query",)}.get(self.distance_terms, ("key", "query"))

    @property
    def num_local(self) -> int:
        """Layers that see a window alone."""
        return (
            self.num_layers - len(range(self.global_first, self.num_layers, self.global_every))
            if self.window
            else 0
        )

    @property
    def output_stddev(self) -> float:
        """The deviation of the initial last matrix of a block."""
        return self.initializer_stddev * (
            (2 * self.num_layers) ** -0.5 if self.initializer == "depth" else 1
        )

    @property
    def classifier_stddev(self) -> float:
        return self.hidden_size**-0.5 if self.initializer == "depth" else self.initializer_stddev

    def rules(self) -> Rules:
        yield (
            self.position_offset and self.positions != "learned",
            f"model.position_offset {self.position_offset} needs model.positions=learned",
        )
        yield (
            self.unbiased != "none" and not self.dense_bias,
            f"model.unbiased {self.unbiased} needs model.dense_bias=True",
        )
        yield (
            self.gradient_dtype == "bfloat16" and self.compute_dtype == "float32",
            "model.gradient_dtype bfloat16 needs model.compute_dtype=bfloat16; set both, or neither",
        )
        yield (
            self.matmul_precision == "highest" and self.compute_dtype == "bfloat16",
            "model.matmul_precision highest needs model.compute_dtype=float32; set both, or neither",
        )
        yield (
            self.hidden_size % self.num_heads,
            f"model.hidden_size {self.hidden_size} is not divisible by model.num_heads {self.num_heads}; "
            f"use {nearest_multiples(self.hidden_size, self.num_heads)}",
        )
        yield (
            self.num_heads % (self.num_key_heads or 1),
            f"model.num_heads {self.num_heads} is not divisible by model.num_key_heads {self.num_key_heads}; "
            f"use {nearest_multiples(self.num_heads, self.num_key_heads or 1)}",
        )
        yield (
            self.norm_kind == "rms" and self.norm_bias,
            "model.norm_kind rms has no bias; set model.norm_bias=False",
        )
        yield (
            self.norm == "before_all" and self.embedding_size,
            f"model.embedding_size {self.embedding_size} needs another model.norm than before_all",
        )
        yield (
            self.num_layers % self.num_stacked,
            f"model.num_layers {self.num_layers} is not divisible by model.layer_groups {self.layer_groups}; "
            f"use {nearest_multiples(self.num_layers, self.num_stacked)}",
        )
        yield (
            self.global_first >= self.global_every,
            f"model.global_first {self.global_first} is not below model.global_every {self.global_every}; lower it",
        )
        yield (
            self.prediction_size and self.block.word_layers != 2,
            f"model.prediction_size {self.prediction_size} needs a model.family with two dense layers before words",
        )
        yield (
            self.layer_groups and self.window,
            f"model.layer_groups {self.layer_groups} needs model.window=0, as layers that share are all alike",
        )
        yield (
            self.score_bias == "vectors" and self.num_key_heads,
            f"model.num_key_heads {self.num_key_heads} needs another model.score_bias than vectors; use 0",
        )
        yield (
            self.score_bias == "vectors" and self.distance_buckets % 2,
            f"model.distance_buckets {self.distance_buckets} is odd, and half of them are of short distances",
        )
        yield (
            self.score_bias == "vectors"
            and self.farthest_distance - 1 <= self.distance_buckets // 2,
            f"model.farthest_distance {self.farthest_distance} leaves no distances to share the other half of "
            f"model.distance_buckets {self.distance_buckets}; use {self.distance_buckets // 2 + 2} or more",
        )
        yield (
            self.positions == "rotary" and self.head_size % 2,
            f"model.positions rotary turns pairs, and heads have {self.head_size} numbers",
        )


def check_has_words(model: ModelConfig) -> None:
    """Raises: InputError if the model has no words, as before a run takes their number from its data."""
    if not model.vocab_size:
        raise InputError(
            "model.vocab_size is 0, and a model has words; give it the tokenizer's vocab_size"
        )


def check_type_ids(model: ModelConfig, largest: int, what: str) -> None:
    """Raises: InputError if `largest`, the largest type id in `what`, is not below the model's type_vocab_size.

    BERT's relatives without types, or with a single one, tell texts apart by the tokens between them.
    """
    if largest >= model.type_vocab_size and (model.family == "bert" or model.type_vocab_size > 1):
        few = f"model.type_vocab_size {model.type_vocab_size}, too few to tell them apart"
        raise InputError(
            f"{what} has pairs of texts, and the model has {few}; use a model with {largest + 1}"
        )


def _size(layers: int, hidden: int) -> ModelConfig:
    """Returns one of Google's shapes: heads of 64 and a feed-forward block of 4 x hidden."""
    return ModelConfig(
        hidden_size=hidden,
        num_layers=layers,
        num_heads=max(1, hidden // 64),
        intermediate_size=4 * hidden,
    )


# Google's 24 miniatures by layers and width, and the names of the released sizes. Source: google-research/bert README.
MINIATURES: dict[str, ModelConfig] = {
    f"L{layers}_H{hidden}": _size(layers, hidden)
    for layers in (2, 4, 6, 8, 10, 12)
    for hidden in (128, 256, 512, 768)
}
MODEL_SIZES: dict[str, ModelConfig] = {
    "tiny": _size(2, 128),
    "mini": _size(4, 256),
    "small": _size(4, 512),
    "medium": _size(8, 512),
    "base": _size(12, 768),
    "large": _size(24, 1024),
} | MINIATURES
MODEL_SIZES |= {
    name: dataclasses.replace(MODEL_SIZES[size], **changes)
    for name, (size, changes) in RELATIVES.items()
}


def model_size(name: str) -> ModelConfig:
    """Returns the model of that name. Raises: InputError with the names there are."""
    if name not in MODEL_SIZES:
        raise InputError(
            f"there is no model size {name!r}{suggest(name, MODEL_SIZES)}, but {', '.join(MODEL_SIZES)}"
        )
    return MODEL_SIZES[name]


def model_of_run(name: str) -> ModelConfig:
    """Returns the model of that name, with what the devices of a run decide left open. Raises: as `model_size`."""
    return left_open(model_size(name))


def left_open(model: ModelConfig = ModelConfig()) -> ModelConfig:
    """Returns a model whose types, attention and rematerialization a run chooses by its devices."""
    return dataclasses.replace(model, compute_dtype="auto", attention="auto", remat="auto")
