# SPDX-License-Identifier: Apache-2.0
"""Runs a stage of measurements on a machine with a GPU, in slices that stop in time and go on where they were.

    benchmarks/gpu.sh 1 --out=DIR      # which makes the environment from the kit and calls python -m benchmarks.gpu 1
    benchmarks/gpu.sh 1 --rehearse     # tiny, on a CPU: its figures are not measurements, and pages refuse them

Stage 1 runs the GPU's tests, a table of step times, peak memory and MFU, and a profile; stage 2 the same beside torch;
stage 3 pre-trains, scores and fine-tunes, seed after seed. A stage stops after --minutes: give the same command again.
What is unfinished is kept in --work. Records go to --out after each measurement, one file a stage; those in --earlier,
from a machine that was given back, are not measured again. Exit status: 0 complete, 1 something failed, 2 stopped.
"""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from absl import flags

from benchmarks import gpu_stages as stages
from benchmarks.gpu_packing import read_kit, source_digest, unpack
from benchmarks.gpu_records import about, error_words, read_stage, write_stage
from benchmarks.jobs import LOG, Stop, Unit, run_unit, tied
from bert_jax.errors import InputError
from bert_jax.storage.locks import lock_file
from bert_jax.storage.writing import write_json
from bert_jax.tools import cli

STAGES = ("1", "2", "3")
ROOT = Path(__file__).resolve().parents[1]
STOPPED = 2  # exit status: more is to be done
_TRIES = 2  # of a measurement that fails
_GRACE_SECONDS = 75  # to save; a compilation, which no signal interrupts, may be under way
_FEWEST_SECONDS = 30  # that must be left to begin a measurement
_BERT = "gpu_bert.json.gz"  # the record of stage 3's queue

KIT = flags.DEFINE_string("kit", "gpu_kit", "the folder that make gpu-kit made")
WORK = flags.DEFINE_string("work", "runs/gpu", "where unfinished work is kept between calls on one machine")
OUT = flags.DEFINE_string("out", "", "where records go; $OUT, or records below --work, if not given")
EARLIER = flags.DEFINE_string("earlier", "gpu_kit/records", "records of earlier machines, which are not measured again")
MINUTES = flags.DEFINE_float("minutes", 7.5, "after which the stage stops; 0 goes on to the end", lower_bound=0)
REHEARSE = flags.DEFINE_bool("rehearse", False, "tiny sizes on a CPU, to try the commands")
ONLY = flags.DEFINE_list("only", [], "stages 1 and 2: measurements by name; all if none is named")
PEER_PYTHON = flags.DEFINE_string(
    "peer_python", "", "stage 2: a Python that has torch and transformers; this one if empty"
)
EPOCHS = flags.DEFINE_float("epochs", 0, "stage 3: over the training data; 0 is 10", lower_bound=0)
SEEDS = flags.DEFINE_integer("seeds", 0, "stage 3: of pre-training, one after the other; 0 is 3", lower_bound=0)
SIZE = flags.DEFINE_string("size", "", "stage 3: of the model; base if not given")
RATE = flags.DEFINE_float("learning_rate", 3e-4, "stage 3: of pre-training", lower_bound=0)
LIMIT = flags.DEFINE_integer("limit", 0, "stage 3: minimal pairs of each paradigm; 0 is all", lower_bound=0)
SET = flags.DEFINE_multi_string("set", [], "stage 3: a flag more for train.py, such as --set=--config.model.unroll=12")

_stage = ""


def main() -> int:
    """Runs the stage; returns the exit status."""
    if _stage not in STAGES:
        raise InputError(f"stage {_stage!r} is none of {', '.join(STAGES)}; give it first: benchmarks/gpu.sh 1")
    started = time.monotonic()
    work = Path(WORK.value) / ("rehearsal" if REHEARSE.value else "measured")  # neither takes the other's for finished
    out = Path(OUT.value or os.environ.get("OUT", "") or work / "records")
    manifest = unpack(Path(KIT.value), work / "data")
    set_environment(work)
    out.mkdir(parents=True, exist_ok=True)
    left = max(1e-9, 60 * MINUTES.value - (time.monotonic() - started)) if MINUTES.value else 0.0
    stop = Stop(left, _GRACE_SECONDS)
    facts = about(manifest, source_digest(), REHEARSE.value)
    if facts["about"]["sources"] != manifest["sources"]:
        print("note: the code here is not that of the kit; records say so with a + behind the commit", flush=True)
    os.environ["BERT_JAX_COMMIT"] = facts["about"]["commit"]  # for jobs, where there is no git
    with stop.on_signals():
        if _stage == "3":
            return pretrain(work, out, stop, facts)
        return measure(work / f"stage{_stage}", out, stop, facts)


