# SPDX-License-Identifier: Apache-2.0
"""Fine-tunes a BERT for a task, once or over a grid of seeds and learning rates.

    bert_jax finetune --config=finetune:sst2 --config.init_checkpoint=PATH --config.data.path=DIR --workdir=DIR

--config names a recipe. Each of its settings is a flag too, as in --config.optimizer.learning_rate=3e-5;
--config.optimizer alone is refused with the settings in it. The same command resumes a run that was stopped. The
model of the best evaluation is kept in the work directory, with its scores and predictions. --helpfull also lists the
flags for running several processes.
"""

from absl import flags
from ml_collections import config_flags

from bert_jax.devices.allocator import reuse_freed_memory
from bert_jax.errors import InputError
from bert_jax.settings.finetuning import FinetuneConfig
from bert_jax.storage.places import to_place
from bert_jax.tools import cli, recipes

CONFIG = config_flags.DEFINE_config_file("config", None, recipes.HELP)
WORKDIR = flags.DEFINE_string(
    "workdir", "", "directory for checkpoints, metrics and the model; a run in it resumes"
)
JOIN = cli.define_cluster_flags()


def main() -> int:
    """Returns the exit status: 0 when trained, 128 + the signal when one ended the run early."""
    if CONFIG.value is None or not WORKDIR.value:
        raise InputError(
            "--config and --workdir are needed, as in --config=finetune:sst2 --workdir=runs/sst2"
        )
    config = recipes.read_config(FinetuneConfig, CONFIG.value.to_dict())

    # before JAX starts its threads
    reuse_freed_memory()
    # JAX starts here: --help and bad settings answer at once
    from bert_jax.finetuning import finetune
    from bert_jax.sweep import sweep
    from bert_jax.training.goodput import process_started

    workdir = to_place(WORKDIR.value)
    with JOIN():
        own = recipes.read_own(config_flags.get_config_filename(flags.FLAGS["config"]))
        if config.sweep.is_grid:
            signal = sweep(config, workdir, own=own).signal
        else:
            signal = finetune(config, workdir, None, process_started(), *own).signal
    return 128 + signal if signal else 0


if __name__ == "__main__":
    cli.run(main)
