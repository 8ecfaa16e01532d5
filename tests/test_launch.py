# SPDX-License-Identifier: Apache-2.0
"""The scripts of launch/, with programs that only record how they are called in place of gcloud, xpk and srun."""

import os
import shlex
import shutil
import subprocess

import pytest
from metadata_server import serve

SCRIPTS = ("gke_xpk.sh", "host.sh", "queued_resource.sh", "slurm.sh", "startup.sh", "tpu_vm.sh")
TRAIN = ("train", "--config=pretrain:base", "--workdir=gs://bucket/a run")  # with a space, which must stay one argument

# Records its arguments, answers with the next line of NAME.says if there is one, and ends with the status in it.
STUB = """\
#!/usr/bin/env bash
name=${0##*/}
printf '%s' "$name" >>"$CALLS"; printf ' %q' "$@" >>"$CALLS"; echo >>"$CALLS"
says=$(dirname "$CALLS")/$name.says
[ -s "$says" ] || exit 0
line=$(head -n 1 "$says"); sed -i 1d "$says"
[ -z "${line#* }" ] || echo "${line#* }"
exit "${line%% *}"
"""


class Place:
    """A directory with programs that record their calls."""

    def __init__(self, path, repository):
        self.path, self.repository = path, repository
        (path / "bin").mkdir()
        (path / "calls").write_text("")

    def program(self, name, *says):
        """Adds a program that ends with "STATUS WORDS" of `says` in turn, and with 0 and no word after that."""
        file = self.path / "bin" / name
        file.write_text(STUB)
        file.chmod(0o755)
        (self.path / f"{name}.says").write_text("".join(f"{line}\n" for line in says))

    def run(self, script, *arguments, **variables):
        environment = os.environ | {"PATH": f"{self.path / 'bin'}:{os.environ['PATH']}", "HOME": str(self.path)}
        environment |= {"CALLS": str(self.path / "calls"), "TMPDIR": str(self.path)} | variables
        return subprocess.run(
            ["bash", str(self.repository / "launch" / script), *arguments],
            env=environment, cwd=self.path, capture_output=True, text=True, timeout=120,
        )  # fmt: skip

    def calls(self):
        return [shlex.split(line) for line in (self.path / "calls").read_text().splitlines()]


@pytest.fixture
def place(tmp_path, repository):
    return Place(tmp_path, repository)


