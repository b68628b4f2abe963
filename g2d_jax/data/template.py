r"""From a prompt to the text that is tokenised: prompt and chat templates are applied only here.

    "What is 1+1?" ─► prompt template ─► [system, user] messages ─► chat template ─► "<|im_start|>user\nWhat is …"

Additions by chat templates are explicit: a default system prompt (Qwen2.5's "You are Qwen, …")
appears only if `TemplateSettings` allows it, and a date is always `TODAY`. The settings are written
into the template itself (`Template.pinned`), and an exported policy includes it: anyone who renders
messages with it produces the text that the policy saw. A template that drops a text is refused:
each sequence of roles is first tried with stand-ins, and all their texts must appear. Templates are
untrusted programs; they run in transformers' Jinja sandbox and nowhere else.
"""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from g2d_jax.config.io import suggest
from g2d_jax.records import Conversation, Message, Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

PLACEHOLDER = "{problem}"
PROMPT_TEMPLATES = {
    "plain": PLACEHOLDER,
    # arXiv 2506.21495, figure 4
    "paper": "Given the following problem, reason and give a final answer to the problem. Problem: "
    "{problem}\n"
    "Your response should end with 'The final answer is $\\boxed{[answer]}$. I hope it is "
    "correct.' "
    "where [answer] is the response to the problem.",
}
DEFAULT_SYSTEM = "default"
_CLOCK = re.compile(r"""strftime_now\(\s*(["'])((?:(?!\1).)*)\1\s*\)""")
_WORDS = re.compile(r"\w\s+\w")
_GENERATION = re.compile(r"(\{%[-+]?\s*)(end)?generation(\s*[-+]?%\})")
# Stand-ins that show what the template puts around a text; of letters alone, which no template
# escapes, strips or splits.
_SYSTEM, _USER, _ANSWER, _NEXT = "zqSYSTEMqz", "zqUSERqz", "zqANSWERqz", "zqNEXTqz"
_ANSWERED = {"role": "assistant", "content": _ANSWER}
_OWN_TEMPLATE = (
    "the template that the model was trained with (chat_template.jinja next to the tokenizer)"
)

TODAY = datetime.datetime(2024, 7, 26)
"""The date that templates see as today, so that prompts do not change overnight: Llama 3.1's."""

Apply = Callable[[Conversation, bool], str]
"""A chat template: messages, and whether a response follows them -> text."""


@dataclass(frozen=True, slots=True)
class TemplateSettings:
    """Settings that turn prompts into text. Part of the tokenizer's fingerprint.

    chat: use the tokenizer's chat template; None: if it has one.
    prompt_template: "plain", "paper" or a text with {problem}, around problems that are bare text.
        Conversations in the data are used as they are.
    system: None: no system block at all, not even the template's own. "default": the block that the
        template inserts without a system message. Any other text, "" included: a system message
        with that content. A system message in the data's own conversation overrides this setting.
    enable_thinking: passed to templates that use it (Qwen3). Other templates are refused with True,
        and with False if they begin a thought regardless. None: the template's default.
    """

    chat: bool | None = None
    prompt_template: str = "plain"
    system: str | None = None
    enable_thinking: bool | None = None

    def __post_init__(self) -> None:
        if PLACEHOLDER not in self.pattern:
            raise ValueError(
                f"tokenizer.prompt_template must be one of {', '.join(PROMPT_TEMPLATES)} or a text that contains "
                f"{PLACEHOLDER}, got {self.prompt_template!r}"
                f"{suggest(self.prompt_template, PROMPT_TEMPLATES)}"
            )

    @property
    def pattern(self) -> str:
        """Return the prompt template's text."""
        return PROMPT_TEMPLATES.get(self.prompt_template, self.prompt_template)


Fault = Callable[[ValueError], None]
"""The handler of a fault that must not start a run: `refuse`, or a warning for a finished run."""


def refuse(error: ValueError) -> None:
    """Raise the error."""
    raise error


def hand_over(check: Callable[[], None], fault: Fault) -> None:
    """Run a check, and pass its ValueError, if any, to `fault`."""
    try:
        check()
    except ValueError as error:
        fault(error)


