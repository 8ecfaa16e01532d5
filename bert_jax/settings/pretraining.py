# SPDX-License-Identifier: Apache-2.0
"""The settings of pre-training, with their defaults and rules. Defaults are written here and nowhere else.

A configuration is a frozen dataclass of frozen dataclasses. A file in `configs/` sets only what its experiment
changes; `--config.section.key=value` changes one more setting. Sizes are global: `batch_size` counts the rows of
the global batch, on any number of devices.
"""

import math
from dataclasses import dataclass, field, replace
from typing import NewType

from bert_jax.settings.model import ModelConfig, left_open
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
    nearest_multiples,
    numbers_of,
    setting,
    step_range,
)


@dataclass(frozen=True)
class DataConfig(Section):
    """The training data, a directory made by prepare_corpus."""

    path: str = setting("", "place")
    batch_size: int = setting(256, least=1, most=MOST_BATCH)  # rows of the global batch
    seed: int = 0  # random seed of the order of the rows
    # check the checksum of every shard before the first step, or of each block when it is read
    verify: bool = setting(True, "nothing")
    # "on" reads rows in blocks during training, in an order made for streaming; "off" copies data behind a URL before
    # training; "auto" is "on" for data behind a URL that are larger than the cache (docs/decisions/0022-streaming.md)
    stream: str = choice("auto", "on", "off")
    # maximum number of streams per batch; at least the number of processes that will ever be used
    streams: int = setting(256, least=1)
    # megabytes of rows that are shuffled together, over all streams
    window_mb: float = setting(1024.0, least=ABOVE_0)
    # gigabytes of the local disk of each process for streamed rows
    cache_gb: float = setting(16.0, "nothing", least=ABOVE_0)

    def rules(self) -> Rules:
        yield (
            not self.path,
            "data.path is empty; give --config.data.path=DIR, a directory made by prepare_corpus",
        )


@dataclass(frozen=True)
class MaskingConfig(Section):
    """How tokens are masked: which are predicted, and what replaces them. Source: paper, section 3.1 and Table 8."""

    # share of the tokens of a sequence to predict; [CLS] and [SEP] count as tokens
    rate: float = setting(0.15, most=1)
    # upper limit of predictions per sequence; 0 is as many as the rate asks for, rate x row length rounded up: 20 of
    # 128 tokens and 77 of 512 (the paper has 20 and 80)
    max_predictions: int = 0
    mask_rate: float = setting(0.8, most=1)  # share of the chosen tokens that become [MASK]
    # share of the chosen tokens that become a random token; the rest are kept
    random_rate: float = setting(0.1, most=1)
    # True gives a sequence the same mask in every epoch, as the paper's duplicates do
    static: bool = False
    # choose all tokens of a word or none; words that exceed the limit are skipped
    whole_word: bool = False
    # with whole_word: longest run of masked words; the probability of n words is proportional to 1 / n
    max_ngram: int = setting(1, least=1, most=100)
    # share of the rows that are not masked but read from left to right: tokens that would be masked are predicted from
    # the token before them (docs/decisions/0006-what-is-predicted.md)
    causal_rate: float = setting(0.0, most=MOST_RATE)
    # the share to predict at the end of the run, to which `rate` falls evenly through all phases; 0 keeps `rate`
    end_rate: float = setting(0.0, most=1)
    seed: int = 0

    def limit(self, row_length: int) -> int:
        """Returns the upper limit of predictions per sequence in rows of `row_length` tokens."""
        return self.max_predictions or math.ceil(round(self.rate * row_length, 6))

    def most(self, row_length: int) -> int:
        """Returns the predictions of the longest sequence. Masks of one rate and one such number are equal."""
        return min(self.limit(row_length), max(1, round(self.rate * row_length)))

    def rules(self) -> Rules:
        yield (
            self.end_rate > self.rate,
            f"masking.end_rate {self.end_rate} is above masking.rate {self.rate}, from which it falls; set it lower",
        )
        yield (
            self.max_ngram > 1 and not self.whole_word,
            f"masking.max_ngram {self.max_ngram} needs masking.whole_word=True",
        )
        yield (
            self.mask_rate + self.random_rate > 1 + 1e-9,
            "masking.mask_rate + masking.random_rate is above 1; the rest of the tokens is kept",
        )


