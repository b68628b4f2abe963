"""The notebooks: what they show; and one of those that train, run by a kernel with the smoke
preset."""

import json
from pathlib import Path

import pytest

NOTEBOOKS = Path(__file__).parents[1] / "notebooks"
NAMES = ["free_gpu.ipynb", "g2d.ipynb", "study.ipynb"]


def cells(name: str) -> list[dict]:
    return json.loads((NOTEBOOKS / name).read_text("utf-8"))["cells"]


@pytest.mark.parametrize("name", ["g2d.ipynb", "study.ipynb"])
def test_a_notebook_shows_what_came_out_where_nothing_runs(name: str) -> None:
    """Outputs of one run from the first cell to the last: tables and a picture beside the frame of
    the report, which a page that is not trusted leaves out, and no line of standard error."""
    code = [cell for cell in cells(name) if cell["cell_type"] == "code"]
    counts = [cell["execution_count"] for cell in code]
    assert counts == list(range(1, len(code) + 1))
    outputs = [output for cell in code for output in cell["outputs"]]
    assert not [o for o in outputs if o["output_type"] == "error" or o.get("name") == "stderr"]
    shown = [output["data"] for output in outputs if "data" in output]
    assert any("image/png" in data for data in shown)
    assert any("<table" in "".join(data.get("text/html", "")) for data in shown)
    assert (NOTEBOOKS / name).stat().st_size < 700_000


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("environment", "package"),
    [
        ({}, "..{extra}"),
        ({"G2D_REPOSITORY": "/kaggle/input/g2d"}, "/kaggle/input/g2d{extra}"),
        (
            {"G2D_REPOSITORY": "git+https://host/repository"},
            "g2d-jax{extra} @ git+https://host/repository",
        ),
    ],
)
def test_the_first_cell_installs_from_a_folder_or_a_url(
    name: str, environment: dict, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No registry has the name. The line of pip is looked at, and not run."""
    first = next(cell for cell in cells(name) if cell["cell_type"] == "code")
    source = "".join(first["source"])
    assert source.count('%pip install --quiet "{package}"') == 1
    monkeypatch.delenv("G2D_REPOSITORY", raising=False)
    for variable, value in environment.items():
        monkeypatch.setenv(variable, value)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    names: dict = {"extra": ""}
    exec(source.replace('%pip install --quiet "{package}"', "installs = package"), names)
    assert names["installs"] == package.format(extra=names["extra"])
    assert (NOTEBOOKS / ".." / "pyproject.toml").exists()


def run(name: str, environment: dict[str, str], folder: Path, patch: pytest.MonkeyPatch) -> list:
    """Run a notebook with the demo's smoke preset on a CPU, and return its cells of code."""
    import nbclient  # here: a second Python, which runs the quick tests, has none of the extra test
    import nbformat

    settings = {"G2D_CONFIG": "demo:preset=smoke", "JAX_PLATFORMS": "cpu"}
    for variable, value in {**environment, **settings}.items():
        patch.setenv(variable, value)
    notebook = nbformat.read(NOTEBOOKS / name, as_version=4)
    nbformat.validate(notebook)
    resources = {"metadata": {"path": folder}}
    nbclient.NotebookClient(notebook, timeout=500, resources=resources).execute()
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_notebook_for_a_free_gpu_shows_a_report(
    one_device: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    *_, result = run("free_gpu.ipynb", one_device, tmp_path, monkeypatch)
    (shown,) = [output.data["text/html"] for output in result.outputs]
    assert shown.startswith("<iframe") and "accuracy %" in shown


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_from_a_dataset_to_a_report_in_a_notebook(
    one_device: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = run("g2d.ipynb", one_device, tmp_path, monkeypatch)
    *_, result, accuracies, curve, _, paths = [cell.outputs for cell in code if cell.outputs]
    (shown,) = [output.data["text/html"] for output in result]
    assert shown.startswith("<iframe") and "accuracy %" in shown and "&lt;svg" in shown
    assert (
        "warmup" in accuracies[0].data["text/html"]
        and "accuracy" in accuracies[0].data["text/html"]
    )
    assert "image/png" in curve[-1].data
    assert f"the whole report: {tmp_path / 'runs' / 'notebook' / 'report.html'}" in paths[0].text


@pytest.mark.slow
def test_a_kernel_completes_settings(one_device: dict[str, str]) -> None:
    from jupyter_client.manager import start_new_kernel

    manager, client = start_new_kernel(env=one_device)
    try:
        client.execute("from g2d_jax import config as settings", reply=True, timeout=60)
        for code, field in (
            ("settings.online(num_gen", "num_generations="),
            ("settings.sampling(8, temp", "temperature="),
        ):
            assert client.complete(code, reply=True, timeout=60)["content"]["matches"] == [field]
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
