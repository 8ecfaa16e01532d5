# SPDX-License-Identifier: Apache-2.0
"""The kit for an offline GPU: what is packed, the commands of each stage, and that slices stop and go on."""

import configparser
import importlib.metadata
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import numpy as np
import pytest

from benchmarks import gpu_packing, gpu_records, pages
from benchmarks import gpu_stages as stages
from benchmarks import peer_workers as peers
from bert_jax.data import packed_dataset
from bert_jax.errors import InputError
from bert_jax.settings.pretraining import PretrainConfig

SAFE_NAME = re.compile(r"[\w.-]+")


def names_of(requirements: list[str]) -> set[str]:
    """Returns the names of requirements that are no extra's."""
    needed = [line for line in requirements if "extra ==" not in line]
    return {gpu_packing.normal(re.match(r"[\w.-]+", line.strip())[0]) for line in needed}


# What is packed


def test_every_library_is_on_the_machine_or_packed(repository):
    setup = configparser.ConfigParser()
    setup.read(repository / "setup.cfg")
    there = {*gpu_packing.MACHINE, *gpu_packing.WHEELS}
    assert names_of(setup["options"]["install_requires"].strip().splitlines()) <= there
    for name in gpu_packing.WHEELS:
        assert names_of(importlib.metadata.requires(name) or []) - {"numpy"} <= there, name
    pinned = gpu_packing.pinned_wheels()
    assert [line.partition("==")[0] for line in pinned] == list(gpu_packing.WHEELS)
    assert all(re.fullmatch(r"[\w.-]+==\d[\w.]*", line) for line in pinned)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Returns a folder of data in which zorro, rte and others are missing, and MRPC is large."""
    root = tmp_path_factory.mktemp("data")
    contents = {
        "blimp/blimp.jsonl.gz": b"pairs", "blimp/baselines.tsv": b"UID\n", "glue/SST-2/train.tsv": b"a\t1\n" * 99,
        "glue/SST-2/dev.tsv": b"b\t0\n", "glue/SST-2/test.tsv": b"not packed", "squad/dev-v1.1.json": b"{}",
        "glue/MRPC/train.tsv": np.random.default_rng(0).bytes(300_000), "glue/MRPC/dev.tsv": b"x",
        "glue/RTE/dev.tsv": b"x",
    }  # fmt: skip
    for name, content in contents.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(content)
    return root


def make_kit(place: Path, data: Path, prepared: Path, room: int = 2**20) -> Path:
    """Returns a kit with an empty wheel."""
    (place / "wheels").mkdir(parents=True)
    (place / "wheels" / "zstandard-1-py3-none-any.whl").write_bytes(b"wheel")
    manifest = gpu_packing.pack(place, data, prepared, room)
    (place / "kit.json").write_text(json.dumps(manifest | {"data": "given"}))
    return place


@pytest.fixture(scope="module")
def kit(tmp_path_factory, data, toy_data):
    return make_kit(tmp_path_factory.mktemp("packed") / "kit", data, toy_data, room=2**18)


def test_a_kit_has_what_fits_and_says_what_does_not(kit, data, toy_data, tmp_path):
    manifest = gpu_packing.read_kit(kit)
    archives = [f"data/{name}.tar.xz" for name in ("blimp", "pretrain", "squad", "sst-2")]
    assert list(manifest["files"]) == [*archives, "wheels/zstandard-1-py3-none-any.whl"]
    assert all(about["bytes"] == (kit / name).stat().st_size for name, about in manifest["files"].items())
    assert list(manifest["left_out"]) == ["mrpc"] and manifest["left_out"]["mrpc"] > 2**18
    assert manifest["not_in_data"] == ["zorro", "cola", "rte", "sts-b", "ner"]
    assert gpu_packing.folder_bytes(kit) <= 2**18
    splits = json.loads((toy_data / "manifest.json").read_text())["splits"]
    assert manifest["pretraining"] == {"train_tokens": splits["train"]["tokens"], "row_length": 32}
    *lines, last = gpu_packing.describe(kit, 64)
    assert "    left out   mrpc, 0.29 MiB" in lines and re.search(r"[\d.]+ MiB .* of 64; [\d,]+ tokens", last)
    gpu_packing.unpack(kit, tmp_path / "there")
    for path in toy_data.rglob("*"):
        if path.is_file():
            assert (tmp_path / "there/pretrain" / path.relative_to(toy_data)).read_bytes() == path.read_bytes()
    assert (tmp_path / "there/tasks/glue/SST-2/train.tsv").read_bytes() == b"a\t1\n" * 99
    assert not (tmp_path / "there/tasks/glue/SST-2/test.tsv").exists()
    for path, baselines in (stages.PAIRS["blimp"], (stages.TASKS["squad1"], stages.TASKS["sst2"])):
        assert (tmp_path / "there" / path).exists() and (tmp_path / "there" / baselines).exists()


def test_nothing_in_a_kit_says_where_it_was_made(kit, data, toy_data):
    text = (kit / "kit.json").read_text()
    for folder in (data, toy_data, kit, Path.cwd(), Path.home()):
        assert str(folder) not in text
    import tarfile

    for archive in (kit / "data").iterdir():
        with tarfile.open(archive) as tar:
            for entry in tar:
                assert not entry.name.startswith(("/", "..")) and (entry.uid, entry.mtime, entry.uname) == (0, 0, "")


def test_the_same_files_make_the_same_archive(kit, data, toy_data, tmp_path):
    again = make_kit(tmp_path / "kit", data, toy_data, room=2**18)
    assert gpu_packing.read_kit(again)["files"] == gpu_packing.read_kit(kit)["files"]


def test_a_kit_that_is_too_large_is_refused(data, toy_data, tmp_path):
    with pytest.raises(InputError, match=r"needs 0\.\d MiB, 0\.\d of them for pre-training data, and 0\.0 are left"):
        make_kit(tmp_path / "kit", data, toy_data, room=100)


def test_packed_data_are_refused(repository, data, toy_data, tmp_path):
    packed_dataset.pack_dataset(str(toy_data), str(tmp_path / "packed"), max_per_row=2)
    command = (sys.executable, "-m", "benchmarks.gpu_kit", f"--output={tmp_path / 'kit'}", f"--data={data}")
    command += (f"--pretrain={tmp_path / 'packed'}",)
    result = subprocess.run(command, cwd=repository, capture_output=True, text=True)
    assert result.returncode == 1 and not (tmp_path / "kit").exists()
    assert "packed is packed already, up to 2 sequences in a row; give the data set" in result.stderr


def test_damage_on_the_way_is_found(kit, data, toy_data, tmp_path):
    copy = make_kit(tmp_path / "kit", data, toy_data)
    gpu_packing.unpack(copy, tmp_path / "there")
    (tmp_path / "there" / "mark").touch()
    gpu_packing.unpack(copy, tmp_path / "there")
    assert (tmp_path / "there" / "mark").exists()  # the second time nothing is unpacked
    archive = copy / "data" / "squad.tar.xz"
    archive.write_bytes(archive.read_bytes()[:-1])
    with pytest.raises(InputError, match=r"squad.tar.xz is missing or damaged; copy the kit again"):
        gpu_packing.unpack(copy, tmp_path / "there")
    with pytest.raises(InputError, match="is no kit; make one with make gpu-kit"):
        gpu_packing.unpack(tmp_path, tmp_path / "there")


def test_wheels_from_a_folder(tmp_path):
    (tmp_path / "from").mkdir()
    for name in gpu_packing.WHEELS[1:]:
        (tmp_path / "from" / f"{name.replace('-', '_')}-1-py3-none-any.whl").touch()
    with pytest.raises(InputError, match="has no wheel of google-crc32c; add it"):
        gpu_packing.get_wheels(tmp_path / "some", tmp_path / "from")
    (tmp_path / "from" / "google_crc32c-1-cp312.whl").touch()
    gpu_packing.get_wheels(tmp_path / "all", tmp_path / "from")
    assert len(list((tmp_path / "all").iterdir())) == len(gpu_packing.WHEELS)


def test_another_tree_has_another_digest(tmp_path):
    (tmp_path / "bert_jax").mkdir()
    (tmp_path / "bert_jax" / "a.py").write_text("1")
    before = gpu_packing.source_digest(tmp_path)
    (tmp_path / "notes.md").write_text("no code")
    assert gpu_packing.source_digest(tmp_path) == before
    (tmp_path / "bert_jax" / "a.py").write_text("2")
    assert gpu_packing.source_digest(tmp_path) != before


# What the stages run


def all_units(scale=stages.REAL):
    return [*stages.stage1(Path("work/stage1"), scale), *stages.stage2(Path("work/stage2"), scale, {})]


@pytest.mark.parametrize("scale", [stages.REAL, stages.REHEARSAL], ids=["real", "rehearsal"])
def test_every_command_has_settings_that_there_are(scale, repository):
    units = all_units(scale)
    assert len({unit.directory for unit in units}) == len(units)
    fields = PretrainConfig()
    for unit in units:
        assert SAFE_NAME.fullmatch(unit.group)
        for job in unit.jobs:
            parts = job.command[job.command.index(sys.executable) + 1 :]
            if parts[0] == "-m":
                assert importlib.util.find_spec(parts[1])
            else:
                assert (repository / parts[0]).exists()
            for part in parts:
                if match := re.match(r"--config\.(\w+)\.(\w+)=", part):
                    assert hasattr(getattr(fields, match[1]), match[2]), part


def test_the_table_is_what_the_issue_asks_for():
    names = {row.name for row in stages.table_rows(stages.REAL)}
    shapes = [f"{size}-{length}" for size in ("base", "large") for length in (128, 512)]
    asked = {f"{shape}-{attention}" for shape in shapes for attention in ("plain", "fused")}
    assert asked <= names
    groups = {unit.group for unit in all_units()}
    assert names | {"tests", "profile", "base-512-packed-plain", "base-512-packed-fused", "large-512-torch"} <= groups
    assert peers.parse_modes(stages.PEERS, "train") == tuple(stages.PEERS.split(","))
    assert {"eager:bfloat16:cudnn", "eager:bfloat16:flash", "compile:bfloat16:cudnn"} <= {*stages.PEERS.split(",")}


def test_names_of_attention_of_peers():
    for name in ("eager:bfloat16:triton", "eager:float32:flash:cudnn"):
        with pytest.raises(InputError, match=f"compare '{name}' names no attention of torch .* use cudnn, flash"):
            peers.parse_modes(name, "train")
    with pytest.raises(InputError, match="is no peer for infer"):
        peers.parse_modes("onnx:float32:flash", "infer")


def test_the_data_of_the_kit_are_where_the_tasks_look(repository):
    """What `gpu_packing` packs for a task is what `ablations` reads for it."""
    # In a process of its own: the module defines flags, which other tests define too.
    code = "import json; from benchmarks import ablations; print(json.dumps(ablations.TASKS))"
    done = subprocess.run([sys.executable, "-c", code], cwd=repository, capture_output=True, text=True, check=True)
    tasks = json.loads(done.stdout)
    places = {place for item in gpu_packing.ITEMS for place, _ in item.files}
    for task, path in stages.TASKS.items():
        source, _ = tasks[task]
        assert str(Path(path).parent) in places and Path(path).parent.name in source, task
    for path, baselines in stages.PAIRS.values():
        assert {str(Path(path).parent), path} & places and str(Path(baselines).parent) in places


def test_the_queue_of_stage_3_takes_its_flags(repository, toy_data, kit, tmp_path):
    gpu_packing.unpack(kit, tmp_path / "data")
    scale = stages.REHEARSAL._replace(epochs=2)
    command = stages.stage3(tmp_path / "work", tmp_path / "data", scale, 1000, 3e-4, ["--set=--config.model.unroll=1"])
    done = subprocess.run([*command, "--commands"], cwd=repository, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 2 * 5  # of both seeds: pre-training, held-out text, BLiMP, SST-2, SQuAD
    assert "--config.model.unroll=1" in lines[0] and "--config.model.compute_dtype=bfloat16" in lines[0]
    assert "--baselines=" + str(tmp_path / "data/pairs/baselines/blimp/baselines.tsv") in lines[2]


def test_the_faster_attention_is_what_stands_beside_torch():
    def row(median):
        return {"figures": [{"step_seconds": {"median": median}}]}

    records = {"base-128-plain": row(2.0), "base-128-fused": row(1.0), "base-512-plain": row(3.0)}
    found = stages.faster_attentions(records, stages.REAL)
    assert found == {("base", 128): "fused", ("base", 512): "plain"}
    commands = [" ".join(unit.jobs[0].command) for unit in stages.stage2(Path("work"), stages.REAL, found)]
    assert [re.search(r"attention=(\w+)", line)[1] for line in commands] == ["fused", "plain", "plain", "plain"]


# Slices

FAKE_STAGE = """
import sys
from pathlib import Path
from benchmarks import gpu, gpu_stages
from benchmarks.jobs import Job, Unit
from bert_jax.tools import cli

