# SPDX-License-Identifier: Apache-2.0
"""The settings of fine-tuning, with their defaults and rules.

Sections that pre-training has too (optimizer, mesh, checkpoints, reports) are defined in `pretraining`.
"""

import dataclasses
import json
import string
from dataclasses import dataclass, field

from bert_jax.errors import InputError, shown
from bert_jax.settings.model import MOST_DROPOUT, MOST_ROWS, ModelConfig
from bert_jax.settings.pretraining import (
    CheckpointConfig,
    EvalConfig,
    MeshConfig,
    OptimizerConfig,
    ReportConfig,
    TeacherConfig,
    microbatches,
)
from bert_jax.settings.rules import (
    ABOVE_0,
    MOST_BATCH,
    MOST_FLOAT,
    MOST_RATE,
    MOST_STEPS_PER_CALL,
    Rules,
    Section,
    check_types,
    choice,
    numbers_of,
    setting,
)


@dataclass(frozen=True)
class ProbeConfig(Section):
    """A probe trained on the features of an encoder (paper, section 5.3), instead of the usual head."""

    # "" fine-tunes; or embeddings last second_to_last weighted_last4 concat_last4 weighted_all
    features: str = choice(
        "", "embeddings", "last", "second_to_last", "weighted_last4", "concat_last4", "weighted_all"
    )
    # model on top of the features: "bilstm", or "linear" for a classifier alone
    kind: str = choice("bilstm", "linear")
    num_layers: int = setting(2, least=1, most=100)  # layers of the BiLSTM
    # width of the BiLSTM, in each direction
    hidden_size: int = setting(768, least=1, most=MOST_ROWS)
    # train the encoder too (paper, Table 5, + BiLSTM); if not, it stays frozen
    train_encoder: bool = False

    def rules(self) -> Rules:
        yield (
            self.train_encoder and not self.features,
            "task.probe.train_encoder needs task.probe.features, which says what a probe reads",
        )


OF_SCORES = ("margin_mse", "kl")  # losses that are learnt from a teacher's scores in the data
POOLINGS = ("mean", "cls", "last", "max", "sqrt", "weighted")
# of each kind of embedding model; the first is its default
_POOLINGS = {"dense": POOLINGS, "sparse": ("max", "sum"), "multi_vector": POOLINGS}


