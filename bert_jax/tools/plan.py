# SPDX-License-Identifier: Apache-2.0
"""Plans memory, communication, FLOPs and bytes of a training step on a TPU pod or on GPUs. Needs no such device.

bert_jax plan --config=pretrain:large,phase=2 --topology=v5e:16x16 --rows_per_chip=8
bert_jax plan --config=finetune:embeddings --config.init_checkpoint=PATH --config.data.path=PATH --topology=v5e:4x4

The compiler for the device makes the plan, in minutes: libtpu for TPUs (pip install 'bert_jax[tpu]'), XLA for GPUs (pip
install 'bert_jax[gpu-plan]'). Time is a bound: compiled FLOPs and bytes at the data sheet's peaks.
"""

import dataclasses
import os
import sys
from typing import TYPE_CHECKING

from absl import flags
from ml_collections import config_flags

from bert_jax.data.records import About, open_about
from bert_jax.errors import InputError
from bert_jax.settings.finetuning import FinetuneConfig
from bert_jax.settings.phases import phase_of
from bert_jax.settings.pretraining import PretrainConfig, ResolvedConfig
from bert_jax.settings.rules import from_dict
from bert_jax.storage.files import JsonObject
from bert_jax.storage.resolve import resolve
from bert_jax.storage.writing import check_file, write_json
from bert_jax.tools import cli, recipes

if TYPE_CHECKING:
    from bert_jax.plan.planner import Plan

CONFIG = config_flags.DEFINE_config_file("config", None, recipes.HELP)
TOPOLOGY = flags.DEFINE_string(
    "topology", "", "devices, such as v5e:4x4, v4:4x4x8, v6e:16x16 or h100:64"
)
ROW_LENGTH = flags.DEFINE_integer(
    "row_length",
    0,
    "tokens per row; 0 takes the rows of data.path, or derives them from masking.max_predictions",
)
ROWS = flags.DEFINE_integer(
    "rows_per_chip", 0, "rows per chip and step; 0 divides data.batch_size", lower_bound=0
)
VOCAB_SIZE = flags.DEFINE_integer(
    "vocab_size",
    30522,
    "vocabulary size if model.vocab_size is 0 and no data are given",
    lower_bound=10,
)
PHASE = flags.DEFINE_integer(
    "phase", 1, "phase to plan, if the run has two as in lamb:large", lower_bound=1
)
SEARCH = flags.DEFINE_boolean(
    "search", False, "find the mesh and settings of the lowest bound for data.batch_size"
)
JSON = flags.DEFINE_string("json", "", "file to write all figures to, as JSON")


def main() -> int:
    """Prints the plan; returns 0 if it fits, 1 if not."""
    if CONFIG.value is None or not TOPOLOGY.value:
        raise InputError(
            "--config and --topology are needed, as in --config=pretrain:large --topology=v5e:16x16"
        )
    if SEARCH.value and ROWS.value:
        raise InputError(f"--search holds data.batch_size; leave out --rows_per_chip={ROWS.value}")
    values = CONFIG.value.to_dict()
    is_task = "task" in values
    if is_task and (SEARCH.value or ROWS.value or ROW_LENGTH.value or PHASE.value > 1):
        raise InputError(
            "--search, --rows_per_chip, --row_length and --phase are of pre-training; leave them out"
        )
    if JSON.value:
        check_file(JSON.value)
    config, about = (
        (recipes.read_config(FinetuneConfig, values), None) if is_task else _pretraining(values)
    )

    # the device that is planned for is not asked for, even where there is one
    os.environ["JAX_PLATFORMS"] = "cpu"
    from bert_jax.plan import planner  # JAX starts here: --help and bad settings answer at once
    from bert_jax.plan.search import search
    from bert_jax.plan.tables import plan_table, search_table
    from bert_jax.plan.tasks import plan_task

    if isinstance(config, FinetuneConfig):
        plans = [plan_task(config, TOPOLOGY.value)]
        lines = plan_table(plans[0])
    elif SEARCH.value:
        row = about.dtype if about else planner.row_of(config, ROW_LENGTH.value)
        plans = search(
            config, TOPOLOGY.value, row, _tell, lambda line: print(line, file=sys.stderr)
        )
        lines = search_table(plans)
    else:
        if ROWS.value:
            config = planner.with_rows(config, TOPOLOGY.value, ROWS.value)
            config.validate()
        row = about.dtype if about else planner.row_of(config, ROW_LENGTH.value)
        plans = [planner.plan(config, TOPOLOGY.value, row)]
        lines = plan_table(plans[0])
    print("\n".join(lines))
    if JSON.value:
        write_json(JSON.value, {"plans": [dataclasses.asdict(plan) for plan in plans]})
    return 0 if any(plan.fits for plan in plans) else 1


def _pretraining(values: JsonObject) -> tuple[ResolvedConfig, About | None]:
    """Returns the settings of the phase to plan, and the description of its data, if they are given."""
    config = from_dict(PretrainConfig, values)
    given = (
        PHASE.value == 2 and config.phase2.num_steps and config.phase2.path
    ) or config.data.path
    about = open_about(resolve(given), verify=False) if given and not ROW_LENGTH.value else None
    vocab_size = config.model.vocab_size or (len(about.token_counts) if about else VOCAB_SIZE.value)
    config = dataclasses.replace(
        config,
        model=dataclasses.replace(config.model, vocab_size=vocab_size),
        data=dataclasses.replace(config.data, path=config.data.path or "none"),
        phase2=dataclasses.replace(config.phase2, path=config.phase2.path or "none"),
    )
    config.validate()
    return phase_of(ResolvedConfig(config), PHASE.value), about


def _tell(plan: "Plan") -> None:
    axes = " x ".join(f"{name} {size}" for name, size in plan.mesh.items())
    verdict = "fits" if plan.fits else "does not fit"
    print(
        f"{axes}, {plan.rows_per_chip} rows a chip: {verdict} ({plan.compile_seconds:.0f} s)",
        file=sys.stderr,
    )


if __name__ == "__main__":
    cli.run(main)