def scale() -> stages.Scale:
    """Returns the sizes that the flags ask for."""
    chosen = stages.REHEARSAL if REHEARSE.value else stages.REAL
    given = {"epochs": EPOCHS.value, "seeds": SEEDS.value, "size": SIZE.value, "limit": LIMIT.value}
    if _stage == "3":
        chosen = chosen._replace(**{name: value for name, value in given.items() if value})
    return chosen


def set_environment(work: Path) -> None:
    """Sets what the jobs of a stage read from the environment."""
    given = {
        "JAX_PLATFORMS": "cpu" if REHEARSE.value else "cuda,cpu",  # tests compare both
        "JAX_COMPILATION_CACHE_DIR": str((work / "compiled").resolve()),
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "PYTHONUNBUFFERED": "1",
    }
    if REHEARSE.value:
        given |= {"BERT_JAX_GPU_TESTS_ON": "cpu"}
    if _stage == "2":
        given |= {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}  # torch needs memory of the same GPU
    else:
        given |= {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.92"}
    os.environ.update(given)


# Stages 1 and 2


def measure(work: Path, out: Path, stop: Stop, facts: dict[str, Any]) -> int:
    """Runs the measurements that are not finished, and writes the record of the stage after each."""
    units = list(units_of(work, out))
    if wrong := [name for name in ONLY.value if name not in {unit.group for unit in units}]:
        raise InputError(f"there is no measurement {wrong[0]!r}; there are {', '.join(unit.group for unit in units)}")
    take_earlier(work, units, facts["about"]["gpu"].get("name", ""))
    problems = read_problems(work)

    def keep() -> dict[str, Any]:
        # Also where stage 2 looks for it: `out` may be emptied between two calls.
        return [write_stage(place, _stage, units, facts, problems) for place in (work.parent / "records", out)][-1]

    for unit in units:
        chosen = not ONLY.value or unit.group in ONLY.value
        if not chosen or unit.jobs[-1].is_finished or len(problems.get(unit.group, [])) >= _TRIES:
            continue
        if stop.asked or stop.seconds_left < min(_FEWEST_SECONDS, 30 * MINUTES.value):
            break
        began = time.monotonic()
        problem = run_unit(unit, stop)
        print(f"{unit.group}: {problem or 'finished'}, {time.monotonic() - began:.0f} s", flush=True)
        if " failed " in problem:
            problems.setdefault(unit.group, []).append(f"{problem}{error_words(unit.directory / LOG)}")
            write_json(work / "problems.json", problems)
        keep()
    record = keep()
    waiting = [name for name in record["waiting"] if not ONLY.value or name in ONLY.value]
    print(f"stage {_stage}: {len(record['rows'])} rows, {len(problems)} failed, {len(waiting)} waiting: {out}")
    return STOPPED if waiting else 1 if record["failed"] else 0


def units_of(work: Path, out: Path) -> Sequence[Unit]:
    """Returns the measurements of stage 1 or 2, in their order."""
    work.mkdir(parents=True, exist_ok=True)
    if _stage == "1":
        return list(stages.stage1(work, scale()))
    chosen = work / "attentions.json"  # decided once: a later record of stage 1 must not change a row half-way
    if not chosen.exists():
        rows = read_stage([out, work.parent / "records", Path(EARLIER.value)], "1")["rows"]
        if not rows:
            raise InputError("stage 2 takes the faster attention of stage 1, which has no row yet; run stage 1 first")
        found = stages.faster_attentions(rows, scale())
        write_json(chosen, [[size, length, name] for (size, length), name in found.items()])
    found = {(size, length): name for size, length, name in json.loads(chosen.read_text(encoding="utf-8"))}
    return list(stages.stage2(work, scale(), found, PEER_PYTHON.value or sys.executable))


def take_earlier(work: Path, units: Sequence[Unit], gpu: str) -> None:
    """Puts the rows of an earlier record where they would have been measured.

    Raises: InputError if that record is of another GPU than `gpu`, or of a rehearsal and this is none, or the other
      way round.
    """
    earlier = read_stage([Path(EARLIER.value)], _stage)
    if earlier["rows"] and earlier["rehearsal"] != REHEARSE.value:
        raise InputError(
            f"{EARLIER.value} has records of {'a rehearsal' if earlier['rehearsal'] else 'a GPU'}; give another "
            "folder with --earlier"
        )
    kinds = {row["devices"]["kind"] for row in earlier["rows"].values() if "devices" in row}
    if gpu and kinds - {gpu}:
        raise InputError(
            f"{EARLIER.value} has rows of {', '.join(sorted(kinds - {gpu}))}, and this machine has {gpu}; ask for the "
            "same GPU, or give an empty folder with --earlier"
        )
    for unit in units:
        output = unit.directory / stages.BENCH
        if unit.group in earlier["rows"] and unit.jobs[-1].output == output and not output.exists():
            output.parent.mkdir(parents=True, exist_ok=True)
            write_json(output, earlier["rows"][unit.group])


def read_problems(work: Path) -> dict[str, list[str]]:
    """Returns how each measurement has failed so far."""
    path = work / "problems.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


# Stage 3


def pretrain(work: Path, out: Path, stop: Stop, facts: dict[str, Any]) -> int:
    """Runs the queue of stage 3 until it is time to stop, and writes its records."""
    manifest = read_kit(Path(KIT.value))
    place, data = (work / "stage3").resolve(), (work / "data").resolve()
    more = [f"--set={flag}" for flag in SET.value]
    command = stages.stage3(place, data, scale(), manifest["pretraining"]["train_tokens"], RATE.value, more)
    place.mkdir(parents=True, exist_ok=True)
    record, earlier = place / "records" / "table6.json.gz", Path(EARLIER.value)
    if not record.exists() and (earlier / _BERT).exists():
        if read_stage([earlier], "3")["rehearsal"] != REHEARSE.value:
            raise InputError(f"{earlier / _BERT} is of a rehearsal and this is none, or the other way round; remove it")
        record.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(earlier / _BERT, record)  # the queue runs no unit again that is whole in it
    wait_for_queue(place / "runs", stop)
    process = subprocess.Popen(tied(command), cwd=ROOT, stdin=subprocess.DEVNULL, start_new_session=True)
    status = stop.wait(process)  # the queue passes the signal on, and what it runs saves its state
    told = subprocess.run([*command, "--status"], cwd=ROOT, capture_output=True, text=True)
    lines = [line.partition(": ")[2] for line in told.stdout.splitlines()]
    if record.exists():
        shutil.copyfile(record, out / _BERT)
    waiting = [line for line in lines if ", next " in line]
    learned = slices(place / "runs")
    write_json(
        out / "gpu_stage3.json",
        {"format": 1, "stage": "3", **facts, "scale": {**scale()._asdict(), "rows": {}}, "learning_rate": RATE.value,
         "command": [part.replace(f"{ROOT}/", "") for part in command[1:]], "rows": {}, "units": lines,
         "slices": learned, "complete": not waiting},
    )  # fmt: skip
    print("\n".join(lines), flush=True)
    return 1 if status == 1 else STOPPED if waiting else 0


def wait_for_queue(runs: Path, stop: Stop) -> None:
    """Waits until no queue of an earlier call, which was killed, saves a state in `runs`, or until it is time to stop.

    Else this call would go on with another seed, beside a job that still holds the memory of the GPU.
    """
    for lock in sorted(runs.glob("*/seed*/.lock")):
        while not stop.asked:
            with lock_file(lock, keep=True) as holder:
                if not holder:
                    break
            time.sleep(0.5)


def slices(runs: Path) -> dict[str, Any]:
    """Returns the last report of each pre-training: step, tokens a second, and how long the run took in all."""
    from bert_jax.training.report import METRICS_FILE, read_metrics

    found = {}
    for path in sorted(runs.glob(f"*/seed*/pretrain/{METRICS_FILE}")):
        reports = read_metrics(path, ("train",))
        goodput = read_metrics(path, ("goodput",))
        if reports:
            found["/".join(path.parts[-4:-2])] = {"last": reports[-1], "goodput": goodput[-1] if goodput else None}
    return found


if __name__ == "__main__":
    if len(sys.argv) > 1 and not sys.argv[1].startswith("-"):
        _stage = sys.argv.pop(1)
    cli.run(main)