@dataclass(frozen=True)
class EmbeddingConfig(Section):
    """How a text becomes a vector, and what is learnt of vectors."""

    # "dense", one vector; "sparse" (SPLADE), a weight for each word of the vocabulary; or "multi_vector" (ColBERT), a
    # vector for each token of the last layer, after a dense layer without a bias: a passage's score is the sum over a
    # query's tokens of the largest product with a token of it
    kind: str = choice("dense", "sparse", "multi_vector")
    # of the last layer: "mean" of the tokens, "cls" the first, "last" the last, "max" the largest numbers, "sqrt" the
    # sum over the root of the count, "weighted" the mean by place; several with commas stand side by side; "" is mean.
    # sparse: "max" or "sum" of a word's weights at all tokens; "" is max
    pooling: str = ""
    # numbers of a vector after a dense layer; 0 has no such layer
    projection_size: int = setting(0, most=MOST_ROWS)
    # of that layer, "tanh", "relu", "gelu" or "none"
    projection_activation: str = choice("tanh", "relu", "gelu", "none")
    normalize: bool = True  # vectors have length 1
    # leading numbers of a vector that are kept, after that; 0 keeps all
    kept_dimensions: int = setting(0, most=MOST_ROWS)
    # sparse: how often log(1 + x) is taken of a logit above 0
    log_times: int = setting(1, least=1, most=2)
    # sparse: largest weights of a text that are kept where texts are found; 0 keeps all
    max_terms: int = setting(0, most=MOST_ROWS)
    # sparse: a query has the weights that its tokens have in a table, which is trained too, and needs no model
    query_table: bool = False
    # multi_vector: most tokens of a query, [CLS], [SEP] and prompt included; passages have task.max_seq_length
    query_length: int = setting(32, least=5, most=MOST_ROWS)
    # multi_vector: queries of fewer tokens are filled up to so many, but no more than query_length, with [MASK], whose
    # vectors count; 0 fills none
    query_expansion: int = setting(32, most=MOST_ROWS)
    expansion_is_seen: bool = False  # whether other tokens attend to these
    # multi_vector: tokens of passages whose vectors do not count, "punctuation", or as JSON: [".", "the"]; "" is none
    skipped_words: str = "punctuation"
    # written before an anchor or query, and before both texts of a graded pair
    query_prompt: str = ""
    passage_prompt: str = ""  # written before what is found: positives and negatives
    other_prompts: str = ""  # prompts by other names, as JSON: {"clustering": "cluster: "}
    # name of the prompt of texts that are said to be neither queries nor passages
    default_prompt: str = ""
    # whether what is at its default above comes from an embedding model that a run starts from; if not, it is as above
    from_start: bool = True
    # columns of hard negatives, separated by commas; "" takes the usual names
    negative_columns: str = ""
    # "infonce" (in-batch negatives), "gist" (the same, without what a teacher finds too near), "triplet" (hard
    # negatives alone), "cosent" or "cosine" (graded pairs), "margin_mse" or "kl" (a teacher's scores of an example's
    # texts, from the data); "" takes infonce, or cosent for graded pairs
    loss: str = choice("", "infonce", "gist", "triplet", "cosent", "cosine", "margin_mse", "kl")
    # infonce, gist, cosent: cosines are divided by it
    temperature: float = setting(0.05, least=1e-5, most=1e15)
    both_directions: bool = False  # infonce: anchors are found by their positives too
    # gist: how far below the positive's cosine, by the teacher, a negative's has to be
    guide_margin: float = setting(0.0, least=-2, most=2)
    # triplet: how much farther than the positive a negative is to be
    margin: float = setting(1.0, least=1e-15, most=1e15)
    # cosine: the score of texts that say the same; scores are divided by it
    best_score: float = setting(1.0, least=1e-15, most=1e15)
    dimensions: str = ""  # Matryoshka: leading dimensions that have the loss too, such as 64,128
    # sparse and multi_vector, in place of `temperature`: products, or sums of them, are divided by it
    dot_temperature: float = setting(1.0, least=1e-5, most=1e15)
    # sparse: what the sum over words of the square of the mean weight in passages is worth in the loss (FLOPS)
    passage_flops: float = setting(3e-5, most=1e15)
    query_flops: float = setting(5e-5, most=1e15)  # the same of queries, unless they have a table
    # sparse: a passage with no more words than this counts as one without words there
    passage_least: int = setting(0, most=MOST_ROWS)
    query_least: int = setting(0, most=MOST_ROWS)  # the same of queries
    # sparse: share of the steps over which both rise from 0 to these numbers, by the square
    flops_rise: float = setting(0.333333333333, most=1)

    def rules(self) -> Rules:
        yield (
            self.kind == "multi_vector"
            and (self.pooling not in ("", "mean") or self.kept_dimensions or self.dimensions),
            "embedding.pooling, kept_dimensions and dimensions are of one vector; leave them out of kind=multi_vector",
        )
        yield (
            self.kind == "multi_vector"
            and (self.loss not in ("", "infonce", *OF_SCORES) or self.both_directions),
            "embedding.kind multi_vector has the losses infonce, in one direction, margin_mse and kl; leave out others",
        )
        self.skipped()
        is_sparse = self.kind == "sparse"
        known = _POOLINGS[self.kind]
        for name in self.poolings():
            others = f"use some of {', '.join(known)}"
            yield name not in known, f"embedding.pooling {name!r} is unknown; {others}"
        dense = self.projection_size or self.kept_dimensions or self.dimensions
        yield (
            is_sparse and dense,
            "embedding.projection_size, kept_dimensions and dimensions are of dense vectors; leave them out",
        )
        yield (
            is_sparse and (len(self.poolings()) > 1 or self.loss in ("cosine", "gist")),
            "embedding.kind sparse has one pooling, and no loss cosine or gist; choose another",
        )
        yield (
            not is_sparse and (self.query_table or self.max_terms or self.log_times > 1),
            "embedding.query_table, max_terms and log_times are of sparse vectors; add embedding.kind=sparse",
        )
        names = ", ".join(self.prompts())
        yield (
            self.default_prompt not in ("", *self.prompts()),
            f"embedding.default_prompt {self.default_prompt!r} is not one of {names}",
        )
        self.sizes()

    def poolings(self) -> list[str]:
        """Returns the names of what stands side by side in a vector."""
        return (self.pooling or _POOLINGS[self.kind][0]).split(",")

    def divisor(self) -> float:
        """Returns what the scores of vectors are divided by."""
        return self.temperature if self.kind == "dense" else self.dot_temperature

    def filled_length(self) -> int:
        """Returns the tokens that queries are filled up to; 0 fills none."""
        return min(self.query_expansion, self.query_length)

    def skipped(self) -> list[str]:
        """Returns the tokens that do not count in passages. Raises: InputError if `skipped_words` is no list."""
        if self.skipped_words == "punctuation":
            return list(string.punctuation)
        try:
            words = json.loads(self.skipped_words or "[]")
        except (ValueError, RecursionError):
            words = None
        if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
            raise InputError(
                f"embedding.skipped_words {shown(self.skipped_words)} is no list of tokens; give punctuation, or as "
                'JSON [".", "the"]'
            )
        return words

    def prompts(self) -> dict[str, str]:
        """Returns all prompts by name. Raises: InputError if `other_prompts` is not such an object."""
        try:
            others = json.loads(self.other_prompts or "{}")
        except (ValueError, RecursionError):
            others = None
        if not isinstance(others, dict) or not all(
            isinstance(text, str) for text in others.values()
        ):
            example = '{"clustering": "cluster: "}'
            raise InputError(
                f"embedding.other_prompts {shown(self.other_prompts)} is not an object such as {example}"
            )
        return others | {
            "query": self.query_prompt,
            "passage": self.passage_prompt,
            "document": self.passage_prompt,
        }

    def vector_size(self, hidden_size: int) -> int:
        """Returns how many numbers a vector has, given those of a token's."""
        size = self.projection_size or hidden_size * len(self.poolings())
        return min(size, self.kept_dimensions or size)

    def sizes(self) -> tuple[int, ...]:
        """Returns the numbers of leading dimensions of Matryoshka, () without."""
        numbers = numbers_of(self.dimensions, "embedding.dimensions", "64,128", 1, 1 << 20)
        return tuple(map(int, numbers))


