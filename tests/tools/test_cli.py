# SPDX-License-Identifier: Apache-2.0
"""How commands fail in odd surroundings: one line that says what to do, and no traceback."""

import os
import random
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from builders import make_pretrained, write_corpus, write_vocab
from commands import run_python

from bert_jax.errors import InputError
from bert_jax.tools.lines import open_lines


def run(command: list[str], folder: Path) -> tuple[int, str, str]:
    """Returns the exit status, stdout and stderr of Python with some arguments."""
    done = run_python(command, folder)
    return done.returncode, done.stdout, done.stderr


def start(command: list[str], folder: Path, **changes: str) -> tuple[int, str, str]:
    """Returns the same of Python that starts anew, with changes of its environment."""
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", **changes}
    done = subprocess.run([sys.executable, *command], capture_output=True, cwd=folder, env=environment)
    return done.returncode, done.stdout.decode("utf-8"), done.stderr.decode("utf-8")


@pytest.mark.parametrize(
    ("script", "config", "setting", "expected"),
    [
        ("train.py", "pretrain.py:tiny", "max_grad_norm", "; there are checkpoint, data, eval, generator,"),
        (
            "train.py",
            "pretrain.py:tiny",
            "model.hidden_siz",
            "(did you mean --config.model.hidden_size?); there are model.activation",
        ),
        (
            "finetune.py",
            "finetune.py:sst2",
            "epochs",
            "(did you mean --config.train.num_epochs?); there are checkpoint, data",
        ),
    ],
)
def test_an_unknown_setting_gets_a_suggestion(repository, tmp_path, script, config, setting, expected):
    command = [script, f"--config=configs/{config}", f"--workdir={tmp_path}/run", f"--config.{setting}=1"]
    status, out, told = run(command, repository)
    assert (status, out, told.count("\n")) == (1, "", 1) and not (tmp_path / "run").exists()
    assert told.startswith(f"error: --config.{setting} is not a setting") and expected in told


@pytest.mark.parametrize(
    ("recipe", "problem"),
    [
        ("def get_config(:", "line 1: SyntaxError: invalid syntax"),
        ("\nimport nowhere", "line 2: ModuleNotFoundError: No module named 'nowhere'; correct it"),
        (
            "def get_config():\n    return {'data': {}}",
            "get_config of the recipe returned dict {'data': {}}, not a",
        ),
    ],
)
def test_a_mistake_in_a_recipe_is_one_line_that_tells_where(repository, tmp_path, recipe, problem):
    (tmp_path / "mine.py").write_text(recipe)
    command = ["train.py", f"--config={tmp_path}/mine.py", f"--workdir={tmp_path}/run"]
    for more in ([], ["--config.data.path=x"]):
        status, _, told = run([*command, *more], repository)
        assert status == 1 and problem in told and told.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--config="], "--config is empty; name a recipe: ablations, "),
        (["--config=pretrain:tiny", "--config", "demo"], "is given 2 times, as pretrain:tiny and as demo; give one"),
        (
            ["--config=demo", "--config.train.num_steps=1e6"],
            "num_steps=1e6 is of another type; use a whole number; --help",
        ),
        (["--config=demo", "--join_seconds=a: b"], "flag --join_seconds=a: b is of another type; use a whole number"),
        (["--config=MINE"], "missing 1 required positional argument: 'size'; what follows the colon of"),
        (["--config=finetune:sst2", "--config.data.path=x"], "is a recipe of fine-tuning; give it to finetune"),
        (["--config=nowhere.py"], "--config=nowhere.py: there is no such file; give one, or the name of a recipe: abl"),
        (["--config=demo", "--batch_size=8"], "'batch_size' (did you mean --config.data.batch_size?); --help lists"),
        (
            ["--config=demo", "--conifg.data.path=x"],
            "--conifg.data.path is not a setting (did you mean --config.data.path",
        ),
        (["--config=demo", "--config.data.path=x", "--workdir=~me/run"], "write --workdir=$HOME/... instead"),
    ],
)
def test_arguments_that_say_too_little_or_too_much_are_one_line(repository, tmp_path, arguments, problem):
    (mine := tmp_path / "mine.py").write_text("def get_config(size): return {}")
    arguments = [argument.replace("MINE", str(mine)) for argument in arguments]
    status, _, told = run([str(repository / "train.py"), f"--workdir={tmp_path}/run", *arguments], tmp_path)
    assert status == 1 and problem in told and told.count("\n") == 1
    # Python may keep the recipe's bytecode beside it; a run's directory is not to be there.
    assert {path.name for path in tmp_path.iterdir()} <= {mine.name, "__pycache__"}


