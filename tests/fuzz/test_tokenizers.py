"""Tokenizers from hostile files: one that encodes or refuses every text, or an error that names the
folder."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fuzz.hostile import (
    DEEP,
    ODD,
    TEXTS,
    VALUES,
    accepted,
    as_json,
    changed,
    damaged,
    tries,
    write_folder,
)
from hypothesis import given
from hypothesis import strategies as st

from g2d_jax.data import arithmetic
from g2d_jax.data.template import TemplateSettings
from g2d_jax.data.tokenizer import PromptTokenizer, load_tokenizer

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.usefixtures("bounded_memory"),
    pytest.mark.filterwarnings("ignore"),  # of transformers, about what it is given
]

NAME = "model-to-load"


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The parsed files of a small tokenizer, by name."""
    folder = tmp_path_factory.mktemp("good")
    tokenizer = arithmetic.tokenizer()
    tokenizer.save_pretrained(folder)
    files: dict[str, Any] = {
        path.name: json.loads(path.read_bytes()) for path in folder.glob("*.json")
    }
    files["special_tokens_map.json"] = {
        "eos_token": "<eos>",
        "pad_token": {"content": "<pad>", "special": True},
    }
    files["added_tokens.json"] = {"<pad>": 0}
    files["config.json"] = {"model_type": "qwen2", "eos_token_id": [1], "vocab_size": 22}
    files["generation_config.json"] = {"eos_token_id": 1}
    return files


@pytest.fixture(scope="module")
def files(good: dict[str, Any]) -> dict[str, bytes]:
    return {name: as_json(content) for name, content in good.items()}


def load(folder: Path, files: dict[str, bytes]) -> PromptTokenizer | None:
    """Load these files, and use what was loaded."""
    place = write_folder(folder / NAME, files)
    tokenizer = accepted(lambda: load_tokenizer(place), NAME)
    if tokenizer is not None:
        use(tokenizer)
    return tokenizer


def use(tokenizer: PromptTokenizer) -> None:
    for text in ("1+1=?", "hello\0\ud800", "<eos>", " "):
        ids = None
        try:
            ids = tokenizer.encode_prompt(text)
            tokenizer.decode(tokenizer.encode_completion(text))
        except ValueError:
            continue
        assert ids.dtype == np.int32 and ids.ndim == 1 and len(ids)
        assert ids.min() >= 0 and ids.max() < tokenizer.vocab_size
    assert tokenizer.stop_id in tokenizer.eos_ids and 0 <= tokenizer.pad_id < tokenizer.vocab_size
    assert len(tokenizer.fingerprint) == 16


@given(st.data())
@tries(100)
def test_changed_files(
    folder: Path, good: dict[str, Any], files: dict[str, bytes], data: st.DataObject
) -> None:
    """Changed, damaged, or missing ones."""
    hostile, names = dict(files), st.sampled_from(sorted(files))
    for name in data.draw(st.lists(names, min_size=1, max_size=2, unique=True)):
        odd = damaged(files[name]) | st.sampled_from(ODD) | VALUES.map(as_json)
        hostile[name] = data.draw(changed(good[name]).map(as_json) | odd)
    for missing in data.draw(st.lists(names, max_size=2)):
        hostile.pop(missing, None)
    load(folder, hostile)


# Chat templates

ENDLESS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"


def test_a_template_without_end_is_refused(
    folder: Path,
    good: dict[str, Any],
    files: dict[str, bytes],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("g2d_jax.data.rehearsal.CPU_SECONDS", 1)
    settings = as_json({**good["tokenizer_config.json"], "chat_template": ENDLESS})
    write_folder(folder / "endless", {**files, "tokenizer_config.json": settings})
    with pytest.raises(
        ValueError, match=r"endless.*the chat template does not end within 1 seconds"
    ):
        load_tokenizer(folder / "endless")
    assert load_tokenizer(folder / "endless", TemplateSettings(chat=False)).stop_id == 1


@pytest.mark.parametrize(
    "template",
    [1, True, ["{{ 1 }}"], {"a": 1}, {"default": 7}, [{"name": "default"}], "{{", "\ud800"],
)
def test_templates_that_are_none(
    folder: Path, good: dict[str, Any], files: dict[str, bytes], template: Any
) -> None:
    settings = as_json({**good["tokenizer_config.json"], "chat_template": template})
    load(folder, {**files, "tokenizer_config.json": settings})


WORDS = [
    "messages",
    "m",
    "m.role",
    "m.content",
    "bos_token",
    "add_generation_prompt",
    "strftime_now('%Y')",
    "1",
    "'a'",
]
TAGS = (
    "{{ WORD }}  {% if WORD %}  {% else %}  {% endif %}  {% for m in WORD %}  {% endfor %}  {% "
    "set m = WORD %}  "
    "{{ WORD.x.y }}  {{ WORD[0] }}  {{ WORD + WORD }}  {{ WORD | tojson }}  {{ "
    "raise_exception(WORD) }}  {{  %}  "
    "{% macro f(x) %}  {% endmacro %}  {{ f(f) }}  {{ WORD.__class__ }}  {% generation %}  {% "
    "break %}  text\ud800"
)
PIECES = st.tuples(st.sampled_from(TAGS.split("  ")), st.sampled_from(WORDS)).map(
    lambda pair: pair[0].replace("WORD", pair[1])
)


@given(st.lists(PIECES, max_size=6).map("".join), st.sampled_from([None, "default", "be kind"]))
@tries(150)
def test_templates_of_any_pieces(template: str, system: str | None) -> None:
    """In this process, which such short templates cannot keep busy."""
    tokenizer = arithmetic.tokenizer()
    tokenizer.chat_template = template
    made = accepted(lambda: PromptTokenizer(tokenizer, TemplateSettings(system=system)), "")
    if made is not None:
        use(made)


@given(TEXTS)
@tries(60)
def test_settings_of_any_text(template: str) -> None:
    accepted(lambda: TemplateSettings(prompt_template=template), "")


@pytest.mark.parametrize("top", [2**24, 2**31, 2**32 - 1])
def test_ids_that_no_table_holds(
    folder: Path, good: dict[str, Any], files: dict[str, bytes], top: int
) -> None:
    whole = json.loads(files["tokenizer.json"])
    whole["model"]["vocab"]["x"] = top
    assert load(folder, {**files, "tokenizer.json": as_json(whole)}) is None


@pytest.mark.parametrize("line", range(len(DEEP)))
@pytest.mark.parametrize("file", ["tokenizer.json", "tokenizer_config.json", "config.json"])
def test_deep_nesting(folder: Path, files: dict[str, bytes], file: str, line: int) -> None:
    assert load(folder, {**files, file: DEEP[line]}) is None