@dataclass(frozen=True)
class RankingConfig(Section):
    """What a reranker learns of the candidates of a query."""

    # of all candidates of a query "softmax" (its grades are shares), "listnet" (the softmax of its grades) or "ranknet"
    # (pairs of them); of each by itself "bce" (grades from 0 to 1) or "mse"; "margin_mse": how far the first is above
    # each other
    loss: str = choice("softmax", "listnet", "ranknet", "bce", "margin_mse", "mse")
    # what another search has found, as a TREC run: the candidates of the queries of a dev or test set in BEIR's layout
    run: str = ""
    candidates: int = setting(100, least=1)  # passages of it for each query, the first


@dataclass(frozen=True)
class TaskConfig(Section):
    """The task. A fine-tuned model is saved with these settings, and uses them to predict."""

    # one of cola sst2 mrpc stsb qqp mnli qnli rte wnli ax classification regression multilabel squad1 squad2 choice ner
    # embeddings reranking
    name: str = ""
    # tokens of a row; longer inputs are truncated, or cut into windows (squad). embeddings: 0 takes the length of an
    # embedding model that a run starts from, or 128
    max_seq_length: int = 128
    # column of the text in your own tables or JSON lines; of files in columns (ner) its number, from 1; "" takes the
    # task's, the usual names, or the first
    text_column: str = ""
    second_text_column: str = ""  # column of the second text of a pair
    # regression: what `predict` makes of the number, "" nothing, or "sigmoid", "tanh", "relu", as rerankers of
    # sentence-transformers name it; training has the number itself
    activation: str = choice("", "sigmoid", "tanh", "relu")
    # classification, regression, multilabel: 1, or 2 for pairs; 0 takes what the training data have
    num_texts: int = setting(0, most=2)
    # column of the label; of files in columns (ner) its number, "" takes the last
    label_column: str = ""
    # the classes in order, separated by commas; "" takes those of the training data, sorted
    labels: str = ""
    # multilabel: what parts the labels of a text in one column; lists need none
    label_separator: str = ","
    # multilabel: the least probability of each label, in order, separated by commas; "" chooses them on dev
    thresholds: str = ""
    # classification: what the examples of each class weigh in the loss, as in "1,4.5", or "balanced"; "" is 1
    class_weights: str = ""
    # classification: share of a label that is given to all classes alike, in training
    label_smoothing: float = setting(0.0, most=MOST_RATE)
    metric: str = ""  # metric that selects the best checkpoint; "" takes the task's
    # ner: fill each row with surrounding sentences, without labels (paper, 5.3)
    document_context: bool = False
    # squad: tokens from the start of a window to the start of the next
    doc_stride: int = setting(128, least=1)
    # squad: longest question, in tokens; the rest is cut off
    max_query_length: int = setting(64, least=1)
    max_answer_length: int = setting(30, least=1)  # squad: longest answer, in tokens
    # squad: number of best starts and of best ends that are combined into spans
    num_best: int = setting(20, least=1)
    # squad2: no answer if null score - best span score is above this; chosen on dev
    null_threshold: float = setting(0.0, least=-MOST_FLOAT)
    probe: ProbeConfig = field(default_factory=ProbeConfig)
    embedding: EmbeddingConfig = field(default_factory=EmbeddingConfig)
    ranking: RankingConfig = field(default_factory=RankingConfig)

    def rules(self) -> Rules:
        yield (
            self.name != "embeddings" and not self.max_seq_length,
            "task.max_seq_length is 0; give the tokens of a row, such as 128",
        )
        yield (
            not self.label_separator,
            "task.label_separator is empty; give what parts labels, such as , or |",
        )
        numbers_of(self.thresholds, "task.thresholds")
        if self.class_weights != "balanced":
            numbers_of(self.class_weights, "task.class_weights")
        yield not self.name, "task.name is empty; give a task, such as --config=finetune:sst2"


