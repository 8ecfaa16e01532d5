# SPDX-License-Identifier: Apache-2.0
"""The design, enforced: who may import whom, where each library lives, and how long a file may be.

A change of design changes the tables below, with a decision record in docs/decisions/.
"""

import ast
import graphlib
import io
import itertools
import re
import subprocess
import sys
import tokenize
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

from bert_jax.model.heads.table import HEADS
from bert_jax.tools.main import NAMES

# A room imports only from the rooms before it, and a file of it from the others of it; "room.*" is what no other entry
# of that room names. The order within a line counts too.
RANKS: Sequence[str] = """
    version errors storage.* settings.* batch devices.*
    text.* tokenizing data.* data.beam
    model.* batches.* checkpoints.* training.* tasks.*
    pretraining finetuning inference.* sweep plan.*
    tools.* __main__ train.py finetune.py
""".split()

# What a tokenizer's files mean is a function of their contents; they are read in `tokenizing`.
TEXT_MAY_IMPORT: Sequence[str] = ("storage.protobuf", "storage.writing")

# Text and data preparation run where there is no accelerator, and start fast.
WITHOUT_JAX: Sequence[str] = """
    __init__ __main__ version errors storage.* settings.* batch devices.allocator text.* tokenizing data.* tasks.*
    training.report training.boards training.shown training.goodput training.curves model.flops
    inference.minimal_pairs
""".split()
JAX_ALL_THE_SAME: Sequence[str] = """
    data.beam tasks.embeddings.search tasks.evaluation tasks.results tasks.trial
""".split()

# One library, one home: when a library changes, one file or one folder does.
HOMES = {
    "jax": "*",
    "numpy": "*",
    "flax": "model.*",
    "optax": "training.optim",
    "orbax": "checkpoints.arrays checkpoints.states",
    "tensorflow_datasets": "data.sources.tfds_text tasks.readers",
    "pyarrow": "data.sources.parquet",
    "tokenizers": "text.*",
    "sentencepiece": "text.*",
    "sentencex": "data.sentences",
    "apache_beam": "data.beam",
    "backports": "storage.files",
    "compression": "storage.files",
    "msgspec": "storage.schema",
    "fsspec": "storage.stores storage.ranges",
    "google_crc32c": "storage.files storage.stores",
    "safetensors": "checkpoints.hf_weights",
    "huggingface_hub": "checkpoints.hub",
    "torch": "checkpoints.hf_weights",
    "tensorboardX": "training.report",
    "wandb": "training.boards",
    "matplotlib": "training.curves",
    "tqdm": "training.report",
    "libtpu": "plan.planner",
    "absl": "tools.* train.py finetune.py",
    "ml_collections": "tools.* train.py finetune.py",
}

