# SPDX-License-Identifier: Apache-2.0
"""Pre-training, from a prepared corpus to a trained BERT: the wiring, on one page."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from bert_jax import cluster, flops
from bert_jax.checkpoint import Checkpoints, Restored, check_arrays, describe
from bert_jax.config import RESUMABLE_CHANGES, ModelConfig, PretrainConfig
from bert_jax.data.pipeline import eval_batches, train_batches
from bert_jax.data.records import Dataset, open_dataset
from bert_jax.errors import InputError
from bert_jax.loop import LoopResult, Pace, evaluate, train_loop
from bert_jax.model.objective import Objective, Params, next_sentence_weights, parts_of, pretraining_objective
from bert_jax.pretrained import Pretrained, load_pretrained, save_pretrained
from bert_jax.report import Reporter, draw_curves
from bert_jax.settings import changed_keys, from_dict, to_dict
from bert_jax.sharding import check_divisible, make_mesh
from bert_jax.step import abstract_state, init_state, make_eval_step, make_train_step
from bert_jax.storage import read_json, write_json
from bert_jax.text.tokenizer import Tokenizer, load_tokenizer


def run(config: PretrainConfig, workdir: Path, devices: Sequence[Any] | None = None) -> LoopResult:
    """Trains until config.train.num_steps, from scratch, from `init_checkpoint` or from where `workdir` stands.

    Uses all devices if none are given.

    Raises: InputError if a setting, the data or the work directory cannot be used; before anything is written.
    """
    # Everything that can be wrong is found before anything is written.
    config.validate()
    dataset = open_dataset(config.data.path, verify=config.data.verify)
    tokenizer = load_tokenizer(dataset.tokenizer_path)
    config = resolve(config, dataset, tokenizer)
    mesh = make_mesh(config.mesh, devices)
    check_divisible(mesh, config.model, config.data.batch_size, config.train.accumulate)
    check_divisible(mesh, config.model, eval_batch_size(config))
    identity = {
        "format": 1,
        "model": to_dict(config.model),
        "run": to_dict(config),
        "dataset": dataset.fingerprint,
    }
    check_workdir(workdir, identity, PretrainConfig, RESUMABLE_CHANGES)
    start = load_pretrained(config.init_checkpoint) if config.init_checkpoint else None
    if start is not None:
        check_start(config, start, tokenizer)

    # The task, and a state: resumed, warm-started or new.
    never_predicted = (tokenizer.cls_id, tokenizer.sep_id)
    objective = pretraining_objective(
        config.model, config.masking, tokenizer.mask_id, never_predicted, config.train.next_sentence
    )
    abstract = abstract_state(objective, config.optimizer, config.train, mesh)
    if start is not None:
        start = complete(start, objective, config.train.seed)
        check_arrays(Path(config.init_checkpoint), describe(start.params), describe(abstract.params))
    workdir.mkdir(parents=True, exist_ok=True)
    checkpoints = Checkpoints(workdir / "checkpoints", config.checkpoint.keep_last, config.checkpoint.keep_best)
    restored = checkpoints.restore(abstract)
    if cluster.is_first():
        write_json(workdir / "config.json", identity)
        tokenizer.save(workdir / "tokenizer")
    state, how = _first_state(config, objective, mesh, restored, start)
    first_step = int(state.step)

    # Steps.
    train_step = make_train_step(objective, config.optimizer, config.train, mesh, abstract)
    evaluation = make_evaluation(config, objective, dataset, mesh, abstract.params)
    batches = train_batches(dataset.train, first_step, config.data.batch_size, config.data.seed, mesh)
    with Reporter(
        workdir,
        config.train.num_steps,
        first_step,
        progress=config.report.progress,
        tensorboard=config.report.tensorboard,
        enabled=cluster.is_first(),
    ) as reporter:
        for line in describe_run(config, dataset, mesh, abstract.params):
            reporter.message(line)
        reporter.message(how)
        throughput = make_throughput(config.model, mesh)
        pace = Pace(
            config.train.num_steps, config.report.every_steps, config.eval.every_steps, config.checkpoint.every_steps
        )
        unreported = restored.notes["unreported"] if restored else None
        result = train_loop(
            state, pace, mesh, train_step, batches, evaluation, throughput, checkpoints, reporter, unreported
        )
        checkpoints.close()
        if result.signal:
            reporter.message(f"stopped by signal {result.signal} after step {result.step}; the same command resumes")
            return result

        # What is left behind.
        params = cluster.on_host(result.state.params)
        if cluster.is_first():
            save_pretrained(workdir / "pretrained", config.model, params, tokenizer)
            draw_curves(workdir / "metrics.jsonl", workdir / "curves.png")
        cluster.wait_for_all("model written")
        reporter.message(f"trained to step {result.step}: model in {workdir / 'pretrained'}, curves in {workdir}")
    return result


def resolve(config: PretrainConfig, dataset: Dataset, tokenizer: Tokenizer) -> PretrainConfig:
    """Returns the configuration with what the data decide: the vocabulary's size, and whether there is a next sentence.

    Raises: InputError if the data does not fit the model.
    """
    model = config.model
    if not model.vocab_size:
        model = dataclasses.replace(model, vocab_size=tokenizer.vocab_size)
    if tokenizer.vocab_size > model.vocab_size:
        raise InputError(
            f"the data's tokenizer has {tokenizer.vocab_size} tokens and model.vocab_size is {model.vocab_size}; "
            "ids would be beyond the table, so raise it (0 takes the tokenizer's size)"
        )
    if dataset.row_length > model.max_positions:
        raise InputError(
            f"rows of {dataset.row_length} tokens in {config.data.path} are longer than model.max_positions "
            f"{model.max_positions}; prepare shorter rows or raise it"
        )
    if config.model.causal and dataset.manifest["row"].get("predictions"):
        raise InputError(
            f"{config.data.path} has masks of its own, and a causal model predicts the next token of unmasked text; "
            "import it with --masks=redraw"
        )
    has_labels = dataset.manifest["identity"]["options"].get("next_sentence") != "none"
    train = dataclasses.replace(config.train, next_sentence=config.train.next_sentence and has_labels)
    return dataclasses.replace(config, model=model, train=train)


# What a start and the run that goes on from it must agree on, though no array shows all of it.
_SAME_IN_START = ("vocab_size", "hidden_size", "num_layers", "num_heads", "intermediate_size", "max_positions",
                  "type_vocab_size", "activation", "layer_norm_epsilon", "vocab_multiple")  # fmt: skip


def check_start(config: PretrainConfig, start: Pretrained, tokenizer: Tokenizer) -> None:
    """Raises: InputError if the run's model or vocabulary is not that of the model that it starts from."""
    if start.tokenizer.fingerprint != tokenizer.fingerprint:
        raise InputError(
            f"init_checkpoint {config.init_checkpoint} was made with another vocabulary or casing than "
            f"{config.data.path}; prepare the corpus with --tokenizer={config.init_checkpoint}, "
            "or its tokenizer/ if it has one"
        )
    mend = [
        f"--config.model.{name}={getattr(start.config, name)}"
        for name in _SAME_IN_START
        if getattr(start.config, name) != getattr(config.model, name)
    ]
    if mend:
        raise InputError(f"init_checkpoint {config.init_checkpoint} is another model; add {' '.join(mend)}")