def microbatches(name: str, size: int, pieces: int) -> tuple[object, str]:
    """Returns the rule that a batch of `size` rows can be divided into so many microbatches; 0 are chosen later."""
    pieces = max(1, pieces)
    near = nearest_multiples(size, pieces)
    return size % pieces, f"{name} {size} is not divisible by accumulate {pieces}; use {near}"


def one_warmup(section: "OptimizerConfig | Phase2Config", name: str) -> tuple[object, str]:
    """Returns the rule that not both the rate and the steps of a warm-up are set."""
    return (
        section.warmup_rate and section.warmup_steps,
        f"{name}.warmup_rate and {name}.warmup_steps both set the warm-up; set one of them to 0",
    )


@dataclass(frozen=True)
class OptimizerConfig(Section):
    """BERT's AdamW, LAMB, StableAdamW or Muon, and Google's schedule.

    Source: google-research/bert optimization.py; You et al. 2019; Wortsman et al. 2023; Jordan et al. 2024.
    """

    # "adamw"; "lamb" for batches of tens of thousands, to use with bias_correction; "stable_adamw", which clips the
    # update of each parameter, to use with bias_correction and with clip_norm=0; or "muon", which makes updates of the
    # matrices inside layers orthogonal, of the size of AdamW's, and leaves the rest to AdamW
    name: str = choice("adamw", "lamb", "stable_adamw", "muon")
    learning_rate: float = 1e-4
    warmup_steps: int = 10_000
    # warm-up as a share of the run's steps, instead of warmup_steps, which must be 0 then
    warmup_rate: float = setting(0.0, most=MOST_RATE)
    # after warm-up: "linear" decay (`decay_power`), "cosine", or "stable", which falls at the end of the run alone
    schedule: str = choice("linear", "cosine", "stable")
    # exponent of the decay: the rate is proportional to (share of the steps that are left) ** decay_power. 1 is linear,
    # 0.5 is that of NVIDIA's LAMB recipe.
    decay_power: float = 1.0
    # with schedule=stable: share of the steps in which the rate falls, in the last phase
    decay_rate: float = setting(0.1, most=1)
    beta1: float = setting(0.9, most=MOST_RATE)
    beta2: float = setting(0.999, most=MOST_RATE)
    epsilon: float = setting(1e-6, least=ABOVE_0)
    weight_decay: float = 0.01
    clip_norm: float = 1.0  # largest norm of the gradient of the global batch; 0 disables clipping
    bias_correction: bool = False  # Adam's bias correction; Google's optimizer has none
    # parameters with LAMB's trust ratio: "decayed" (those with weight decay) or "all"
    trust_ratio_for: str = choice("decayed", "all")
    # "float32" or "bfloat16", the type of Adam's first moment, and of Muon's; the second stays float32
    state_dtype: str = choice("float32", "bfloat16")
    # ratio of a layer's learning rate to that of the one above; embeddings are below layer 0
    layer_decay: float = setting(1.0, least=ABOVE_0, most=1)
    freeze_encoder: bool = False  # train only the heads

    def warmup_of(self, num_steps: int) -> int:
        """Returns the steps of warm-up in a schedule of `num_steps`."""
        return self.warmup_steps or round(self.warmup_rate * num_steps)

    def rules(self) -> Rules:
        yield (
            self.name == "stable_adamw" and not self.bias_correction,
            "optimizer.name stable_adamw needs corrected moments; set optimizer.bias_correction=True",
        )
        yield (
            self.schedule != "linear" and self.decay_power != 1,
            f"optimizer.decay_power {self.decay_power} needs optimizer.schedule=linear",
        )
        yield one_warmup(self, "optimizer")


