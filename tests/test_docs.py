"""The documents say what the code does: every setting is in the reference; what they name
exists."""

import ast
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from forks import Forks

from g2d_jax import __version__
from g2d_jax import config as settings
from g2d_jax.cli import arguments
from g2d_jax.config import STAGES, Config, check
from g2d_jax.config.graph import plan
from g2d_jax.plan.topologies import topology
from g2d_jax.recipes.config_load import resolve, shipped
from g2d_jax.runtime import failures
from g2d_jax.runtime.tracking import read_metrics
from g2d_jax.session import stage_result
from g2d_jax.stages import run_issues
from g2d_jax.sweep import points

ROOT = Path(__file__).parents[1]


def fields(values: dict, prefix: str = "") -> list[str]:
    """Dotted paths of all leaves."""
    paths = []
    for name, value in values.items():
        path = f"{prefix}{name}"
        paths += fields(value, f"{path}.") if isinstance(value, dict) and value else [path]
    return paths


def all_settings() -> set[str]:
    """Paths of the settings of a run and, without their stage's name, of all kinds of stages."""
    base = settings.base().to_dict() | {"stages": None}
    base["data"] |= {"train": None, "dev": None, "test": None}
    stages = [getattr(settings, kind)().to_dict() | {"data": None} for kind in STAGES]
    return {path for values in (base, *stages) for path in fields(values)}


def test_the_reference_of_settings_is_written_from_the_docstrings() -> None:
    """`python docs/write_settings.py` brings it up to date; a field without a docstring fails."""
    page = runpy.run_path(str(ROOT / "docs" / "write_settings.py"))["page"]()
    assert (ROOT / "docs" / "settings.md").read_text() == page


def test_every_setting_has_an_anchor() -> None:
    text = (ROOT / "docs" / "settings.md").read_text()
    named = re.findall(r'^\| <a id="([^"]*)"></a>`', text, flags=re.MULTILINE)
    assert len({*named}) == len(named)
    base = {*fields(settings.base().to_dict() | {"stages": None})}
    assert {path for path in base if not path.startswith("data.")} <= {*named}


@pytest.mark.parametrize(
    "page", ["tutorial", "concepts", "howto", "rewards", "troubleshooting", "limits", "metrics"]
)
def test_settings_that_a_page_names_exist(page: str) -> None:
    known = all_settings()
    sections = {path.partition(".")[0] for path in known if "." in path}
    named = re.findall(
        r"`(?:config\.)?(\w+\.[\w.]+)(?:=[^`]*)?`", (ROOT / "docs" / f"{page}.md").read_text()
    )
    named = [
        name for name in named if name.partition(".")[0] in sections and not name.endswith(".json")
    ]
    assert [
        name for name in named if not any(f"{path}.".startswith(f"{name}.") for path in known)
    ] == []


def test_the_names_of_trl_and_verl_lead_to_settings() -> None:
    grpo, dpo = (ROOT / "docs" / "coming-from.md").read_text().split("\n## ")[1:3]
    tables = [re.findall(r"^\| .* \|$", part, flags=re.MULTILINE)[1:] for part in (grpo, dpo)]
    assert len(tables[0]) > 25 and len(tables[1]) > 5
    ours = " ".join(
        row.split("|")[column] for rows, column in zip(tables, (3, 2), strict=True) for row in rows
    )
    named = re.findall(r"`(?:config)?\.?([\w.]+\w)(?:=[^`]*)?`", re.sub(r"\(.*?\)", "", ours))
    known = [f".{path}" for path in all_settings()]
    assert [name for name in named if not any(path.endswith(f".{name}") for path in known)] == []


def anchors(page: Path) -> set[str]:
    """What "PAGE#…" may name: the headings in lower case, with hyphens and without punctuation, and
    anchors."""
    text = page.read_text()
    headings = re.findall(r"^#+ (.*)$", text, flags=re.MULTILINE)
    slugs = {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}
    return slugs | set(re.findall(r'<a id="([^"]*)"></a>', text))


