"""Published chat templates are accepted under all settings, with whole prompts; broken ones are
refused at load."""

import itertools
import re

import pytest
from chat_templates import DROPPING, PUBLISHED, WITHOUT_HEADER, WITHOUT_SYSTEM
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from g2d_jax.data.template import Template, TemplateSettings
from g2d_jax.data.tokenizer import PromptTokenizer, load_tokenizer

QUESTION = "  What is\n\n1+1?  "
USER, ANSWER, AGAIN = (
    {"role": role, "content": content}
    for role, content in (
        ("user", "one two"),
        ("assistant", "<think>\nhm\n</think>\n\nthree"),
        ("user", "four"),
    )
)
MARKS = re.compile(r"<[|/\w]\S*?>|\[/?INST\]")


def build(make, name, *, special=True, adds_bos=False, **settings):
    """A tokenizer with a published template, its own tokens among those of the vocabulary."""
    template, bos, eos, _ = PUBLISHED[name]
    pretrained = make(template, adds_bos=adds_bos)
    written = set(MARKS.findall(template)) - {"<think>", "</think>", "<think>\\n\\n</think>"}
    named = [token for token in (bos, eos) if token]
    pretrained.add_tokens([AddedToken(token, special=True) for token in named], special_tokens=True)
    pretrained.add_tokens(
        [AddedToken(token, special=special) for token in sorted(written - set(named))]
    )
    pretrained.bos_token, pretrained.eos_token = bos, eos
    return PromptTokenizer(pretrained, TemplateSettings(**settings))


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_templates_are_accepted(make, name):
    template, _, _, end = PUBLISHED[name]
    thinks = (None, True, False) if "enable_thinking" in template else (None,)
    for system, thinking in itertools.product((None, "default", "", "Be brief."), thinks):
        if name in WITHOUT_SYSTEM and system in ("", "Be brief."):
            with pytest.raises(
                ValueError,
                match=r"unset tokenizer\.system and put its text into tokenizer\.prompt_t",
            ):
                build(make, name, system=system, enable_thinking=thinking)
            continue
        tokenizer = build(make, name, system=system, enable_thinking=thinking)
        bos = tokenizer.pretrained.bos_token
        assert tokenizer.backend.id_to_token(tokenizer.stop_id) == end
        for prompt in (QUESTION, (USER, ANSWER, AGAIN)):
            text = tokenizer.render(prompt)
            assert text == tokenizer.decode_raw(tokenizer.encode_prompt(prompt))
            assert not bos or not text.startswith(bos * 2)
            assert "Be brief." in text or system != "Be brief."
            parts = ["What is\n\n1+1?"] if prompt is QUESTION else ["one two", "three", "four"]
            assert [text.count(part) for part in parts] == [1] * len(parts)
            assert system is not None or not re.search("Alibaba|SmolLM|Date", text)


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_saved_tokenizer_renders_the_trained_ids(make, name, tmp_path):
    """In transformers alone, from a user's message without the settings: what the policy saw as its
    prompt."""
    thinks = (None, False) if "enable_thinking" in PUBLISHED[name][0] else (None,)
    systems = (
        (None, "default")
        if name in WITHOUT_SYSTEM
        else (None, "default", "", 'Say {{ it }} „kurz“ 😀 \\n\n"so".')
    )
    for number, (system, thinking) in enumerate(itertools.product(systems, thinks)):
        tokenizer = build(make, name, system=system, enable_thinking=thinking)
        tokenizer.save(tmp_path / str(number))
        theirs = PreTrainedTokenizerFast.from_pretrained(tmp_path / str(number))
        given = (
            [({"role": "system", "content": "Be brief."}, USER)]
            if name not in WITHOUT_SYSTEM
            else []
        )
        for prompt in ((USER,), (USER, ANSWER, AGAIN), *given):
            ours = tokenizer.encode_prompt(prompt).tolist()
            options = {"add_generation_prompt": True, "return_dict": False}
            assert theirs.apply_chat_template(list(prompt), **options) == ours, (
                system,
                thinking,
                prompt,
            )
            # with the settings' system message, if any
            published = list(tokenizer.conversation(prompt))
            assert theirs.apply_chat_template(published, **options) == ours, (
                system,
                thinking,
                prompt,
            )
        # Saved once more, after a start from the saved folder with the template's own ways, nothing
        # changes.
        again = PromptTokenizer(theirs, TemplateSettings(system="default"))
        assert again.render("1+1?") == tokenizer.render("1+1?")


