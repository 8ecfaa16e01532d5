# SPDX-License-Identifier: Apache-2.0
"""Random models in the layouts that remote code had before transformers had their families, and what they compute.

Names and order are those of nomic's modeling_hf_nomic_bert.py, Alibaba's new-impl modeling.py and Jina's
xlm-roberta-flash-implementation, as transformers' conversion_mapping.py reads them; of the models with ALiBi, which
transformers lacks, those of jina-bert-implementation and of MosaicML's bert_layers.py, which DNABERT-2 has too.
"""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
from hf_models import make_tokenizer
from safetensors.numpy import save_file

LAYERS, HEADS, WIDTH, WIDE, WORDS = 2, 4, 24, 20, 131
# family -> names in layer {i}: query, key and value; output; norm; first products; last product; norm
NAMES = {
    "nomic_bert": ("encoder.layers.{i}.", "attn.Wqkv", "attn.out_proj", "norm1", "mlp.fc11", "mlp.fc2", "norm2"),
    "gte": ("encoder.layer.{i}.", "attention.qkv_proj", "attention.o_proj", "attn_ln", "mlp.up_gate_proj",
            "mlp.down_proj", "mlp_ln"),
    "jina_embeddings_v3": ("encoder.layers.{i}.", "mixer.Wqkv", "mixer.out_proj", "norm1", "mlp.fc1", "mlp.fc2",
                           "norm2"),
}  # fmt: skip
_BERT = ("encoder.layer.{i}.", "attention.self.", "attention.output.dense", "attention.output.LayerNorm")
ALIBI = {  # the same, of a "jina_bert" by its kind
    "geglu": (*_BERT, "mlp.gated_layers", "mlp.wo", "mlp.layernorm"),
    "original": (*_BERT, "intermediate.dense", "output.dense", "output.LayerNorm"),
    "mosaic": (_BERT[0], "attention.self.Wqkv", *_BERT[2:], "mlp.gated_layers", "mlp.wo", "mlp.layernorm"),
}
BASES = {"nomic_bert": "bert.", "gte": "new.", "jina_embeddings_v3": "roberta."}
CONFIGS: dict[str, dict[str, Any]] = {
    "nomic_bert": {
        "model_type": "nomic_bert", "architectures": ["NomicBertModel"], "n_embd": WIDTH, "n_layer": LAYERS,
        "n_head": HEADS, "n_inner": WIDE, "n_positions": 8192, "layer_norm_epsilon": 1e-6, "rotary_emb_base": 90,
        "rotary_emb_fraction": 1.0, "rotary_emb_interleaved": False, "rotary_scaling_factor": None,
        "activation_function": "swiglu", "attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0, "prenorm": False,
        "parallel_block": False, "use_rms_norm": False, "causal": False, "qkv_proj_bias": False,
        "type_vocab_size": 2, "vocab_size": WORDS, "auto_map": {"AutoModel": "modeling.NomicBertModel"},
    },
    "gte": {
        "model_type": "new", "architectures": ["NewModel"], "hidden_size": WIDTH, "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS, "intermediate_size": WIDE, "max_position_embeddings": 64,
        "layer_norm_eps": 1e-6, "hidden_act": "gelu", "rope_theta": 90.0, "rope_scaling": None,
        "position_embedding_type": "rope", "layer_norm_type": "layer_norm", "logn_attention_scale": False,
        "pack_qkv": True, "unpad_inputs": "true", "use_memory_efficient_attention": "true", "type_vocab_size": 2,
        "vocab_size": WORDS, "pad_token_id": 0,
    },
    "jina_embeddings_v3": {
        "model_type": "xlm-roberta", "architectures": ["XLMRobertaModel"], "hidden_size": WIDTH,
        "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "intermediate_size": WIDE,
        "max_position_embeddings": 64, "layer_norm_eps": 1e-6, "hidden_act": "gelu", "rotary_emb_base": 90.0,
        "position_embedding_type": "rotary", "use_flash_attn": True, "type_vocab_size": 1, "vocab_size": WORDS,
        "pad_token_id": 0,
    },
}  # fmt: skip
_SIZES = {"hidden_size": WIDTH, "num_hidden_layers": LAYERS, "num_attention_heads": 6, "intermediate_size": WIDE,
          "max_position_embeddings": 64, "layer_norm_eps": 1e-6, "hidden_act": "gelu", "type_vocab_size": 2,
          "vocab_size": WORDS, "pad_token_id": 0, "model_type": "bert"}  # fmt: skip
_JINA = _SIZES | {"architectures": ["JinaBertModel"], "position_embedding_type": "alibi", "emb_pooler": "mean"}
CONFIGS_OF_ALIBI: dict[str, dict[str, Any]] = {
    "geglu": _JINA | {"feed_forward_type": "geglu", "auto_map": {"AutoModel": "modeling_bert.JinaBertModel"}},
    "original": _JINA | {"feed_forward_type": "original"},
    "mosaic": _SIZES | {"architectures": ["BertModel"], "position_embedding_type": "absolute", "flash_attn": False,
                        "alibi_starting_size": 512, "auto_map": {"AutoModel": "bert_layers.BertModel"}},
}  # fmt: skip