def complete(start: Pretrained, objective: Objective, seed: int) -> Pretrained:
    """Returns the model with the parts that the objective needs and no others; `notes` says which ones are random."""
    fresh = jax.jit(objective.init)(jax.random.key(seed))
    encoder = {name: start.params["encoder"].get(name, part) for name, part in fresh["encoder"].items()}
    params = {name: start.params.get(name, part) for name, part in fresh.items()} | {"encoder": encoder}
    present, wanted = parts_of(start.params), parts_of(fresh)
    notes = [f"it has no {part}, which starts at random" for part in wanted if part not in present]
    notes += [f"its {part} is not used" for part in present if part not in wanted]
    return dataclasses.replace(start, params=params, notes=(*start.notes, *notes))


def eval_batch_size(config: PretrainConfig) -> int:
    """Returns the rows of an evaluation batch."""
    return config.eval.batch_size or config.data.batch_size // config.train.accumulate


def check_workdir(workdir: Path, identity: dict[str, Any], kind: type, may_change: tuple[str, ...]) -> None:
    """Raises: InputError if the work directory belongs to another run, saying what differs.

    `kind` is the dataclass of the run's settings; those that start with one of `may_change` may differ.
    """
    path = workdir / "config.json"
    if not path.exists():
        if workdir.exists() and not workdir.is_dir():
            raise InputError(f"workdir {workdir} is a file; give a directory")
        return
    before = read_json(path)
    if before.get("dataset") != identity["dataset"]:
        raise InputError(f"workdir {workdir} was trained on other data; give another workdir or the data it began with")
    changed = [
        name
        for name in changed_keys(_with_defaults(before.get("run", {}), kind), identity["run"])
        if not any(name == allowed or name.startswith(allowed + ".") for allowed in may_change)
    ]
    if changed:
        raise InputError(
            f"workdir {workdir} belongs to a run with another {', '.join(changed)}; give another workdir, or the same "
            f"settings to resume (only {', '.join(may_change)} may change)"
        )


