r"""From a prompt to the text that is tokenised: the one place where prompt and chat templates are applied.

    "What is 1+1?" ─► prompt template ─► [system, user] messages ─► chat template ─► "<|im_start|>user\nWhat is …"

What chat templates add on their own account is made explicit: a default system prompt (Qwen2.5's "You are Qwen, …")
and a date (Llama 3.1's fixed one, Llama 3.2's today) come in only as `TemplateSettings` says.
Templates are untrusted programs; they run in transformers' Jinja sandbox and nowhere else.
"""

from __future__ import annotations

import datetime
import difflib
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from g2d_jax.data.rehearsal import rehearse
from g2d_jax.records import Message, Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

PLACEHOLDER = "{problem}"
PROMPT_TEMPLATES = {
    "plain": PLACEHOLDER,
    # arXiv 2506.21495, figure 4
    "paper": "Given the following problem, reason and give a final answer to the problem. Problem: {problem}\n"
    "Your response should end with 'The final answer is $\\boxed{[answer]}$. I hope it is correct.' "
    "where [answer] is the response to the problem.",
}
DEFAULT_SYSTEM = "default"
_CLOCK = re.compile(r"""strftime_now\(\s*(["'])((?:(?!\1).)*)\1\s*\)""")
_WORDS = re.compile(r"\w\s+\w")
# Stand-ins whose place in a rendered conversation shows what the template put around them.
_SYSTEM, _USER, _ANSWER, _NEXT = "zqSYSTEMqz", "zqUSERqz", "zqANSWERqz", "zqNEXTqz"
_ANSWERED = {"role": "assistant", "content": _ANSWER}


@dataclass(frozen=True, slots=True)
class TemplateSettings:
    """How prompts become text. Part of the tokenizer's fingerprint.

    chat: use the tokenizer's chat template; None: if it has one.
    prompt_template: "plain", "paper" or a text with {problem}, around problems that are bare text. Conversations in the
        data are used as they are.
    system: None: no system block at all, also where the template would insert its own. "default": whatever the template
        inserts when no system message is given. Any other text, "" included: a system message with that content.
        A system message in the data's own conversation wins over this setting.
    date: YYYY-MM-DD that templates take for today, so that prompts do not change overnight.
    enable_thinking: handed to templates that know it (Qwen3); None: left to the template.
    """

    chat: bool | None = None
    prompt_template: str = "plain"
    system: str | None = None
    date: str = "2024-07-26"
    enable_thinking: bool | None = None

    def __post_init__(self) -> None:
        if PLACEHOLDER not in self.pattern:
            close = difflib.get_close_matches(self.prompt_template, PROMPT_TEMPLATES, n=1)
            hint = f" Did you mean {close[0]!r}?" if close else ""
            raise ValueError(
                f"prompt_template is one of {', '.join(PROMPT_TEMPLATES)} or a text that contains {PLACEHOLDER}, "
                f"got {self.prompt_template!r}.{hint}"
            )
        try:
            datetime.date.fromisoformat(self.date)
        except ValueError as error:
            raise ValueError(f"date must be written YYYY-MM-DD, for example 2024-07-26, got {self.date!r}") from error

    @property
    def pattern(self) -> str:
        """Return the prompt template's text."""
        return PROMPT_TEMPLATES.get(self.prompt_template, self.prompt_template)