def test_links_and_named_files_exist() -> None:
    missing = []
    for page in PAGES:
        text = page.read_text()
        for link, anchor in re.findall(r"\]\((?!https?:)([^)#\s]*)#?([^)\s]*)\)", text):
            target = page.parent / link if link else page
            if not target.exists() or (anchor and anchor not in anchors(target)):
                missing.append((page.name, link, anchor))
        files = re.findall(r"`(\w+/[\w/]+\.py)`", text)
        folders = (ROOT, ROOT / "g2d_jax", ROOT / "tests")
        missing += [
            (page.name, file, "")
            for file in files
            if not any((folder / file).exists() for folder in folders)
        ]
    assert missing == []


def test_every_example_has_a_line_in_the_index() -> None:
    text = (ROOT / "examples" / "README.md").read_text()
    examples = {path.name for path in (ROOT / "examples").iterdir()}
    missing = [name for name in examples if f"]({name}" not in text]
    assert set(missing) <= {"README.md", "__pycache__"}


def test_every_equation_names_a_function_and_a_test_that_exist() -> None:
    rows = re.findall(
        r"^\| .* \| (`.*) \| (`.*) \|$",
        (ROOT / "docs" / "equations.md").read_text(),
        flags=re.MULTILINE,
    )
    assert len(rows) > 20
    for functions, tests in rows:
        for module, name in re.findall(r"`([\w.]+)\.(\w+)", functions):
            file = ROOT / "g2d_jax" / f"{module.replace('.', '/')}.py"
            source = file.read_text() if file.exists() else ""
            assert f"def {name}(" in source or (file.with_suffix("") / f"{name}.py").exists(), (
                module,
                name,
            )
        (file, *more), names = re.findall(r"[\w/]+\.py", tests), re.findall(r"::(\w+)", tests)
        for name in names:
            assert any(
                f"def {name}(" in (ROOT / "tests" / each).read_text() for each in (file, *more)
            ), (tests, name)


def test_functions_that_pages_name_with_their_file_exist() -> None:
    missing = []
    found = 0
    for page in sorted((ROOT / "docs").rglob("*.md")):
        for file, name in re.findall(r"`([\w/]+\.py):(\w+)`", page.read_text()):
            source = (ROOT / "g2d_jax" / file).read_text()
            found += 1
            if not re.search(rf"^ *(def |class )?{name}( =|:|\(|\[)", source, flags=re.MULTILINE):
                missing.append((page.name, file, name))
    assert found > 0 and missing == []


def test_every_promise_names_the_file_that_tests_it() -> None:
    text = (ROOT / "docs" / "reliability.md").read_text()
    promises = text.partition("## Promises")[2].partition("\n## ")[0]
    rows = [line for line in promises.splitlines() if line.startswith("- ")]
    assert len(rows) > 20
    for row in rows:
        (file,) = re.findall(r"`(tests/[\w/.]+)`$", row)
        assert (ROOT / file).exists(), row


def test_the_config_in_the_readme_is_one(tmp_path: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)
    (block,) = [text for text in blocks if "def get_config" in text]
    file = tmp_path / "my_config.py"
    file.write_text(block)
    config = resolve(str(file), ["config.stages.warmup.steps=100"])
    run, found = check.issues(config)
    assert not found and plan(run).order == ("warmup", "collect", "dpo", "evaluate")
    assert config.stages.warmup.steps == 100


def blocks(page: str, start: str = "") -> list[str]:
    """The Python of a page that begins so."""
    found = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / page).read_text(), flags=re.DOTALL)
    return [block for block in found if block.startswith(start)]


@pytest.mark.parametrize("page", ["howto.md", "coming-from.md", "rewards.md"])
def test_settings_in_the_python_of_a_page_can_be_made(page: str) -> None:
    config = settings.base()
    for block in blocks(page, "config."):
        exec(block, {"config": config, "settings": settings})
    assert Config.of(config) != Config()