@pytest.mark.parametrize(
    ("command", "problem"),
    [
        (
            ["prepare_corpus", "--input=x", "--tokenizer=x", "--output=file:///x"],
            "--output=file:///x is of this machine; write the path alone, /x",
        ),
        (["build_vocab"], "error: --input is needed: Files, quoted globs"),
        (
            ["grow_model", "--checkpoint=x", "--output=y"],
            "error: there is nothing to add; give --add_tokens, --special",
        ),
        (["convert_checkpoint", "--input=", "--output=x"], "error: --input is empty, and it is needed: The model to"),
        (
            ["convert_checkpoint", "--input=x"],
            "error: --output is needed: Directory to create; it must not exist. hf://ORG/NAME uploads to the hub; --h",
        ),
        (
            ["plan", "--config=finetune:sst2", "--topology=v5e:4x4", "--rows_per_chip=8"],
            "are of pre-training; leave them out",
        ),
    ],
)
def test_what_a_command_does_not_do_is_one_line(repository, toy_data, tmp_path, command, problem):
    arguments = [argument.replace("DATA", str(toy_data)) for argument in command]
    status, _, told = run(["-m", "bert_jax", *arguments], tmp_path)
    assert status == 1 and problem in told and told.count("\n") == 1 and not list(tmp_path.iterdir())


INTERRUPTED = "def __getattr__(name): raise KeyboardInterrupt"


@pytest.mark.parametrize("command", [["train.py"], ["-m", "bert_jax.tools.prepare_corpus"]])
def test_ctrl_c_while_modules_are_imported_is_one_line(repository, tmp_path, command):
    (tmp_path / "absl").mkdir()
    (tmp_path / "absl" / "__init__.py").write_text(INTERRUPTED)  # as if it came then
    status, out, told = start(command, repository, PYTHONPATH=f"{tmp_path}:{repository}")
    assert (status, out, told) == (-signal.SIGINT, "", "stopped by Ctrl-C\n")


PRINT = """
import sys
from bert_jax.tools import cli
def main():
    print("naïve 東京 \\udcff")
    print("naïve 東京", file=sys.stderr)
cli.run(main)
"""


@pytest.mark.parametrize("locale", [{"LC_ALL": "C"}, {"LC_ALL": "POSIX", "PYTHONIOENCODING": "latin-1"}])
def test_output_is_utf_8_whatever_the_locale(repository, tmp_path, locale):
    (tmp_path / "tool.py").write_text(PRINT, encoding="utf-8")
    locale |= {"PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONPATH": str(repository)}
    done = subprocess.run([sys.executable, "tool.py"], capture_output=True, cwd=tmp_path, env=os.environ | locale)
    assert (done.returncode, done.stdout) == (0, "naïve 東京 ".encode() + b"\xff\n"), done.stderr
    assert done.stderr.decode("utf-8") == "naïve 東京\n"


def test_a_table_that_is_read_as_lines_is_said(tmp_path, capsys):
    for name, told in (("a.csv", "a.csv is read as lines of text, not as a table\n"), ("a.txt", "")):
        (tmp_path / name).write_text("text,label\n")
        with open_lines(str(tmp_path / name)):
            assert capsys.readouterr().err.endswith(told)


def test_closed_standard_streams_are_no_traceback(repository, monkeypatch):
    monkeypatch.setattr(sys, "stdin", None)
    with pytest.raises(InputError, match="standard input is closed; give a file as --input"), open_lines("-"):
        pass
    command = f"{shlex.quote(sys.executable)} -c 'from bert_jax.tools import cli; cli.run(lambda: print(1))' <&- >&-"
    done = subprocess.run(["sh", "-c", command], stderr=subprocess.PIPE, cwd=repository)
    assert (done.returncode, done.stderr) == (0, b"")


