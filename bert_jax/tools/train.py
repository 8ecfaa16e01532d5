# SPDX-License-Identifier: Apache-2.0
"""Pre-trains a BERT on a prepared data set, from scratch or from a trained model.

    bert_jax train --config=pretrain:base --config.data.path=DIR --workdir=DIR

--config names a recipe. Each of its settings is a flag too, as in --config.optimizer.learning_rate=2e-4;
--config.optimizer alone is refused with the settings in it. The same command resumes a run that was stopped; with a
larger --config.train.num_steps, it continues a finished run.
--helpfull also lists the flags for running several processes.
"""

from absl import flags
from ml_collections import config_flags

from bert_jax.devices.allocator import reuse_freed_memory
from bert_jax.errors import InputError
from bert_jax.settings.pretraining import PretrainConfig
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
            "--config and --workdir are needed, as in --config=pretrain:tiny --workdir=runs/tiny"
        )
    config = recipes.read_config(PretrainConfig, CONFIG.value.to_dict())

    # before JAX starts its threads
    reuse_freed_memory()
    # JAX starts here: --help and bad settings answer at once
    from bert_jax.pretraining import pretrain
    from bert_jax.training.goodput import process_started

    with JOIN():
        result = pretrain(config, to_place(WORKDIR.value), started=process_started())
    return 128 + result.signal if result.signal else 0


if __name__ == "__main__":
    cli.run(main)
