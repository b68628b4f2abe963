"""Text to token ids and back, for any Hugging Face fast tokenizer.

Prompts go through `data/template.py` and nothing else is added, except at most one
beginning-of-sequence token: the chat template's, or, without a chat template, by the tokenizer's
own rule. Completions end with one stop token. Masks never depend on ids: padding may share its id
with the end of sequence.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import os
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import numpy as np
from etils import epath

from g2d_jax.config import places
from g2d_jax.data import arithmetic
from g2d_jax.data.template import Fault, Template, TemplateSettings, hand_over, refuse, try_out
from g2d_jax.records import Conversation, Example, Problem, Prompt
from g2d_jax.rewards.extract import answer_text
from g2d_jax.runtime import storage

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

Ids: TypeAlias = np.ndarray
"""[T] int32 token ids."""

Record = TypeVar("Record", Problem, Example)

THINKING = ("<think>", "</think>")
"""The tokens that begin and end a thought. Even as special tokens they stay in the text, because
the answer follows the thought."""

CHAT_TEMPLATE = "chat_template.jinja"
"""transformers' name for the file of a tokenizer's chat template."""

_SUFFIXES = (".json", ".jinja", ".txt", ".model")  # of a tokenizer's files
_VOCABULARIES = (
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
    "sentencepiece.bpe.model",
)
# A larger id comes from a damaged file: a model's tables are sized for the largest one.
_MAX_VOCABULARY = 2**24


class PromptTokenizer:
    """A fast tokenizer with its templates and stop tokens.

    settings: TemplateSettings. template: Template.
    eos_ids: sorted ids that end a response: the given ones, the tokenizer's own and the chat
    template's end of turn.
    stop_id: the one of them that ends completions encoded from text: the end of turn for chat, else
    the tokenizer's own.
    pad_id: the tokenizer's padding id, or stop_id if it has none.
    bos_id, adds_bos: the id that begins a text, or None; whether the tokenizer adds it by itself.
    special_tokens: their names and ids, and the end of turn's, even if not marked as special.
    thinking: those of them that begin and end a thought.
    pretrained, backend: the tokenizer as transformers and `tokenizers` represent it.
    vocab_size: one more than the largest id; a model's table may be larger.
    id_limit: ids in use are less than it: vocab_size, or `rows` of the model's embedding if that is
    smaller.
    fingerprint: 16 hex digits of everything that determines ids and text.

    generates: whether responses follow its prompts; a reward model's tokenizer writes whole
    conversations only.
    fault: called for a chat template whose prompts are incomplete (`Template.check`), and for stop
    tokens, padding, BOS and template tokens beyond the embedding's rows; encoding one of these
    raises regardless.

    Raises ValueError for a tokenizer that is not a fast one or has no stop token, for settings it
    cannot follow, and the errors of `fault`.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerFast,
        settings: TemplateSettings | None = None,
        *,
        eos_ids: Sequence[int] = (),
        rows: int | None = None,
        generates: bool = True,
        fault: Fault = refuse,
    ) -> None:
        if not getattr(tokenizer, "is_fast", False):
            raise ValueError(
                "a fast tokenizer (one with tokenizer.json) is needed, got "
                f"{type(tokenizer).__name__}"
            )
        self.settings = settings or TemplateSettings()
        self.template = Template(tokenizer, self.settings, fault)
        self.pretrained = tokenizer
        vocabulary = tokenizer.backend_tokenizer.get_vocab(with_added_tokens=True)
        self.vocab_size: int = max(vocabulary.values(), default=-1) + 1
        # Checked before a copy: the bindings iterate over all ids.
        if not 0 < self.vocab_size <= _MAX_VOCABULARY:
            raise ValueError(
                f"a tokenizer must have 1 to {_MAX_VOCABULARY} ids, this one has {self.vocab_size}"
            )
        self.backend = _backend_copy(tokenizer)
        self.special_tokens: dict[str, int] = {}
        for i, token in self.backend.get_added_tokens_decoder().items():
            if token.special:
                self.special_tokens[token.content] = i
        self._hidden = {i for token, i in self.special_tokens.items() if token not in THINKING}
        named = map(str, tokenizer.all_special_tokens)
        self.special_tokens |= {token: vocabulary[token] for token in named if token in vocabulary}
        self.thinking = {
            name: self.special_tokens[name] for name in THINKING if name in self.special_tokens
        }
        if generates:
            hand_over(self.template.check, fault)
        self.stop_id, self.eos_ids = self._stops(eos_ids)
        self.pad_id: int = self.stop_id
        if tokenizer.pad_token_id is not None:
            self.pad_id = int(tokenizer.pad_token_id)
        self.bos_id: int | None = tokenizer.bos_token_id
        self.adds_bos = self.bos_id is not None and self.backend.encode("").ids[:1] == [self.bos_id]
        self.id_limit: int = self.vocab_size
        if rows is not None:
            self.id_limit = min(self.vocab_size, rows)
        hand_over(self._require_own_ids, fault)
        self.fingerprint: str = self._fingerprint()

    def render(self, prompt: Problem | Prompt) -> str:
        """Render a prompt as text before tokenisation. Raises ValueError as `Template.render`
        does."""
        return self.template.render(_bare(prompt))

    def conversation(self, prompt: Problem | Prompt) -> Conversation:
        """Return the prompt as chat messages, system message included, for other libraries'
        templating."""
        return self.template.conversation(_bare(prompt))

    def encode_prompt(self, prompt: Problem | Prompt) -> Ids:
        """Encode a prompt, [P] int32 with P at least 1, ending where the response begins.

        Raises ValueError when the chat template fails, when the problem's own text contains a
        special token (it would act as one), when the tokenizer does not know a character, and when
        nothing is left to encode.
        """
        bare = _bare(prompt)
        contents = [bare] if isinstance(bare, str) else [message["content"] for message in bare]
        for content in contents:
            self._refuse_special(content)
        text = self.template.render(bare)
        ids = self.encode_text(text)
        if self.adds_bos and not self.template.is_chat:
            ids = self._inside([self.bos_id, *ids], text)  # type: ignore[list-item]  # adds_bos: there is one
        if not ids:
            raise ValueError(f"the prompt {bare!r} has no tokens")
        return np.asarray(self.without_second_bos(ids), np.int32)

    def opens_thought(self, prompt: Problem | Prompt) -> bool:
        """Return whether the template opens a thought at the prompt's end, which the response
        closes."""
        return self.render(prompt).rstrip().endswith(THINKING[0])

    def leaves_open(self, prompt: Problem | Prompt, text: str) -> bool:
        """Return whether a response leaves a thought open, its prompt's or its own: it then has no
        answer."""
        if "<think>" not in text and "<think>" not in self.template.own:
            return False
        before = THINKING[0] if self.opens_thought(prompt) else ""
        return answer_text(before + text) is None

    def encode_completion(self, text: str, prompt: Problem | Prompt | None = None) -> Ids:
        """Encode a response and its stop token, [T] int32; a stop token at the end of `text` counts
        as that one.

        prompt: the prompt before it, whose thought it does not open again (see `continued`). The
        response is encoded separately from it, as the sampler generates; THINKING counts as special
        tokens. Raises ValueError when the text contains another special token elsewhere, or a
        character that the tokenizer does not know.
        """
        stop = self.stop_id
        if prompt is not None and text.lstrip().startswith(THINKING[0]):
            text = continued(self.render(prompt), text)
        for name, identifier in self.special_tokens.items():
            if identifier in self.eos_ids and name and text.rstrip().endswith(name):
                stop = identifier
                text = text.rstrip().removesuffix(name)
                break
        self._refuse_special(text, allowed=self.thinking)
        return np.asarray(self._inside([*self.encode_text(text), stop], text), np.int32)

    def encode_example(self, example: Example) -> tuple[Ids, Ids]:
        """Encode the prompt as for sampling, and the completion, which alone carries loss: ([P],
        [T]) int32."""
        completion = self.encode_completion(example.completion, example.prompt)
        return self.encode_prompt(example.prompt), completion

    def decode(self, ids: Ids | Sequence[int]) -> str:
        """Decode ids without the stop token and special tokens other than THINKING, for rewards and
        readers."""
        ids = list(map(int, ids))
        if ids and ids[-1] in self.eos_ids:
            ids = ids[:-1]
        if self.thinking:
            return self.decode_raw([i for i in ids if i not in self._hidden])
        return str(self.backend.decode(ids, skip_special_tokens=True))

    def decode_raw(self, ids: Ids | Sequence[int]) -> str:
        """Decode ids with every special token written out."""
        return str(self.backend.decode(list(map(int, ids)), skip_special_tokens=False))

    def ends(self) -> str:
        """Name the tokens that end a response, each with its id: "'<|im_end|>' (2), '</s>' (0)"."""
        named = [f"{self.backend.id_to_token(i)!r} ({i})" for i in self.eos_ids]
        return ", ".join(named)

    def stop_string_fault(self, string: str) -> str:
        """Explain the fault of a stop string that contains a special token, "" for any other.

        Responses are read without that token. The string is not refused: a policy may spell it in
        other tokens.
        """
        for name, identifier in self.special_tokens.items():
            ends = identifier in self.eos_ids
            if not name or name not in string or not (ends or identifier in self._hidden):
                continue
            way = (
                f"to end responses there, add its id, {identifier}, to eos_token_id in "
                "generation_config.json"
            )
            if ends:
                way = "remove the string, since that token ends a response by itself"
            return (
                f"has {string!r}, but responses are read without the special "
                f"token {name!r}, so the string never ends one there: {way}"
            )
        return ""

    def drop_too_long(
        self, records: Sequence[Record], max_prompt_length: int
    ) -> tuple[list[Record], int]:
        """Return the records whose prompt has at most `max_prompt_length` tokens, and the count of
        the others."""
        short = []
        for record in records:
            if len(self.encode_prompt(record.prompt)) <= max_prompt_length:
                short.append(record)
        return short, len(records) - len(short)

    def save(self, folder: storage.PathLike) -> None:
        """Write the tokenizer in transformers' format, with the chat template pinned by the
        settings.

        Without a chat template the folder has none afterwards. eos_ids are in the model's files. A
        tokenizer with several chat templates keeps those for other uses.
        """
        written = copy.copy(self.pretrained)
        own = written.chat_template
        written.chat_template = self.template.pinned or None
        if self.template.is_chat and isinstance(own, dict):
            written.chat_template = {**own, "default": self.template.pinned}
        with tempfile.TemporaryDirectory() as temporary:
            written.save_pretrained(temporary)
            _name_for_all(Path(temporary))
            for file in sorted(Path(temporary).rglob("*")):
                if file.is_file():
                    target = epath.Path(folder) / file.relative_to(temporary)
                    target.parent.mkdir(parents=True, exist_ok=True)
                    storage.write_bytes(target, file.read_bytes())

    def encode_text(self, text: str) -> list[int]:
        """Encode a rendered text, in which special tokens count as such.

        Raises ValueError if it cannot be encoded, and for a token beyond the rows of the model's
        embedding.
        """
        return self._inside(encode(self.backend, text), text)

    def _inside(self, ids: list[int], text: str) -> list[int]:
        """Return ids that the embedding covers. Raises ValueError for one beyond its rows, quoting
        the text."""
        if max(ids, default=0) >= self.id_limit:
            raise ValueError(f"{self._outside(max(ids), 'a token')}; it is in {text!r:.200}")
        return ids

    def without_second_bos(self, ids: list[int]) -> list[int]:
        """Return ids from the last of the BOS tokens at their beginning."""
        while len(ids) > 1 and ids[0] == ids[1] == self.bos_id:
            ids = ids[1:]
        return ids

    def _refuse_special(self, text: str, allowed: Iterable[str] = ()) -> None:
        for name in self.special_tokens:
            if name and name in text and name not in allowed:
                at = max(text.index(name) - 20, 0)
                raise ValueError(
                    f"the special token {name!r} is in the text itself "
                    f"({text[at : at + 60]!r}) and would act as one: remove it from the data"
                )

    def _require_own_ids(self) -> None:
        """Raise ValueError for a token of the tokenizer's own beyond the rows of the model's
        embedding."""
        if self.id_limit == self.vocab_size:
            return
        own = [(i, "a stop token") for i in self.eos_ids] + [(self.pad_id, "the padding token")]
        if self.bos_id is not None:
            own.append((self.bos_id, "the BOS token"))
        for identifier, kind in own:
            if identifier >= self.id_limit:
                raise ValueError(self._outside(identifier, kind))
        for part in self.template.frame():
            self.encode_text(part)

    def _outside(self, identifier: int, kind: str) -> str:
        return (
            f"{kind}, {self.backend.id_to_token(identifier)!r}, has the id {identifier}, but the "
            f"model's embedding has {self.id_limit} rows (vocab_size in its config.json). Use the "
            "model's original tokenizer; if tokens were added to it, resize the "
            "embedding with transformers (resize_token_embeddings) and save the model again"
        )

    def _stops(self, given: Sequence[int]) -> tuple[int, tuple[int, ...]]:
        own = self.pretrained.eos_token_id
        turn_end = self.template.turn_end().lstrip()
        # Any added token that ends a turn ends a response; not all tokenizers mark theirs as
        # special.
        decoder = self.backend.get_added_tokens_decoder()
        added = {token.content: i for i, token in decoder.items()} | self.special_tokens
        names = [name for name in added if name and turn_end.startswith(name)]
        end_of_turn = None
        if names:
            name = max(names, key=len)
            end_of_turn = self.special_tokens[name] = added[name]
        stops = [i for i in (end_of_turn, own, *given) if i is not None]
        if not stops:
            raise ValueError(
                "the tokenizer has no end-of-sequence token: set its eos_token, or pass eos_ids"
            )
        for i in stops:
            is_whole = isinstance(i, int | np.integer) and not isinstance(i, bool)
            if not is_whole or not 0 <= i < self.vocab_size:
                raise ValueError(
                    f"end-of-sequence ids must be from 0 to {self.vocab_size - 1}, got {i!r:.100}"
                )
        return int(stops[0]), tuple(sorted(set(map(int, stops))))

    def _fingerprint(self) -> str:
        return storage.fingerprint(
            {
                "backend": json.loads(self.backend.to_str()),
                "chat_template": self.template.source,
                "special_tokens": {
                    key: str(token) for key, token in self.pretrained.special_tokens_map.items()
                },
                "settings": dataclasses.asdict(self.settings),
                "stops": [self.stop_id, *self.eos_ids],
                "pad_id": self.pad_id,
            }
        )