RAISE = """
import sys
from bert_jax.tools import cli
def main():
    raise {}
cli.run(main)
"""


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (
            "MemoryError('Unable to allocate 95.4 GiB')",
            "error: there is too little memory (Unable to allocate 95.4 GiB)",
        ),
        ("RuntimeError('RESOURCE_EXHAUSTED: Out of memory\\n1\\n2')", "memory (RESOURCE_EXHAUSTED: Out of memory 1 2)"),
    ],
)
def test_too_little_memory_is_one_line(repository, error, expected):
    status, out, told = run(["-c", RAISE.format(error)], repository)
    assert (status, out, told.count("\n")) == (1, "", 1)
    assert expected in told and "; use a smaller batch_size, or a larger train.accumulate" in told


@pytest.mark.parametrize("error", ["RuntimeError('a bug')", "AssertionError"])
def test_other_errors_keep_their_traceback(repository, error):
    status, _, told = run(["-c", RAISE.format(error)], repository)
    assert status == 1 and "Traceback" in told and error.partition("(")[0] in told


@pytest.mark.slow
@pytest.mark.parametrize(("platform", "reason"), [("cuda", "it has no plugin here"), ("misspelt", "'misspelt'")])
def test_a_platform_that_is_not_there_is_one_line(repository, tmp_path, platform, reason):
    command = ["-m", "bert_jax.tools.show_params", f"--checkpoint={make_pretrained(tmp_path)}"]
    status, out, told = start(command, repository, JAX_PLATFORMS=platform)
    if platform == "cuda" and status == 0:
        pytest.skip("there is a GPU")
    assert (status, out, told.count("\n")) == (1, "", 1)
    assert told.startswith(f"error: JAX_PLATFORMS='{platform}' gives no device to compute on (") and reason in told
    assert told.endswith(
        "; unset it, so that JAX takes what there is, or set it to cpu, or install JAX for that platform\n"
    )


IMPORTING = """
import os, signal, time, weakref
import bert_jax.tools
class Module: pass
names = {"os": os, "signal": signal}
exec(compile("def cb(_):\\n os.kill(os.getpid(), signal.SIGINT)\\n return sum(1 for _ in range(999))",
             "<frozen importlib._bootstrap>", "exec"), names)
module = Module()
lock = weakref.ref(module, names["cb"])
del module  # calls cb
time.sleep(10)
print("the Ctrl-C was lost")
"""


def test_ctrl_c_in_a_callback_of_the_import_system_is_not_lost(repository):
    """Python drops an exception in a callback, and prints its traceback."""
    done = subprocess.run([sys.executable, "-c", IMPORTING], capture_output=True, text=True, cwd=repository, timeout=60)
    assert (done.stdout, done.stderr, done.returncode) == ("", "stopped by Ctrl-C\n", -signal.SIGINT)


SWALLOWING = """
import os, signal, time
try:
    os.kill(os.getpid(), signal.SIGINT)
    for _ in range(100):
        time.sleep(0.01)
except BaseException:
    print("raised in the middle of an import")
"""


def test_ctrl_c_in_an_import_waits_for_its_end(repository, tmp_path):
    """Libraries swallow it in the middle of their import, or abort."""
    (tmp_path / "outer.py").write_text("import swallowing\n")
    (tmp_path / "swallowing.py").write_text(SWALLOWING)
    code = "import bert_jax.tools, time, outer; time.sleep(10); print('the Ctrl-C was lost')"
    environment = os.environ | {"PYTHONPATH": f"{repository}:{tmp_path}"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=60)
    assert (done.stdout, done.stderr, done.returncode) == ("", "stopped by Ctrl-C\n", -signal.SIGINT)


