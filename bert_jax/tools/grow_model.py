# SPDX-License-Identifier: Apache-2.0
r"""Adds words or positions to a trained model, for further pre-training.

    bert_jax grow_model --checkpoint=DIR --output=DIR --add_tokens=FILE [--use_unused]
    bert_jax grow_model --checkpoint=DIR --output=DIR --max_positions=1024
    bert_jax grow_model --checkpoint=DIR --output=DIR --special='[E1],[/E1]'

A new word starts as the mean of the pieces that it was split into. A new position starts as a copy of an old one; of
rotary positions model.rotary_theta is raised. All other parameters stay the same. FILE has one word per line. Special
tokens, such as the marks of entities, are found in text as they stand; they are kept through Hugging Face's format.

Further pre-training on text of another field, such as medicine, takes four commands. Give train the shape of the
model that it starts from, here that of base:

    bert_jax grow_model --checkpoint=runs/base --output=medbase --add_tokens=medical_words.txt
    bert_jax prepare_corpus --input='medical/*.txt.gz' --tokenizer=medbase/tokenizer --output=meddata
    bert_jax train --config=pretrain:base --config.data.path=meddata --workdir=runs/med \
        --config.init_checkpoint=medbase --config.optimizer.learning_rate=2e-5 --config.train.num_steps=100000
    echo 'The patient was given [MASK].' | bert_jax predict --checkpoint=runs/med
"""

from pathlib import Path

from absl import flags

from bert_jax.errors import InputError
from bert_jax.storage.files import read_file
from bert_jax.storage.places import is_taken, to_place
from bert_jax.text.vocab import parse_vocab
from bert_jax.tools import cli
from bert_jax.tools.shared_flags import define_checkpoint

_CHECKPOINT = define_checkpoint()
_OUTPUT = flags.DEFINE_string(
    "output", None, "Directory to create; it must not exist.", required=True
)
_ADD_TOKENS = flags.DEFINE_string(
    "add_tokens", "", "File of new words, one per line, as the tokenizer writes them."
)
_SPECIAL = flags.DEFINE_list(
    "special", [], "Tokens to find in text as they stand, separated by commas."
)
_USE_UNUSED = flags.DEFINE_boolean(
    "use_unused", False, "Replace [unused..] tokens with the new words."
)
_MAX_POSITIONS = flags.DEFINE_integer(
    "max_positions", 0, "New number of positions; 0 adds none.", lower_bound=0
)


def main() -> None:
    """Writes the grown model, a directory that `bert_jax.load_pretrained` reads."""
    cli.check_given(_CHECKPOINT)
    output = to_place(_OUTPUT.value)
    if is_taken(output):
        raise InputError(f"output {output} exists; give a directory that does not")
    if _USE_UNUSED.value and not _ADD_TOKENS.value:
        raise InputError("--use_unused is for --add_tokens; give a file of words, or leave it out")
    if not (_ADD_TOKENS.value or _SPECIAL.value or _MAX_POSITIONS.value):
        raise InputError("there is nothing to add; give --add_tokens, --special or --max_positions")
    words = []
    if _ADD_TOKENS.value:
        words = [
            word
            for word in parse_vocab(read_file(Path(_ADD_TOKENS.value)), _ADD_TOKENS.value)
            if word
        ]
    from bert_jax.checkpoints.grow import grow
    from bert_jax.checkpoints.pretrained import save_pretrained

    bert = cli.load_model(_CHECKPOINT.value)
    grown = grow(bert, words, _USE_UNUSED.value, _MAX_POSITIONS.value, _SPECIAL.value)
    save_pretrained(grown, output, replace=False)
    print(
        f"{output}: {grown.tokenizer.vocab_size:,} tokens, {bert.tokenizer.vocab_size:,} before;"
        f" {grown.config.max_positions:,} positions, {bert.config.max_positions:,} before"
    )
    if words:
        mean = sum(len(bert.tokenizer.encode(word)) for word in words) / len(words)
        print(f"{len(words):,} new words, of {mean:.1f} pieces each before")


if __name__ == "__main__":
    cli.run(main)
