# SPDX-License-Identifier: Apache-2.0
"""Starting from the parameters of a trained model: checks, and the choice of parts."""

import dataclasses
import hashlib

import jax
import numpy as np

from bert_jax.checkpoints.arrays import check_arrays, describe
from bert_jax.checkpoints.pretrained import Pretrained, read_pretrained
from bert_jax.devices.job import this_job
from bert_jax.errors import InputError
from bert_jax.model.keys import root_key
from bert_jax.model.objective import Objective, Params, parts_of
from bert_jax.settings.model import ModelConfig
from bert_jax.settings.pretraining import ResolvedConfig
from bert_jax.settings.rules import affecting
from bert_jax.storage.resolve import resolve
from bert_jax.text.tokenizer import Tokenizer


def load_start(
    config: ResolvedConfig, objective: Objective, tokenizer: Tokenizer, params: Params
) -> Pretrained | None:
    """Returns the model of `init_checkpoint` with the objective's parts, or None if none is set.

    `params` are the run's, with shapes alone. Raises: InputError if the model cannot be read or does not fit them.
    """
    if not config.init_checkpoint:
        return None
    start = read_pretrained(resolve(config.init_checkpoint))
    check_start(config, start, tokenizer)
    start = complete(start, objective, config.train.seed)
    check_arrays(config.init_checkpoint, describe(start.params), describe(params))
    # One path may lead to other models on other hosts.
    this_job().check_same({"parameters of init_checkpoint": params_digest(start.params)})
    return start


def check_start(config: ResolvedConfig, start: Pretrained, tokenizer: Tokenizer) -> None:
    """Raises: InputError if the model or vocabulary of the run differs from that of the loaded model."""
    if start.tokenizer.fingerprint != tokenizer.fingerprint:
        other = f"init_checkpoint {config.init_checkpoint} has another vocabulary or casing than {config.data.path}"
        raise InputError(f"{other}; prepare the corpus with --tokenizer={config.init_checkpoint}")
    changes = [
        f"--config.model.{name}={getattr(start.config, name)}"
        for name in affecting(ModelConfig, "model")  # array shapes do not show all of them
        if getattr(start.config, name) != getattr(config.model, name)
    ]
    if changes:
        raise InputError(
            f"init_checkpoint {config.init_checkpoint} is another model; add {' '.join(changes)}"
        )


def complete(start: Pretrained, objective: Objective, seed: int) -> Pretrained:
    """Returns the model with the parts that the objective needs and no others; `notes` lists the random ones."""
    key = root_key(seed, "parameters")
    given = start.params
    shapes = jax.eval_shape(objective.init, key)
    # one block before all logits
    if start.config.block.of_tokens and "mlm" in given and "mlm" not in shapes:
        pooler = given["mlm"]["transform"] | {"norm": given["mlm"]["norm"]}
        given = given | {"encoder": given["encoder"] | {"pooler": pooler}}

    def missing(key: jax.Array) -> Params:  # what it leaves out is not compiled
        fresh = objective.init(key)
        encoder = {
            name: part for name, part in fresh["encoder"].items() if name not in given["encoder"]
        }
        return {name: part for name, part in fresh.items() if name not in given} | {
            "encoder": encoder
        }

    fresh = jax.jit(missing)(key)
    encoder = {name: (fresh["encoder"] | given["encoder"])[name] for name in shapes["encoder"]}
    params = {name: (fresh | given)[name] for name in shapes} | {"encoder": encoder}
    present = parts_of(given)
    wanted = parts_of(shapes)
    notes = [f"it has no {part}, which starts at random" for part in wanted if part not in present]
    notes += [f"its {part} is not used" for part in present if part not in wanted]
    return dataclasses.replace(start, params=params, notes=(*start.notes, *notes))


def params_digest(params: Params) -> str:
    """Returns a sha256 of parameters, for several processes to compare; "" where there is one."""
    if not this_job().is_several:
        return ""
    digest = hashlib.sha256()
    for leaf in jax.tree.leaves(params):
        digest.update(np.asarray(leaf).tobytes())
    return digest.hexdigest()[:12]