# The tests of a module are in the file of its name: of text.vocab in tests/text/test_vocab.py, of a command also in
# tests/tools. Those of the modules below are elsewhere; a module that has neither is an error.
TESTS_ELSEWHERE = {
    "batches.make": "batches/test_examples.py",
    "batches.order": "batches/test_shapes.py",
    "batches.pack": "batches/test_shapes.py",
    "checkpoints.arrays": "checkpoints/test_states.py",
    "checkpoints.hf_weights": "checkpoints/test_hf.py",
    "checkpoints.pretrained": "checkpoints/test_revisions.py",
    "checkpoints.sealed": "checkpoints/test_states.py",
    "checkpoints.warm_start": "tools/test_convert_checkpoint.py",
    "data.blocks": "batches/test_stream.py",
    "data.building": "data/test_prepare.py",
    "data.google.import_examples": "data/google/test_examples.py",
    "devices.cluster": "end_to_end/test_cluster.py",
    "model.distances": "model/test_score_bias.py",
    "devices.preemption": "devices/test_members.py",
    "devices.tpu_hosts": "devices/test_joining.py",
    "inference.compare": "tools/test_convert_checkpoint.py",
    "inference.pretrained": "inference/test_features.py",
    "model.attention": "model/test_fused_attention.py",
    "model.attention_kernels": "model/test_fused_attention.py",
    "model.fused_attention_gpu": "model/test_fused_attention.py",
    "model.fused_attention_tpu": "model/test_fused_attention.py",
    "model.derivatives": "model/test_acts.py",
    "model.heads.base": "model/heads/test_own_head.py",
    "model.heads.choice": "batches/test_examples.py",
    "model.heads.encoder": "checkpoints/test_names.py",
    "model.heads.labels": "tasks/test_evaluation.py",
    "model.heads.multilabel": "tasks/test_multilabel.py",
    "model.heads.own": "tasks/test_own_kinds.py",
    "model.heads.pretraining": "model/test_model.py",
    "model.heads.ranking": "tasks/test_reranking.py",
    "tasks.candidates": "tasks/embeddings/test_prepare.py",
    "model.heads.replaced": "checkpoints/test_families.py",
    "model.heads.sequence": "batches/test_examples.py",
    "model.heads.spans": "batches/test_examples.py",
    "model.heads.table": "checkpoints/test_names.py",
    "model.heads.tokens": "batches/test_examples.py",
    "model.bert": "model/test_google_goldens.py",
    "model.parts": "model/test_model.py",
    "model.sequences": "model/test_model.py",
    "model.teaching": "training/test_teachers.py",
    "plan.tables": "plan/test_planner.py",
    "training.describe": "training/test_packed_training.py",
    "settings.finetuning": "settings/test_settings.py",
    "settings.model": "settings/test_settings.py",
    "settings.pretraining": "settings/test_settings.py",
    "settings.relatives": "settings/test_settings.py",
    "settings.rules": "settings/test_settings.py",
    "storage.answers": "storage/test_places.py",
    "storage.files": "storage/test_storage.py",
    "storage.leases": "storage/test_places.py",
    "storage.schema": "test_own_files.py",
    "storage.stores": "storage/test_places.py",
    "storage.urls": "storage/test_storage.py",
    "storage.writing": "storage/test_storage.py",
    "tasks.classify_read": "tasks/test_classify.py",
    "tasks.own": "tasks/test_own_kinds.py",
    "tasks.ner_read": "tasks/test_ner.py",
    "tasks.base": "tasks/test_evaluation.py",
    "tasks.hooks": "tasks/test_trial.py",
    "tasks.glue.read": "tasks/glue/test_tasks.py",
    "tasks.glue.score": "tasks/glue/test_tasks.py",
    "tasks.prepare": "test_finetuning.py",
    "tasks.results": "test_finetuning.py",
    "tasks.tagging": "tasks/test_ner.py",
    "tasks.labels": "tasks/test_classify.py",
    "tasks.texts": "tasks/test_classify.py",
    "text.bert_json": "text/test_tokenizer_json.py",
    "text.tokenizer_files": "text/test_hf_classes.py",
    "tokenizing": "text/test_tokenizer.py",
    "text.wordpiece": "text/test_tokenizer.py",
    "text.words": "text/test_tokenizer.py",
    "tools.mine_negatives": "inference/test_negatives.py",
    "tools.prepare_pairs": "tasks/embeddings/test_prepare.py",
    "tasks.embeddings.prepared": "tasks/embeddings/test_prepare.py",
    "tools.compare_runs": "end_to_end/test_finetune_commands.py",
    "tools.evaluate": "tools/test_scoring_commands.py",
    "tools.export": "end_to_end/test_finetune_commands.py",
    "tools.extract_features": "end_to_end/test_finetune_commands.py",
    "tools.finetune": "end_to_end/test_finetune_commands.py",
    "tools.grow_model": "checkpoints/test_grow.py",
    "tools.import_tfrecords": "tools/test_shared_flags.py",
    "tools.lines": "tools/test_cli.py",
    "tools.main": "test_main.py",
    "tools.plan": "plan/test_planner.py",
    "tools.predict": "end_to_end/test_finetune_commands.py",
    "tools.prepare_beam": "data/test_beam.py",
    "tools.prepare_corpus": "data/test_prepare.py",
    "tools.recipes": "test_main.py",
    "tools.search": "inference/test_search.py",
    "tools.score": "tools/test_score_tool.py",
    "tools.score_sentences": "tools/test_scoring_commands.py",
    "tools.show_params": "tools/test_cli.py",
    "tools.train": "end_to_end/test_commands.py",
    "training.phases": "training/test_open_phases.py",
    "training.program": "training/test_step.py",
    "training.run": "test_pretraining.py",
    "training.stages": "training/test_loop.py",
    "training.train": "settings/test_phases.py",
    "training.shown": "training/test_report.py",
    "version": "test_public_names.py",
}