# What begins a command line in a page -> what it needs that no test has; "": tests parse or run it.
PROGRAMS = {
    "g2d": "",
    "python": "",
    "python3": "",
    "launch": "",
    "head": "",
    "pip": "the network",
    "sphinx-build": "the extra docs: .ci/run",
    "tensorboard": "a browser",
    "hf": "the hub",
    "lm_eval": "lm-eval, with torch",
    "vllm": "a vLLM",
    "docker": "a container engine",
    "kubectl": "a cluster",
    "sbatch": "Slurm",
    "srun": "Slurm",
    "sky": "a cloud",
    "gcloud": "a cloud",
    "ssh-add": "a key",
    "ulimit": "a shell",
}
OF_THE_REPOSITORY = ("benchmarks/", "configs/", "examples/", "launch/", "notebooks/", "tests/")
PAGES = [
    ROOT / "README.md",
    ROOT / "AGENTS.md",
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "examples").rglob("*.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
]


def program(line: str) -> str:
    """The program of PROGRAMS that a line begins with, behind variables; "" if it begins with
    none."""
    words = re.sub(r"^([A-Z][A-Z0-9_]*=\S* )+", "", line).split()
    name = Path(words[0]).name if words else ""
    name = "launch" if words and words[0].startswith("launch/") else name
    return name if name in PROGRAMS else ""


def command_lines(page: Path) -> tuple[list[str], list[str]]:
    """The command lines of a page: whole ones, of its blocks, and those within its sentences.

    A block is one of commands if its first line begins with a program that is known: then every
    line has to.
    """
    text = page.read_text()
    whole = re.findall(r"^ {4}(g2d .*)$", text, flags=re.MULTILINE)
    for kind, block in re.findall(r"^```(.*)\n((?s:.*?))^```", text, flags=re.MULTILINE):
        lines = [line for line in block.splitlines() if line.strip()]
        whole += lines if kind in ("", "sh") and program(lines[0]) else []
    inline = [code for code in re.findall(r"(?<!`)`([^`\n]+)`(?!`)", text) if program(code)]
    return whole, [code for code in inline if " " in code]


def all_command_lines() -> tuple[dict[str, Path], dict[str, Path]]:
    """The command lines of all pages, whole ones and those within sentences -> a page that has
    it."""
    whole: dict[str, Path] = {}
    inline: dict[str, Path] = {}
    for page in PAGES:
        lines, codes = command_lines(page)
        whole |= dict.fromkeys(lines, page)
        inline |= dict.fromkeys(codes, page)
    return whole, inline


def commands_of(line: str) -> list[list[str]]:
    """The words of each command of a line, those that a scheduler or ssh starts too, without
    variables."""
    words = shlex.split(re.sub(r"^([A-Z][A-Z0-9_]*=\S* )+", "", line), comments=True)
    joined = " ".join("\n" if word == "&&" else shlex.quote(word) for word in words)
    commands = [shlex.split(part) for part in joined.split("\n")]
    for words in list(commands):
        commands += [shlex.split(word[word.index("=") + 1 :]) for word in words if "/g2d " in word]
        commands += [words[words.index("g2d") :]] if "g2d" in words[1:] else []
    return commands


def options_of(command: str, capsys: pytest.CaptureFixture[str]) -> set[str]:
    """The options that `g2d COMMAND --help` names."""
    with pytest.raises(SystemExit):
        arguments.parse([command, "--help"])
    return set(re.findall(r"--[\w-]+", capsys.readouterr().out))


def config_of(page: Path, folder: Path) -> str:
    """Write the config file that a page shows, or the README's, and return its path."""
    file = folder / f"{page.parent.name}_{page.stem.replace('-', '_')}.py"
    for shown in (page, ROOT / "README.md") if not file.exists() else ():
        blocks = re.findall(r"```python\n(.*?)```", shown.read_text(), flags=re.DOTALL)
        if found := [block for block in blocks if "def get_config" in block]:
            file.write_text(found[0])
            break
    return str(file)