def stage1(work, scale):
    for name, code in {units!r}.items():
        place = work / name
        write = f"import pathlib, sys, time; open({log!r}, 'a').write('{{name}} '); {{code}}; "
        write += f"pathlib.Path({{str(place / 'bench.json')!r}}).write_text('{{{{\\"figures\\": []}}}}')"
        yield Unit(name, 0, place, (Job("bench", (sys.executable, "-c", write), place / "bench.json"),))

gpu_stages.stage1, gpu._stage = stage1, "1"
cli.run(gpu.main)
"""


def start_stage(repository: Path, kit: Path, place: Path, units: dict[str, str], *arguments: str) -> subprocess.Popen:
    """Returns a process that runs a stage of invented measurements."""
    program = FAKE_STAGE.format(units=units, log=str(place / "ran"))
    folders = (f"--kit={kit}", f"--work={place / 'work'}", f"--out={place / 'out'}", f"--earlier={place / 'earlier'}")
    command = [sys.executable, "-c", program, *folders, "--rehearse", *arguments]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, cwd=repository, text=True, **pipes)


def run_stage(*arguments) -> int:
    process = start_stage(*arguments)
    output, errors = process.communicate(timeout=600)
    assert process.returncode in (0, 1, 2) and "Traceback" not in errors, output + errors
    return process.returncode


def call(repository: Path, code: str, *flags: str) -> str:
    """Returns the error of some code that has `gpu`, "" if there is none; in a process of its own, as it has flags."""
    code = f"import sys; from pathlib import Path; from benchmarks import gpu; gpu.flags.FLAGS(sys.argv); {code}"
    done = subprocess.run([sys.executable, "-c", code, *flags], cwd=repository, text=True, stderr=subprocess.PIPE)
    return done.stderr if done.returncode else ""


def read(place: Path) -> dict:
    return json.loads((place / "out" / "gpu_stage1.json").read_text())


def wait_for(path: Path, process: subprocess.Popen) -> str:
    """Returns what a process has written to a file, once there is something; fails if it ends before."""
    deadline = time.monotonic() + 300
    while not (path.exists() and path.read_text()):
        assert time.monotonic() < deadline and process.poll() is None, process.communicate()
        time.sleep(0.05)
    return path.read_text()


def test_a_stopped_stage_goes_on(repository, kit, tmp_path):
    begun, go = tmp_path / "begun", tmp_path / "go"
    wait = f"pathlib.Path({str(begun)!r}).write_text('x'); time.sleep(0 if pathlib.Path({str(go)!r}).exists() else 300)"
    units = {"one": "0", "two": wait, "three": "0"}
    assert run_stage(repository, kit, tmp_path, units, "--minutes=1e-6") == 2
    assert read(tmp_path)["waiting"] == ["one", "two", "three"] and not (tmp_path / "ran").exists()
    process = start_stage(repository, kit, tmp_path, units)
    wait_for(begun, process)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=300)
    assert process.returncode == 2
    record = read(tmp_path)
    assert list(record["rows"]) == ["one"] and record["waiting"] == ["two", "three"] and record["rehearsal"] is True
    go.touch()
    assert run_stage(repository, kit, tmp_path, units) == 0
    record = read(tmp_path)
    assert sorted(record["rows"]) == ["one", "three", "two"] and record["waiting"] == [] and record["failed"] == {}
    assert (tmp_path / "ran").read_text().split() == ["one", "two", "two", "three"]
    assert record["about"]["kit"]["data"] == "given" and record["about"]["versions"]["jax"]
    assert all(SAFE_NAME.fullmatch(path.name) for path in (tmp_path / "out").iterdir())


def test_a_failure_leaves_the_others_and_is_tried_twice(repository, kit, tmp_path):
    units = {"bad": "print('RESOURCE_EXHAUSTED: 9 GB'); sys.exit(7)", "good": "0"}
    for _ in range(3):
        assert run_stage(repository, kit, tmp_path, units) == 1
    record = read(tmp_path)
    assert list(record["rows"]) == ["good"] and record["waiting"] == []
    assert len(record["failed"]["bad"]) == 2 and "exit status 7" in record["failed"]["bad"][0]
    assert "RESOURCE_EXHAUSTED: 9 GB" in record["failed"]["bad"][0]
    assert (tmp_path / "ran").read_text().split() == ["bad", "good", "bad"]


def test_rows_of_an_earlier_machine_are_kept(repository, kit, tmp_path):
    (tmp_path / "earlier").mkdir()
    earlier = {"format": 1, "rehearsal": True, "rows": {"one": {"figures": [], "from": "before"}}}
    (tmp_path / "earlier" / "gpu_stage1.json").write_text(json.dumps(earlier))
    assert run_stage(repository, kit, tmp_path, {"one": "0", "two": "0"}) == 0
    assert read(tmp_path)["rows"]["one"]["from"] == "before" and (tmp_path / "ran").read_text() == "two "
    (tmp_path / "earlier" / "gpu_stage1.json").write_text(json.dumps(earlier | {"rehearsal": False}))
    other = {"one": {"devices": {"kind": "NVIDIA H200"}}}
    (tmp_path / "earlier" / "gpu_stage1.json").write_text(json.dumps(earlier | {"rows": other}))
    flags = (f"--earlier={tmp_path / 'earlier'}", "--rehearse")
    take = "gpu._stage = '1'; gpu.take_earlier(Path('work'), [], {!r})"
    assert call(repository, take.format("NVIDIA H200"), *flags) == ""
    problem = call(repository, take.format("NVIDIA H100"), *flags)
    assert "has rows of NVIDIA H200, and this machine has NVIDIA H100; ask for the same GPU" in problem
    (tmp_path / "earlier" / "gpu_stage1.json").write_text(json.dumps(earlier | {"rehearsal": False}))
    process = start_stage(repository, kit, tmp_path, {"one": "0"})
    assert "has records of a GPU; give another folder" in process.communicate(timeout=600)[1]


def test_what_a_call_leaves_out_of_its_folder_is_kept_for_the_next_stage(repository, kit, tmp_path):
    assert run_stage(repository, kit, tmp_path, {"one": "0"}) == 0
    kept = tmp_path / "work" / "rehearsal" / "records" / "gpu_stage1.json"
    assert kept.read_bytes() == (tmp_path / "out" / "gpu_stage1.json").read_bytes()


def test_stage_2_asks_for_stage_1(repository, tmp_path):
    (tmp_path / "measured").mkdir()
    code = f"gpu.units_of(Path({str(tmp_path)!r}, 'measured', 'stage2'), Path({str(tmp_path)!r}))"
    assert "run stage 1 first" in call(repository, code, f"--earlier={tmp_path}")
    assert not (tmp_path / "measured" / "stage2" / "attentions.json").exists()


def test_a_stage_waits_for_a_queue_that_is_still_saving(repository, tmp_path):
    lock = tmp_path / "bert-tiny" / "seed0" / ".lock"
    code = (
        "import sys, time; from pathlib import Path; from bert_jax.storage.locks import lock_file\n"
        f"with lock_file(Path({str(lock)!r}), keep=True): print('locked', flush=True); time.sleep(8)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
        assert process.stdout and process.stdout.readline() == b"locked\n"
        wait = f"gpu.wait_for_queue(Path({str(tmp_path)!r}), gpu.Stop({{}}))"
        assert call(repository, wait.format(1e-9)) == "" and process.poll() is None  # it was time to stop
        assert call(repository, wait.format(0)) == "" and process.wait(1) == 0


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs Linux: prctl ends a process with its parent")
def test_a_killed_stage_leaves_nothing_running(repository, kit, tmp_path):
    pid = tmp_path / "pid"
    code = f"import os; pathlib.Path({str(pid)!r}).write_text(str(os.getpid())); time.sleep(100)"
    process = start_stage(repository, kit, tmp_path, {"one": code})
    job = wait_for(pid, process)
    process.send_signal(signal.SIGKILL)
    process.wait()
    deadline = time.monotonic() + 300
    while is_running(job):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def is_running(pid: str) -> bool:
    """Returns whether a process runs; one that has ended may wait for its new parent to collect it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["4"], "error: stage '4' is none of 1, 2, 3"),
        (["1", "--kit=nowhere"], "error: nowhere is no kit; make one with make gpu-kit"),
    ],
)
def test_wrong_calls_are_one_line(repository, arguments, message, tmp_path):
    command = [sys.executable, "-m", "benchmarks.gpu", *arguments, f"--work={tmp_path}"]
    done = subprocess.run(command, cwd=repository, text=True, capture_output=True)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(message) and done.stderr.count("\n") == 1


