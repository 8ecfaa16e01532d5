# SPDX-License-Identifier: Apache-2.0
"""Start and error handling that all commands share."""

import atexit
import contextlib
import os
import re
import signal
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from absl import app, flags, logging

from bert_jax.devices.tuning import settings_for_programs, tune_process
from bert_jax.errors import TOO_MANY_FILES, InputError, are_too_many
from bert_jax.storage import files
from bert_jax.storage.places import check_workdir_place, to_place
from bert_jax.storage.resolve import is_hub, resolve
from bert_jax.storage.stores import check_writable, is_remote
from bert_jax.text.fitting import cuts_in_one_line
from bert_jax.tools import recipes, streams

if TYPE_CHECKING:
    from bert_jax.checkpoints.pretrained import Pretrained


# Messages for a flag's value of another type, and the type to name in their place.
_TYPES = {
    "invalid literal for int": "a whole number",
    "could not convert": "a number",
    "Non-boolean": "True or False",
}
# errors of arguments
_OF_FLAGS = (flags.Error, AttributeError, KeyError, TypeError, ValueError, OSError)


def run(main: Callable[[], int | None]) -> None:
    """Parses the flags and runs `main()`. Bad input gives one line on stderr and exit status 1.

    `main` returns the exit status, or None for 0. Output is UTF-8 in every locale.
    """
    streams.prepare_streams()
    files.allow_many_files()
    # Keep compiled programs, so that the same command starts faster the next time. JAX reads these variables once. A
    # directory of the user's own keeps the user's own settings.
    if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        for name, value in settings_for_programs().items():
            os.environ.setdefault(name.upper(), str(value))
    # a library's panic is told in one line, without a trace of the library
    os.environ["RUST_BACKTRACE"] = "0"

    def guarded(argv: list[str]) -> int:
        if not flags.FLAGS["verbosity"].present:
            logging.set_verbosity(logging.WARNING)  # Orbax tells every detail of every save
        try:
            if len(argv) > 1:
                raise InputError(
                    f"unexpected argument {argv[1]!r}; options are written --name=value"
                )
            for flag in map(flags.FLAGS.__getitem__, flags.FLAGS):
                # the validator asks for a value
                if flag.default is None and flag.validators and flag.value == "":
                    raise InputError(f"--{flag.name} is empty, and it is needed: {flag.help}")
            _check_home()
            _check_output_urls()
            with cuts_in_one_line():
                status = main() or 0
            # Ctrl-C in Python's shutdown changes nothing
            atexit.register(signal.signal, signal.SIGINT, signal.SIG_IGN)
            if status > 128:  # a signal has ended the run
                signal.signal(signal.SIGINT, signal.SIG_IGN)
            return status
        except InputError as error:
            print(f"error: {error}", file=sys.stderr)
            return error.STATUS
        # other than in training, which handles Ctrl-C itself and saves its state
        except KeyboardInterrupt:
            print("stopped by Ctrl-C", file=sys.stderr)
            return 130
        except BrokenPipeError:  # the reader of the output has ended, as `head` does
            # Python flushes stdout once more when it ends, and would print the same error there.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 141
        except (AssertionError, MemoryError, RuntimeError) as error:
            if problem := _device_problem(error):
                print(f"error: {problem}", file=sys.stderr)
                return 1
            raise
        except OSError as error:  # a full disk, a missing right
            reason = error.strerror or " ".join(str(error).split())
            if are_too_many(error):
                reason += f"; {TOO_MANY_FILES}"
            print(
                f"error: cannot read or write {error.filename or 'a file'}: {reason}",
                file=sys.stderr,
            )
            return 1

    app.run(guarded, flags_parser=_parse)


def _device_problem(error: Exception) -> str:
    """Returns the message for an error caused by a lack of devices or memory; "" for other errors."""
    message = " ".join(str(error).split())
    if isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in message:
        return (
            f"there is too little memory ({message[:200] or 'nothing more is known'}); use a smaller batch_size, or a "
            "larger train.accumulate, or model.remat=full"
        )
    no_plugin = False
    if isinstance(error, AssertionError) and not message and "jax" in sys.modules:
        # Some versions of JAX end so, without a word, where the platform has no plugin.
        import jax

        try:
            no_plugin = not jax.devices()
        except (AssertionError, RuntimeError):
            no_plugin = True
    if not no_plugin and "Unable to initialize backend" not in message:
        return ""
    reason = message.partition(" (set JAX_PLATFORMS")[0][:300] or "it has no plugin here"
    return (
        f"JAX_PLATFORMS={os.environ.get('JAX_PLATFORMS', '')!r} gives no device to compute on ({reason}); unset it, so "
        "that JAX takes what there is, or set it to cpu, or install JAX for that platform"
    )


def _check_home() -> None:
    """Raises: InputError if a path in an argument begins with ~, which the shell has left as it is."""
    for argument in sys.argv[1:]:
        name, _, value = argument.partition("=")
        if name.startswith("-") and any(
            re.match(r"~\w*/", path) for path in re.split("[,=]", value)
        ):
            raise InputError(
                f"{argument}: a shell replaces ~ only where a word begins; write {name}=$HOME/... instead"
            )