# What one reads to follow pre-training from the command line to a saved checkpoint, but kernels and what stands beside.
# What a reader must hold in mind is counted in statements and expressions, "nodes", and how hard a page is in nodes a
# line of code: a limit in lines makes code dense (docs/decisions/0001-the-house.md). Both only fall, but for the mean
# when refusals went: their lines were the thinnest, two nodes each.
MAX_NODES = 202_984
MAX_LINES_OF_BERT = 300  # what a reader of the paper reads
MAX_DENSITY = 5.0
SPDX = "# SPDX-License-Identifier: Apache-2.0"

# A path of somebody's machine; the expression is written so that it does not find itself.
MACHINE_PATH = re.compile(r"(?<![\w.~/-])/(?:work|home|root|Users)/\w")
TEXT_PLACES = ("bert_jax", "configs", "tests", "docs", "benchmarks", "notebooks", "launch", ".ci")
TEXT_SUFFIXES = {"", ".py", ".md", ".cfg", ".toml", ".yml", ".yaml", ".ipynb", ".sh"}


class Source(NamedTuple):
    """A file of the package, or a script beside it."""

    name: str  # "text.vocab"; a package's __init__ is "text"; a script is "train.py"
    path: Path
    text: str


class Import(NamedTuple):
    name: str  # dotted
    line: int


def read_sources(root: Path) -> list[Source]:
    """Returns the package's files, sorted, and the scripts that there are."""
    sources = []
    for path in sorted((root / "bert_jax").rglob("*.py")):
        parts = path.relative_to(root / "bert_jax").with_suffix("").parts
        sources.append(Source(".".join(parts).removesuffix("__init__").rstrip("."), path, path.read_text("utf-8")))
    scripts = [root / "train.py", root / "finetune.py"]
    return sources + [Source(path.name, path, path.read_text("utf-8")) for path in scripts if path.exists()]


def find_imports(source: Source) -> list[Import]:
    """Returns everything that a file imports, inside functions too; `from a import b` is a.b.

    Not what a package's __init__ imports for type checkers alone.
    """
    imports = []
    tree = ast.parse(source.text)
    if source.path.name == "__init__.py":
        for node in tree.body:
            if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
                node.body = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            imports += [Import(alias.name, node.lineno) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            prefix = f"{'.' * node.level}{node.module or ''}"
            imports += [Import(f"{prefix}.{alias.name}", node.lineno) for alias in node.names]
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", "")) in (
            "import_module",
            "__import__",
        ):
            imports += [
                Import(argument.value, node.lineno)
                for argument in node.args[:1]
                if isinstance(argument, ast.Constant) and isinstance(argument.value, str)
            ]
    return imports


def entry_of(name: str, entries: Sequence[str]) -> str | None:
    """Returns the entry that a module belongs to: its own name, or its folder's."""
    folder = f"{name.split('.')[0]}.*"
    return next((entry for entry in (name, folder) if entry in entries), None)


def count_nodes(source: Source) -> int:
    """Returns the number of statements and expressions of a file."""
    return sum(isinstance(node, (ast.expr, ast.stmt)) for node in ast.walk(ast.parse(source.text)))