class Template:
    """The prompt and chat template of one tokenizer under fixed settings.

    own: the tokenizer's chat template; "" without chat.
    source: the same with `TODAY` in place of the time.
    pinned: the same with all settings written into it, see `pin`.
    inserted: the system block that the template adds by itself and `pinned` does not, or "".
    fault: called for texts that the chat template leaves out, and for an enable_thinking that it
    ignores. Raises ValueError when the tokenizer's chat template cannot follow the settings.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerFast, settings: TemplateSettings, fault: Fault = refuse
    ) -> None:
        has_template = bool(tokenizer.chat_template)
        if settings.chat and not has_template:
            raise ValueError(
                "tokenizer.chat is True, but the model has no chat template: pass --template paper, "
                "or a text with {problem} in it; in a config leave "
                "tokenizer.chat unset and set tokenizer.prompt_template"
            )
        self.is_chat: bool = has_template and settings.chat is not False
        if not self.is_chat and settings.system not in (None, DEFAULT_SYSTEM):
            raise ValueError(
                f"tokenizer.system is {settings.system!r}, but no chat template is in use to insert "
                "it: leave it unset"
            )
        self.settings = settings
        self._tokenizer = tokenizer
        self._fault = fault
        self._bos = str(tokenizer.bos_token or "")
        # Roles of conversations that the template is known to write in full.
        self._tried: set[tuple[str, ...]] = set()
        self.own: str = _chat_template(tokenizer) if self.is_chat else ""
        self.source: str = _at_midnight(self.own)
        self.pinned: str = ""
        self.inserted: str = ""
        hand_over(self._require_switch, fault)
        if self.is_chat:
            self._pin()

    def _require_switch(self) -> None:
        """Raise ValueError for an enable_thinking that the template ignores: True, and False if
        prompts begin a thought regardless."""
        thinking = self.settings.enable_thinking
        if thinking is None or "enable_thinking" in self.own:
            return
        if thinking is False and not self._begins_thought():
            return
        why = "the chat template does not use that variable"
        if not self.is_chat:
            why = "no chat template is in use"
        elif not thinking:
            why += " and begins every response with a thought"
        raise ValueError(
            f"tokenizer.enable_thinking is {thinking}, but {why}: leave it unset (None)"
        )

    def require_thoughts(self, data: str) -> None:
        """Raise ValueError if the template does not write thoughts in <think> and </think>, as
        reasoning models' do. data: a description of the data that has thoughts."""
        if "think>" in self.own:
            return
        raise ValueError(
            f"{data}. No chat template in use writes <think> and </think>: "
            "write the thoughts into the content, or remove such rows"
        )

    def _begins_thought(self) -> bool:
        if not self.is_chat:
            return False
        prompt: Message = {"role": "user", "content": "?"}
        return self._run((prompt,), generation=True, source=self.own).rstrip().endswith("<think>")

    def conversation(self, prompt: Prompt) -> Conversation:
        """Return the messages of a prompt: with the prompt template and the system message of the
        settings, if any."""
        if isinstance(prompt, str):  # braces in it stay as they are
            messages: Conversation = (_user(prompt.join(self.settings.pattern.split(PLACEHOLDER))),)
        elif prompt and prompt[-1]["role"] == "user":
            messages = tuple(prompt)
        else:
            raise ValueError("a prompt of messages must end with a user message")
        system = self.settings.system
        if messages[0]["role"] != "system" and system not in (None, DEFAULT_SYSTEM):
            messages = ({"role": "system", "content": str(system)}, *messages)
        return messages

    def render(self, prompt: Prompt) -> str:
        """Render the text to tokenise, ending where the response begins.

        Raises ValueError when the chat template fails or leaves out a text, or for a conversation
        of several messages without one.
        """
        messages = self.conversation(prompt)
        if self.is_chat:
            return self.apply(messages, generation=True)
        if len(messages) == 1 and messages[0]["role"] == "user":
            return messages[0]["content"]
        roles = ", ".join(_roles(messages))
        raise ValueError(
            f"a conversation ({roles}) needs a chat template: set chat=None and use a chat "
            "tokenizer"
        )

    def frame(self) -> list[str]:
        """Return the texts that prompt and chat template write around a problem."""
        return self.render(_USER).split(_USER)

    def differences(self) -> list[str]:
        """List the differences in output between `pinned` and the tokenizer's own template, a
        sentence each."""
        if not self.is_chat:
            return []
        prompt = (_user(_USER),)
        with_system = ({"role": "system", "content": _SYSTEM}, *prompt)
        if all(self._is_same(messages) for messages in (prompt, with_system)):
            return []
        system = self.settings.system
        named = _variables(self.settings)
        sentences = []
        if self.inserted:
            sentences.append(
                "Without a system message it writes none; the model's own template writes "
                f"{self.inserted!r:.300}."
            )
        elif system not in (None, DEFAULT_SYSTEM):
            sentences.append(
                f"Without a system message it writes the one from training: {system!r:.300}."
            )
        if "strftime_now" in self.own or "date_string" in self.own:
            sentences.append(f"Instead of today's date it writes {named['date_string']}.")
        if "enable_thinking" in self.own and "enable_thinking" in named:
            sentences.append(
                "Unless the caller sets it, enable_thinking is "
                f"{_literal(named['enable_thinking'])}."
            )
        return sentences or ["It writes one BOS; the model's own template writes two."]

    def _is_same(self, messages: Conversation) -> bool:
        """Return whether the pinned template renders a conversation as the tokenizer's own does,
        errors included."""
        texts = []
        for source in (self.own, self.pinned):
            try:
                texts.append(self._run(messages, True, source))
            except ValueError:
                texts.append("")
        return texts[0] == texts[1]

    def turn_end(self) -> str:
        """Return the text that the chat template writes after an assistant's message; "" without
        chat."""
        if not self.is_chat:
            return ""
        _, answer, end = self.apply((_user(_USER), _ANSWERED), generation=False).rpartition(_ANSWER)
        return end if answer else ""

    def check(self) -> None:
        """Raise ValueError for a chat template whose prompts leave out a text or lack the
        assistant's header."""
        if not self.is_chat:
            return
        *system, _ = self.conversation(_USER)
        prompt = (*system, _user(_USER))
        self.apply(prompt, generation=True)
        self.apply((*prompt, _ANSWERED), generation=False)
        require_header(self._run, prompt)

    def apply(self, messages: Conversation, *, generation: bool) -> str:
        """Run the chat template on messages as they are, up to the beginning of a response if
        `generation`.

        The text begins with at most one BOS. An error of the template becomes a ValueError with the
        remedy, and so does a text that it leaves out, unless `fault` continues.
        """
        hand_over(partial(self._require_texts, messages), self._fault)
        self._tried.add(_roles(messages))  # one trial is enough
        return self._with_one_bos(self._run(messages, generation))

    def _require_texts(self, messages: Conversation) -> None:
        roles = _roles(messages)
        if roles not in self._tried:
            require_texts(self._run, roles)
            self._tried.add(roles)

    def _try(self, *messages: Message) -> str:
        """Run the chat template as it is. Raises ValueError for texts that it leaves out, even if
        `fault` continues."""
        self._require_texts(messages)
        return self._run(messages, generation=False)

    def _run(self, messages: Conversation, generation: bool, source: str | None = None) -> str:
        """Run the chat template as it is, without checks of its texts and BOS.

        source: another template, None for the pinned one.
        """
        conversation = [dict(message) for message in messages]
        try:
            text = self._tokenizer.apply_chat_template(
                conversation,
                chat_template=self.pinned if source is None else source,
                tokenize=False,
                add_generation_prompt=generation,
            )
        except Exception as error:  # the template is a foreign program
            roles = ", ".join(_roles(messages))
            raise ValueError(
                f"the tokenizer's chat template failed on a conversation ({roles}): "
                f"{error!s:.1000}. If it accepts no system message, unset tokenizer.system and put its "
                "text into tokenizer.prompt_template; if it requires alternating roles, change the "
                "data; or set tokenizer.chat=False to use none."
            ) from error
        return str(text)

    def _with_one_bos(self, text: str) -> str:
        while self._bos and text.startswith(self._bos * 2):
            text = text.removeprefix(self._bos)
        return text

    def _pin(self) -> None:
        """Write the settings into the template, without its own system block unless they want
        it."""
        self.pinned = pin(self.source, self.settings)
        prompt = (_user(_USER),)
        self.apply(prompt, generation=False)  # reports texts that it leaves out
        text = self._run(prompt, generation=False)
        doubled = self._bos if self._bos and text.startswith(self._bos * 2) else ""
        self.pinned = pin(self.source, self.settings, doubled=doubled)
        if self.settings.system is not None:
            return
        header = self._user_header() or ""
        is_clear = bool(header) and header + _USER in text
        first_turn = header if is_clear else _USER
        block, _, rest = text.partition(first_turn)
        # Start tokens without words ("[gMASK]<sop>") are not a system block.
        if not self._fills_system_block(text) and not _WORDS.search(block.removeprefix(self._bos)):
            return
        if not is_clear or not rest.startswith(_USER):
            raise ValueError(
                f"cannot find the end of the chat template's own system block: {_UNREMOVABLE}"
            )
        # SmolLM2's BOS begins the block and every turn, and so the turn after the block.
        begins_with_bos = bool(self._bos) and block.startswith(self._bos)
        kept = self._bos if begins_with_bos and not header.startswith(self._bos) else ""
        self.inserted = block.removeprefix(kept)
        self.pinned = pin(
            self.source, self.settings, block=block, header=header, kept=kept, doubled=doubled
        )

    def _user_header(self) -> str | None:
        """Return the text that begins a later user turn, None if unknown."""
        messages = (_user(_USER), _ANSWERED, _user(_NEXT))
        try:
            shorter, longer = (self._try(*messages[:n]) for n in (2, 3))
        except ValueError:  # a template for one turn only
            return None
        if not longer.startswith(shorter):
            return None
        return longer[len(shorter) :].partition(_NEXT)[0]

    def _fills_system_block(self, text: str) -> bool:
        """Return whether `text`, rendered without a system message, has the block that would hold a
        given one."""
        try:
            given = self._try({"role": "system", "content": _SYSTEM}, _user(_USER))
        except ValueError:  # no system messages at all
            return False
        before, system, after = given.partition(_SYSTEM)
        return bool(
            system and re.fullmatch(f"{re.escape(before)}.*{re.escape(after)}", text, re.DOTALL)
        )