FINISHED = """
import atexit, subprocess, sys
from bert_jax.tools.cli import run

sender, status = sys.argv.pop(), int(sys.argv.pop())
atexit.register(lambda: subprocess.Popen([sys.executable, sender], stdout=subprocess.PIPE).stdout.readline())
run(lambda: status)
"""
SENDER = """
import os, signal, time

print(flush=True)
parent = os.getppid()
while os.getppid() == parent:
    os.kill(parent, signal.SIGINT)
    time.sleep(0.001)
"""


@pytest.mark.parametrize("status", [0, 143])
def test_ctrl_c_after_the_work_changes_nothing(repository, tmp_path, status):
    """From the first function of atexit to the end of the process, a thousand times a second."""
    (tmp_path / "sender.py").write_text(SENDER)
    assert start(["-c", FINISHED, str(status), f"{tmp_path}/sender.py"], repository) == (status, "", "")


def test_ctrl_c_still_ends_a_program_that_has_called_a_command(repository):
    code = "import signal\nfrom bert_jax.tools.cli import run\ntry:\n run(lambda: 0)\nexcept SystemExit:\n"
    code += " signal.raise_signal(signal.SIGINT)\nprint('the Ctrl-C was lost')"
    assert start(["-c", code], repository) == (-signal.SIGINT, "", "stopped by Ctrl-C\n")


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "killpg"), reason="sends a signal to a group of processes, as a terminal does")
def test_ctrl_c_in_the_preparation_of_text_is_one_line(repository, tmp_path):
    """The terminal sends it to every process: workers that begin, work or end print nothing."""
    write_corpus(tmp_path / "text.txt", num_documents=4000)
    write_vocab(tmp_path / "vocab.txt")
    # Python's own start takes longer on a busy machine, and prints a traceback if it is interrupted.
    ready = "import bert_jax.tools, runpy, sys; print(flush=True); del sys.argv[0]; "
    ready += "runpy.run_module(sys.argv[0], run_name='__main__', alter_sys=True)"
    command = [sys.executable, "-c", ready, "bert_jax.tools.prepare_corpus", f"--input={tmp_path}/text.txt"]
    command += [f"--tokenizer={tmp_path}/vocab.txt", "--max_seq_length=32", "--workers=3"]
    rng, stopped = random.Random(0), 0
    for number in range(12):
        process = subprocess.Popen(
            [*command, f"--output={tmp_path}/data"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=repository,
            start_new_session=True,
        )
        assert process.stdout.readline() == b"\n"
        time.sleep(0.1 + 0.15 * number + 0.15 * rng.random())
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGINT)
        told = process.communicate(timeout=60)[1].decode()
        assert "Traceback" not in told and "Error" not in told, told
        if process.returncode:
            stopped += 1
            assert process.returncode in (130, -signal.SIGINT) and told.endswith("stopped by Ctrl-C\n")
        assert not (tmp_path / "data" / ".lock").exists()
    assert stopped >= 3
    subprocess.run([*command, f"--output={tmp_path}/data"], check=True, cwd=repository)
    subprocess.run([*command, f"--output={tmp_path}/undisturbed"], check=True, cwd=repository)
    for path in (tmp_path / "undisturbed").rglob("*"):
        other = tmp_path / "data" / path.relative_to(tmp_path / "undisturbed")
        assert path.is_dir() or path.read_bytes() == other.read_bytes()


SHOW = """
import os
from bert_jax.tools import cli
names = [f"JAX_{name}" for name in ("COMPILATION_CACHE_DIR", "COMPILATION_CACHE_MAX_SIZE")]
cli.run(lambda: print(*(os.environ.get(name) for name in names)))
"""


@pytest.mark.parametrize("own", [False, True])
def test_programs_are_kept_within_a_limit_and_where_the_user_says(repository, tmp_path, own):
    """Where the user keeps them, as long as the user says: no size of ours, which would delete the user's files."""
    environment = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "PYTHONPATH": str(repository)}
    environment |= {"JAX_COMPILATION_CACHE_DIR": "mine"} if own else {}
    done = subprocess.run([sys.executable, "-c", SHOW], env=environment, capture_output=True, text=True)
    ours = f"{tmp_path}/.cache/bert_jax/compiled_programs {2 * 2**30}"
    assert (done.returncode, done.stdout.strip()) == (0, "mine None" if own else ours), done.stderr