def count_code_lines(source: Source) -> int:
    """Returns the lines that are neither blank nor a comment alone; docstrings are code."""
    tokens = tokenize.generate_tokens(io.StringIO(source.text).readline)
    comments = {
        token.start[0] for token in tokens if token.type == tokenize.COMMENT and token.line.strip().startswith("#")
    }
    lines = enumerate(source.text.splitlines(), start=1)
    return sum(bool(line.strip()) and number not in comments for number, line in lines)


def check_imports(sources: list[Source]) -> list[str]:
    """Returns what breaks the order of imports, the homes of libraries, or has no place in the design."""
    names = {source.name for source in sources}
    packages = {source.name for source in sources if source.path.name == "__init__.py"}
    graph: dict[str, set[str]] = {}
    problems = []
    for source in sources:
        rank = "__init__" if source.name in packages else entry_of(source.name, RANKS)
        if rank is None:
            problems.append(f"{source.path}: has no rank; give it a place in RANKS, with a decision record")
            continue
        for imported, line in find_imports(source):
            where = f"{source.path}:{line}"
            top, _, rest = imported.partition(".")
            if not top:
                problems.append(f"{where}: relative import; write it from bert_jax on")
            elif top == "bert_jax":
                target = rest if rest in names else rest.rpartition(".")[0]  # a module, or a name in one
                if target not in packages:
                    graph.setdefault(source.name, set()).add(target)
                    problems += _check_order(where, rank, target)
            elif top not in sys.stdlib_module_names:
                problems += _check_home(where, source.name, rank, top)
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        problems.append(f"files import each other in a circle: {' -> '.join(error.args[1])}")
    return problems


def _check_order(where: str, rank: str, target: str) -> list[str]:
    target_rank = entry_of(target, RANKS)
    if rank == "__init__":
        return (
            []
            if target == "version"
            else [f"{where}: a package's __init__ imports nothing of bert_jax (it would drag it in); hand it on lazily"]
        )
    if target_rank is None:
        return [f"{where}: bert_jax.{target} has no rank, or does not exist"]
    if rank == "text.*" and target.startswith("storage.") and target not in TEXT_MAY_IMPORT:
        return [f"{where}: text reads no file; hand it bytes or a parsed value (see bert_jax/tokenizing.py)"]
    siblings = rank == target_rank and rank.endswith(".*")
    if siblings or RANKS.index(target_rank) < RANKS.index(rank):
        return []
    return [f"{where}: {rank} imports bert_jax.{target}, which comes later in the design; see RANKS"]


def _check_home(where: str, name: str, rank: str, library: str) -> list[str]:
    if library not in HOMES:
        return [f"{where}: {library} has no home; give it one in HOMES and in setup.cfg"]
    homes = HOMES[library].split()
    if homes != ["*"] and entry_of(name, homes) is None:
        return [f"{where}: {library} lives in {', '.join(homes)}, and nowhere else"]
    if library == "jax" and entry_of(name or "__init__", WITHOUT_JAX) and name not in JAX_ALL_THE_SAME:
        return [f"{where}: {name or 'bert_jax'} must work without jax; move what needs it to a later file"]
    return []


def check_files(root: Path, sources: list[Source]) -> list[str]:
    """Returns whether there is too much code, or too dense, and which files lack a good name or their first line."""
    problems = []
    for source in sources:
        if source.path.name == "utils.py":
            problems.append(f"{source.path}: a file is named for what it does; utils is not a subject")
    nodes, lines = (sum(count(source) for source in sources) for count in (count_nodes, count_code_lines))
    if nodes > MAX_NODES:
        problems.append(f"the package has {nodes:,} nodes; {MAX_NODES:,} is the most, so take something away")
    if nodes / lines > MAX_DENSITY:
        problems.append(f"the package has {nodes / lines:.2f} nodes a line of code; {MAX_DENSITY} is the most")
    page = next((source for source in sources if source.name == "model.bert"), None)
    if page and len(page.text.splitlines()) > MAX_LINES_OF_BERT:
        problems.append(
            f"{page.path}: BERT is one page, of {MAX_LINES_OF_BERT} lines; move what is not the paper's beside it"
        )
    python_files = [source.path for source in sources]
    python_files += [path for place in TEXT_PLACES[1:] for path in sorted((root / place).rglob("*.py"))]
    for path in python_files:
        if path.read_text("utf-8").partition("\n")[0] != SPDX:
            problems.append(f"{path}: the first line is not {SPDX!r}")
    return problems