@dataclass(frozen=True)
class TrainConfig(Section):
    """The length of training, and how a step is computed."""

    num_steps: int = setting(1_000_000, "end", least=1)
    # microbatches per step; the result equals that of the whole batch. 0 takes as few as fit into a device's memory; on
    # TPUs more, so small that what a layer makes stays on the chip (docs/planner.md)
    accumulate: int = setting(0, "work")
    # train the next sentence head, if the data have labels; False is the paper's "No NSP"
    next_sentence: bool = True
    # seconds without progress after which the run ends; 0 disables
    hang_seconds: int = setting(3600, "nothing")
    # Shard the optimizer's state, its update and, between steps, the parameters over the "data" axis (ZeRO, stage 1).
    # "auto", for runs alone, is "on" on several GPUs that are all along "data", and on such TPUs for more than 12
    # layers; it is "off" elsewhere.
    zero1: str = choice("auto", "on", "off", affects="work")
    seed: int = 0  # random seed of the initial parameters and of dropout
    # steps that the host dispatches in one call, for models whose steps take less time than the host's work for them.
    # Use a divisor of report.every_steps: around a report, an evaluation or a save, steps are dispatched one by one
    steps_per_call: int = setting(1, "work", least=1, most=MOST_STEPS_PER_CALL)

    @property
    def microbatches(self) -> int:
        """Microbatches of a step, where nothing chose their number."""
        return max(1, self.accumulate)

    @property
    def divides_state(self) -> bool:
        """Whether `zero1` is on; it is not where nothing chose."""
        return self.zero1 == "on"


@dataclass(frozen=True)
class Phase2Config(Section):
    """A second phase after `train.num_steps`, and the settings that it changes (docs/decisions/0013-phases.md)."""

    # steps of this phase; 0 disables it, and the settings below are not used
    num_steps: int = setting(0, "end")
    # data made by prepare_corpus; if the path is the first phase's, this phase takes the next rows
    path: str = setting("", "place")
    # rows of the global batch; 0 takes data.batch_size
    batch_size: int = setting(0, most=MOST_BATCH)
    accumulate: int = setting(0, "work")  # microbatches per step; 0 takes train.accumulate
    # predictions per sequence; 0 takes masking.max_predictions, if that is 0 or rows have the same length
    max_predictions: int = 0
    # "restart" has a warm-up and a decay of its own; "continue" uses the schedule of `optimizer` for both phases
    schedule: str = choice("restart", "continue")
    # learning rate at the start of this phase's decay; 0 takes optimizer.learning_rate
    learning_rate: float = 0.0
    warmup_steps: int = 0
    # warm-up as a share of this phase's steps, instead of warmup_steps, which must be 0 then
    warmup_rate: float = setting(0.0, most=MOST_RATE)
    keep_moments: bool = True  # keep the moments of Adam; False starts them at zero

    def rules(self) -> Rules:
        yield one_warmup(self, "phase2")
        yield (
            self.schedule == "continue"
            and (self.learning_rate or self.warmup_steps or self.warmup_rate),
            "phase2.schedule continue has no learning_rate or warm-up of its own; set phase2's to 0",
        )
        yield (
            self.num_steps and not self.path,
            "phase2.path is empty; give a directory made by prepare_corpus, or phase2.num_steps=0",
        )


@dataclass(frozen=True)
class EvalConfig(Section):
    """When to evaluate. Each evaluation uses the whole held-out split."""

    # steps between evaluations; 0 evaluates at the end only
    every_steps: int = setting(10_000, "end")
    # rows of the global evaluation batch; 0 takes those of a microbatch. A batch of a task has at most as many tokens
    # as so many of the longest rows.
    batch_size: int = setting(0, "work", most=MOST_BATCH)

    def rows(self, batch_size: int, accumulate: int) -> int:
        """Returns the rows of an evaluation batch; training splits `batch_size` rows into `accumulate` microbatches."""
        return self.batch_size or batch_size // max(1, accumulate)


