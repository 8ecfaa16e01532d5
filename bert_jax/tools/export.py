# SPDX-License-Identifier: Apache-2.0
"""Exports a model for serving: StableHLO, parameters, tokenizer and labels, to run without this package.

bert_jax export --checkpoint=DIR --output=NEW
"""

from absl import flags

from bert_jax.errors import InputError
from bert_jax.storage.places import to_place
from bert_jax.tools import cli, recipes
from bert_jax.tools.shared_flags import define_checkpoint, define_recipe

CHECKPOINT = define_checkpoint()
OUTPUT = flags.DEFINE_string("output", "", "the directory to write; it must not exist")
PLATFORMS = flags.DEFINE_list(
    "platforms", ["cpu", "cuda", "tpu"], "platforms that the exported model will run on"
)
RECIPE = define_recipe()


def main() -> None:
    """Writes the exported model."""
    cli.check_given(CHECKPOINT, OUTPUT)
    unknown = [
        platform for platform in PLATFORMS.value if platform not in ("cpu", "cuda", "rocm", "tpu")
    ]
    if unknown or not PLATFORMS.value:
        raise InputError(
            f"--platforms {','.join(PLATFORMS.value)} is unknown; use some of cpu, cuda, rocm, tpu"
        )

    from bert_jax.inference.export import export_model

    own = recipes.read_own(RECIPE.value)
    export_model(
        cli.load_model(CHECKPOINT.value), to_place(OUTPUT.value), tuple(PLATFORMS.value), own
    )
    print(f"exported to {OUTPUT.value}; its README.md says how to call it")


if __name__ == "__main__":
    cli.run(main)
