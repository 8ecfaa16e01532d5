# SPDX-License-Identifier: Apache-2.0
"""Makes a classification task from Python's documentation: which area of the library does a docstring describe?

bert_jax make_docs_task --output=DIR

Writes train.tsv, dev.tsv and test.tsv with columns text and area; no module is in two of them.
"""

from absl import flags

from bert_jax.storage.places import to_place
from bert_jax.tasks.docs_task import AREAS, make_docs_task
from bert_jax.tools import cli

OUTPUT = flags.DEFINE_string("output", "", "the directory to write; a task that is already there is kept")


def main() -> None:
    """Writes the task and prints its size."""
    cli.check_given(OUTPUT)
    if (to_place(OUTPUT.value) / "train.tsv").exists():
        print(f"{OUTPUT.value}: it was there already")
        return
    splits = make_docs_task(to_place(OUTPUT.value))
    counted = ", ".join(
        f"{name} {len(examples)} of {len({example.module for example in examples})} modules"
        for name, examples in sorted(splits.items(), key=lambda item: -len(item[1]))
    )
    print(f"{OUTPUT.value}: examples: {counted}; areas: {', '.join(AREAS)}")


if __name__ == "__main__":
    cli.run(main)