def _with_defaults(run: dict[str, Any], kind: type) -> dict[str, Any]:
    """Returns a run's settings with those added that are newer than it, which had their defaults' meaning then."""
    try:
        return to_dict(from_dict(kind, run))
    except InputError:  # a setting that is no more
        return run


def _first_state(
    config: PretrainConfig, objective: Objective, mesh: Mesh, restored: Restored | None, start: Pretrained | None
) -> tuple:
    """Returns the state to go on from, and a line that says where it comes from."""
    if restored is not None:
        line = f"resume from step {int(restored.state.step)}: parameters, optimizer and data order"
        return restored.state, "; ".join([*restored.passed_over, line])
    if start is not None:
        state = init_state(objective, config.optimizer, config.train, mesh, start.params)
        line = f"warm start from {config.init_checkpoint}: its parameters, a fresh optimizer, step 0"
        return state, "; ".join([line, *start.notes])
    return init_state(objective, config.optimizer, config.train, mesh), "start from random parameters, step 0"


def make_evaluation(config: PretrainConfig, objective: Objective, dataset: Dataset, mesh: Mesh, params: Params) -> Any:
    """Returns params -> metrics over the whole held-out split, or None if nothing is held out.

    Masks are fixed: they are those of epoch 0.
    """
    if not dataset.heldout.num_rows:
        return None
    eval_step = make_eval_step(objective, mesh, params)
    size = eval_batch_size(config)
    baselines = heldout_baselines(config, objective, dataset, mesh)

    def evaluation(params: Params) -> dict[str, float]:
        metrics = evaluate(eval_step, params, eval_batches(dataset.heldout, size, mesh))
        metrics["loss"] = sum(metrics[name] for name in ("mlm_loss", "nsp_loss") if name in metrics)
        metrics["mlm_perplexity"] = float(np.exp(min(metrics["mlm_loss"], 80.0)))
        return {name: metrics[name] for name in EVAL_METRICS if name in metrics} | baselines

    return evaluation


EVAL_METRICS = ("loss", "mlm_loss", "mlm_accuracy", "mlm_perplexity", "nsp_loss", "nsp_accuracy")


