# SPDX-License-Identifier: Apache-2.0
"""A trained model as StableHLO with its parameters beside it, to be served without the code that made it."""

import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import export

from bert_jax.batch import Batch
from bert_jax.checkpoints.names import flatten, unflatten
from bert_jax.checkpoints.pretrained import Pretrained
from bert_jax.inference.predict import task_of
from bert_jax.model.heads.pretraining import MASKED_LM
from bert_jax.model.objective import encode, forward
from bert_jax.settings.rules import to_dict
from bert_jax.storage.places import Place
from bert_jax.storage.writing import new_directory, write_json
from bert_jax.tasks.catalog import USUAL, Own
from bert_jax.text.tokenizer_json import DescribedPieces
from bert_jax.text.wordpiece import WordPiece

PLATFORMS = ("cpu", "cuda", "tpu")

_README = """# An exported model: {what}

`model.stablehlo` is the program, for {platforms}; `params.npz` its parameters; `labels.json` what the outputs mean; the
tokenizer's files lie beside them. JAX runs it without the code that made it (flatbuffers must be installed):

```python
import jax, numpy as np
model = jax.export.deserialize(open("model.stablehlo", "rb").read())
params = dict(np.load("params.npz"))
# [B, L] int32: token ids, 0 in the first text and 1 in the second, 1 for a token and 0 for padding
outputs = jax.jit(model.call)(params, token_ids, type_ids, mask{more})
```

B is free, and so is L up to {length}. Token ids are {rows}, as
`bert_jax.load_tokenizer`{transformers} cuts text with these files. Outputs: {outputs}

It was written by jax {jax} (calling convention {version}): that version reads it, and later ones do for six months at
least, as JAX promises; an older one may not. Then export the model again.
{settings}"""
_SETTINGS = """
`task_settings` of `labels.json` are the settings of the task: for squad2, there is no answer where the two logits of
[CLS] add up to more than those of the best answer by over `null_threshold`.
"""
_TRANSFORMERS = {
    WordPiece.kind: " or transformers' BertTokenizer",
    DescribedPieces.kind: " or transformers' AutoTokenizer",
}
_OUTPUTS = "hidden [B, L, H]; pooled [B, H] if the model has a pooler; logits [B, P, V] of the words at mask_positions."


def export_model(
    bert: Pretrained,
    directory: Place,
    platforms: tuple[str, ...] = PLATFORMS,
    own: Own = USUAL,
) -> None:
    """Writes a directory with everything that prediction needs except JAX; the batch size and the length are free.

    Raises: InputError if the directory exists.
    """
    task = task_of(bert, own)
    config = bert.config
    has_masks = task is None and "mlm" in bert.params

    def call(
        flat: dict[str, jax.Array],
        token_ids: jax.Array,
        type_ids: jax.Array,
        mask: jax.Array,
        places: jax.Array | None = None,
    ) -> dict[str, jax.Array]:
        params = unflatten(flat)
        rows = token_ids.shape[0]
        batch = Batch(
            token_ids=token_ids,
            type_ids=type_ids,
            sequence_ids=mask,
            cls_positions=jnp.zeros((rows, 1), jnp.int32),
            sequence_weights=jnp.ones((rows, 1), jnp.float32),
            mlm_positions=places,
        )
        if task is not None:
            logits = forward(config, params, batch, task.head, None, task.num_outputs)
            return {"logits": task.head.exported(logits)}
        encoded = encode(config, params, batch)
        outputs = {"hidden": encoded.hidden.astype(jnp.float32)}
        if encoded.pooled is not None:
            outputs["pooled"] = encoded.pooled[:, 0].astype(jnp.float32)
        if places is not None:
            words = forward(config, params, batch, MASKED_LM)
            outputs["logits"] = words[..., : config.vocab_size]
        return outputs

    flat: dict[str, Any] = {name: np.asarray(value) for name, value in flatten(bert.params).items()}
    # of those that inputs have
    constraints = ["b >= 1", "l >= 1", f"l <= {config.max_positions}"] + ["p >= 1"] * has_masks
    letters = "b, l, p" if has_masks else "b, l"
    rows, *lengths = export.symbolic_shape(letters, constraints=constraints)
    tokens, *places = (jax.ShapeDtypeStruct((rows, length), jnp.int32) for length in lengths)
    shapes = jax.tree.map(lambda array: jax.ShapeDtypeStruct(array.shape, array.dtype), flat)
    exported = export.export(jax.jit(call), platforms=platforms)
    program = exported(shapes, tokens, tokens, tokens, *places)
    description: dict[str, Any] = {
        "format": 1,
        "task": "",
        "head": "",
        "labels": [],
        "task_settings": {},
        "max_length": config.max_positions,
        "platforms": list(platforms),
        "jax": jax.__version__,
    }
    outputs = _OUTPUTS
    settings = ""
    if task is not None:
        outputs = task.head.about_exported
        settings = _SETTINGS
        description["task"] = task.config.name
        description["head"] = task.head.name
        description["labels"] = list(task.labels)
        description["task_settings"] = to_dict(task.config)
    tokenizer = bert.tokenizer
    cls, sep = tokenizer.tokens((tokenizer.cls_id, tokenizer.sep_id))
    between = " ".join([sep] * len(tokenizer.between))
    readme = _README.format(
        what=json.dumps(description["task"] or bert.task),
        platforms=", ".join(platforms),
        length=config.max_positions,
        more=", mask_positions" if has_masks else "",
        outputs=outputs,
        settings=settings,
        transformers=_TRANSFORMERS.get(tokenizer.kind, ""),
        rows=f"{cls} text {sep}, or {cls} text {between} text {sep}",
        jax=jax.__version__,
        version=program.calling_convention_version,
    )
    with new_directory(directory) as temporary:
        (temporary / "model.stablehlo").write_bytes(program.serialize())
        with open(temporary / "params.npz", "wb") as stream:
            np.savez(stream, **flat)
        write_json(temporary / "labels.json", description)
        tokenizer.save(temporary)
        (temporary / "README.md").write_text(readme, encoding="utf-8")