@dataclass(frozen=True)
class MeshConfig(Section):
    """The number of devices along each axis of the mesh; one axis may be -1, for all remaining devices."""

    data: int = setting(-1, least=-1)  # devices that divide the rows and replicate the parameters
    fsdp: int = setting(1, least=-1)  # devices that divide both the rows and the parameters
    # devices that divide the heads, the feed-forward blocks and the vocabulary
    tensor: int = setting(1, least=-1)
    # number of slices joined by the data center network (DCN). The data axis is divided over slices, so mesh.data must
    # be a multiple of this. 0 reads the number from the devices.
    dcn: int = 0

    def rules(self) -> Rules:
        sizes = (self.data, self.fsdp, self.tensor)
        yield (
            0 in sizes or sizes.count(-1) > 1,
            f"mesh (data, fsdp, tensor) = {sizes}; use sizes of 1 or more, and -1 at most once",
        )


@dataclass(frozen=True)
class CheckpointConfig(Section):
    """When checkpoints are saved, and which are kept."""

    every_steps: int = 1_000  # steps between saves; 0 saves at the end only
    # 2 at least: the run resumes from the second if the newest is damaged
    keep_last: int = setting(2, least=2)
    # number of checkpoints kept for the best held-out loss, besides the last ones; 0 disables
    keep_best: int = 1
    # steps between revisions: parameters only, from step 0 on, never deleted; 0 disables
    keep_every: int = 0
    # revisions of pre-training after these numbers of words of text too, such as "1e6,2e6,10e6"
    keep_words: str = ""

    def rules(self) -> Rules:
        self.words()
        return ()

    def words(self) -> tuple[float, ...]:
        """Returns the numbers of words after which revisions are kept, ascending."""
        return tuple(
            sorted(
                numbers_of(
                    self.keep_words, "checkpoint.keep_words", "1e6,10e6", ABOVE_0, MOST_FLOAT
                )
            )
        )


@dataclass(frozen=True)
class ReportConfig(Section):
    """Reports of the training run: metrics, the progress bar and profiles."""

    every_steps: int = setting(100, least=1)
    tensorboard: bool = True
    to: str = choice("", "wandb")  # "wandb" sends the metrics to Weights & Biases too
    progress: bool = True  # a progress bar, on a terminal only
    # "100:105" profiles steps 101 to 105; a file "profile_now" in the workdir profiles the next five
    profile_steps: str = ""

    def rules(self) -> Rules:
        step_range(self.profile_steps)
        return ()


@dataclass(frozen=True)
class TeacherConfig(Section):
    """Trained models whose outputs are learnt beside the labels. Source: Hinton et al. 2015."""

    checkpoint: str = ""  # in any format; several, separated by commas, are averaged; "" has none
    # by which the outputs of teacher and student are divided
    temperature: float = setting(1.0, least=1e-3, most=1e3)
    # of what the teacher says in the loss; 1 leaves out the labels
    weight: float = setting(0.5, least=ABOVE_0, most=1)