def pin(
    source: str,
    settings: TemplateSettings,
    *,
    block: str = "",
    header: str = "",
    kept: str = "",
    doubled: str = "",
) -> str:
    """Write settings into a chat template, so that messages alone are rendered as they are here.

    The caller's own values still count: a system message, and the template's own variables. The
    defaults are `TODAY`, and the settings' enable_thinking and system message.
    block: the template's own text before the first turn; `kept` replaces it. If a conversation
    begins differently, for instance with another date, the block ends where the first user turn
    begins, with `header`. A caller's tools restore the block, because it contains them.
    doubled: a BOS that the template writes twice, and once here. Marks of what a model generates
    are removed if anything is cut: transformers counts their places in the output so far.
    """
    own = "".join(
        f"{{%- if {name} is not defined %}}{{%- set {name} = {_literal(value)} %}}{{%- endif %}}"
        for name, value in _variables(settings).items()
        if name in source
    )
    if settings.system not in (None, DEFAULT_SYSTEM):
        message = f'{{"role": "system", "content": {_literal(settings.system)}}}'
        own += (
            '{%- if not messages or messages[0]["role"] != "system" %}'
            f"{{%- set messages = [{message}] + messages %}}{{%- endif %}}"
        )
    if not block and not doubled:
        # Templates run with trim_blocks: the line break after a tag is not written.
        if own:
            return f"{own}\n{source}"
        return source
    inner = _GENERATION.sub(_as_condition, source)
    # Jinja drops a line break at the very end; the empty text preserves spaces before the tag.
    inner = inner.removesuffix("\n") + '{{ "" }}'
    parts = [own, f"{{%- set rendered %}}\n{inner}{{% endset %}}"]
    if block:
        parts += [
            '{%- set first_role = messages[0]["role"] if messages else "" %}',
            '{%- if not tools and first_role != "system" %}',
            f"{{%- set block = {_literal(block)} %}}{{%- set header = {_literal(header)} %}}",
            "{%- if rendered.startswith(block) %}{%- set first_turn = block | length %}",
            '{%- elif first_role == "user" %}{%- set first_turn = rendered.find(header) %}',
            "{%- else %}{%- set first_turn = -1 %}{%- endif %}",
            f"{{%- if first_turn < 0 %}}{{{{- raise_exception({_literal(_NO_USER)}) }}}}",
            "{%- endif %}",
            f"{{%- set rendered = {_literal(kept)} + rendered[first_turn:] %}}{{%- endif %}}",
        ]
    if doubled:
        parts += [
            f"{{%- if rendered.startswith({_literal(doubled * 2)}) %}}",
            f"{{%- set rendered = rendered[{len(doubled)}:] %}}{{%- endif %}}",
        ]
    return "".join([*parts, "{{- rendered }}"])