def test_the_script_wants_a_kit(repository, tmp_path):
    script = repository / "benchmarks" / "gpu.sh"
    assert subprocess.run(["bash", "-n", str(script)]).returncode == 0 and os.access(script, os.X_OK)
    environment = os.environ | {"KIT": str(tmp_path / "nothing"), "WORK": str(tmp_path / "work")}
    done = subprocess.run([str(script), "1"], env=environment, text=True, capture_output=True)
    assert done.returncode == 1 and done.stderr.count("\n") == 1
    assert re.fullmatch(r"error: .*nothing has no wheels; make it with make gpu-kit .*\n", done.stderr)


# Records and pages

FIGURES = {
    "step_seconds": {"median": 0.1, "low": 0.09, "high": 0.2}, "sequences_per_second": {"median": 2560.4},
    "useful_mfu": {"median": 0.41}, "padded_mfu": {"median": 0.52}, "peak_memory_bytes": 5 * 2**30,
    "peak_memory_of": "device", "compile_seconds": 31.4,
}  # fmt: skip


def stage_record(names, rehearsal=False) -> dict:
    """Returns a record whose every row took 100 ms, beside torch with 200."""
    name, twice = "torch eager:bfloat16:cudnn", {"median": 2.0, "low": 1.5, "high": 2.5}
    theirs = {**FIGURES, "name": name, "step_seconds": {"median": 0.2, "low": 0.2, "high": 0.2}}
    ratio = {"kind": "same precision", "theirs": name, "times_as_fast": twice}
    row = {"figures": [{**FIGURES, "name": "ours bfloat16"}, theirs], "comparisons": [ratio], "failed": {"x:y": "no"}}
    gpu = {"name": "G", "driver_version": "580", "cuda": "13.0"}
    facts = {"gpu": gpu, "versions": {"jax": "0.11.2"}, "commit": "0" * 40 + "+"}
    found = {"format": 1, "rehearsal": rehearsal, "about": facts, "tests": {"passed": 11}}
    return found | {"rows": dict.fromkeys(names, row)}