class Template:
    """The prompt and chat template of one tokenizer under fixed settings.

    Raises ValueError when the settings ask for what the tokenizer's chat template cannot do.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast, settings: TemplateSettings) -> None:
        has_template = bool(tokenizer.chat_template)
        if settings.chat and not has_template:
            raise ValueError("chat=True needs a tokenizer with a chat template and this one has none: set chat=None")
        self.is_chat: bool = has_template if settings.chat is None else settings.chat
        if not self.is_chat and settings.system not in (None, DEFAULT_SYSTEM):
            raise ValueError(f"a system prompt needs a chat template, which is not in use here: {settings.system!r}")
        self.settings = settings
        self._tokenizer = tokenizer
        self.source: str = _chat_template(tokenizer, settings) if self.is_chat else ""
        self._bos = str(tokenizer.bos_token or "")
        self._inserted = self._inserted_block() if self.is_chat and settings.system is None else ""

    def conversation(self, prompt: Prompt) -> tuple[Message, ...]:
        """Return the messages of a prompt: with the prompt template and the system message of the settings, if any."""
        if isinstance(prompt, str):  # braces in it stay as they are
            messages: tuple[Message, ...] = (_user(prompt.join(self.settings.pattern.split(PLACEHOLDER))),)
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

        Raises ValueError when the chat template fails, or for a conversation of several messages without one.
        """
        messages = self.conversation(prompt)
        if self.is_chat:
            text = self.apply(messages, generation=True)
            return text if messages[0]["role"] == "system" else self._without_inserted(text)
        if len(messages) == 1 and messages[0]["role"] == "user":
            return messages[0]["content"]
        roles = ", ".join(message["role"] for message in messages)
        raise ValueError(f"a conversation ({roles}) needs a chat template: set chat=None and use a chat tokenizer")

    def turn_end(self) -> str:
        """Return what the chat template writes after an assistant's message; "" without chat."""
        if not self.is_chat:
            return ""
        _, answer, end = self.apply((_user(_USER), _ANSWERED), generation=False).rpartition(_ANSWER)
        return end if answer else ""

    def apply(self, messages: tuple[Message, ...], *, generation: bool) -> str:
        """Run the chat template on messages as they are, up to where a response begins if `generation`.

        Whatever it raises becomes a ValueError that says what to do.
        """
        conversation = [dict(message) for message in messages]
        try:
            text = self._tokenizer.apply_chat_template(
                conversation,
                chat_template=self.source,
                tokenize=False,
                add_generation_prompt=generation,
                **_variables(self.settings),
            )
        except Exception as error:  # the template is someone else's program
            roles = ", ".join(message["role"] for message in messages)
            raise ValueError(
                f"the tokenizer's chat template failed on a conversation ({roles}): {error!s:.1000}. Some templates "
                "take no system message or ask for alternating roles; change system, or set chat=False to do without."
            ) from error
        return str(text)

    def _without_inserted(self, text: str) -> str:
        bos = self._bos if self._bos and text.startswith(self._bos) else ""
        rest = text[len(bos) :]
        if not rest.startswith(self._inserted):
            raise ValueError(
                f"the chat template inserts a system block that changes with the conversation and cannot be taken out: "
                f"{_UNREMOVABLE}"
            )
        return bos + rest[len(self._inserted) :]

    def _inserted_block(self) -> str:
        """Find the template's own system block: what it writes unasked before the first user turn, BOS apart.

        The turn's own header is what the template adds before one more user message.
        """
        text = self.apply((_user(_USER),), generation=False)
        header = self._user_header()
        is_clear = header is not None and header + _USER in text
        before = text.partition(f"{header}{_USER}" if is_clear else _USER)[0].removeprefix(self._bos)
        # Start tokens without words ("[gMASK]<sop>") are no system block.
        if not self._fills_system_block(text) and not _WORDS.search(before):
            return ""
        if not is_clear:
            raise ValueError(f"cannot tell where the chat template's own system block ends: {_UNREMOVABLE}")
        return before

    def _user_header(self) -> str | None:
        """Find the text with which a later user turn begins, None where that cannot be told."""
        messages = (_user(_USER), _ANSWERED, _user(_NEXT))
        try:
            shorter, longer = (self.apply(messages[:n], generation=False) for n in (2, 3))
        except ValueError:  # a template for one turn only
            return None
        return longer[len(shorter) :].partition(_NEXT)[0] if longer.startswith(shorter) else None

    def _fills_system_block(self, text: str) -> bool:
        """Tell whether `text`, rendered without a system message, has the block that a given one would be put in."""
        try:
            given = self.apply(({"role": "system", "content": _SYSTEM}, _user(_USER)), generation=False)
        except ValueError:  # no system messages at all
            return False
        before, system, after = given.partition(_SYSTEM)
        return bool(system and re.fullmatch(f"{re.escape(before)}.*{re.escape(after)}", text, re.DOTALL))


def try_out(tokenizer: PreTrainedTokenizerFast, settings: TemplateSettings) -> None:
    """Run the tokenizer's chat template, if it is to be used, where it can do no harm: see `rehearse`.

    Raises ValueError when it takes too long or too much memory.
    """
    if not tokenizer.chat_template or settings.chat is False:
        return
    system, user = {"role": "system", "content": _SYSTEM}, _user(_USER)
    conversations = ([user], [system, user], [user, _ANSWERED], [user, _ANSWERED, _user(_NEXT)])
    variables = {**tokenizer.special_tokens_map, **_variables(settings)}
    rehearse(_chat_template(tokenizer, settings), conversations, variables)


def _user(content: str) -> Message:
    return {"role": "user", "content": content}


def _chat_template(tokenizer: PreTrainedTokenizerFast, settings: TemplateSettings) -> str:
    """Return the chat template, with the date of the settings at midnight written where it asks for the time.

    Raises ValueError for a template that is no text, or that asks for the time in a format that it computes.
    """
    source = tokenizer.get_chat_template()
    if not isinstance(source, str):
        raise ValueError(f"the tokenizer's chat template must be a text, got {type(source).__name__}")
    midnight = datetime.datetime.fromisoformat(settings.date)
    source = _CLOCK.sub(lambda call: repr(midnight.strftime(call[2])), source)
    if re.search(r"strftime_now\s*\(", source):
        raise ValueError("the chat template asks for the time in a format that it computes: set chat=False")
    return source


def _variables(settings: TemplateSettings) -> dict[str, Any]:
    """Return what chat templates are given beside the messages."""
    variables: dict[str, Any] = {"date_string": datetime.date.fromisoformat(settings.date).strftime("%d %b %Y")}
    return variables if settings.enable_thinking is None else {**variables, "enable_thinking": settings.enable_thinking}


_UNREMOVABLE = 'give the system message yourself (system="…"), or accept the template\'s own with system="default"'