def _literal(value: Any) -> str:
    """Return a text, True or False in Jinja's notation."""
    return json.dumps(value, ensure_ascii=False)


def require_texts(apply: Apply, roles: Sequence[str]) -> None:
    """Raise ValueError for a chat template that leaves out a text of a conversation of these roles.

    The check looks for stand-ins, ignoring white space: users' and assistants' in their order, and
    the system's anywhere, since Mistral's template puts it into the last user's. Changes to special
    texts do not count, such as stripping one or removing a flag from it (SmolLM3's /no_think).
    """
    messages = tuple(
        {"role": role, "content": f"zq{role.upper()}{i}qz"} for i, role in enumerate(roles)
    )
    text = apply(messages, roles[-1] == "user")
    written = "".join(text.split())
    place = 0
    for message in sorted(messages, key=_is_system):
        if _is_system(message):
            place = 0
        place = written.find(message["content"], place)
        if place < 0:
            raise ValueError(_left_out(message, messages, text))


def _is_system(message: Message) -> bool:
    return message["role"] == "system"


def _left_out(message: Message, messages: Sequence[Message], text: str) -> str:
    shown = ", ".join(f"{one['role']} {one['content']!r}" for one in messages)
    advice = (
        "It may be made for other roles (human, gpt) or for content in parts, or misspell a name. "
        f"Use {_OWN_TEMPLATE}, or set tokenizer.chat=False to use none"
    )
    if _is_system(message):
        advice = (
            "Unset tokenizer.system and put its text into tokenizer.prompt_template, or remove "
            f"system messages from the data; or use {_OWN_TEMPLATE}"
        )
    return (
        f"the chat template leaves out the {message['role']}'s text, or moves it: for {shown} it "
        f"writes {text!r:.500}. {advice}"
    )