_NO_UNKNOWN = (
    "no token covers a part of it, and there is none for unknown text. If neither model.path "
    "nor tokenizer.path is set, this is the tokenizer of the embedded arithmetic, which has only "
    "digits and signs: set model.path to a model that reads such text, or tokenizer.path for a "
    "random one"
)


def continued(rendered: str, text: str) -> str:
    """Return a response without a leading `<think>`, or empty thought, that also ends its prompt.

    Raises ValueError for a response that opens a thought after a prompt that closed it.
    """
    opening, closing = THINKING
    prompt = rendered.rstrip()
    thought, _, rest = text.lstrip().removeprefix(opening).partition(closing)
    if prompt.endswith(closing) and thought.strip():
        raise ValueError(
            f"the prompt ends with a closed thought, but the response opens another, {text!r:.80}: "
            "remove it from the response, or set tokenizer.enable_thinking"
        )
    if prompt.endswith(closing):
        return rest.lstrip()
    if prompt.endswith(opening):
        text = text.lstrip().removeprefix(opening)
        if rendered.endswith("\n"):
            return text.lstrip("\n")
    return text


def encode(backend: Any, text: str) -> list[int]:
    """Encode a text by the tokenizer's Rust half. Raises ValueError if it cannot be encoded."""
    try:
        return list(backend.encode(text, add_special_tokens=False).ids)
    except Exception as error:  # also TypeError, for lone surrogates; the bindings raise no others
        reason = str(error)
        if "Missing [UNK] token" in reason:
            reason = _NO_UNKNOWN
        raise ValueError(f"the tokenizer cannot encode {text!r:.200}: {reason}") from error