def heldout_baselines(config: PretrainConfig, objective: Objective, dataset: Dataset, mesh: Mesh) -> dict[str, float]:
    """Returns what a model that sees no context would score on the held-out predictions.

    Every label is predicted from the token frequencies of the training split, plus one; every next sentence by
    the more frequent label.
    """
    counts = dataset.token_counts.astype(np.float64) + 1
    log_probabilities = np.log(counts / counts.sum())
    commonest = int(np.argmax(counts))
    mask = jax.jit(objective.prepare)
    loss = hits = predictions = random_next = sequences = 0.0
    for batch in eval_batches(dataset.heldout, eval_batch_size(config), mesh):
        masked = cluster.on_host(mask(batch))
        labels = masked.mlm_labels[masked.mlm_weights > 0]
        loss -= log_probabilities[labels].sum()
        hits += (labels == commonest).sum()
        predictions += len(labels)
        next_labels = masked.next_sentence_labels[np.asarray(next_sentence_weights(masked)) > 0]
        random_next += (next_labels == 1).sum()
        sequences += len(next_labels)
    baselines = {
        "unigram_loss": float(loss / max(1.0, predictions)),
        "unigram_accuracy": float(hits / max(1.0, predictions)),
    }
    if config.train.next_sentence:
        share = random_next / max(1.0, sequences)
        baselines["nsp_base_rate"] = float(max(share, 1 - share))
    return baselines


def make_throughput(model: ModelConfig, mesh: Mesh) -> Any:
    """Returns (summed counts, seconds) -> sequences/s, tokens/s and FLOP/s, of all devices together."""
    peak = flops.peak_flops(mesh.devices.flat[0].device_kind, model.compute_dtype) * mesh.size

    def rates(sums: dict[str, float], seconds: float) -> dict[str, float]:
        work = flops.train_flops(model, sums["tokens"], sums["squared_lengths"], sums["predictions"], sums["sequences"])
        values = {
            "sequences_per_second": sums["sequences"] / seconds,
            "tokens_per_second": sums["tokens"] / seconds,
            "flops_per_second": work / seconds,
        }
        return values | ({"mfu": work / seconds / peak} if peak else {})

    return rates


def describe_run(config: PretrainConfig, dataset: Dataset, mesh: Mesh, params: Params) -> list[str]:
    """Returns lines that say what is about to be trained, on what, and where."""
    model = config.model
    size = sum(int(np.prod(leaf.shape)) for leaf in jax.tree.leaves(params))
    epochs = config.train.num_steps * config.data.batch_size / dataset.train.num_rows
    axes = " x ".join(f"{name} {count}" for name, count in mesh.shape.items())
    packed = dataset.manifest["row"]["max_sequences"] > 1
    sequences = f"{dataset.train.num_sequences:,} sequences in " if packed else ""
    return [
        f"model: {model.num_layers} layers, hidden {model.hidden_size}, {model.num_heads} heads, vocabulary "
        f"{model.vocab_size}, {size:,} parameters, {model.compute_dtype}",
        f"data: {sequences}{dataset.train.num_rows:,} rows of {dataset.row_length} tokens, "
        f"{dataset.heldout.num_rows:,} held out; "
        f"{config.train.num_steps:,} steps of {config.data.batch_size} rows are {epochs:.1f} epochs",
        f"task: {_describe_task(config, dataset)}",
        f"devices: {mesh.size} ({mesh.devices.flat[0].device_kind}), {axes}",
    ]


def _describe_task(config: PretrainConfig, dataset: Dataset) -> str:
    """Returns what is predicted, in a few words."""
    masking = config.masking
    if config.model.causal:
        tokens = "the next token, from left to right"
    elif dataset.manifest["row"].get("predictions"):
        tokens = "tokens masked in the data"
    else:
        units = "tokens" if not masking.whole_word else "whole words"
        units += f" in runs of up to {masking.max_ngram}" if masking.max_ngram > 1 else ""
        tokens = (
            f"{masking.rate:.0%} of the tokens, masked as {units}, {'once' if masking.static else 'anew each epoch'}"
        )
    kind = {"nsp": "next sentence", "sop": "order of sentences"}
    labels = dataset.manifest["identity"]["options"].get("next_sentence", "nsp")
    return tokens + (f"; {kind[labels]}" if config.train.next_sentence else "; no next sentence")