def check_machine_paths(root: Path) -> list[str]:
    """Returns the lines of text files that name a path of somebody's machine."""
    files = [path for path in root.iterdir() if path.is_file() and path.name != ".git"]  # as a worktree has it
    files += [path for place in TEXT_PLACES for path in (root / place).rglob("*") if path.is_file()]
    return [
        f"{path}:{number}: names a path of one machine: {line.strip()[:80]}"
        for path in sorted(files)
        if path.suffix in TEXT_SUFFIXES and "__pycache__" not in path.parts
        for number, line in enumerate(path.read_text("utf-8", errors="replace").splitlines(), start=1)
        if MACHINE_PATH.search(line)
    ]


def check(root: Path) -> list[str]:
    """Returns everything in a checkout that breaks the design."""
    sources = read_sources(root)
    problems = check_imports(sources) + check_files(root, sources) + check_machine_paths(root)
    return [problem.replace(f"{root}/", "") for problem in problems]


def public_names(source: Source) -> set[str]:
    """Returns the public names that a module defines, and the end of its own name."""
    names = {source.name.rpartition(".")[2]}
    for node in ast.parse(source.text).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names.add(node.name)
    return {name for name in names if not name.startswith("_")}


def check_tests(sources: list[Source], tests: Path) -> list[str]:
    """Returns the modules without tests of their own, and entries of TESTS_ELSEWHERE that are wrong."""
    problems = []
    modules = {
        s.name: s for s in sources if s.path.name != "__init__.py" and s.name != "__main__" and "." in s.path.name
    }
    modules = {name: source for name, source in modules.items() if not name.endswith(".py")}
    for name, source in modules.items():
        *folders, last = name.split(".")
        own, elsewhere = tests.joinpath(*folders, f"test_{last}.py"), TESTS_ELSEWHERE.get(name)
        if own.exists() == (elsewhere is not None):
            problems.append(f"{name}: tests belong in {own} or, named in TESTS_ELSEWHERE, in one other file")
        words = public_names(source)
        place = tests / elsewhere if elsewhere else own
        if place.exists() and not words & set(re.findall(r"\w+", place.read_text("utf-8"))):
            problems.append(f"{name}: {place} names nothing of it")
        elif elsewhere and not place.exists():
            problems.append(f"{name}: there is no {place}")
    return problems + [f"{name} is in TESTS_ELSEWHERE, and no module" for name in set(TESTS_ELSEWHERE) - set(modules)]


def test_every_module_has_tests(repository):
    assert not check_tests(read_sources(repository), repository / "tests")


def commands_imported(test: str) -> set[str]:
    """Returns the commands of the package that a test imports into its own process."""
    found = ast.walk(ast.parse(test))
    named = {f"{node.module}.{name.name}" for node in found if isinstance(node, ast.ImportFrom) for name in node.names}
    return {name for name in NAMES if any(f"{each}.".startswith(f"bert_jax.tools.{name}.") for each in named)}


def test_no_test_imports_a_command(repository):
    """A command defines its flags when it is imported, and two of them define --output."""
    tests = (repository / "tests").rglob("*.py")
    assert {path.name: found for path in tests if (found := commands_imported(path.read_text("utf-8")))} == {}
    assert commands_imported("from bert_jax.tools.predict import main\nfrom bert_jax.tools import cli, score") == {
        "predict", "score"
    }  # fmt: skip