def load_tokenizer(
    source: str | os.PathLike[str],
    settings: TemplateSettings | None = None,
    *,
    revision: str | None = None,
    rows: int | None = None,
    generates: bool = True,
    fault: Fault = refuse,
) -> PromptTokenizer:
    """Load a tokenizer by folder (local, gs:// or s3://), hub id, or an embedded task
    ("procedural:slips").

    Its stop tokens include those of config.json and generation_config.json in its folder. No code
    of the repository is run.
    rows, generates, fault: see PromptTokenizer. Raises ValueError when it cannot be found or read,
    or does not fit.
    """
    name = os.fspath(source)
    options = {"rows": rows, "generates": generates, "fault": fault}
    if name in arithmetic.TASKS:
        return PromptTokenizer(arithmetic.tokenizer(), settings, rows=rows)
    if name.startswith("procedural:"):
        raise ValueError(
            f"there is no tokenizer {name!r}: choose one of {', '.join(arithmetic.TASKS)}, which "
            "have digits and signs. For words set tokenizer.path to a folder or hub id, or leave it "
            "empty for the model's own"
        )
    if storage.is_local(name):
        return _load_hugging_face(name, name, settings, revision, options)
    with tempfile.TemporaryDirectory() as temporary:
        _fetch(name, Path(temporary))
        return _load_hugging_face(temporary, name, settings, None, options)