@pytest.mark.parametrize("script", SCRIPTS)
def test_scripts_are_correct_bash_and_say_what_they_need(repository, script):
    path = repository / "launch" / script
    assert subprocess.run(["bash", "-n", str(path)]).returncode == 0
    text = path.read_text()
    assert os.access(path, os.X_OK) and text.startswith("#!/usr/bin/env bash\n# SPDX-License-Identifier: Apache-2.0\n")
    assert "# Needs: " in text and "# Not run on a " in text
    if shutil.which("shellcheck"):
        done = subprocess.run(["shellcheck", str(path)], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout


def test_all_scripts_are_tested(repository):
    assert sorted(path.name for path in (repository / "launch").iterdir()) == sorted(SCRIPTS)


TPU = {
    "NAME": "bert",
    "ZONE": "us-west4-a",
    "TYPE": "v5litepod-16",
    "PACKAGE": "gs://bucket/bert_jax.whl",
    "PAUSE": "0",
}


def test_a_tpu_vm_is_made_once_and_the_command_runs_on_all_hosts(place, repository):
    place.program("gcloud", "1 ", "0 ", "0 ", "0 ", "0 there")
    done = place.run("tpu_vm.sh", *TRAIN, **TPU)
    assert done.returncode == 0, done.stderr
    describe, create, scp, ssh = [call[1:] for call in place.calls()]
    assert place.run("tpu_vm.sh", *TRAIN, **TPU).returncode == 0  # now it is there
    assert [call[1:] for call in place.calls()][4:] == [describe, scp, ssh]
    where = ["compute", "tpus", "tpu-vm"]
    assert describe == [*where, "describe", "bert", "--zone=us-west4-a"]
    kind = ["--accelerator-type=v5litepod-16", "--version=v2-alpha-tpuv5-lite", "--zone=us-west4-a"]
    assert create == [*where, "create", "bert", *kind]
    assert scp == [*where, "scp", f"{repository}/launch/host.sh", "bert:host.sh", "--worker=all", "--zone=us-west4-a"]
    assert ssh[:5] == [*where, "ssh", "bert"] and ssh[5] == "--worker=all"
    command = shlex.split(ssh[6].removeprefix("--command="))  # as the host's shell takes it apart
    assert command == ["PACKAGE=gs://bucket/bert_jax.whl", "bash", "host.sh", *TRAIN]


def test_a_pre_empted_request_is_made_again_until_the_run_is_done(place, repository):
    not_done, done = "1 ", "0 gs://bucket/a run/pretrained/config.json"
    states = ["1 ", "0 ", "0 ACTIVE", "0 SUSPENDED", "0 ", "0 ", "0 ACTIVE"]  # missing, made, .., deleted, made, ..
    answers = [not_done, *states[:2], not_done, states[2], not_done, *states[3:6], not_done, states[6], done]
    place.program("gcloud", *answers)
    ended = place.run("queued_resource.sh", *TRAIN, **TPU)
    assert ended.returncode == 0, ended.stderr
    calls = [call[1:] for call in place.calls()]
    verbs = [call[3] if call[:3] == ["compute", "tpus", "queued-resources"] else call[1] for call in calls]
    again = ["ls", "describe"]
    assert verbs == [*again, "create", *again, *again, "delete", "create", *again, "ls", "delete"]
    made = calls[verbs.index("create")]
    assert made[4:9] == [
        "bert", "--node-id=bert", "--accelerator-type=v5litepod-16", "--runtime-version=v2-alpha-tpuv5-lite", "--spot"
    ]  # fmt: skip
    assert "--metadata=bert-jax-package=gs://bucket/bert_jax.whl" in made
    (files,) = [item for item in made if item.startswith("--metadata-from-file=")]
    assert f"startup-script={repository}/launch/startup.sh,bert-jax-host={repository}/launch/host.sh," in files
    assert calls[0] == ["storage", "ls", "gs://bucket/a run/pretrained/config.json"]
    assert "finished: gs://bucket/a run/pretrained/config.json" in ended.stdout


def test_a_request_needs_a_work_directory_in_a_bucket(place):
    place.program("gcloud")
    done = place.run("queued_resource.sh", "train", "--workdir=/tmp/run", **TPU)
    assert done.returncode == 1 and "error: the command needs --workdir=gs://" in done.stderr and not place.calls()


@pytest.mark.parametrize("script", ["tpu_vm.sh", "queued_resource.sh", "gke_xpk.sh"])
def test_a_variable_that_is_missing_is_named(place, script):
    done = place.run(script, *TRAIN, **{name: value for name, value in TPU.items() if name != "ZONE"}, CLUSTER="c")
    assert done.returncode != 0 and "ZONE: " in done.stderr and not place.calls()


def test_a_host_runs_the_command_again_until_it_is_done(place):
    """143 is a pre-emption, 75 a lost host, 76 a run that hung, 134 a killed first process."""
    place.program("bert_jax", "143 ", "75 ", "76 ", "134 ", "0 trained")
    done = place.run("host.sh", *TRAIN, PACKAGE="unused", PLACE=str(place.path), PAUSE="0")
    assert done.returncode == 0 and done.stdout == "trained\nfinished\n"
    assert place.calls() == [["bert_jax", *TRAIN, "--join_seconds=900"]] * 5


def test_a_host_does_not_repeat_an_error_of_the_user(place):
    place.program("bert_jax", "1 ")
    done = place.run("host.sh", *TRAIN, PACKAGE="unused", PLACE=str(place.path), PAUSE="0")
    assert done.returncode == 1 and "it is not tried again" in done.stderr and len(place.calls()) == 1


def test_a_host_installs_the_package_until_it_succeeds(place):
    """`uv venv` makes the environment, here with a program in it that records its calls."""
    place.program("gcloud", "1 ", "0 ")
    place.program("bert_jax")
    environment = place.path / "env"
    uv = place.path / "bin" / "uv"
    uv.write_text(
        f'#!/usr/bin/env bash\nprintf \'uv\' >>"$CALLS"; printf \' %q\' "$@" >>"$CALLS"; echo >>"$CALLS"\n'
        f"mkdir -p {environment}/bin && cp {place.path}/bin/bert_jax {environment}/bin/\n"
    )
    uv.chmod(0o755)
    for _ in range(2):  # the second time it is there
        done = place.run("host.sh", "--version", PACKAGE="gs://bucket/b.whl", PLACE=str(environment), PAUSE="0")
        assert done.returncode == 0, done.stderr
    copy = ["gcloud", "storage", "cp", "gs://bucket/b.whl", "/tmp/"]
    made = ["uv", "venv", "--quiet", "--python", "3.11", str(environment)]
    python = str(environment / "bin" / "python")
    installed = ["uv", "pip", "install", "--quiet", "--python", python, "/tmp/b.whl[train,tpu,gcs,hub]"]
    assert place.calls() == [copy, copy, made, installed, ["bert_jax", "--version"], ["bert_jax", "--version"]]


def test_the_start_up_script_runs_the_command_of_the_request(place, repository):
    attributes = {
        "bert-jax-package": "unused",
        "bert-jax-command": "".join(f"{argument}\n" for argument in TRAIN),
        "bert-jax-host": (repository / "launch" / "host.sh").read_text(),
    }
    place.program("bert_jax", "143 ", "0 ")
    with serve(attributes) as address:
        done = place.run("startup.sh", GCE_METADATA_IP=address, PLACE=str(place.path), PAUSE="0")
        del attributes["bert-jax-package"]
        without = place.run("startup.sh", GCE_METADATA_IP=address, PLACE=str(place.path), PAUSE="0")
    assert done.returncode == 0, done.stderr
    assert place.calls() == [["bert_jax", *TRAIN, "--join_seconds=900"]] * 2
    assert without.returncode != 0


def test_gke_gets_a_workload_with_the_command(place):
    place.program("xpk")
    done = place.run("gke_xpk.sh", *TRAIN, **TPU, CLUSTER="tpus", PROJECT="mine", IMAGE="image", SLICES="2")
    assert done.returncode == 0, done.stderr
    ((name, *arguments),) = place.calls()
    assert (name, arguments[:2]) == ("xpk", ["workload", "create"])
    options = dict(argument.removeprefix("--").split("=", 1) for argument in arguments[2:])
    command = options.pop("command")
    assert shlex.split(command) == ["bert_jax", *TRAIN, "--join_seconds=900"]
    assert options == {
        "workload": "bert", "cluster": "tpus", "zone": "us-west4-a", "project": "mine", "tpu-type": "v5litepod-16",
        "num-slices": "2", "docker-image": "image", "max-restarts": "10",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("status", "again"), [(0, False), (1, False), (75, True), (76, True), (134, True), (143, True)]
)
def test_slurm_queues_a_run_again_that_is_not_done(place, status, again):
    place.program("srun", f"{status} ")
    place.program("scontrol")
    done = place.run("slurm.sh", *TRAIN, SLURM_JOB_ID="17", BERT_JAX="/shared/env")
    assert done.returncode == status
    started, *after = place.calls()
    assert started == ["srun", "--kill-on-bad-exit=0", "--wait=120", "/shared/env/bin/bert_jax", *TRAIN]
    assert after == ([["scontrol", "requeue", "17"]] if again else [])


def test_slurm_asks_for_a_signal_before_the_end(repository):
    lines = [line for line in (repository / "launch/slurm.sh").read_text().splitlines() if line.startswith("#SBATCH")]
    assert {"#SBATCH --signal=TERM@120", "#SBATCH --requeue"} <= set(lines)
