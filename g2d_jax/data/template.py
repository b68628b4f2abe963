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
# Spelled out, since the names that strftime writes depend on the machine's language.
_MONTHS = (
    "January", "February", "March", "April", "May", "June",
    "July", "August", "September", "October", "November", "December",
)  # fmt: skip
_WEEKDAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
_WORDS = re.compile(r"\w\s+\w")
# Stand-ins whose place in a rendered conversation shows what the template put around them.
_SYSTEM, _USER, _ANSWER, _NEXT = "zqSYSTEMqz", "zqUSERqz", "zqANSWERqz", "zqNEXTqz"


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
        """The prompt template's text."""
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
        self.source: str = _chat_template(tokenizer) if self.is_chat else ""
        self._bos = str(tokenizer.bos_token or "")
        self._inserted = self._inserted_block() if self.is_chat and settings.system is None else ""

    def conversation(self, prompt: Prompt) -> tuple[Message, ...]:
        """The messages of a prompt: with the prompt template and the system message of the settings, if any."""
        messages = self._bare_messages(prompt)
        system = self.settings.system
        if messages[0]["role"] != "system" and system is not None and system != DEFAULT_SYSTEM:
            messages = ({"role": "system", "content": system}, *messages)
        return messages

    def render(self, prompt: Prompt) -> str:
        """The text to tokenise, ending where the response begins.

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
        """What the chat template writes after an assistant's message; "" without chat."""
        if not self.is_chat:
            return ""
        question, answer = self._turn(_USER), {"role": "assistant", "content": _ANSWER}
        _, found, end = self.apply((question, answer), generation=False).rpartition(_ANSWER)
        return end if found else ""

    def _bare_messages(self, prompt: Prompt) -> tuple[Message, ...]:
        if isinstance(prompt, str):
            return (self._turn(prompt.join(self.settings.pattern.split(PLACEHOLDER))),)  # braces in it stay as they are
        if not prompt or prompt[-1]["role"] != "user":
            raise ValueError("a prompt of messages must end with a user message")
        return tuple(prompt)

    @staticmethod
    def _turn(content: str) -> Message:
        return {"role": "user", "content": content}

    def apply(self, messages: tuple[Message, ...], *, generation: bool) -> str:
        """Run the chat template on messages as they are, up to where a response begins if `generation`.

        Whatever it raises becomes a ValueError that says what to do.
        """
        conversation = [dict(message) for message in messages]
        try:
            text = self._tokenizer.apply_chat_template(
                conversation,
                chat_template=_with_fixed_clock(self.source, datetime.date.fromisoformat(self.settings.date)),
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
        """The template's own system block: what it writes before the first user turn, BOS apart, without being asked.

        The turn's own header is what the template adds before one more user message.
        """
        text = self.apply((self._turn(_USER),), generation=False)
        header = self._user_header()
        known = header is not None and header + _USER in text
        before = text.partition(f"{header}{_USER}" if known else _USER)[0].removeprefix(self._bos)
        # Start tokens without words ("[gMASK]<sop>") are no system block.
        if not self._fills_system_block(text) and not _WORDS.search(before):
            return ""
        if not known:
            raise ValueError(f"cannot tell where the chat template's own system block ends: {_UNREMOVABLE}")
        return before

    def _user_header(self) -> str | None:
        """The text with which a later user turn begins, None where that cannot be told."""
        messages = (self._turn(_USER), {"role": "assistant", "content": _ANSWER}, self._turn(_NEXT))
        try:
            shorter, longer = (self.apply(messages[:n], generation=False) for n in (2, 3))
        except ValueError:  # a template for one turn only
            return None
        return longer[len(shorter) :].partition(_NEXT)[0] if longer.startswith(shorter) else None

    def _fills_system_block(self, text: str) -> bool:
        """Whether `text`, rendered without a system message, has the block that a given one would be put in."""
        try:
            given = self.apply(({"role": "system", "content": _SYSTEM}, self._turn(_USER)), generation=False)
        except ValueError:  # no system messages at all
            return False
        before, found, after = given.partition(_SYSTEM)
        return (
            bool(found) and len(text) >= len(before) + len(after) and text.startswith(before) and text.endswith(after)
        )


def try_out(tokenizer: PreTrainedTokenizerFast, settings: TemplateSettings) -> None:
    """Run the tokenizer's chat template, if it is to be used, where it can do no harm: see `rehearse`.

    Raises ValueError when it takes too long or too much memory.
    """
    if not tokenizer.chat_template or settings.chat is False:
        return
    source = _with_fixed_clock(_chat_template(tokenizer), datetime.date.fromisoformat(settings.date))
    system, user = {"role": "system", "content": _SYSTEM}, {"role": "user", "content": _USER}
    answer, more = {"role": "assistant", "content": _ANSWER}, {"role": "user", "content": _NEXT}
    conversations = ([user], [system, user], [user, answer], [user, answer, more])
    rehearse(source, conversations, {**tokenizer.special_tokens_map, **_variables(settings)})


def _chat_template(tokenizer: PreTrainedTokenizerFast) -> str:
    source = tokenizer.get_chat_template()
    if not isinstance(source, str):
        raise ValueError(f"the tokenizer's chat template must be a text, got {type(source).__name__}")
    return source


def _variables(settings: TemplateSettings) -> dict[str, Any]:
    """What chat templates are given beside the messages."""
    date = datetime.date.fromisoformat(settings.date)
    variables: dict[str, Any] = {"date_string": f"{date.day:02d} {_MONTHS[date.month - 1][:3]} {date.year}"}
    return variables if settings.enable_thinking is None else {**variables, "enable_thinking": settings.enable_thinking}


def _with_fixed_clock(source: str, date: datetime.date) -> str:
    """The template with a `strftime_now` of its own, which formats `date` (at midnight) instead of today.

    A macro, because transformers hands templates plain data only. The newline after it is trimmed by Jinja's
    trim_blocks, so the rest starts at the start of a line, as before.
    """
    if "strftime_now" not in source:
        return source
    month, weekday = _MONTHS[date.month - 1], _WEEKDAYS[date.weekday()]
    directives = {
        "%Y": f"{date.year:04d}", "%y": f"{date.year % 100:02d}", "%m": f"{date.month:02d}", "%-m": f"{date.month}",
        "%d": f"{date.day:02d}", "%-d": f"{date.day}", "%B": month, "%b": month[:3], "%A": weekday, "%a": weekday[:3],
        "%H": "00", "%I": "12", "%M": "00", "%S": "00", "%p": "AM",
    }  # fmt: skip
    filters = "".join(f" | replace('{name}', '{value}')" for name, value in directives.items())
    return f"{{%- macro strftime_now(format) %}}{{{{ format{filters} }}}}{{% endmacro %}}\n{source}"


_UNREMOVABLE = 'give the system message yourself (system="…"), or accept the template\'s own with system="default"'
