# SPDX-License-Identifier: Apache-2.0
"""Random models in the layouts that remote code had before transformers had their families, and what they compute.

Names and order are those of nomic's modeling_hf_nomic_bert.py, Alibaba's new-impl modeling.py and Jina's
xlm-roberta-flash-implementation, as transformers' conversion_mapping.py reads them.
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


def random_tensors(family: str, seed: int = 0, base: str = "") -> dict[str, np.ndarray]:
    """Returns the tensors of an encoder; all that can have a bias there have one."""
    rng = np.random.default_rng(seed)
    draw = lambda *shape: rng.normal(0, 0.3, shape).astype(np.float32)  # noqa: E731
    where, qkv, output, norm, wide, narrow, last = NAMES[family]
    table = {"embeddings.word_embeddings.weight": draw(WORDS, WIDTH)}
    table["embeddings.token_type_embeddings.weight"] = draw(CONFIGS[family]["type_vocab_size"], WIDTH)
    norms = ["embeddings.LayerNorm" if family == "gte" else "emb_ln"]
    for i in range(LAYERS):
        layer = where.format(i=i)
        norms += [layer + norm, layer + last]
        rows = {qkv: 3 * WIDTH, output: WIDTH, wide: WIDE * (2 if family == "gte" else 1), narrow: WIDTH}
        rows |= {"mlp.fc12": WIDE} if family == "nomic_bert" else {}
        for name, count in rows.items():
            table[f"{layer}{name}.weight"] = draw(count, WIDE if name == narrow else WIDTH)
            if family == "jina_embeddings_v3" or (family == "gte" and name != wide):
                table[f"{layer}{name}.bias"] = draw(count)
    for name in norms:
        table |= {f"{name}.weight": 1 + draw(WIDTH), f"{name}.bias": draw(WIDTH)}
    return {base + name: array for name, array in table.items()}


def write_older(directory: Path, family: str, base: str = "", **changes: Any) -> dict[str, np.ndarray]:
    """Writes a model's directory; returns its tensors."""
    tensors = random_tensors(family, base=base)
    directory.mkdir(parents=True)
    make_tokenizer(WORDS).save(directory)
    (directory / "config.json").write_text(json.dumps(CONFIGS[family] | changes))
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return tensors


def hidden_states(family: str, tensors: dict[str, np.ndarray], ids: np.ndarray, frequencies: np.ndarray) -> np.ndarray:
    """Returns the last hidden states [L, H] of one row without types, in float64. `frequencies` [D / 2] turn heads."""
    tensors = {name: array.astype(np.float64) for name, array in tensors.items()}
    where, qkv, output, norm, wide, narrow, last = NAMES[family]

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

    x = tensors["embeddings.word_embeddings.weight"][ids] + tensors["embeddings.token_type_embeddings.weight"][0]
    x = normed(x, "embeddings.LayerNorm" if family == "gte" else "emb_ln")
    for i in range(LAYERS):
        layer = where.format(i=i)
        query, key, value = (
            part.reshape(len(ids), HEADS, -1).swapaxes(0, 1) for part in np.split(dense(x, layer + qkv), 3, axis=-1)
        )
        scores = turned(query) @ turned(key).swapaxes(1, 2) / math.sqrt(WIDTH // HEADS)
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
        else:
            inner = gelu(inner)
        x = normed(x + dense(inner, layer + narrow), layer + last)
    return x
