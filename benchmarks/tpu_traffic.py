# SPDX-License-Identifier: Apache-2.0
"""What libtpu makes of a training step under several settings: HBM, bytes accessed and FLOPs of a chip. Needs no TPU.

python benchmarks/tpu_traffic.py --topology=v5e:2x4 --size=large --phase=2 --rows=4 --output=FILE.json

The compiler counts the body of a loop once, and layers are a loop. So each program is compiled with one layer and with
two in an iteration: their difference is one layer, of which there are as many as the model has.
"""

import dataclasses
import json
from typing import Any

import jax
from absl import flags

from bert_jax.devices.sharding import make_mesh
from bert_jax.errors import InputError
from bert_jax.plan import hlo
from bert_jax.plan import planner as planner
from bert_jax.settings.model import model_size
from bert_jax.settings.pretraining import DataConfig, MaskingConfig, PretrainConfig
from bert_jax.tools import cli

NO_DROPOUT = {"hidden_dropout_rate": 0.0, "attention_dropout_rate": 0.0}
SETTINGS: dict[str, dict[str, Any]] = {
    "float32": {"compute_dtype": "float32"},
    "bfloat16": {},
    "without dropout": NO_DROPOUT,
    "remat=dots": {"remat": "dots"},
    "remat=full": {"remat": "full"},
    "attention=fused": {"attention": "fused"},
    "fused, without dropout": {"attention": "fused", **NO_DROPOUT},
    "fused, remat=dots": {"attention": "fused", "remat": "dots"},
}

_TOPOLOGY = flags.DEFINE_string("topology", "v5e:2x4", "as tools.plan takes it; data parallel")
_SIZE = flags.DEFINE_string("size", "large", "of the model")
_PHASE = flags.DEFINE_enum("phase", "2", ["1", "2"], "rows of 128 or of 512 tokens")
_ROWS = flags.DEFINE_integer("rows", 4, "of a chip", lower_bound=1)
_SETTINGS = flags.DEFINE_list("settings", list(SETTINGS), "which, by name")
_OUTPUT = flags.DEFINE_string("output", "", "JSON file to write")


def measure(config: PretrainConfig, topology: str) -> dict[str, float]:
    """Returns gigabytes and FLOPs of a chip's step by kind, or of a program that does not fit what it would need."""
    row_length = planner.default_row_length(config)
    mesh = make_mesh(config.mesh, planner.tpu_devices(topology)[0])
    accessed = {}
    for unroll in (1, 2):
        model = dataclasses.replace(config.model, unroll=unroll)
        lowered = planner.lower_train_step(dataclasses.replace(config, model=model), mesh, row_length)
        try:
            compiled = lowered.compile()
        except jax.errors.JaxRuntimeError as error:
            return {"needed_gb": planner.out_of_memory(str(error))[0] / 1e9}
        accessed[unroll] = compiled.cost_analysis()["bytes accessed"]
        if unroll == 1:
            temporaries = compiled.memory_analysis().temp_size_in_bytes
            work = hlo.flops(compiled.as_text() or "")
    of_layer = accessed[2] - accessed[1]
    return {
        "temporaries_gb": temporaries / 1e9,
        "accessed_gb": (accessed[1] + (config.model.num_layers - 1) * of_layer) / 1e9,
        "of_layers_gb": config.model.num_layers * of_layer / 1e9,
        "tflops": work / 1e12,
    }


def main() -> None:
    """Compiles each setting twice, and prints a line for it when it is done."""
    found = {}
    for name in _SETTINGS.value:
        if name not in SETTINGS:
            raise InputError(f"setting {name!r} is unknown; there are: {', '.join(SETTINGS)}")
        changes = {"compute_dtype": "bfloat16", "vocab_size": 30522} | SETTINGS[name]
        config = PretrainConfig(
            model=dataclasses.replace(model_size(_SIZE.value), **changes),
            masking=MaskingConfig(max_predictions=20 if _PHASE.value == "1" else 80),
            data=DataConfig(path="none"),
        )
        config = planner.with_rows(config, _TOPOLOGY.value, _ROWS.value)
        found[name] = measure(config, _TOPOLOGY.value)
        print(f"{name:24}", *(f"{kind} {value:8.3f}" for kind, value in found[name].items()), flush=True)
    if _OUTPUT.value:
        about = {"topology": _TOPOLOGY.value, "size": _SIZE.value, "phase": _PHASE.value, "rows": _ROWS.value}
        with open(_OUTPUT.value, "w", encoding="utf-8") as file:
            json.dump(about | {"jax": jax.__version__, "settings": found}, file, indent=1)


if __name__ == "__main__":
    cli.run(main)
