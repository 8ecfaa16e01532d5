# SPDX-License-Identifier: Apache-2.0
"""Fine-tunes a BERT.

python finetune.py --config=configs/finetune.py:sst2 --config.init_checkpoint=PATH --config.data.path=DIR --workdir=DIR
"""

import bert_jax.tools  # noqa: F401, I001 - first: from here on Ctrl-C is one line

from pathlib import Path

from absl import flags
from ml_collections import config_flags

from bert_jax.devices.allocator import reuse_freed_memory
from bert_jax.errors import InputError
from bert_jax.settings.finetuning import FinetuneConfig
from bert_jax.settings.rules import from_dict
from bert_jax.tools import cli

CONFIG = config_flags.DEFINE_config_file("config", None, "a file of configs/, and after a colon its argument")
WORKDIR = flags.DEFINE_string("workdir", "", "where checkpoints, metrics and the trained model go; resumes if used")
JOIN = cli.define_cluster_flags()


def main() -> int:
    """Returns the exit status: 0 when trained, 128 + the signal when one ended the run early."""
    if CONFIG.value is None or not WORKDIR.value:
        raise InputError(
            "--config and --workdir are needed, as in --config=configs/finetune.py:sst2 --workdir=runs/sst2"
        )
    config = from_dict(FinetuneConfig, CONFIG.value.to_dict())
    config.validate()

    reuse_freed_memory()
    from bert_jax.finetuning import finetune
    from bert_jax.sweep import sweep  # JAX starts here: --help and bad settings answer at once

    run = sweep if config.sweep.is_grid else finetune
    with JOIN():
        signal = run(config, Path(WORKDIR.value)).signal
    return 128 + signal if signal else 0


if __name__ == "__main__":
    cli.run(main)