def require_sound(words: list[str], own: str) -> None:
    """Parse the words behind g2d as the command does, and make what they name: the config with its
    overrides, a study's points, the machine.

    own: a file for a config that is not shipped. Raises SystemExit or ValueError.
    """
    typed, overrides = arguments.parse(words)
    values = vars(typed)
    spec = values.get("config") or values.get("recipe") or ""
    if spec.startswith("benchmarks/"):  # a record's, which reads what its study left
        return
    if spec:
        config = resolve(own if spec.partition(":")[0].endswith(".py") else spec, overrides)
        if typed.command == "sweep":
            points.with_axes(config, typed.product, typed.zip, typed.seeds)
        else:
            check.checked(config)
    if machine := values.get("topology"):
        topology(machine)


@pytest.mark.usefixtures("prepared")
def test_every_command_line_of_a_page_is_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Those of g2d are parsed, with their configs and overrides; of those that are shortened within
    a sentence the options exist, as do files of the repository that any line names. What else a
    line begins with is in PROGRAMS, with what it needs."""
    whole, inline = all_command_lines()
    options: dict[str, set[str]] = {}
    for line, page in (whole | inline).items():
        for words in commands_of(line):
            assert program(words[0]), f"{page}: neither checked nor in PROGRAMS: {line}"
            files = [word.partition(":")[0] for word in words if word.startswith(OF_THE_REPOSITORY)]
            assert [file for file in files if not (ROOT / file).exists()] == [], (page, line)
            given = {word.partition("=")[0] for word in words if word.startswith("--")}
            if program(words[0]).startswith("python") and files and "pytest" not in words:
                script = (ROOT / files[0]).read_text()
                assert [option for option in given if option not in script] == [], (page, line)
            if program(words[0]) != "g2d":
                continue
            if words[1] not in options:
                options[words[1]] = options_of(words[1], capsys)
            settings_of_a_run = {option for option in given if option.startswith("--config.")}
            assert given - options[words[1]] <= settings_of_a_run, (page, line)
            shortened = any(re.fullmatch("[A-Z_]{4,}|…", word) for word in words)
            if line in whole or ("--config" in given and not shortened):
                require_sound(words[1:], config_of(page, tmp_path))
    assert len(whole) > 60 and len(options) == 12


READ_A_RUN = ("status", "report", "compare", "sample", "evaluate", "export")
# What a line of these has in it that tests lack -> what that is
LACKING = {
    "gs://": "a bucket",
    "adapters": "a run with adapters",
    "--as ": "the extra plan",
    "gsm8k": "the hub",
    "amc23": "the hub",
    "numinamath": "the hub",
    '"What is': "a model that reads words",
}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_commands_that_read_a_run_do_so(finished: Path, forks: Forks, tmp_path: Path) -> None:
    """On a finished run, whatever the page calls it and its last policy; no --watch, which needs a
    terminal."""
    for run in ("mine", "other"):
        shutil.copytree(finished, tmp_path / run)
    done = set()
    failed = []
    for line in all_command_lines()[0]:
        for words in commands_of(line):
            command = words[1] if program(words[0]) == "g2d" else ""
            if command not in READ_A_RUN or any(word in line for word in LACKING):
                continue
            places = ["mine", "other"][: 1 + (command == "compare")]
            rest = ["dpo" if word == "best" else word for word in words[2 + len(places) :]]
            rest = [word for word in rest if word != "--watch"]
            if "--output" in rest:
                rest[rest.index("--output") + 1] = f"written-{len(done)}"
            ran = forks.run(command, *places, *rest, cwd=tmp_path)
            done.add((command, *rest))
            if ran.returncode:
                failed.append((line, ran.stderr))
    assert failed == []
    assert len({command for command, *_ in done}) > 5


def test_every_config_says_what_it_needs() -> None:
    """A command line of a page that needs a device is told by its config."""
    for name, file in shipped().items():
        if isinstance(file, str):  # a recipe, which docs/models.md plans
            continue
        assert "\nHardware:  " in str(ast.get_docstring(ast.parse(file.read_text()))), name


@pytest.fixture
def tutorial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the files that the tutorial writes."""
    monkeypatch.chdir(tmp_path)
    for block in blocks("tutorial.md", "# "):
        Path(block.split()[1]).write_text(block)
    runpy.run_path("make_data.py")
    return tmp_path