def template_rows(repository: Path) -> dict[str, list[str]]:
    """Returns the rows that the page asks each record for."""
    text = (repository / "benchmarks" / "templates" / "gpu.md").read_text()
    found: dict[str, list[str]] = {}
    for spec in re.findall(r"<!-- draw (?:steps|peers)\n(.*?)-->", text, re.DOTALL):
        spec = tomllib.loads(spec)
        found.setdefault(spec["record"], []).extend(name for name, _ in spec["rows"])
    return found


def test_the_page_has_every_row_that_is_measured(repository):
    for name, rows in template_rows(repository).items():
        of_stage = {"gpu_stage1": stages.stage1(Path("work"), stages.REAL)}
        of_stage["gpu_stage2"] = stages.stage2(Path("work"), stages.REAL, {})
        assert sorted(rows) == sorted(unit.group for unit in of_stage[name] if unit.jobs[-1].name == "bench")


def test_pages_draw_records_of_a_gpu_and_refuse_those_of_a_rehearsal(repository, tmp_path):
    text = (repository / "benchmarks" / "templates" / "gpu.md").read_text().partition("## BERT-Base")[0]
    (tmp_path / "page.md").write_text(text)
    sources = pages.Sources(tmp_path, repository / "benchmarks" / "paper.toml")
    for rehearsal in (False, True):
        for name, rows in template_rows(repository).items():
            (tmp_path / f"{name}.json").write_text(json.dumps(stage_record(rows, rehearsal)))
        if not rehearsal:
            drawn = pages.draw_page(tmp_path / "page.md", sources)
    assert "| Base, 256 x 128, plain | 100.0 (90.0 to 200.0) | 2,560 | 41.0% | 52.0% | 5.0 | 31 |" in drawn
    assert "|  | torch eager:bfloat16:cudnn | 200.0 (200.0 to 200.0) | 2.00 (1.50 to 2.50) | 5.0 |" in drawn
    assert "| | torch x:y | did not run | | |" in drawn and f"-->{'0' * 40}+<!-- end -->" in drawn
    with pytest.raises(InputError, match="is of a rehearsal: its figures are no measurements"):
        pages.draw_page(tmp_path / "page.md", sources)
    (tmp_path / "gpu_stage1.json").write_text(json.dumps(stage_record(["other"])))
    with pytest.raises(InputError, match="base-128-plain was not measured; there are other"):
        pages.draw_page(tmp_path / "page.md", sources)
    (tmp_path / "gpu_stage1.json").write_text('{"format": 1, "about": {"gpu": {"name": "G"')
    with pytest.raises(InputError, match="is damaged"):
        pages.draw_page(tmp_path / "page.md", sources)


def test_tests_are_counted_and_failures_named(tmp_path):
    (tmp_path / "tests.xml").write_text(
        '<testsuites><testsuite><testcase name="a"/><testcase name="b"><skipped message="no GPU"/></testcase>'
        '<testcase name="c[x]"><failure message="AssertionError: 1 is 2&#10;more"/></testcase></testsuite></testsuites>'
    )
    found = gpu_records.read_tests(tmp_path / "tests.xml")
    assert found == {"passed": 1, "skipped": 1, "failed": ["c[x]: AssertionError: 1 is 2"]}


def test_a_profile_is_summed_by_kinds_of_events():
    events = [("fusion.1", 2e9), ("fusion.23", 1e9), ("gemm_128x64.4", 4e9), ("7", 1e9)]
    found = gpu_records.by_name(events, top=2)
    assert found["seconds"] == pytest.approx(8) and gpu_records.by_name([], 2) == {}
    assert found["kinds"] == [
        {"name": "gemm_128x64", "seconds": 4.0, "count": 1}, {"name": "fusion", "seconds": 3.0, "count": 2},
    ]  # fmt: skip
