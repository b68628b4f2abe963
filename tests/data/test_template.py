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


PAPER = (
    "Given the following problem, reason and give a final answer to the problem. Problem: What "
    "is {1+1}?\n"
    "Your response should end with 'The final answer is $\\boxed{[answer]}$. I hope it is "
    "correct.' "
    "where [answer] is the response to the problem."
)
SYSTEM = "<|im_start|>system\n{}<|im_end|>\n"
USER, ASSISTANT = ({"role": role, "content": role} for role in ("user", "assistant"))
MINE = ({"role": "system", "content": "Mine."}, {"role": "user", "content": QUESTION})
TURNS = "<|im_start|>user\nuser<|im_end|>\n<|im_start|>assistant\nassistant<|im_end|>\n"
WORDS = (
    "{{ 'A chat with a toy.\n' }}{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% "
    "endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"
)
# No system role: its text begins the first user's, and roles must alternate, as Gemma 3.
FOLDED = (
    "{{ bos_token }}{% set ns = namespace(before='') %}{% for m in messages %}"
    "{% if m.role == 'system' %}{% set ns.before = m.content + '\n\n' %}{% else %}"
    "{{ '<turn>' + ('model' if m.role == 'assistant' else m.role) + '\n' + ns.before + m.content "
    "+ '<end>\n' }}"
    "{% set ns.before = '' %}{% endif %}{% endfor %}{% if add_generation_prompt %}{{ "
    "'<turn>model\n' }}{% endif %}"
)
ASKED = "<end>\n<turn>model\n"
CLOCK = (
    "{% for m in messages %}{{ strftime_now('%A %d %B %Y, %Y-%m-%d %H:%M ') + m.content }}{% "
    "endfor %}"
)


@pytest.mark.parametrize(
    ("template", "prompt", "settings", "text"),
    [
        (None, QUESTION, {}, QUESTION),
        (None, QUESTION, {"prompt_template": "paper"}, PAPER),
        (None, "{problem}", {"prompt_template": "<{problem}>"}, "<{problem}>"),
        (None, (USER,), {}, "user"),
        ("chatml_with_default", QUESTION, {"chat": False}, QUESTION),
        # the template's own system prompt comes in only on request, and a conversation's own wins
        ("chatml_with_default", QUESTION, {"system": None}, PROMPT),
        ("chatml_with_default", QUESTION, {"system": "default"}, SYSTEM.format("You are a toy.") + PROMPT),
        ("chatml_with_default", QUESTION, {"system": ""}, SYSTEM.format("") + PROMPT),
        ("chatml_with_default", QUESTION, {"system": "Be brief."}, SYSTEM.format("Be brief.") + PROMPT),
        *(("chatml_with_default", MINE, {"system": system}, SYSTEM.format("Mine.") + PROMPT)
          for system in (None, "default", "Be brief.")),
        ("chatml_with_default", (USER, ASSISTANT, MINE[1]), {}, TURNS + PROMPT),
        (WORDS, QUESTION, {}, "user: What is {1+1}?\nassistant:"),
        (FOLDED, QUESTION, {}, "<turn>user\n" + QUESTION + ASKED),
        (FOLDED, QUESTION, {"system": "Be brief."}, "<turn>user\nBe brief.\n\n" + QUESTION + ASKED),
        (FOLDED, (USER, ASSISTANT, USER), {}, f"<turn>user\nuser{ASKED}assistant<end>\n<turn>user\nuser{ASKED}"),
        # the time is always the same
        (CLOCK, QUESTION, {"system": "default"}, "Friday 26 July 2024, 2024-07-26 00:00 " + QUESTION),
    ],
)  # fmt: skip
def test_rendered_prompts(make, template, prompt, settings, text):
    assert render(make(getattr(make, str(template), template)), prompt, **settings) == text


@pytest.mark.parametrize(
    ("settings", "hint"),
    [
        ({"prompt_template": "papr"}, "did you mean paper"),
        ({"prompt_template": "Solve: {question}"}, "{problem}"),
    ],
)
def test_settings_that_cannot_be(settings, hint):
    with pytest.raises(ValueError, match=hint):
        TemplateSettings(**settings)


@given(st.text())
@examples(50)
def test_no_text_of_a_problem_breaks_the_prompt_template(make, problem):
    assert (
        render(make(), problem, prompt_template="Solve {x}: {problem} {}")
        == "Solve {x}: " + problem + " {}"
    )


def test_dated_block_is_taken_out_and_the_bos_stays(make):
    tokenizer = make(make.dated, bos_token=BOS)
    assert render(tokenizer) == "<|bos|>[user]\n\nWhat is {1+1}?<|im_end|>[assistant]\n\n"
    assert render(tokenizer, system="default").startswith(
        "<|bos|>[system]\n\nToday Date: 26 Jul 2024\n\n<|im_end|>[user]"
    )


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


def test_failing_template_says_what_to_do(make):
    no_system = (
        "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
        "{{ messages[0].content }}"
    )
    assert render(make(no_system)) == QUESTION
    with pytest.raises(ValueError, match=r"no system role.*chat=False"):
        render(make(no_system), system="Be brief.")
    for template in ("{% for %}", "{{ ''.__class__.__mro__[1].__subclasses__() }}"):
        with pytest.raises(ValueError, match="chat template failed"):
            render(make(template), system="default")
    with pytest.raises(ValueError, match="computes the format of a time"):
        render(make("{{ strftime_now(messages[0].content) }}"))


def test_chat_settings_that_need_a_template(make):
    with pytest.raises(ValueError, match="no chat template"):
        Template(make(), TemplateSettings(chat=True))
    with pytest.raises(ValueError, match="no chat template is in use to insert it"):
        Template(make(), TemplateSettings(system="Be brief."))


def test_conversations(make):
    template = Template(
        make(make.chatml_with_default), TemplateSettings(system="S", prompt_template="Q: {problem}")
    )
    assert template.conversation("x") == (
        {"role": "system", "content": "S"},
        {"role": "user", "content": "Q: x"},
    )
    assert (
        template.turn_end() == "<|im_end|>\n"
        and Template(make(), TemplateSettings()).turn_end() == ""
    )
    with pytest.raises(ValueError, match=r"\(system, user\) needs a chat template"):
        render(make(), MINE)
    with pytest.raises(ValueError, match="end with a user message"):
        render(make(), (USER, ASSISTANT))


@pytest.mark.parametrize("thinking", [True, False])
def test_a_switch_that_changes_nothing_is_refused(make, thinking):
    """False is what a model without thoughts does anyway, and what one cannot do that begins each
    response with a thought."""
    asked = TemplateSettings(enable_thinking=thinking)
    message = f"enable_thinking is {thinking}, but the chat template does not .*: leave it unset"
    plain = make.chatml_with_default
    always = plain.replace("<|im_start|>assistant\n", "<|im_start|>assistant\n<think>\n")
    assert always != plain
    for template in (plain, always):
        tokenizer = make(template)
        if thinking or template == always:
            with pytest.raises(ValueError, match=message):
                Template(tokenizer, asked)
            said: list[ValueError] = []
            Template(tokenizer, asked, said.append)  # of a run that is finished
            assert len(said) == 1
        else:
            Template(tokenizer, asked)
    Template(make(make.chatml_thinking), asked)


def test_without_a_template_nothing_can_be_made_to_think(make):
    with pytest.raises(ValueError, match="enable_thinking is True, but no chat template is in use"):
        Template(make(), TemplateSettings(enable_thinking=True))
    Template(make(), TemplateSettings(enable_thinking=False))
