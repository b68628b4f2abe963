"""The notebooks: valid, without outputs; and the one that trains, run by a kernel with the smoke
preset."""

import json
from pathlib import Path

import pytest

NOTEBOOKS = Path(__file__).parents[1] / "notebooks"


def cells(name: str) -> list[dict]:
    return json.loads((NOTEBOOKS / name).read_text("utf-8"))["cells"]


@pytest.mark.parametrize("name", ["g2d.ipynb", "study.ipynb"])
def test_notebooks_are_kept_without_outputs(name: str) -> None:
    code = [cell for cell in cells(name) if cell["cell_type"] == "code"]
    assert len(code) >= 5 and all(
        cell["outputs"] == [] and cell["execution_count"] is None for cell in code
    )


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
    environment: dict, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No registry has the name. The line of pip is looked at, and not run."""
    source = "".join(
        next(cell for cell in cells("g2d.ipynb") if cell["cell_type"] == "code")["source"]
    )
    assert source.count("%pip install --quiet") == 1
    monkeypatch.delenv("G2D_REPOSITORY", raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    names: dict = {}
    exec(source.replace('%pip install --quiet "{package}"', "installs = package"), names)
    assert names["installs"] == package.format(extra=names["extra"])
    assert (NOTEBOOKS / ".." / "pyproject.toml").exists()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_from_a_dataset_to_a_report_in_a_notebook(
    one_device: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import nbclient  # here: a second Python, which runs the quick tests, has none of the extra test
    import nbformat

    for name, value in {
        **one_device,
        "G2D_CONFIG": "demo:preset=smoke",
        "JAX_PLATFORMS": "cpu",
    }.items():
        monkeypatch.setenv(name, value)
    notebook = nbformat.read(NOTEBOOKS / "g2d.ipynb", as_version=4)
    nbformat.validate(notebook)
    nbclient.NotebookClient(
        notebook, timeout=500, resources={"metadata": {"path": tmp_path}}
    ).execute()
    *_, result, accuracies, _, paths = [
        cell.outputs for cell in notebook.cells if cell.cell_type == "code" and cell.outputs
    ]
    (shown,) = [output.data["text/html"] for output in result]
    assert shown.startswith("<iframe") and "pass@1 %" in shown and "&lt;svg" in shown
    assert (
        "warmup" in accuracies[0].data["text/html"]
        and "accuracy" in accuracies[0].data["text/html"]
    )
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
