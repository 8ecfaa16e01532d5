# SPDX-License-Identifier: Apache-2.0
"""The shapes of a model's parameters, by arithmetic: tracing `init_params` for them takes a second of a load."""

import jax
import jax.numpy as jnp

from bert_jax.batch import PyTree
from bert_jax.model.score_bias import BUCKETS
from bert_jax.settings.model import ModelConfig, check_has_words


def abstract_params(config: ModelConfig, num_classes: int = 1) -> dict[str, PyTree]:
    """Returns the shapes of the parameters of the encoder and of every head that its family has, float32.

    `num_classes` are the outputs of the part "classifier". Parameters of layers have the axis of layers first.

    Raises: InputError if the model has no words.
    """
    check_has_words(config)
    hidden = config.hidden_size
    width = config.embedding_width
    wide = config.intermediate_size
    vocab_size = config.padded_vocab_size
    layers = (config.num_stacked,)

    def leaf(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    def norm(size: int, stack: tuple[int, ...] = ()) -> PyTree:
        scale = {"scale": leaf(*stack, size)}
        return scale | ({"bias": leaf(*stack, size)} if config.norm_bias else {})

    def dense(rows: int, columns: int, stack: tuple[int, ...] = (), bias: bool = True) -> PyTree:
        kernel = {"kernel": leaf(*stack, rows, columns)}
        return kernel | ({"bias": leaf(*stack, columns)} if bias else {})

    def block(rows: int, columns: int) -> PyTree:
        return dense(rows, columns, bias=config.dense_bias)

    embeddings = {"word": {"embedding": leaf(vocab_size, width)}, "norm": norm(width)}
    if config.positions == "learned":
        rows = config.max_positions + config.position_offset
        embeddings["position"] = {"embedding": leaf(rows, width)}
    if config.type_vocab_size:
        embeddings["type"] = {"embedding": leaf(config.type_vocab_size, width)}
    if config.widens_embeddings:
        embeddings["project"] = dense(width, hidden)

    products = {"query": hidden, "key": config.key_size, "value": config.key_size, "output": hidden}
    own = () if config.distance_shared else config.distance_products
    products |= {f"distance_{name}": hidden for name in own}
    attention = {
        name: dense(hidden, size, layers, config.layer_bias) for name, size in products.items()
    }
    feed_forward = {
        "intermediate": dense(hidden, wide, layers, config.wide_bias),
        "output": dense(wide, hidden, layers, config.layer_bias),
        "norm": norm(hidden, layers),
    }
    if config.feed_forward == "gated":
        feed_forward["gate"] = dense(hidden, wide, layers, config.wide_bias)
    pooler = block(hidden, hidden)
    if config.block.norm:
        pooler["norm"] = norm(hidden)

    params = {
        "encoder": {
            "embeddings": embeddings,
            "layers": {
                "attention": attention | {"norm": norm(hidden, layers)},
                "mlp": feed_forward,
            },
            **({"pooler": pooler} if config.block.activation else {}),
        },
        "mlm": {
            "transform": block(hidden, width),
            "norm": norm(width),
            "output_bias": leaf(vocab_size),
        },
        "next_sentence": dense(hidden, 2),
        "classifier": dense(hidden, num_classes),
        "span": dense(hidden, 2),
    }
    if config.block.has_own_words:
        params["mlm"] = {"words": {"embedding": leaf(vocab_size, width)}}
    if config.block.word_layers == 2:
        first, second = config.word_sizes.values()
        params["mlm"] |= {
            "transform": dense(hidden, first, bias=False),
            "second": dense(first, second, bias=False),
        }
    if config.score_bias == "buckets":
        params["encoder"]["score_bias"] = {"embedding": leaf(BUCKETS, config.num_heads)}
    if config.score_bias == "vectors":
        size = 2 * (config.distance_buckets or config.farthest_distance)
        distances = {"embedding": leaf(size, hidden)}
        distances |= {"norm": norm(hidden)} if config.distance_norm else {}
        params["encoder"]["distances"] = distances
    if config.family == "electra":
        params["discriminator"] = {"transform": dense(hidden, hidden), "output": dense(hidden, 1)}
    return params