def _fetch(name: str, folder: Path) -> None:
    """Copy a tokenizer's files from an object store. Raises ValueError when there are none."""
    storage.check_driver(name)
    try:
        with storage.naming("list", name):
            files = [file for file in epath.Path(name).iterdir() if file.suffix in _SUFFIXES]
    except FileNotFoundError:
        files = []
    if not files:
        raise ValueError(f"tokenizer {name!r}: there is no such folder, or no tokenizer in it")
    for file in files:
        (folder / file.name).write_bytes(storage.read_bytes(file))


# tokenizer.json is the whole tokenizer; names of transformers 4, 5
_GENERIC = ("PreTrainedTokenizerFast", "TokenizersBackend")


def _load_hugging_face(
    source: str,
    name: str,
    settings: TemplateSettings | None,
    revision: str | None,
    options: Mapping[str, Any],
) -> PromptTokenizer:
    """Load a tokenizer from a local folder or hub id; name: its name in messages. options: of
    PromptTokenizer."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    source = os.path.expanduser(source)
    is_folder = os.path.isdir(source)
    if places.is_path(source) and not is_folder:
        raise ValueError(f"tokenizer {name!r}: there is no such folder")
    vocabularies = list(filter(os.path.exists, (f"{source}/{file}" for file in _VOCABULARIES)))
    if is_folder and not vocabularies:
        raise ValueError(  # transformers would return an empty one
            f"tokenizer {name!r}: the folder contains no tokenizer ({_VOCABULARIES[0]}): copy the "
            "files of the model's original tokenizer into it, or set tokenizer.path to a "
            "folder or hub id that has it"
        )
    for path in vocabularies:
        with open(path, "rb") as handle:
            storage.refuse_pointer(path, handle.read(len(storage.POINTER)))
    try:
        # AutoTokenizer decides by the model: next to a Qwen2 model it uses Qwen2's own rules instead
        # of a tokenizer.json that declares a class for generic tokenizers.
        declared_class = _declared(source, "tokenizer_config.json", "tokenizer_class", revision)
        loader: Any = PreTrainedTokenizerFast if declared_class in _GENERIC else AutoTokenizer
        tokenizer = loader.from_pretrained(source, revision=revision, trust_remote_code=False)
        if not tokenizer.chat_template:
            # Its place for processors of models with images; a tokenizer alone does not read it.
            template = _declared(source, "chat_template.json", "chat_template", revision)
            tokenizer.chat_template = template or None
        declared = _declared_eos(source, revision)
    except ImportError:
        raise  # it names the package to install
    # Damaged files make transformers raise any error, and the bindings bare Exceptions.
    except Exception as error:
        reason = storage.hub_reason(error)
        if is_folder:
            reason = (
                f"{type(error).__name__}: {error!s:.1000}. Its tokenizer.json, or a file next to it, is "
                "cut off or belongs to no tokenizer: replace it by a complete copy"
            )
        raise ValueError(f"tokenizer {name!r} cannot be loaded: {reason}") from error
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise ValueError(f"tokenizer {name!r} has no fast version (tokenizer.json)")
    try:
        try_out(tokenizer, settings or TemplateSettings())
        return PromptTokenizer(tokenizer, settings, eos_ids=declared, **options)
    except ValueError as error:
        raise ValueError(f"tokenizer {name!r}: {error}") from error


def _name_for_all(folder: Path) -> None:
    """Write a generic tokenizer's class under the name that versions 4 and 5 of transformers
    read."""
    file = folder / "tokenizer_config.json"
    content = storage.read_json(file)
    if content.get("tokenizer_class") in _GENERIC:
        content["tokenizer_class"] = _GENERIC[0]
        storage.write_json(file, content)


def _declared_eos(name: str, revision: str | None) -> tuple[int, ...]:
    """Return the end-of-sequence ids of generation_config.json and config.json, if present."""
    declared: list[int] = []
    for file in ("generation_config.json", "config.json"):
        eos = _declared(name, file, "eos_token_id", revision)
        if isinstance(eos, list):
            declared += eos
        elif eos is not None:
            declared.append(eos)
    return tuple(declared)


def _declared(name: str, file: str, field: str, revision: str | None) -> Any:
    """Return one field of a JSON file next to the tokenizer, None if file or field is missing."""
    from transformers.utils.hub import cached_file

    path = cached_file(name, file, revision=revision, _raise_exceptions_for_missing_entries=False)
    if path is None:
        return None
    content: Any = storage.read_json(path)
    if not isinstance(content, dict):
        return None
    return content.get(field)


def _bare(prompt: Problem | Prompt) -> Prompt:
    """Return the prompt of a problem."""
    return prompt.prompt if isinstance(prompt, Problem) else prompt


def _backend_copy(tokenizer: PreTrainedTokenizerFast) -> Any:
    """Copy the tokenizer's Rust half, on its own: then no call on the original can switch padding
    or truncation on in it."""
    from tokenizers import Tokenizer

    backend = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    backend.no_padding()
    backend.no_truncation()
    return backend
