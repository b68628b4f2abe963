"""The documents say what the code does: every setting is in the reference, every named test and file exists."""

import ast
import re
from pathlib import Path

from g2d_jax import config as settings
from g2d_jax import pipeline
from g2d_jax.config import Config
from g2d_jax.config_load import resolve

ROOT = Path(__file__).parents[1]


def fields(values: dict, prefix: str = "") -> list[str]:
    """Dotted paths of all leaves."""
    found = []
    for name, value in values.items():
        path = f"{prefix}{name}"
        found += fields(value, f"{path}.") if isinstance(value, dict) and value else [path]
    return found


def test_every_setting_is_in_the_reference() -> None:
    text = (ROOT / "docs" / "config.md").read_text()
    known = set(re.findall(r"`([A-Za-z0-9_.]+)`", text))
    base = settings.base().to_dict()
    for split in ("train", "dev", "test"):
        base["data"][split] = None
    missing = [path for path in fields({k: v for k, v in base.items() if k != "stages"}) if path not in known]
    for make in (
        settings.sft,
        settings.online,
        settings.collect,
        settings.offline,
        settings.best_checkpoint,
        settings.evaluate,
    ):
        stage = {**make().to_dict(), "data": None, "kind": None}
        missing += [path for path in fields(stage) if path not in known | {"data", "kind"}]
    assert missing == []


def test_named_tests_and_files_exist() -> None:
    text = (ROOT / "docs" / "equations.md").read_text()
    for row in re.findall(r"\| `([a-z_/]+\.py)((?:::\w+)?)`(.*)", text):
        file = ROOT / "tests" / row[0]
        source = file.read_text()
        for name in re.findall(r"::(\w+)", row[1] + row[2]):
            assert f"def {name}" in source, (row[0], name)
    readme = (ROOT / "README.md").read_text()
    for file in re.findall(r"`([a-z_]+/[a-z_]+\.py)`", readme):
        assert (ROOT / "g2d_jax" / file).exists(), file


def slowness(file: Path) -> dict[str, str]:
    """How much of each test of a file is left to `-m slow`: "slow", "partly slow" or ""."""
    module = ast.parse(file.read_text())
    names = {"pytest.mark.slow", "slow"}
    of_all = [ast.unparse(node.value) for node in module.body if "pytestmark" in ast.unparse(node).partition(" = ")[0]]
    found = {}
    for node in ast.walk(module):
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            decorators = [ast.unparse(decorator) for decorator in node.decorator_list]
            whole = names & {*decorators} or any("mark.slow" in marks for marks in of_all)
            partly = any(re.search(r"\bslow\b", decorator) for decorator in decorators)
            found[node.name] = "slow" if whole else "partly slow" if partly else ""
    return found


def test_every_promise_names_tests_that_exist() -> None:
    """And says of each how much of it is run by -m slow."""
    text = (ROOT / "docs" / "reliability.md").read_text()
    promises = text.partition("## Promises")[2].partition("\n## ")[0]
    rows = [line for line in promises.splitlines() if line.startswith("| ") and not line.startswith("| promise")]
    assert len(rows) > 30
    for row in rows:
        named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`(?: \(((?:partly )?slow)\))?", row)
        assert named, f"a promise without a test: {row}"
        for file, name, said in named:
            assert slowness(ROOT / file).get(name) == said, (file, name)


def test_the_config_in_the_readme_is_one(tmp_path: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)
    (block,) = [text for text in blocks if "def get_config" in text]
    file = tmp_path / "my_config.py"
    file.write_text(block)
    config = resolve(str(file), ["config.stages.warmup.steps=100"])
    assert pipeline.check(Config.of(config)).order == ("warmup", "collect", "dpo", "evaluate")
    assert config.stages.warmup.steps == 100