@dataclass(frozen=True)
class GeneratorConfig(Section):
    """A smaller model that fills in masks, so that the model learns which tokens were replaced (ELECTRA, DeBERTaV3)."""

    # its layers; 0 has no generator: the model itself predicts masked words
    num_layers: int = 0
    # its heads, each as wide as the model's, and so its width; 0 takes the model's
    num_heads: int = 0
    # "apart": the model's tables of embeddings are the generator's and a difference, which the model alone learns, as
    # in DeBERTaV3; "shared": both learn one, as in ELECTRA
    tables: str = choice("apart", "shared")
    # what the loss of replaced tokens is worth beside that of masked words
    weight: float = setting(50.0, least=ABOVE_0, most=1e6)

    def model_for(self, model: ModelConfig) -> ModelConfig:
        """Returns the generator of a model: tables of its width, and dense layers where its own is another."""
        heads = self.num_heads or model.num_heads
        width = heads * model.head_size
        tables = model.embedding_width
        return replace(
            model,
            hidden_size=width,
            num_layers=self.num_layers,
            num_heads=heads,
            num_key_heads=0,
            layer_groups=min(1, model.layer_groups),
            intermediate_size=max(1, model.intermediate_size * heads // model.num_heads),
            embedding_size=model.embedding_size if width == tables else tables,
        )


@dataclass(frozen=True)
class PretrainConfig(Section):
    """A pre-training run."""

    model: ModelConfig = field(default_factory=left_open)
    data: DataConfig = field(default_factory=DataConfig)
    masking: MaskingConfig = field(default_factory=MaskingConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    phase2: Phase2Config = field(default_factory=Phase2Config)
    eval: EvalConfig = field(default_factory=EvalConfig)
    mesh: MeshConfig = field(default_factory=MeshConfig, metadata={"affects": "work"})
    checkpoint: CheckpointConfig = field(
        default_factory=CheckpointConfig, metadata={"affects": "nothing"}
    )
    report: ReportConfig = field(default_factory=ReportConfig, metadata={"affects": "nothing"})
    teacher: TeacherConfig = field(default_factory=TeacherConfig)
    generator: GeneratorConfig = field(default_factory=GeneratorConfig)
    # model to start from, with a new optimizer at step 0; "" initializes at random
    init_checkpoint: str = ""

    @property
    def data_paths(self) -> tuple[str, ...]:
        """The data of each phase."""
        return (self.data.path, self.phase2.path) if self.phase2.num_steps else (self.data.path,)

    @property
    def models(self) -> tuple[ModelConfig, ...]:
        """The model and, if there is one, its generator; the last predicts masked words."""
        generator = self.generator
        return (self.model, generator.model_for(self.model))[: 1 + (generator.num_layers > 0)]

    @property
    def in_memory(self) -> ModelConfig:
        """A model whose layers take the memory of those of all `models`."""
        return replace(self.model, num_layers=sum(model.num_layers for model in self.models))

    def validate(self) -> None:
        """Raises: InputError at the first setting that breaks a rule."""
        check_types(self)
        super().validate()

    def rules(self) -> Rules:
        model = self.model
        phase2 = self.phase2
        yield (
            model.compute_dtype == "float64",
            "model.compute_dtype float64 is for functions alone; a run takes float32, bfloat16 or auto",
        )
        yield (
            model.causal and self.train.next_sentence,
            "the [CLS] of a model.causal sees only itself; set train.next_sentence=False",
        )
        mixed = f"masking.causal_rate {self.masking.causal_rate} needs rows of two kinds in a batch, and"
        for is_set, why in (
            (model.causal, "model.causal=True reads all rows alike; set it to False"),
            (model.attention == "fused", "model.attention=fused reads all alike; set it to plain"),
            (model.num_local, f"model.window {model.window} reads all rows alike; set it to 0"),
            (self.teacher.checkpoint, "a teacher reads whole rows; leave out teacher.checkpoint"),
        ):
            yield self.masking.causal_rate and is_set, f"{mixed} {why}, or masking.causal_rate=0"
        yield (
            self.masking.end_rate and self.teacher.checkpoint,
            "a teacher reads masks of one rate; set masking.end_rate=0, or leave out teacher.checkpoint",
        )
        replaces = (
            f"generator.num_layers {self.generator.num_layers} makes tokens to tell apart, and"
        )
        for is_set, why in (
            (model.causal, "model.causal=True is for models that predict words; set it to False"),
            (
                self.masking.causal_rate,
                "rows read causally have no masks; set masking.causal_rate=0",
            ),
            (
                self.teacher.checkpoint,
                "a teacher's words are not learnt; leave out teacher.checkpoint",
            ),
            (self.optimizer.layer_decay != 1, "its layers are others; set optimizer.layer_decay=1"),
        ):
            yield (
                self.generator.num_layers and is_set,
                f"{replaces} {why}, or generator.num_layers=0",
            )
        size = self.data.batch_size
        pieces = self.train.accumulate
        yield microbatches("data.batch_size", size, pieces)
        if phase2.num_steps:
            size, pieces = phase2.batch_size or size, phase2.accumulate or pieces
            yield microbatches("phase2.batch_size", size, pieces)


# with the values that follow from the data
ResolvedConfig = NewType("ResolvedConfig", PretrainConfig)