def test_a_module_without_tests_is_found(tmp_path):
    source = Source("text.new", tmp_path / "new.py", "def count(): pass\n")
    only = [problem for problem in check_tests([source], tmp_path) if problem.startswith("text.new")]
    assert len(only) == 1 and "tests belong in" in only[0]
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "test_new.py").write_text("def test_other(): pass\n")
    assert "names nothing of it" in check_tests([source], tmp_path)[0]
    (tmp_path / "text" / "test_new.py").write_text("from bert_jax.text.new import count\n")
    assert not [problem for problem in check_tests([source], tmp_path) if problem.startswith("text.new")]


def test_the_design_holds(repository):
    problems = check(repository)
    assert not problems, "\n" + "\n".join(problems)


LIBRARY = ("data.prepare", "data.records", "training.report", "tasks.glue.score", "tasks.squad.score", "tasks.tagging")


@pytest.mark.parametrize(
    "modules",
    [("text", *LIBRARY), *((f"tools.{name}",) for name in ("build_vocab", "prepare_corpus", "import_tfrecords"))],
)
def test_no_jax_in_text_and_data_preparation(repository, modules):
    code = "import importlib, sys\nfor name in sys.argv[1:]:\n    importlib.import_module(f'bert_jax.{name}')\n"
    code += "    found = {'jax', 'flax', 'tensorflow'} & set(sys.modules)\n    assert not found, (name, found)"
    done = subprocess.run([sys.executable, "-c", code, *modules], text=True, capture_output=True, cwd=repository)
    assert (done.stderr, done.returncode) == ("", 0)


def asked_by_name(source: Source, names: set[str]) -> list[str]:
    """Returns the lines that compare with one of the names, by ==, != , in or match, or look it up in a dict."""
    found = []
    for node in ast.walk(ast.parse(source.text)):
        if isinstance(node, ast.Compare):
            operands = [node.left, *node.comparators]
        elif isinstance(node, ast.Dict):
            operands = [key for key in node.keys if key is not None]
        else:
            operands = [node.value] if isinstance(node, ast.MatchValue) else []
        inside = [getattr(operand, "elts", [operand]) for operand in operands]
        if names & {each.value for each in itertools.chain(*inside) if isinstance(each, ast.Constant)}:
            found.append(f"{source.name}:{node.lineno}")
    return found


def test_no_head_is_asked_for_by_name(repository):
    """All that is asked of a head is in its file; `encoder` and `next_sentence` are names of parameters too."""
    names = set(HEADS) - {"encoder", "next_sentence"}
    sources = [source for source in read_sources(repository) if not source.name.startswith("model.heads")]
    assert [line for source in sources for line in asked_by_name(source, names)] == []


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ('head == "masked_lm"', 1),
        ('"masked_lm" != head', 1),
        ('if head in ("x", "masked_lm"): pass', 1),
        ('table = {"masked_lm": 1, "x": 2}', 1),
        ('match head:\n    case "masked_lm": pass', 1),
        ('head = "masked_lm"; HEADS["masked_lm"]; f("masked_lm") == 1', 0),
    ],
)
def test_questions_by_name_are_found(tmp_path, text, count):
    assert len(asked_by_name(Source("x", tmp_path, text), {"masked_lm"})) == count


GOOD = {
    "bert_jax/__init__.py": "if TYPE_CHECKING:\n    from bert_jax.storage import x",
    "bert_jax/storage/files.py": "import json",
    "bert_jax/batch.py": "",
    "bert_jax/data/__init__.py": "",
    "bert_jax/data/records.py": "from bert_jax.storage.files import files\nfrom bert_jax.data.sources.corpus import x",
    "bert_jax/data/sources/corpus.py": "import numpy",
    "bert_jax/batches/load.py": "import jax\nfrom bert_jax.data.records import x",
    "bert_jax/model/objective.py": "",
    "bert_jax/training/step.py": "import jax",
    "bert_jax/training/loop.py": "import bert_jax.training.step",
    "train.py": "from absl import app\nfrom bert_jax.training import loop",
}