def test_the_tutorial_makes_the_problems_it_shows_and_a_config(tutorial: Path) -> None:
    shown = (ROOT / "docs" / "tutorial.md").read_text().split("==> ")[1:]
    for name, *lines in (part.partition("```")[0].split("\n") for part in shown):
        rows = [line for line in lines if line]
        assert len(rows) == 2 and Path(name.removesuffix(" <==")).read_text().startswith(
            "\n".join(rows) + "\n"
        )
    order = plan(run_issues.checked(resolve("my_config.py"))[0]).order
    assert order == ("sft", "warmup", "collect", "dpo", "evaluate")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_tutorial_ends_as_it_says(tutorial: Path, one_device: dict[str, str]) -> None:
    text = (ROOT / "docs" / "tutorial.md").read_text()
    # SmolLM2 of its last section is another model, which you prepare first.
    lines = [
        line for line in command_lines(ROOT / "docs" / "tutorial.md")[0] if "runs/first" in line
    ]
    for (command,) in map(commands_of, lines):
        python = [sys.executable, "-m", "g2d_jax", *command[1:]]
        # the suite's flags make slow programs
        subprocess.run(python, env={**one_device, "XLA_FLAGS": ""}, check=True)
    result = stage_result.read("runs/first/05-evaluate").evaluation
    promised = [
        float(row)
        for row in re.findall(r"^\| .*? \| ([\d.]+) ± [\d.]+ \|", text, flags=re.MULTILINE)
    ]
    reached = [100 * policy.pass_at["1"] for policy in result.policies]
    assert len(promised) == 3 and reached == pytest.approx(promised, abs=8)


def test_every_metric_of_a_run_is_explained(finished: Path) -> None:
    text = (ROOT / "docs" / "metrics.md").read_text()
    explained = set(re.findall(r"`([^`\s]+)`", text))
    starts = tuple(name.removesuffix("…") for name in explained if name.endswith("…"))
    metrics = {
        name
        for row in read_metrics(finished)
        if "warning" not in row["kind"]
        for name in row["metrics"]
    }
    assert len(metrics) > 60
    assert {name for name in metrics - explained if not name.startswith(starts)} == set()


def test_the_citation_is_of_this_version() -> None:
    assert f"\nversion: {__version__}\n" in (ROOT / "CITATION.cff").read_text()


def test_the_package_is_installed_from_a_folder_or_a_url() -> None:
    """No registry has its name, so no page, message, notebook or launcher may give the name
    alone."""
    folders = ("docs", "g2d_jax", "notebooks", "launch", "configs", "examples", "benchmarks")
    suffixes = (".md", ".py", ".ipynb", ".sh", ".sbatch", ".yaml", ".cuda", ".tpu")
    files = [ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
    for folder in folders:
        files += [file for file in (ROOT / folder).rglob("*") if file.suffix in suffixes]
    for file in files:
        text = file.read_text()
        with_extra = re.findall(r"g2d[-_]jax(?:\[[^\]]*\]|\{extra\}).{0,3}", text)
        alone = re.findall(r"pip install [^\n]*\bg2d[-_]jax\b(?!\[|\{|'s)", text)
        assert [name for name in with_extra if " @ " not in name] + alone == [], file
    assert failures.install_command("cuda").startswith("pip install '.[cuda]'")
    assert "pip install '.[cuda]'" in (ROOT / "docs" / "index.md").read_text()


def test_extras_that_pages_and_messages_name_are_those_of_pyproject() -> None:
    known = set(
        tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    )
    code = "".join(file.read_text() for file in (ROOT / "g2d_jax").rglob("*.py"))
    pages = "".join(
        file.read_text() for file in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    )
    named = set(re.findall(r"extras\.missing\([^()]*\"(\w+)\"\)", code))
    named |= {
        extra for group in re.findall(r"'\.\[([\w,]+)\]'", pages) for extra in group.split(",")
    }
    named |= set(re.findall(r"\bextra `(\w+)`", pages))
    assert len(named) >= 8 and named <= known