@dataclass(frozen=True)
class FinetuneModelConfig(Section):
    """Settings of the pre-trained model that fine-tuning may change."""

    hidden_dropout_rate: float = setting(0.1, most=MOST_DROPOUT)
    attention_dropout_rate: float = setting(0.1, most=MOST_DROPOUT)
    # "auto" is bfloat16 on TPUs and on NVIDIA GPUs from Ampere on, and float32 elsewhere
    compute_dtype: str = choice("auto", "float32", "bfloat16")
    # "default" or "highest", as in pre-training
    matmul_precision: str = choice("default", "highest")
    attention: str = choice("auto", "plain", "fused")  # as in pre-training
    remat: str = choice("auto", "none", "dots", "full", affects="work")
    unroll: int = setting(0, "work")

    def rules(self) -> Rules:
        return dataclasses.replace(ModelConfig(), **dataclasses.asdict(self)).rules()


@dataclass(frozen=True)
class FinetuneDataConfig(Section):
    """The data of the task: a directory or file in the task's format, or tfds:NAME."""

    source: str = setting("", "place")
    path: str = setting("", "place")  # another name for source
    # examples (squad: windows) of the global batch
    batch_size: int = setting(32, least=1, most=MOST_BATCH)
    seed: int = 0  # random seed of the order of the examples
    # several examples per row, in random batches: "on", "off", or "auto" (if it takes fewer FLOPs)
    pack: str = choice("auto", "on", "off")
    # if batches are not packed: group examples of similar length, to save padding
    bucket: bool = True
    # of prepared pairs with several sources: each batch has pairs of one, so that its negatives are of a kind
    source_batches: bool = False
    # of prepared pairs: "on" reads rows in blocks during training, in an order made for it; "off" copies what is behind
    # a URL before training; "auto" is "on" for data behind a URL that are larger than the cache
    stream: str = choice("auto", "on", "off")
    # megabytes of streamed rows that are shuffled together, over all sources
    window_mb: float = setting(1024.0, least=ABOVE_0)
    # gigabytes of the local disk of each process for streamed rows
    cache_gb: float = setting(16.0, "nothing", least=ABOVE_0)

    def rules(self) -> Rules:
        yield (
            not self.source and not self.path,
            "data.path is empty; give --config.data.path=DIR, TRAIN_FILE,DEV_FILE or tfds:NAME",
        )
        yield (
            self.source and self.path and self.source != self.path,
            f"data.source {self.source} and data.path {self.path} name two places; give one of them",
        )


@dataclass(frozen=True)
class FinetuneTrainConfig(Section):
    """The length of training, and how a step is computed."""

    num_epochs: float = setting(3.0, "end", least=ABOVE_0, most=1e6)
    # evaluations without a better one after which the run ends; 0 goes on. The learning rate is that of num_epochs all
    # the same, so it is not yet 0 then
    patience: int = setting(0, "end")
    # microbatches per step; 0 takes as few as fit into the memory of a device
    accumulate: int = setting(0, "work")
    # seconds without progress after which the run ends; 0 disables
    hang_seconds: int = setting(3600, "nothing")
    # steps that the host dispatches in one call, if their batches have the same shape, as packed ones do. Use a divisor
    # of report.every_steps: around a report, an evaluation or a save, steps are dispatched one by one
    steps_per_call: int = setting(1, "work", least=1, most=MOST_STEPS_PER_CALL)
    seed: int = 0  # random seed of the new head's parameters and of dropout


