# SPDX-License-Identifier: Apache-2.0
"""Writes tests/golden/instances.json with the references' own code.

    git clone https://github.com/google-research/bert /tmp/bert
    git -C /tmp/bert checkout eedf5716ce1268e56f0a50264a88cafad334ac61
    git clone https://github.com/google-research/albert /tmp/albert
    git -C /tmp/albert checkout b772393d3dae115b493258ce8e37c17b2cc62100
    python tests/reference/make_instance_goldens.py --bert=/tmp/bert --albert=/tmp/albert

Needs no TensorFlow: `create_training_instances` of create_pretraining_data.py uses it for flags and files only,
so a stand-in serves. Masking is replaced by a function that draws no random numbers. Every token of the text
is the number of its position, so that an instance tells which spans it was cut from. BERT gives the cases of
nsp, ALBERT those of sop.
"""

import argparse
import hashlib
import importlib.util
import json
import random
import sys
import tempfile
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

CASES = {  # name: (documents, sentences up to, tokens up to, max_seq_length, short_seq_rate, duplicates, seed)
    "usual": (120, 30, 40, 128, 0.1, 3, 12345),
    "long": (60, 60, 40, 512, 0.1, 2, 1),
    "always_short": (100, 20, 30, 128, 1.0, 2, 2),
    "never_short": (100, 20, 30, 64, 0.0, 2, 3),
    "one_sentence_documents": (80, 1, 60, 128, 0.1, 5, 4),
    "sentences_too_long": (40, 6, 400, 128, 0.1, 4, 5),
    "shortest_rows": (50, 10, 12, 8, 0.3, 2, 6),
    "two_documents": (2, 50, 30, 128, 0.1, 10, 7),
    "one_document": (1, 80, 30, 128, 0.1, 10, 8),
}


def import_reference(folder: str) -> ModuleType:
    """Returns the module create_pretraining_data in a folder, its masking taken out."""
    tensorflow, tokenization = mock.MagicMock(), mock.MagicMock()
    tensorflow.gfile.GFile = lambda path, mode: open(path)
    tensorflow.flags.FLAGS = SimpleNamespace(random_next_sentence=False, spm_model_file="", input_file_mode="r")
    tokenization.convert_to_unicode = lambda text: text
    stand_ins = {
        "tensorflow": tensorflow,
        "tensorflow.compat": tensorflow,
        "tensorflow.compat.v1": tensorflow,
        "tokenization": tokenization,
        "albert": SimpleNamespace(tokenization=tokenization),
        "six": mock.MagicMock(),
        "six.moves": SimpleNamespace(range=range, zip=zip),
    }
    tensorflow.compat.v1 = tensorflow
    with mock.patch.dict(sys.modules, stand_ins):
        spec = importlib.util.spec_from_file_location("reference", Path(folder) / "create_pretraining_data.py")
        assert spec and spec.loader
        reference = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(reference)
    results = 4 if hasattr(reference, "is_start_piece") else 3  # ALBERT's masking also returns boundaries of words
    reference.create_masked_lm_predictions = lambda tokens, *_: (tokens, [], [], [])[:results]
    return reference


def spans(instance: Any) -> str:
    """Returns "label first_start first_stop second_start second_stop" of a reference instance."""
    middle = instance.segment_ids.index(1)
    first, second = (
        [int(token) for token in instance.tokens[1 : middle - 1]],
        [int(token) for token in instance.tokens[middle:-1]],
    )
    assert instance.tokens[0] == "[CLS]" and instance.tokens[middle - 1] == instance.tokens[-1] == "[SEP]"
    for side in (first, second):
        assert side == list(range(side[0], side[-1] + 1)), "a side of the instance is not a single span"
    return f"{int(instance.is_random_next)} {first[0]} {first[-1] + 1} {second[0]} {second[-1] + 1}"


def make_case(reference: ModuleType, name: str, next_sentence: str) -> dict[str, Any]:
    """Returns one golden: the corpus as the lengths of its sentences, the options, and what the reference makes."""
    num_documents, most_sentences, most_tokens, max_seq_length, short_seq_rate, duplicates, seed = CASES[name]
    rng = random.Random(name)
    documents = [
        [rng.randint(1, most_tokens) for _ in range(rng.randint(1, most_sentences))] for _ in range(num_documents)
    ]
    position = 0
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "text"
        with path.open("w") as stream:
            for document in documents:
                for length in document:
                    stream.write(" ".join(map(str, range(position, position + length))) + "\n")
                    position += length
                stream.write("\n")
        made = reference.create_training_instances(
            [str(path)], SimpleNamespace(tokenize=str.split, vocab={}), max_seq_length, duplicates, short_seq_rate,
            0.15, 20, random.Random(seed),
        )  # fmt: skip
    lines = [spans(instance) for instance in made]
    return {
        "next_sentence": next_sentence,
        "documents": documents,
        "max_seq_length": max_seq_length,
        "short_seq_rate": short_seq_rate,
        "duplicates": duplicates,
        "seed": seed,
        "num_instances": len(lines),
        "first_instances": lines[:5],
        "sha256": hashlib.sha256("\n".join(lines).encode()).hexdigest(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--bert", required=True, help="a checkout of google-research/bert")
    parser.add_argument("--albert", required=True, help="a checkout of google-research/albert")
    parser.add_argument("--output", default=str(Path(__file__).parents[1] / "golden" / "instances.json"))
    arguments = parser.parse_args()
    cases = {}
    for next_sentence, folder in (("nsp", arguments.bert), ("sop", arguments.albert)):
        reference = import_reference(folder)
        cases |= {f"{next_sentence}_{name}": make_case(reference, name, next_sentence) for name in CASES}
    made_with = f"google-research/bert eedf571, google-research/albert b772393, Python {sys.version.split()[0]}"
    text = json.dumps({"made_with": made_with, "cases": cases})
    Path(arguments.output).write_text(text.replace('"max_seq_length"', '\n"max_seq_length"') + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
