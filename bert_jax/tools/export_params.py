# SPDX-License-Identifier: Apache-2.0
"""Exports the model of a run: configuration, parameters and tokenizer, without the optimizer's state.

    python -m bert_jax.tools.export_params --checkpoint=runs/base --output=bert-base

--checkpoint is a work directory of train.py. The run need not be finished: its newest complete checkpoint is used.
"""

from absl import flags

from bert_jax.errors import InputError
from bert_jax.storage.places import is_taken, to_place
from bert_jax.tools import cli

_CHECKPOINT = flags.DEFINE_string("checkpoint", None, "A work directory of train.py.", required=True)
_OUTPUT = flags.DEFINE_string("output", None, "Directory to create; it must not exist.", required=True)


def main() -> None:
    """Writes the directory that `bert_jax.load_pretrained` reads."""
    output = to_place(_OUTPUT.value)
    if is_taken(output):
        raise InputError(f"output {output} exists; give a directory that does not")
    from bert_jax.checkpoints.pretrained import save_pretrained

    save_pretrained(cli.load_model(_CHECKPOINT.value), output, replace=False)
    print(f"{output}: config.json, tokenizer/ and params/")


if __name__ == "__main__":
    cli.run(main)
