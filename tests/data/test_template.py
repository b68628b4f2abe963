import datetime

import pytest
from examples import examples
from hypothesis import given
from hypothesis import strategies as st

from g2d_jax.data.template import Template, TemplateSettings

BOS = "<|bos|>"
QUESTION = "What is {1+1}?"
PROMPT = "<|im_start|>user\nWhat is {1+1}?<|im_end|>\n<|im_start|>assistant\n"


def render(tokenizer, prompt=QUESTION, **settings):
    return Template(tokenizer, TemplateSettings(**settings)).render(prompt)


def test_plain_prompt_is_the_problem_itself(make):
    assert render(make()) == QUESTION


def test_papers_prompt(make):
    assert render(make(), prompt_template="paper") == (
        "Given the following problem, reason and give a final answer to the problem. Problem: What is {1+1}?\n"
        "Your response should end with 'The final answer is $\\boxed{[answer]}$. I hope it is correct.' "
        "where [answer] is the response to the problem."
    )


@given(st.text())
@examples(50)
def test_no_text_of_a_problem_breaks_the_prompt_template(make, problem):
    assert render(make(), problem, prompt_template="Solve {x}: {problem} {}") == "Solve {x}: " + problem + " {}"


def test_problem_text_with_the_placeholder_is_filled_in_once(make):
    assert render(make(), "{problem}", prompt_template="<{problem}>") == "<{problem}>"


@pytest.mark.parametrize(("name", "hint"), [("papr", "Did you mean 'paper'"), ("Solve: {question}", "{problem}")])
def test_prompt_template_without_a_place_for_the_problem(name, hint):
    with pytest.raises(ValueError, match=hint):
        TemplateSettings(prompt_template=name)


def test_date_is_checked():
    with pytest.raises(ValueError, match="YYYY-MM-DD"):
        TemplateSettings(date="26 Jul 2024")


def test_templates_own_system_prompt_comes_in_only_on_request(make):
    tokenizer = make(make.chatml_with_default)
    assert render(tokenizer, system=None) == PROMPT
    assert render(tokenizer, system="default") == "<|im_start|>system\nYou are a toy.<|im_end|>\n" + PROMPT
    assert render(tokenizer, system="") == "<|im_start|>system\n<|im_end|>\n" + PROMPT
    assert render(tokenizer, system="Be brief.") == "<|im_start|>system\nBe brief.<|im_end|>\n" + PROMPT


def test_a_conversations_own_system_message_wins(make):
    conversation = ({"role": "system", "content": "Mine."}, {"role": "user", "content": QUESTION})
    for system in (None, "default", "Be brief."):
        text = render(make(make.chatml_with_default), conversation, system=system)
        assert text == "<|im_start|>system\nMine.<|im_end|>\n" + PROMPT


def test_conversation_of_several_turns_loses_only_the_inserted_block(make):
    conversation = (
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
    )
    assert render(make(make.chatml_with_default), conversation) == (
        "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nb<|im_end|>\n<|im_start|>user\nc<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_dated_block_is_taken_out_and_the_bos_stays(make):
    tokenizer = make(make.dated, bos_token=BOS)
    assert render(tokenizer) == "<|bos|>[user]\n\nWhat is {1+1}?<|im_end|>[assistant]\n\n"
    assert render(tokenizer, system="default", date="2025-01-02").startswith(
        "<|bos|>[system]\n\nToday Date: 02 Jan 2025\n\n<|im_end|>[user]"
    )


@pytest.mark.parametrize("indent", ["", "\n  "])
def test_templates_that_ask_for_the_time_get_the_fixed_date(make, indent):
    clock = indent + "{% for m in messages %}{{ strftime_now('%A %d %B %Y, %Y-%m-%d %H:%M ') + m.content }}{% endfor %}"
    text = render(make(clock), system="default", date="2024-02-29")
    assert text == indent[:1] + "Thursday 29 February 2024, 2024-02-29 00:00 " + QUESTION
    today = datetime.date.today().isoformat()
    assert today not in text


def test_system_block_of_fixed_words_is_taken_out(make):
    template = (
        "{{ 'A chat with a toy.\n' }}{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"
    )
    assert render(make(template)) == "user: What is {1+1}?\nassistant:"


def test_system_block_that_cannot_be_told_apart_is_refused(make):
    one_turn = (
        "{% if messages | length > 1 %}{{ raise_exception('one turn') }}{% endif %}"
        "Be a good toy. {{ messages[0].content }}"
    )
    with pytest.raises(ValueError, match='system="default"'):
        Template(make(one_turn), TemplateSettings())
    assert render(make(one_turn), system="default") == "Be a good toy. " + QUESTION


def test_enable_thinking(make):
    tokenizer = make(make.chatml_thinking)
    assert render(tokenizer) == render(tokenizer, enable_thinking=True) == PROMPT
    assert render(tokenizer, enable_thinking=False) == PROMPT + "<think>\n\n</think>\n\n"


def test_turn_end(make):
    assert Template(make(make.chatml_with_default), TemplateSettings()).turn_end() == "<|im_end|>\n"
    assert Template(make(), TemplateSettings()).turn_end() == ""


def test_failing_template_says_what_to_do(make):
    no_system = (
        "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
        "{{ messages[0].content }}"
    )
    assert render(make(no_system)) == QUESTION
    with pytest.raises(ValueError, match=r"no system role.*chat=False"):
        render(make(no_system), system="Be brief.")
    with pytest.raises(ValueError, match="chat template failed"):
        Template(make("{% for %}"), TemplateSettings())


def test_template_cannot_leave_the_sandbox(make):
    with pytest.raises(ValueError, match="chat template failed"):
        Template(make("{{ ''.__class__.__mro__[1].__subclasses__() }}"), TemplateSettings(system="default")).render("x")


def test_chat_settings_that_need_a_template(make):
    with pytest.raises(ValueError, match="none"):
        Template(make(), TemplateSettings(chat=True))
    with pytest.raises(ValueError, match="system prompt needs a chat template"):
        Template(make(), TemplateSettings(system="Be brief."))
    assert render(make(make.chatml_with_default), chat=False) == QUESTION


def test_conversations_without_a_chat_template(make):
    user = {"role": "user", "content": "hi"}
    assert render(make(), (user,)) == "hi"
    with pytest.raises(ValueError, match=r"\(system, user\) needs a chat template"):
        render(make(), ({"role": "system", "content": "s"}, user))
    with pytest.raises(ValueError, match="end with a user message"):
        render(make(), (user, {"role": "assistant", "content": "a"}))


def test_conversation_for_other_libraries(make):
    template = Template(make(make.chatml_with_default), TemplateSettings(system="S", prompt_template="Q: {problem}"))
    assert template.conversation("x") == ({"role": "system", "content": "S"}, {"role": "user", "content": "Q: x"})