def require_header(apply: Apply, messages: Conversation) -> None:
    """Raise ValueError for a chat template whose prompts lack the header of the assistant's turn.

    Such a template writes the same with add_generation_prompt as without, though it begins an
    assistant's message with more than white space (Mistral's does not) and the tags of a thought
    (Qwen3's). messages: the last one is the user's.
    """
    prompt = _after_user(apply(messages, True))
    without = _after_user(apply(messages, False))
    whole = _after_user(apply((*messages, _ANSWERED), False).partition(_ANSWER)[0])
    if _bare(prompt) == _bare(without) != _bare(whole):
        header = whole.removeprefix(prompt)
        raise ValueError(
            "the chat template ignores add_generation_prompt: a prompt ends with "
            f"{prompt!r:.200}, but an assistant's message begins with {header!r:.200}, which the "
            f"model would have to write itself. Use {_OWN_TEMPLATE}, or append: "
            f"{{% if add_generation_prompt %}}{{{{ {header!r} }}}}{{% endif %}}"
        )


def _after_user(text: str) -> str:
    return text.rpartition(_USER)[2]


def _bare(text: str) -> str:
    """Return a text without white space and the tags of a thought."""
    return re.sub(r"\s|</?think>", "", text)


def try_out(tokenizer: PreTrainedTokenizerFast, settings: TemplateSettings) -> None:
    """Run the tokenizer's chat template, if in use, in a safe process: see `rehearse`.

    Raises ValueError when it needs too much time or memory.
    """
    if not tokenizer.chat_template or settings.chat is False:
        return
    turns = (_user(_USER), _ANSWERED, _user(_NEXT))
    system = {"role": "system", "content": _SYSTEM}
    bare = [turns[:1], turns[:2], turns]
    conversations = [*bare, *((system, *messages) for messages in bare)]
    variables = {**tokenizer.special_tokens_map, **_variables(settings)}
    from g2d_jax.data.rehearsal import rehearse  # here: most runs have no chat template

    rehearse(_at_midnight(_chat_template(tokenizer)), conversations, variables)


def _as_condition(tag: re.Match[str]) -> str:
    """Replace a tag that marks generated text, or its end, by a condition that is always true."""
    before, end, after = tag.groups()
    condition = "endif" if end else "if true"
    return f"{before}{condition}{after}"


def _roles(messages: Sequence[Message]) -> tuple[str, ...]:
    return tuple(message["role"] for message in messages)


def _user(content: str) -> Message:
    return {"role": "user", "content": content}


def _chat_template(tokenizer: PreTrainedTokenizerFast) -> str:
    """Return the tokenizer's chat template. Raises ValueError unless it is a text."""
    source = tokenizer.get_chat_template()
    if not isinstance(source, str):
        raise ValueError(
            f"the tokenizer's chat template must be a text, got {type(source).__name__}"
        )
    return source


def _at_midnight(source: str) -> str:
    """Return a chat template with `TODAY` at midnight in place of the current time.

    Raises ValueError for a template that computes its time format.
    """
    source = _CLOCK.sub(lambda call: repr(TODAY.strftime(call[2])), source)
    if re.search(r"strftime_now\s*\(", source):
        raise ValueError("the chat template computes the format of a time: set chat=False")
    return source


def _variables(settings: TemplateSettings) -> dict[str, Any]:
    """Return the inputs of chat templates besides the messages."""
    variables: dict[str, Any] = {"date_string": TODAY.strftime("%d %b %Y")}
    if settings.enable_thinking is not None:
        variables["enable_thinking"] = settings.enable_thinking
    return variables


_UNREMOVABLE = (
    'give the system message yourself (system="…"), or accept the template\'s own with '
    'system="default"'
)
_NO_USER = (
    "the system block of this template was removed: begin the conversation with a system or a "
    "user message"
)
