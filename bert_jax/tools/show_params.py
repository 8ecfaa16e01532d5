# SPDX-License-Identifier: Apache-2.0
"""Lists the parameters of a checkpoint in any format: path, shape, type and norm of each, and the total number.

    bert_jax show_params --checkpoint=PATH

PATH is anything that convert_checkpoint accepts. Parameters have the paths of bert_jax, with layers stacked along the
leading axis. The norm is the root of the sum of squares.
"""

from bert_jax.storage.resolve import resolve
from bert_jax.tools import cli
from bert_jax.tools.shared_flags import define_checkpoint

_CHECKPOINT = define_checkpoint()


def main() -> None:
    """Prints a line for the model, one for each parameter and one for their sum."""
    cli.check_given(_CHECKPOINT)
    import numpy as np

    from bert_jax.checkpoints.names import flatten
    from bert_jax.model.objective import count_parameters

    bert = cli.load_model(_CHECKPOINT.value)
    config = bert.config
    print(
        f"{resolve(_CHECKPOINT.value).format}: {bert.task}, {config.num_layers} layers, hidden {config.hidden_size}, "
        f"{config.num_heads} heads, {config.activation}, vocabulary {config.vocab_size} "
        f"({'un' if bert.tokenizer.lowercase else ''}cased), {config.max_positions} positions"
    )
    flat = {path: np.asarray(array) for path, array in sorted(flatten(bert.params).items())}
    rows = [
        (
            path,
            " x ".join(map(str, array.shape)),
            str(array.dtype),
            f"{np.linalg.norm(array.astype(np.float64)):.6g}",
        )
        for path, array in flat.items()
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    for path, shape, dtype, norm in rows:
        print(f"{path:{widths[0]}}  {shape:>{widths[1]}}  {dtype:{widths[2]}}  {norm:>{widths[3]}}")
    padding = config.padded_vocab_size - config.vocab_size
    num_bytes = sum(array.nbytes for array in flat.values())
    print(
        f"{len(rows)} arrays, {count_parameters(bert.params):,} numbers, {num_bytes:,} bytes; "
        f"{padding} rows pad the vocabulary to {config.padded_vocab_size}"
    )


if __name__ == "__main__":
    cli.run(main)
