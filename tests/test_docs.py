"""The documents say what the code does: every setting is in the reference; what they name exists."""

import ast
import re
from pathlib import Path

from g2d_jax import config as settings
from g2d_jax import pipeline
from g2d_jax.config import STAGES, Config
from g2d_jax.config_load import resolve

ROOT = Path(__file__).parents[1]


def fields(values: dict, prefix: str = "") -> list[str]:
    """Dotted paths of all leaves."""
    paths = []
    for name, value in values.items():
        path = f"{prefix}{name}"
        paths += fields(value, f"{path}.") if isinstance(value, dict) and value else [path]
    return paths


def test_every_setting_is_in_the_reference() -> None:
    text = (ROOT / "docs" / "config.md").read_text()
    described = set(re.findall(r"`([A-Za-z0-9_.]+)`", text))
    base = settings.base().to_dict() | {"stages": None}
    base["data"] |= {"train": None, "dev": None, "test": None}
    stages = [getattr(settings, kind)().to_dict() | {"data": None} for kind in STAGES]
    paths = {path for values in (base, *stages) for path in fields(values)}
    assert paths - described - {"stages", "data", "kind"} == set()


def anchors(page: Path) -> set[str]:
    """What "PAGE#…" may name: the headings in lower case, with hyphens and without punctuation."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), flags=re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_links_and_named_files_exist() -> None:
    missing = []
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        text = page.read_text()
        for link, anchor in re.findall(r"\]\((?!https?:)([^)#\s]*)#?([^)\s]*)\)", text):
            target = page.parent / link if link else page
            if not target.exists() or (anchor and anchor not in anchors(target)):
                missing.append((page.name, link, anchor))
        files = re.findall(r"`(\w+/[\w/]+\.py)`", text) if page.parent.name != "benchmarks" else []  # those are dated
        folders = (ROOT, ROOT / "g2d_jax", ROOT / "tests")
        missing += [(page.name, file, "") for file in files if not any((folder / file).exists() for folder in folders)]
    assert missing == []


def test_every_equation_names_a_function_and_a_test_that_exist() -> None:
    rows = re.findall(r"^\| .* \| (`.*) \| (`.*) \|$", (ROOT / "docs" / "equations.md").read_text(), flags=re.MULTILINE)
    assert len(rows) > 20
    for functions, tests in rows:
        for module, name in re.findall(r"`([\w.]+)\.(\w+)", functions):
            file = ROOT / "g2d_jax" / f"{module.replace('.', '/')}.py"
            source = file.read_text() if file.exists() else ""
            assert f"def {name}(" in source or (file.with_suffix("") / f"{name}.py").exists(), (module, name)
        (file, *more), names = re.findall(r"[\w/]+\.py", tests), re.findall(r"::(\w+)", tests)
        for name in names:
            assert any(f"def {name}(" in (ROOT / "tests" / each).read_text() for each in (file, *more)), (tests, name)


def slowness(file: Path) -> dict[str, str]:
    """How much of each test of a file is left to `-m slow`: "slow", "partly slow" or ""."""
    module = ast.parse(file.read_text())
    names = {"pytest.mark.slow", "slow"}
    of_all = [ast.unparse(node.value) for node in module.body if "pytestmark" in ast.unparse(node).partition(" = ")[0]]
    shares = {}
    for node in ast.walk(module):
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            decorators = [ast.unparse(decorator) for decorator in node.decorator_list]
            whole = names & {*decorators} or any("mark.slow" in marks for marks in of_all)
            partly = any(re.search(r"\bslow\b", decorator) for decorator in decorators)
            shares[node.name] = "slow" if whole else "partly slow" if partly else ""
    return shares


def test_every_promise_names_tests_that_exist() -> None:
    """And says of each how much of it is run by -m slow."""
    text = (ROOT / "docs" / "reliability.md").read_text()
    promises = text.partition("## Promises")[2].partition("\n## ")[0]
    rows = [line for line in promises.splitlines() if line.startswith("| ") and not line.startswith("| promise")]
    assert len(rows) > 30
    for row in rows:
        named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`(?: \(((?:partly )?slow)\))?", row)
        assert named, f"a promise without a test: {row}"
        for file, name, share in named:
            assert slowness(ROOT / file).get(name) == share, (file, name)


def test_the_config_in_the_readme_is_one(tmp_path: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)
    (block,) = [text for text in blocks if "def get_config" in text]
    file = tmp_path / "my_config.py"
    file.write_text(block)
    config = resolve(str(file), ["config.stages.warmup.steps=100"])
    assert pipeline.check(Config.of(config)).order == ("warmup", "collect", "dpo", "evaluate")
    assert config.stages.warmup.steps == 100