def _check_output_urls() -> None:
    """Raises: InputError, before any work, if a flag that names an output is a URL that cannot be written."""
    for name in ("workdir", "output", "json"):
        value = flags.FLAGS[name].value if name in flags.FLAGS else None
        if isinstance(value, str) and value.startswith("file://"):
            raise InputError(
                f"--{name}={value} is of this machine; write the path alone, {value[7:]}"
            )
        if isinstance(value, str) and is_remote(value) and not is_hub(value):
            if name == "workdir":
                check_workdir_place(to_place(value))
            check_writable(value)


def check_given(*needed: flags.FlagHolder[Any]) -> None:
    """Raises: InputError, with the flag's help, if one of these is not given."""
    for flag in needed:
        if not flag.value:
            raise InputError(f"--{flag.name} is needed: {flags.FLAGS[flag.name].help}")


def load_model(path: str, dtype: str = "") -> "Pretrained":
    """Returns the model at a path for a command that computes with it, and prints its notes.

    A `dtype` of "" keeps the model's.
    """
    from bert_jax.checkpoints.pretrained import read_pretrained
    from bert_jax.inference.pretrained import computing_in

    tune_process()
    bert = read_pretrained(resolve(path))
    for note in bert.notes:
        print(f"note: {note}", file=sys.stderr)
    return computing_in(bert, dtype)


def define_cluster_flags() -> Callable[[], contextlib.AbstractContextManager[None]]:
    """Defines the flags of commands that run in several processes; returns a function that joins the processes.

    Call that function before JAX is used. It returns a context manager; an error in its block ends all processes.
    """
    how = flags.DEFINE_enum(
        "distributed",
        "auto",
        ["auto", "on", "off"],
        "whether several processes run this command; auto detects it from the scheduler or the TPU VM",
    )
    coordinator = flags.DEFINE_string(
        "coordinator", "", "HOST:PORT of the first process, if there is no scheduler"
    )
    num_processes = flags.DEFINE_integer(
        "num_processes", 0, "number of processes that run this command"
    )
    process_id = flags.DEFINE_integer("process_id", -1, "index of this process, counted from 0")
    join_seconds = flags.DEFINE_integer(
        "join_seconds",
        60,
        "seconds that processes wait for each other at the start",
        lower_bound=1,
    )
    lost_seconds = flags.DEFINE_integer(
        "lost_seconds",
        60,
        "seconds without a heartbeat from one process after which the others end the job",
        lower_bound=1,
    )
    agree_seconds = flags.DEFINE_integer(
        "agree_seconds",
        1800,
        "seconds that processes wait for one that works on nothing, before they end the job",
        lower_bound=1,
    )

    def join() -> contextlib.AbstractContextManager[None]:
        from bert_jax.devices import cluster

        cluster.join(
            how.value,
            coordinator.value,
            num_processes.value,
            process_id.value,
            join_seconds.value,
            lost_seconds.value,
            agree_seconds.value,
        )
        return cluster.one_fate()

    return join


def _parse(argv: list[str]) -> list[str]:
    """Returns the arguments that are not flags; an invalid flag gives one line, not a traceback."""
    given: list[recipes.Given] = []
    whole = sys.argv
    try:
        if "config" in flags.FLAGS:
            arguments, given = recipes.take_settings(
                flags.FLAGS.read_flags_from_files(argv[1:], force_gnu=False)
            )
            argv = [argv[0], *recipes.resolve_recipe(arguments)]
        sys.argv = argv  # where ml_collections looks for settings itself, to define a flag for each
        rest = flags.FLAGS(argv)
        config = flags.FLAGS["config"].value if "config" in flags.FLAGS else None
        if config is not None:
            recipes.change_settings(recipes.check_config(config), given)
        return rest
    except SystemExit as end:
        if end.code == 1:  # absl ends --help with it
            sys.exit(0)
        raise
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.STATUS)
    except Exception as error:
        problem = recipes.find_mistake(argv, error)
        if not problem and not isinstance(error, _OF_FLAGS):
            raise
        problem = problem or f"{_reason(error).rstrip('.')}; --help lists the options"
        print(f"error: {problem}", file=sys.stderr)
        sys.exit(1)
    finally:
        sys.argv = whole


def _reason(error: Exception) -> str:
    """Returns the message of an error of the flags as one line; they wrap a traceback of a config file into theirs."""
    message = str(error.args[0] if error.args else error)
    if lacks := re.match(r"flag --(\w+)=None: .* must have a value", message):
        return f"--{lacks[1]} is needed: {flags.FLAGS[lacks[1]].help}"
    if isinstance(error, flags.UnrecognizedFlagError) and "config" in flags.FLAGS:
        setting = recipes.find_setting(flags.FLAGS["config"].value, error.flagname)
        message += f" (did you mean --config.{setting}?)" if setting else ""
    if "Traceback" in message:  # in an InputError the line ends are written out
        message = (
            message.replace("\\n", "\n")
            .splitlines()[-1]
            .removeprefix("bert_jax.errors.InputError: ")
        )
    for pattern, wanted in _TYPES.items():
        message = re.sub(
            rf": \W*{pattern}.*", f" is of another type; use {wanted}", message, flags=re.DOTALL
        )
    return " ".join(message.split())
