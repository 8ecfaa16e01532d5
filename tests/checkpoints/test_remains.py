# SPDX-License-Identifier: Apache-2.0
"""What a killed run leaves of files that it was writing, and what other commands write meanwhile."""

from bert_jax.checkpoints.remains import sweep_temporaries


def test_what_a_killed_run_was_writing_goes_and_what_other_commands_write_stays(tmp_path):
    remains = [
        ".config.json.12-0a1b2c3d.tmp",
        ".metrics.jsonl.12-0a1b2c3d.tmp",
        ".pretrained.12.tmp/params/x",  # as older versions named them
        ".finetuned.tmp/params/x",
        ".seen-0a1b2c3d",
        "tokenizer/.vocab.txt.12-0a1b2c3d.tmp",
        "predictions/.dev.jsonl.12-0a1b2c3d.tmp",
        "revisions/.00000004.12-0a1b2c3d.tmp/params/x",
    ]
    others = [
        ".features.jsonl.34-0a1b2c3d.tmp",  # extract_features --output=WORKDIR/features.jsonl
        ".hf.34-0a1b2c3d.tmp/model.safetensors",
        "exports/.hf.34-0a1b2c3d.tmp/model.safetensors",
        "exports/.seen-0a1b2c3d",
        "config.json",
        "pretrained/params/x",
        "revisions/00000002/params/x",
        ".lock",
    ]
    for name in (*remains, *others):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    sweep_temporaries(tmp_path)
    left = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()}
    assert left == set(others)