def write_tree(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{SPDX}\n{text}")


def test_the_checker_accepts_a_good_tree(tmp_path):
    write_tree(tmp_path, GOOD)
    assert check(tmp_path) == []


@pytest.mark.parametrize(
    ("file", "text", "problem"),
    [
        (
            "bert_jax/storage/files.py",
            "import bert_jax.training.step",
            "files.py:2: storage.* imports bert_jax.training.step, which comes later",
        ),
        (
            "bert_jax/storage/files.py",
            "def f():\n    from bert_jax.training import step",
            "files.py:3: storage.* imports bert_jax.training.step",
        ),
        (
            "bert_jax/settings/pretraining.py",
            "from bert_jax.batch import Batch",
            "imports bert_jax.batch, which comes later",
        ),
        ("bert_jax/text/vocab.py", "from bert_jax.data.records import Split", "imports bert_jax.data.records"),
        ("bert_jax/text/vocab.py", "import jax.numpy as jnp", "text.vocab must work without jax"),
        ("bert_jax/__init__.py", "import jax", "bert_jax must work without jax"),
        (
            "bert_jax/__init__.py",
            "if TYPE_CHECKING:\n    import jax\nelse:\n    import jax",
            "py:5: bert_jax must work",
        ),
        ("bert_jax/data/__init__.py", "from bert_jax.batches.load import x", "a package's __init__ imports nothing"),
        ("bert_jax/data/records.py", "from bert_jax.batches.load import x", "imports bert_jax.batches.load"),
        ("bert_jax/data/sources/corpus.py", "from .records import Split", "relative import"),
        ("bert_jax/data/sources/corpus.py", "import bert_jax.data.records", "in a circle: data."),
        (
            "bert_jax/training/step.py",
            "import importlib\nimportlib.import_module('bert_jax.training.loop')",
            "in a circle: training.",
        ),
        (
            "bert_jax/training/step.py",
            "from bert_jax.nowhere import x",
            "bert_jax.nowhere has no rank, or does not exist",
        ),
        ("bert_jax/training/step.py", "from flax import linen", "flax lives in model.*, and nowhere else"),
        ("bert_jax/training/step.py", "import torch", "torch lives in checkpoints.hf_weights, and nowhere else"),
        ("bert_jax/training/step.py", "import scipy", "scipy has no home"),
        ("bert_jax/model/bert.py", "import bert_jax.training.step", "model.* imports bert_jax.training.step"),
        ("bert_jax/extra.py", "", "extra.py: has no rank"),
        ("bert_jax/data/utils.py", "", "utils is not a subject"),
        ("docs/a.md", "see " + "/ho" + "me/me/x", "a.md:2: names a path of one machine"),
    ],
)
def test_the_checker_finds(tmp_path, file, text, problem):
    write_tree(tmp_path, GOOD | {file: text})
    assert problem in "\n".join(check(tmp_path))


def test_the_checker_finds_a_missing_licence(tmp_path):
    write_tree(tmp_path, GOOD | {"tests/test_x.py": ""})
    (tmp_path / "tests" / "test_x.py").write_text("import json\n")
    assert [problem for problem in check(tmp_path) if "test_x.py: the first line is not" in problem]


def test_the_checker_counts_nodes_and_code_lines(tmp_path, monkeypatch):
    """`total = 1 + 1` is an assignment, its target, a sum and two numbers."""
    monkeypatch.setitem(globals(), "MAX_NODES", 10)
    monkeypatch.setitem(globals(), "MAX_DENSITY", 5.0)
    text = "\n# a comment\ntotal = 1 + 1  # beside code\n\n"
    write_tree(tmp_path, {"bert_jax/data/one.py": text, "bert_jax/data/two.py": text})
    assert not [problem for problem in check(tmp_path) if "nodes" in problem]
    write_tree(tmp_path, {"bert_jax/data/three.py": "total = [1 + 1]"})
    found = "\n".join(check(tmp_path))
    assert "the package has 16 nodes; 10 is the most" in found and "5.33 nodes a line of code; 5.0 is the most" in found
