# SPDX-License-Identifier: Apache-2.0
"""Checkpoints in an object store that refuses."""

import jax
import pytest
from buckets import behind_a_front, variables
from builders import assert_same, message

from bert_jax.checkpoints.states import Checkpoints
from bert_jax.errors import InputError
from bert_jax.settings.pretraining import PretrainConfig
from bert_jax.storage import places
from bert_jax.storage.places import to_place
from bert_jax.training.workdir import check_workdir


def state_of(value):
    return {"a": jax.numpy.full((100, 10), float(value)), "b": {"c": jax.numpy.arange(7)}}


@pytest.mark.slow
def test_a_save_that_a_predecessor_goes_on_writing_harms_nothing(bucket_server, bucket):
    """It was suspended in a save, lost its lease, and wakes: Orbax writes the rest without asking."""
    url = f"{bucket}/run/checkpoints"

    def write_late(content):
        for name in ("_CHECKPOINT_METADATA", "state/_METADATA", "state/manifest.ocdbt", "state/d/0"):
            bucket_server.write(f"{url}/00000002/{name}", content)

    with variables(bucket_server.environment):
        with Checkpoints(to_place(url)) as checkpoints:
            checkpoints.save(1, state_of(1))
            checkpoints.wait()
            write_late(b"late")
            checkpoints.save(2, state_of(2))
            write_late(b"later")
            checkpoints.close()
            write_late(b"latest")
        with Checkpoints(to_place(url)) as checkpoints:
            restored = checkpoints.restore(jax.eval_shape(lambda: state_of(0)))
            assert not restored.passed_over
            assert_same(restored.state["a"], state_of(2)["a"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ((403, "no access"), "the credentials do not permit it .*storage.objectUser"),
        ((403, "The project exceeded its quota"), "a quota of gs://.* is used up .*; raise it"),
        # TensorStore tries the errors 429 and 5xx again for many minutes (decision 0021), so they are not here.
        ((401, "Invalid token"), "there are no valid credentials for gs://"),
        ((404, "The specified bucket does not exist."), "there is no bucket gs://"),
    ],
)
def test_a_refused_save_is_one_line_and_what_was_saved_stays(bucket_server, bucket, capfd, answer, expected):
    with behind_a_front(bucket_server) as (server, front), variables(server.environment):
        directory = to_place(f"{bucket}/run/checkpoints")
        with Checkpoints(directory) as checkpoints:
            checkpoints.save(1, state_of(1))
            checkpoints.wait()
            refused = "/state-" if answer[0] == 403 else "checkpoints"  # in the midst of it, or before it begins
            front.rule = lambda method, asked: answer if "/upload/" in asked and refused in asked else None
            capfd.readouterr()
            with pytest.raises(InputError, match=expected) as caught:
                checkpoints.save(2, state_of(2))
                checkpoints.wait()
            front.rule = lambda method, asked: None
        assert "\n" not in str(caught.value)
        assert "Traceback" not in capfd.readouterr().err
        with Checkpoints(directory) as checkpoints:  # the next run
            restored = checkpoints.restore(jax.eval_shape(lambda: state_of(0)))
            assert_same(restored.state["a"], state_of(1)["a"])
            checkpoints.save(2, state_of(2))
            checkpoints.close()
            assert checkpoints.steps() == [1, 2]


def test_a_work_directory_elsewhere_than_gs_is_refused_with_the_reason():
    assert "workdir s3://b/run cannot hold checkpoints" in message(
        check_workdir, to_place("s3://b/run"), {}, PretrainConfig()
    )
    assert str(to_place("gcs://b/run")) == "gs://b/run"
    assert places.is_taken(to_place("memory://nothing/here")) is False