@pytest.mark.parametrize("name", ["SmolLM2", "Qwen2.5", "SmolLM3"])
def test_what_the_caller_of_a_saved_template_names_still_counts(make, name, tmp_path):
    build(make, name).save(tmp_path)
    theirs = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    messages = [{"role": "system", "content": "Be brief."}, USER, ANSWER]
    options = {"tokenize": False, "add_generation_prompt": False}
    own = {
        "chat_template": PUBLISHED[name][0].replace('strftime_now("%d %B %Y")', '"26 July 2024"')
    }
    assert theirs.apply_chat_template(messages, **options) == theirs.apply_chat_template(
        messages, **options, **own
    )
    tools = [{"type": "function", "function": {"name": "add"}}]
    assert "one two" in theirs.apply_chat_template([USER], tools=tools, **options)


def test_a_block_that_changes_with_the_conversation_is_taken_out(make):
    template = (
        "{% if messages[0].role != 'system' %}"
        "[system]You see {{ messages[0].content | length }} letters.<|im_end|>{% endif %}"
        "{% for m in messages %}{{ '[' + m.role + ']' + m.content + '<|im_end|>' }}{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    tokenizer = PromptTokenizer(make(template))
    assert tokenizer.render("1+1?") == "[user]1+1?<|im_end|>[assistant]"
    assert tokenizer.render("[user][user]") == "[user][user][user]<|im_end|>[assistant]"
    assert tokenizer.render((USER, {"role": "assistant", "content": "[user]"}, AGAIN)) == (
        "[user]one two<|im_end|>[assistant][user]<|im_end|>[user]four<|im_end|>[assistant]"
    )
    with pytest.raises(ValueError, match="begin the conversation with a system or a user message"):
        tokenizer.render((ANSWER, USER))


@pytest.mark.parametrize("name", ["SmolLM2", "Qwen2.5"])
def test_a_block_is_taken_out_before_any_first_turn(make, name):
    tokenizer = build(make, name)
    first = "<|im_start|>assistant\n"
    assert tokenizer.render((ANSWER, USER)).startswith(first) and "one two" in tokenizer.render(
        (ANSWER, USER)
    )


@pytest.mark.parametrize("name", ["dated", "chatml_thinking"])
@pytest.mark.parametrize("system", [None, "default"])
def test_a_bos_that_a_template_writes_twice_is_saved_as_one(make, name, system, tmp_path):
    own = getattr(make, name)
    twice = "{{ bos_token }}" * (2 - own.count("bos_token")) + own
    tokenizer = PromptTokenizer(make(twice, bos_token="<|bos|>"), TemplateSettings(system=system))
    tokenizer.save(tmp_path)
    theirs = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    for prompt in ((USER,), ({"role": "system", "content": "Be brief."}, USER)):
        text = theirs.apply_chat_template(list(prompt), tokenize=False, add_generation_prompt=True)
        assert text == tokenizer.render(prompt) and text.count("<|bos|>") == 1


def test_differences_are_those_of_rendered_text(make):
    assert build(make, "Qwen2.5", system="default").template.differences() == []
    assert build(make, "Llama 3").template.differences() == []
    assert build(make, "Llama 3.2", system="default").template.differences() == [
        "Instead of today's date it writes 26 Jul 2024."
    ]
    without = build(make, "SmolLM2").template.differences()
    assert len(without) == 1 and "named SmolLM" in without[0]
    fixed = (
        "{{ date_string | default('26 Jul 2024') }}{% for m in messages %}{{ m.content "
        "}}<|end|>{% endfor %}"
    )
    assert (
        PromptTokenizer(make(fixed), TemplateSettings(system="default")).template.differences()
        == []
    )


def test_without_a_chat_template_none_is_saved(make, tmp_path):
    tokenizer = PromptTokenizer(make(make.chatml_with_default), TemplateSettings(chat=False))
    tokenizer.save(tmp_path)
    assert not PreTrainedTokenizerFast.from_pretrained(tmp_path).chat_template
    assert load_tokenizer(tmp_path).render("1+1?") == tokenizer.render("1+1?") == "1+1?"


@pytest.mark.parametrize(
    "edge", ["\n", "\n\n", "  ", "  \n", "\n  ", " \n \n", "{# note #}\n", "{#- note -#} \n "]
)
@pytest.mark.parametrize("system", [None, "Be brief.", "default"])
def test_white_space_around_a_template_stays(make, edge, system):
    """Jinja drops a line break behind a tag, and spaces before one: what is written around must not
    drop more."""
    # spaces there hide where a user's turn begins
    behind = edge if system else "\n" * edge.count("\n")
    template = (
        edge + "{% if date_string is defined %}{% endif %}{% if messages[0].role != 'system' "
        "%}[system]Be good.<|im_end|>"
        "{% endif %}{% for m in messages %}{{ '[' + m.role + ']' + m.content + '<|im_end|>' }}{% "
        "endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}" + behind
    )
    pretrained = make(template)
    messages = [{"role": "system", "content": "Be brief."}, USER]
    theirs = pretrained.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert (
        PromptTokenizer(pretrained, TemplateSettings(system=system)).render(tuple(messages))
        == theirs
    )
    if system == "default":
        asked = pretrained.apply_chat_template([USER], tokenize=False, add_generation_prompt=True)
        assert PromptTokenizer(pretrained, TemplateSettings(system=system)).render((USER,)) == asked


def test_marks_of_what_a_model_generates_are_not_kept_at_wrong_places(make, tmp_path):
    """transformers counts places by what was written so far, which is nothing yet where a block is
    taken out."""
    tokenizer = build(make, "SmolLM3")
    assert (
        "generation %" in tokenizer.template.source
        and "generation %" not in tokenizer.template.pinned
    )
    assert "generation %" in build(make, "SmolLM3", system="default").template.pinned


@pytest.mark.parametrize("name", ["SmolLM2", "Llama 3.2"])
@pytest.mark.parametrize("adds_bos", [False, True])
def test_one_bos_where_the_template_writes_its_own_block(make, name, adds_bos):
    tokenizer = build(make, name, adds_bos=adds_bos)
    ids = tokenizer.encode_prompt("1+1?")
    first = {
        "SmolLM2": "<|im_start|>user\n1+1?",
        "Llama 3.2": "<|begin_of_text|><|start_header_id|>user",
    }[name]
    assert tokenizer.render("1+1?") == tokenizer.decode_raw(ids) and tokenizer.render(
        "1+1?"
    ).startswith(first)
    assert ids[0] == tokenizer.bos_id != ids[1]


@pytest.mark.parametrize("name", ["SmolLM2", "Llama 3", "Gemma 3", "Phi 3.5", "Qwen2.5"])
def test_an_end_of_turn_that_is_no_special_token_stops(make, name):
    end = PUBLISHED[name][3]
    tokenizer = build(make, name, special=False)
    stop = tokenizer.pretrained.convert_tokens_to_ids(end)
    assert tokenizer.stop_id == stop in tokenizer.eos_ids
    ids = tokenizer.encode_completion("two")
    assert ids[-1] == stop and tokenizer.decode(ids) == "two"
    assert tokenizer.encode_completion(f"two{end}").tolist() == ids.tolist()
    for encode in (tokenizer.encode_prompt, tokenizer.encode_completion):
        with pytest.raises(ValueError, match="is in the text itself"):
            encode(f"one {end} two")


@pytest.mark.parametrize("name", DROPPING)
@pytest.mark.parametrize("system", [None, "default"])
def test_a_template_that_drops_a_text_is_refused(make, name, system):
    template, role = DROPPING[name]
    told = (
        f"the chat template leaves out the {role}'s text.*it writes '.*tokenizer.chat=False to use "
        "none"
    )
    with pytest.raises(ValueError, match=told):
        PromptTokenizer(make(template), TemplateSettings(system=system))
    assert PromptTokenizer(make(template), TemplateSettings(chat=False)).render("1+1?") == "1+1?"


def test_a_template_that_drops_the_system_text_is_refused_where_there_is_one(make, jsonl):
    silent = (
        "{% for m in messages if m.role != 'system' %}{{ '<|im_start|>' + m.role + '\n' + "
        "m.content + '<|im_end|>\n' }}"
        "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )
    refused = (
        r"leaves out the system's text.*Unset tokenizer\.system and put its text into "
        r"tokenizer\.prompt_template"
    )
    with pytest.raises(ValueError, match=refused):
        PromptTokenizer(make(silent), TemplateSettings(system="Be brief."))
    tokenizer = PromptTokenizer(make(silent))
    assert tokenizer.render("1+1?") == "<|im_start|>user\n1+1?<|im_end|>\n<|im_start|>assistant\n"
    with pytest.raises(ValueError, match=refused):  # and in the data
        tokenizer.encode_prompt(({"role": "system", "content": "Be brief."}, USER))


def test_a_template_that_forgets_earlier_turns_is_refused_where_there_are_some(make):
    last_two = (
        "{% for m in messages[-2:] %}{{ '<|im_start|>' + m.role + '\n' + m.content + "
        "'<|im_end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )
    tokenizer = PromptTokenizer(make(last_two))
    assert tokenizer.render("1+1?").startswith("<|im_start|>user\n1+1?")
    with pytest.raises(
        ValueError, match="leaves out the user's text, or moves it: for user 'zqUSER0qz', assistant"
    ):
        tokenizer.encode_prompt((USER, ANSWER, AGAIN))


@pytest.mark.parametrize("name", WITHOUT_HEADER)
@pytest.mark.parametrize("system", [None, "default", "Be brief."])
def test_a_template_without_the_assistants_header_is_refused(make, name, system):
    template, header = WITHOUT_HEADER[name]
    with pytest.raises(ValueError, match="ignores add_generation_prompt") as error:
        PromptTokenizer(make(template, bos_token="<|bos|>"), TemplateSettings(system=system))
    assert repr(header) in str(error.value)
    # What the message says to add is enough; a reward model's conversations need none.
    added = re.search(r"append: (.*)$", str(error.value))[1]
    mended = PromptTokenizer(
        make(template + added, bos_token="<|bos|>"), TemplateSettings(system=system)
    )
    assert mended.render("1+1?").endswith(header)
    PromptTokenizer(
        make(template, bos_token="<|bos|>"), TemplateSettings(system=system), generates=False
    )


@pytest.mark.parametrize("name", [*WITHOUT_HEADER, *DROPPING])
def test_what_ran_already_is_read_with_a_warning(make, name):
    template = {**WITHOUT_HEADER, **DROPPING}[name][0]
    told: list[str] = []
    tokenizer = PromptTokenizer(
        make(template, bos_token="<|bos|>"), fault=lambda error: told.append(str(error))
    )
    assert any("ignores add_generation_prompt" in text or "leaves out" in text for text in told)
    before = len(told)
    assert tokenizer.render("1+1?") == tokenizer.render("1+1?") and len(told) == before


def test_the_folder_is_named(make, tmp_path):
    pretrained = make(DROPPING["a typo"][0])
    pretrained.save_pretrained(tmp_path)
    with pytest.raises(
        ValueError, match=re.escape(f"tokenizer {str(tmp_path)!r}: the chat template leaves out")
    ):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    "filter", ["| trim", "| replace('\n', ' ')", ".strip()", "| trim | replace('  ', ' ')"]
)
def test_white_space_does_not_count(make, filter):
    template = (
        "{% for m in messages %}{{ '[' + m.role + ']' + m.content FILTER + '<|im_end|>' }}{% "
        "endfor %}"
    )
    header = "{% if add_generation_prompt %}[assistant]{% endif %}"
    assert Template(make(template.replace("FILTER", filter) + header), TemplateSettings()).render(
        " a  b "
    )
