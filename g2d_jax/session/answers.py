"""Warnings about correct answers that would not be read: stop strings cut them, or the prompt asks
for another form than the reward reads."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from g2d_jax.config import Issue, Sft, prefix_of
from g2d_jax.config.section import warning
from g2d_jax.data.template import PLACEHOLDER
from g2d_jax.records import Problem
from g2d_jax.rewards.extract import in_form
from g2d_jax.rewards.forms import Form, asked_for, readers
from g2d_jax.rewards.verify import reading
from g2d_jax.runtime.terminal import shortened
from g2d_jax.session.session import Session
from g2d_jax.session.tokenizers import stop_strings

SHOWN = 3
"""Number of problems shown in full, as the model reads them."""


def answer_issues(session: Session) -> Iterator[Issue]:
    """Warn of each task whose correct answers would be cut or not read."""
    for task in session.config.all_tasks:
        problems = problems_of(session, task)
        if problems and is_read_by_rule(session, task):
            yield from _form_issues(session, task, problems[0])
        yield from _stop_issues(session, task, problems)


def is_read_by_rule(session: Session, task: str) -> bool:
    """Return whether reward.answers decides how a task's answers are read; your own function may
    read any form."""
    if task == "main" and session.reward is not None:
        return False
    reward = session.config.all_tasks[task].reward
    return reward.function == "verify" or (reward.is_function and reward.answers != "boxed")


def forms_asked_for(session: Session, problem: Problem) -> list[Form]:
    """List the forms of answers that a problem's prompt asks for."""
    return list(asked_for(_instruction(session, problem)))


def read_by_rule(session: Session, task: str, forms: Sequence[Form]) -> list[Form]:
    """List the forms that a task's rule reads."""
    rule = session.config.all_tasks[task].reward.answers
    return [form for form in forms if form.is_read_by(rule)]


def problems_of(session: Session, task: str) -> list[Problem]:
    """List a task's problems to try: those of train; if there are none, of test; else of dev."""
    for split in ("train", "test", "dev"):
        problems = [problem for problem in session.problems.by_split[split] if problem.task == task]
        if problems:
            return problems
    return []


def show_problem(session: Session, problem: Problem) -> None:
    """Print the prompt as the model reads it, and the reference answer as it was parsed."""
    prompt = session.tokenizer.encode_prompt(problem)
    answer = "no reference answer"
    if problem.answer is not None:
        answer = f"reference answer: {problem.answer}"
    reward = session.config.all_tasks[problem.task].reward
    if problem.answer is not None and reward.function == "verify":
        answer += f", read as {reading(problem.answer)}"
    task = f", task {problem.task}" if len(session.config.all_tasks) > 1 else ""
    lines = session.tokenizer.decode_raw(prompt).splitlines()
    session.tracker.say(
        "\n  | ".join([f"problem {problem.id}{task}, a prompt of {len(prompt)} tokens:", *lines])
        + f"\n  {answer}"
    )


def _instruction(session: Session, problem: Problem) -> str:
    """Return the text around a problem in its prompt, or a conversation's messages: it may ask for
    a form.

    The problem's own text is left out, since it may hold anything.
    """
    settings = session.tokenizer.settings
    if isinstance(problem.prompt, str):
        return f"{settings.system or ''}\n{settings.pattern.replace(PLACEHOLDER, '')}"
    return "\n".join([settings.system or "", *(message["content"] for message in problem.prompt)])


def _form_issues(session: Session, task: str, problem: Problem) -> Iterator[Issue]:
    """Warn if a prompt asks for a form of answers that the task's rule does not read, or asks for
    none and no demonstration shows one."""
    rule = session.config.all_tasks[task].reward.answers
    requested = forms_asked_for(session, problem)
    form, also = "no form of answers", ""
    if requested:
        rules = " or ".join(map(repr, readers(requested[0])))
        form, also = requested[0].write("x"), f", or set it to {rules}"
    elif session.config.stages_of(Sft) or asked_for(str(problem.prompt)):
        return
    if read_by_rule(session, task, requested):
        return
    yield warning(
        f"{prefix_of(task)}reward.answers",
        f"is {rule!r}, and the prompt asks for {form}",
        f"let tokenizer.prompt_template, or the data's prompts, ask for {in_form('x', rule)}{also}",
    )


def _stop_issues(session: Session, task: str, problems: Sequence[Problem]) -> Iterator[Issue]:
    """Warn of stop strings that would end a correct response before its answer."""
    stops = list(stop_strings(session.config))
    if not stops:
        return
    rule = session.config.all_tasks[task].reward.answers
    answers = [in_form(problem.answer, rule) for problem in problems if problem.answer is not None]
    answers += [problem.solution.strip() for problem in problems if problem.solution]
    examples = worked_examples(
        session.tokenizer.settings.pattern, session.tokenizer.template.is_chat
    )
    of_kind = {"right responses": answers, "worked examples of the template": examples}
    for setting, string in stops:
        if fault := session.tokenizer.stop_string_fault(string):
            yield warning(setting, fault)
        has = f"has {string!r}, which ends"
        ends_any = False
        for kind, texts in of_kind.items():
            ended = [text for text in texts if string in text]
            if ended:
                ends_any = True
                example = shortened(ended[0], 1000)
                yield warning(
                    setting, f"{has} {len(ended)} of {len(texts)} {kind} early: {example!r}"
                )
        if not ends_any and not string.strip(" "):
            spaces = "space" if string == " " else f"{len(string)} spaces in a row"
            yield warning(setting, f"{has} a response at its first {spaces}")


def worked_examples(pattern: str, is_chat: bool) -> list[str]:
    """List the responses of the worked examples in a prompt template.

    Examples are found by the text before {problem} on its line, such as "Problem: "; without such
    text there are none. If nothing follows {problem}, an example's problem ends with its line. The
    response then begins with the line break, unless a chat template ends the message.
    """
    before, _, after = pattern.partition(PLACEHOLDER)
    label = before.rpartition("\n")[2]
    if not label.strip():
        return []
    ends_with_problem = not after.strip(" ")
    separator = "\n" if ends_with_problem else after
    blocks = f"\n{before}".split(f"\n{label}")[1:-1]
    responses = [block.partition(separator)[2].strip() for block in blocks]
    begin = "\n" if ends_with_problem and not is_chat else ""
    return [begin + response for response in responses if response]