@dataclass(frozen=True)
class SweepConfig(Section):
    """A grid of runs in one command. The model of the best run is kept."""

    # number of seeds: N runs with train.seed and data.seed 0 .. N - 1; 0 is one run with the given seeds
    seeds: int = 0
    # learning rates of the grid, separated by commas; "" takes optimizer.learning_rate
    learning_rates: str = ""

    def rules(self) -> Rules:
        self.rates()
        return ()

    @property
    def is_grid(self) -> bool:
        """Whether this is a grid, and not a single run."""
        return bool(self.seeds or self.learning_rates)

    def rates(self) -> tuple[float, ...]:
        """Returns the learning rates of the grid; () stands for optimizer.learning_rate."""
        return numbers_of(
            self.learning_rates, "sweep.learning_rates", "5e-5,3e-5", ABOVE_0, MOST_FLOAT
        )


@dataclass(frozen=True)
class FinetuneConfig(Section):
    """A fine-tuning run."""

    task: TaskConfig = field(default_factory=TaskConfig)
    model: FinetuneModelConfig = field(default_factory=FinetuneModelConfig)
    data: FinetuneDataConfig = field(default_factory=FinetuneDataConfig)
    optimizer: OptimizerConfig = field(
        default_factory=lambda: OptimizerConfig(learning_rate=5e-5, warmup_steps=0, warmup_rate=0.1)
    )
    train: FinetuneTrainConfig = field(default_factory=FinetuneTrainConfig)
    # 0 evaluates after each epoch
    eval: EvalConfig = field(default_factory=lambda: EvalConfig(every_steps=0))
    mesh: MeshConfig = field(default_factory=MeshConfig, metadata={"affects": "work"})
    checkpoint: CheckpointConfig = field(  # 0 saves with evaluation
        default_factory=lambda: CheckpointConfig(every_steps=0), metadata={"affects": "nothing"}
    )
    report: ReportConfig = field(default_factory=ReportConfig, metadata={"affects": "nothing"})
    sweep: SweepConfig = field(default_factory=SweepConfig, metadata={"affects": "nothing"})
    teacher: TeacherConfig = field(default_factory=TeacherConfig)
    # a pre-trained model in any format; random:PATH takes only its shape and tokenizer
    init_checkpoint: str = ""

    def resolved(self) -> "FinetuneConfig":
        """Returns the settings with those that follow from others: a probe freezes the encoder, unless it trains it."""
        probe = self.task.probe
        if not probe.features or probe.train_encoder or self.optimizer.freeze_encoder:
            return self
        return dataclasses.replace(
            self, optimizer=dataclasses.replace(self.optimizer, freeze_encoder=True)
        )

    def validate(self) -> None:
        """Raises: InputError at the first setting that breaks a rule."""
        check_types(self)
        super().validate()

    def rules(self) -> Rules:
        task = self.task
        others = "stsb regression multilabel squad1 squad2 choice ner embeddings reranking".split()
        yield (  # nothing would change
            (task.class_weights or task.label_smoothing) and task.name in others,
            "task.class_weights and label_smoothing are for texts of one class each; leave them out",
        )
        yield (
            self.checkpoint.keep_words,
            "checkpoint.keep_words is for pre-training; keep revisions by checkpoint.keep_every",
        )
        yield (
            not self.init_checkpoint,
            "init_checkpoint is empty; give --config.init_checkpoint=PATH, a pre-trained model",
        )
        yield (
            self.data.pack == "on" and task.probe.features and task.probe.kind == "bilstm",
            "a BiLSTM would run from one example of a row into the next; set data.pack=off",
        )
        is_guided = task.name == "embeddings" and task.embedding.loss == "gist"
        yield (
            is_guided and not self.teacher.checkpoint,
            "embedding.loss gist needs a teacher; give teacher.checkpoint, a model of vectors",
        )
        yield (
            is_guided and self.teacher != TeacherConfig(checkpoint=self.teacher.checkpoint),
            "teacher.weight and temperature are for what is learnt from a teacher, and gist only asks it; leave them "
            "out",
        )
        yield (
            is_guided and task.embedding.both_directions,
            "embedding.both_directions is for infonce; leave it out with gist",
        )
        has_negatives = task.name == "embeddings" and task.embedding.loss in ("", "infonce", "gist")
        yield (
            has_negatives and self.data.batch_size == 1,
            "data.batch_size 1 has nothing that an anchor is told apart from; use more, such as 128",
        )
        yield microbatches("data.batch_size", self.data.batch_size, self.train.accumulate)