def random_tensors(family: str, seed: int = 0, base: str = "") -> dict[str, np.ndarray]:
    """Returns the tensors of an encoder; all that can have a bias there have one."""
    rng = np.random.default_rng(seed)
    draw = lambda *shape: rng.normal(0, 0.3, shape).astype(np.float32)  # noqa: E731
    where, qkv, output, norm, wide, narrow, last = (NAMES | ALIBI)[family]
    table = {"embeddings.word_embeddings.weight": draw(WORDS, WIDTH)}
    types = (CONFIGS | CONFIGS_OF_ALIBI)[family]["type_vocab_size"]
    table["embeddings.token_type_embeddings.weight"] = draw(types, WIDTH)
    norms = ["embeddings.LayerNorm" if family in ("gte", *ALIBI) else "emb_ln"]
    for i in range(LAYERS):
        layer = where.format(i=i)
        norms += [layer + norm, layer + last]
        rows = dict.fromkeys((qkv + part for part in ("query", "key", "value")), WIDTH)
        rows = rows if qkv.endswith(".") else {qkv: 3 * WIDTH}
        doubled = family in ("gte", "geglu", "mosaic")
        rows |= {output: WIDTH, wide: WIDE * (2 if doubled else 1), narrow: WIDTH}
        rows |= {"mlp.fc12": WIDE} if family == "nomic_bert" else {}
        for name, count in rows.items():
            table[f"{layer}{name}.weight"] = draw(count, WIDE if name == narrow else WIDTH)
            if family in ("jina_embeddings_v3", "original") or (doubled and name != wide):
                table[f"{layer}{name}.bias"] = draw(count)
    for name in norms:
        table |= {f"{name}.weight": 1 + draw(WIDTH), f"{name}.bias": draw(WIDTH)}
    return {base + name: array for name, array in table.items()}


def write_older(directory: Path, family: str, base: str = "", **changes: Any) -> dict[str, np.ndarray]:
    """Writes a model's directory; returns its tensors."""
    tensors = random_tensors(family, base=base)
    directory.mkdir(parents=True)
    make_tokenizer(WORDS).save(directory)
    (directory / "config.json").write_text(json.dumps((CONFIGS | CONFIGS_OF_ALIBI)[family] | changes))
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return tensors


def slopes(heads: int) -> list[float]:
    """Returns the slopes of ALiBi, by the recursion of its authors' code."""
    power = 2 ** int(math.log2(heads))
    if heads == power:
        return [2.0 ** (-8 * (head + 1) / heads) for head in range(heads)]
    return slopes(power) + slopes(2 * power)[::2][: heads - power]


def hidden_states(family: str, tensors: dict[str, np.ndarray], ids: np.ndarray, frequencies: np.ndarray) -> np.ndarray:
    """Returns the last hidden states [L, H] of one row without types, in float64.

    `frequencies` [D / 2] turn heads, except those of models with ALiBi.
    """
    tensors = {name: array.astype(np.float64) for name, array in tensors.items()}
    where, qkv, output, norm, wide, narrow, last = (NAMES | ALIBI)[family]
    heads = (CONFIGS | CONFIGS_OF_ALIBI)[family].get("num_attention_heads", HEADS)

    def dense(x: np.ndarray, name: str) -> np.ndarray:
        return x @ tensors[f"{name}.weight"].T + tensors.get(f"{name}.bias", 0)

    def normed(x: np.ndarray, name: str) -> np.ndarray:
        x = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-6)
        return x * tensors[f"{name}.weight"] + tensors[f"{name}.bias"]

    def turned(heads: np.ndarray) -> np.ndarray:
        angles = np.arange(len(ids))[:, None] * frequencies
        as_complex = heads[..., : heads.shape[-1] // 2] + 1j * heads[..., heads.shape[-1] // 2 :]
        as_complex = as_complex * np.exp(1j * angles)
        return np.concatenate([as_complex.real, as_complex.imag], axis=-1)

    def gelu(x: np.ndarray) -> np.ndarray:
        return x * np.vectorize(lambda each: (1 + math.erf(each / math.sqrt(2))) / 2)(x)

    def heads_of(x: np.ndarray, name: str) -> list[np.ndarray]:
        if name.endswith("."):
            parts = [dense(x, name + part) for part in ("query", "key", "value")]
        else:
            parts = np.split(dense(x, name), 3, axis=-1)
        return [part.reshape(len(ids), heads, -1).swapaxes(0, 1) for part in parts]

    x = tensors["embeddings.word_embeddings.weight"][ids] + tensors["embeddings.token_type_embeddings.weight"][0]
    x = normed(x, "embeddings.LayerNorm" if family in ("gte", *ALIBI) else "emb_ln")
    places = np.arange(len(ids))
    for i in range(LAYERS):
        layer = where.format(i=i)
        query, key, value = heads_of(x, layer + qkv)
        query, key = (query, key) if family in ALIBI else (turned(query), turned(key))
        scores = query @ key.swapaxes(1, 2) / math.sqrt(WIDTH // heads)
        if family in ALIBI:
            scores -= np.array(slopes(heads))[:, None, None] * abs(places[:, None] - places)
        raised = np.exp(scores)
        context = (raised / raised.sum(-1, keepdims=True)) @ value
        x = normed(x + dense(context.swapaxes(0, 1).reshape(len(ids), -1), layer + output), layer + norm)
        inner = dense(x, layer + wide)
        if family == "nomic_bert":
            gate = dense(x, f"{layer}mlp.fc12")
            inner = inner * gate / (1 + np.exp(-gate))
        elif family == "gte":
            up, gate = np.split(inner, 2, axis=-1)
            inner = up * gelu(gate)
        elif family in ("geglu", "mosaic"):
            inner = gelu(inner[:, :WIDE]) * inner[:, WIDE:]
        else:
            inner = gelu(inner)
        x = normed(x + dense(inner, layer + narrow), layer + last)
    return x
