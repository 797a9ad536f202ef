"""The files in examples/cluster have the fields that Kubernetes, JobSet and SkyPilot read, by packages of these projects."""

from pathlib import Path

import pytest
import yaml

FOLDER = Path(__file__).parents[2] / "examples" / "cluster"


def test_jobset():
    """Fields that a model of JobSet's API does not know are absent from the document that it writes."""
    models = pytest.importorskip("kubeflow_trainer_api.models", reason="pip install kubeflow-trainer-api")
    document = yaml.safe_load((FOLDER / "jobset.yaml").read_text())
    assert models.JobsetV1alpha2JobSet.from_dict(document).to_dict() == document


def test_the_job_in_it():
    validate = pytest.importorskip("kubernetes_validate", reason="pip install kubernetes-validate")
    (job,) = yaml.safe_load((FOLDER / "jobset.yaml").read_text())["spec"]["replicatedJobs"]
    document = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": job["name"]}, **job["template"]}
    validate.validate(document, validate.latest_version(), strict=True)


def test_skypilot():
    sky = pytest.importorskip("sky", reason="pip install skypilot")
    task = sky.Task.from_yaml(str(FOLDER / "skypilot.yaml"))
    assert task.num_nodes == 4 and [*task.resources][0].accelerators == {"H200": 8}
