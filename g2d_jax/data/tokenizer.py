"""Text to token ids and back, for any Hugging Face fast tokenizer.

Prompts go through `data/template.py` and nothing else is added: at most one beginning-of-sequence
token, written by the chat template if it writes one, by the tokenizer's own rule where no chat
template is used. Completions end with one stop token. No mask is ever made from ids: padding may
share its id with the end of sequence.
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
"""The tokens that begin and end a thought. Where they are special tokens they stay in the text all
the same: the answer is what follows the thought."""

CHAT_TEMPLATE = "chat_template.jinja"
"""The name that transformers has for the file of a tokenizer's chat template."""

_SUFFIXES = (".json", ".jinja", ".txt", ".model")  # of a tokenizer's files
_VOCABULARIES = (
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
    "sentencepiece.bpe.model",
)
# A larger id is a damaged file's: the tables of a model are made for the largest one.
_MAX_VOCABULARY = 2**24


class PromptTokenizer:
    """A fast tokenizer with its templates and stop tokens.

    settings: TemplateSettings. template: Template.
    eos_ids: sorted ids that end a response: those given, the tokenizer's own and the chat
    template's end of turn.
    stop_id: the one of them that ends completions made from text: the end of turn for chat, else
    the tokenizer's own.
    pad_id: the tokenizer's padding id, or stop_id where it has none.
    bos_id, adds_bos: the id that begins a text, None without one; whether the tokenizer puts it
    there by itself.
    special_tokens: their names and ids, and the end of turn's, marked as special or not.
    thinking: those of them that begin and end a thought.
    pretrained, backend: the tokenizer as transformers and `tokenizers` know it.
    vocab_size: one more than the largest id; a model's table may be larger.
    id_limit: ids in use are less than it: vocab_size, or `rows` of the model's embedding where
    these are fewer.
    fingerprint: 16 hex digits of everything that decides ids and text.

    generates: whether responses follow its prompts; a reward model's tokenizer writes whole
    conversations only.
    fault: called for a chat template whose prompts are not whole (`Template.check`), and for stop
    tokens, padding, BOS and tokens of the template that the embedding has no row for; to encode one
    of these is an error all the same.

    Raises ValueError for a tokenizer that is not a fast one or has no stop token, for settings it
    cannot follow, and what `fault` raises.
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
        # Before a copy is made: the bindings walk through all ids.
        if not 0 < self.vocab_size <= _MAX_VOCABULARY:
            raise ValueError(
                f"a tokenizer has 1 to {_MAX_VOCABULARY} ids, this one has {self.vocab_size}"
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

        Raises ValueError when the chat template fails, when the problem's own text holds a special
        token (it would act as one), when the tokenizer does not know a character, and when nothing
        is left to encode.
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
        """Return whether a response leaves a thought open, its prompt's or its own: it has no
        answer."""
        if "<think>" not in text and "<think>" not in self.template.own:
            return False
        before = THINKING[0] if self.opens_thought(prompt) else ""
        return answer_text(before + text) is None

    def encode_completion(self, text: str, prompt: Problem | Prompt | None = None) -> Ids:
        """Encode a response and its stop token, [T] int32; a stop token written at the end of
        `text` is that one.

        prompt: what it follows, whose thought it does not open again (see `continued`). Encoded
        apart from it, as the sampler generates; THINKING counts as such. Raises ValueError when the
        text holds another special token elsewhere, or a character that the tokenizer does not know.
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
        """Encode the prompt exactly as for sampling, and the completion, which alone carries loss:
        ([P], [T]) int32."""
        completion = self.encode_completion(example.completion, example.prompt)
        return self.encode_prompt(example.prompt), completion

    def decode(self, ids: Ids | Sequence[int]) -> str:
        """Decode ids without the stop token and special tokens, THINKING apart: what rewards and
        readers see."""
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
        """Say what is wrong with a stop string that has a special token, "" for any other.

        Responses are read without that token. The string is not refused: a policy may spell it out
        in other tokens.
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
                way = "leave the string out, for that token ends a response by itself"
            return (
                f"has {string!r}, and responses are read without the special "
                f"token {name!r}, so that the string never ends one at it: {way}"
            )
        return ""

    def drop_too_long(
        self, records: Sequence[Record], max_prompt_length: int
    ) -> tuple[list[Record], int]:
        """Return the records whose prompt has at most `max_prompt_length` tokens, and how many
        others there are."""
        short = []
        for record in records:
            if len(self.encode_prompt(record.prompt)) <= max_prompt_length:
                short.append(record)
        return short, len(records) - len(short)

    def save(self, folder: storage.PathLike) -> None:
        """Write the tokenizer as transformers reads it, with the chat template as pinned by the
        settings.

        Prompts without a chat template leave none behind. eos_ids belong to the model's files. A
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
        """Encode a rendered text, whose special tokens count as such.

        Raises ValueError if it cannot be encoded, and for a token that the model's embedding has no
        row for.
        """
        return self._inside(encode(self.backend, text), text)

    def _inside(self, ids: list[int], text: str) -> list[int]:
        """Return the ids of a text. Raises ValueError for one that the model's embedding has no row
        for."""
        if max(ids, default=0) >= self.id_limit:
            raise ValueError(f"{self._outside(max(ids), 'a token')}; it stands in {text!r:.200}")
        return ids

    def without_second_bos(self, ids: list[int]) -> list[int]:
        """Return ids without what stands before the last BOS of those that they begin with."""
        while len(ids) > 1 and ids[0] == ids[1] == self.bos_id:
            ids = ids[1:]
        return ids

    def _refuse_special(self, text: str, allowed: Iterable[str] = ()) -> None:
        for name in self.special_tokens:
            if name and name in text and name not in allowed:
                at = max(text.index(name) - 20, 0)
                raise ValueError(
                    f"the special token {name!r} stands in the text itself "
                    f"({text[at : at + 60]!r}) and would act as one: remove it from the data"
                )

    def _require_own_ids(self) -> None:
        """Raise ValueError for a token of the tokenizer's own that the model's embedding has no row
        for."""
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
            f"{kind}, {self.backend.id_to_token(identifier)!r}, has the id {identifier}, and the "
            f"model's embedding has {self.id_limit} rows (vocab_size in its config.json). Take the "
            "tokenizer that the model was trained with; if tokens were added to it, resize the "
            "embedding with transformers (resize_token_embeddings) and save the model again"
        )

    def _stops(self, given: Sequence[int]) -> tuple[int, tuple[int, ...]]:
        own = self.pretrained.eos_token_id
        turn_end = self.template.turn_end().lstrip()
        # Whatever added token a turn ends with ends a response; not all tokenizers mark theirs as
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
                    f"end-of-sequence ids lie between 0 and {self.vocab_size - 1}, got {i!r:.100}"
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
    "a part of it is in no token, and there is none for what is unknown. Where neither model.path "
    "nor tokenizer.path is set it is the tokenizer of the embedded arithmetic, which knows digits "
    "and signs alone: set model.path to a model that reads such text, or tokenizer.path for a "
    "random one"
)


def continued(rendered: str, text: str) -> str:
    """Return a response without the `<think>`, or the empty thought, that its prompt ends with too.

    Raises ValueError for a response that opens a thought after a prompt that has closed it.
    """
    opening, closing = THINKING
    prompt = rendered.rstrip()
    thought, _, rest = text.lstrip().removeprefix(opening).partition(closing)
    if prompt.endswith(closing) and thought.strip():
        raise ValueError(
            f"the prompt ends with a closed thought, and the response opens another, {text!r:.80}: "
            "leave it out of the response, or set tokenizer.enable_thinking"
        )
    if prompt.endswith(closing):
        return rest.lstrip()
    if prompt.endswith(opening):
        text = text.lstrip().removeprefix(opening)
        if rendered.endswith("\n"):
            return text.lstrip("\n")
    return text


def encode(backend: Any, text: str) -> list[int]:
    """Encode a text as it stands by the tokenizer's Rust half. Raises ValueError if it cannot be
    encoded."""
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

    Its stop tokens include those of config.json and generation_config.json beside it. No code of
    the repository is run.
    rows, generates, fault: see PromptTokenizer. Raises ValueError when it cannot be found or read,
    or does not fit.
    """
    name = os.fspath(source)
    options = {"rows": rows, "generates": generates, "fault": fault}
    if name in arithmetic.TASKS:
        return PromptTokenizer(arithmetic.tokenizer(), settings, rows=rows)
    if name.startswith("procedural:"):
        raise ValueError(
            f"there is no tokenizer {name!r}: {', '.join(arithmetic.TASKS)} have one, of digits and "
            "signs. For words set tokenizer.path to a folder or hub id, or leave it empty for the "
            "model's own"
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


# tokenizer.json is all there is; names of transformers 4, 5
_GENERIC = ("PreTrainedTokenizerFast", "TokenizersBackend")


def _load_hugging_face(
    source: str,
    name: str,
    settings: TemplateSettings | None,
    revision: str | None,
    options: Mapping[str, Any],
) -> PromptTokenizer:
    """Load a tokenizer from a local folder or hub id; name: what messages call it. options: of
    PromptTokenizer."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    source = os.path.expanduser(source)
    is_folder = os.path.isdir(source)
    if places.is_path(source) and not is_folder:
        raise ValueError(f"tokenizer {name!r}: there is no such folder")
    vocabularies = list(filter(os.path.exists, (f"{source}/{file}" for file in _VOCABULARIES)))
    if is_folder and not vocabularies:
        raise ValueError(  # transformers would make an empty one
            f"tokenizer {name!r}: the folder holds no tokenizer ({_VOCABULARIES[0]}): put the "
            "files of the one the model was trained with into it, or set tokenizer.path to a "
            "folder or hub id that has it"
        )
    for path in vocabularies:
        with open(path, "rb") as handle:
            storage.refuse_pointer(path, handle.read(len(storage.POINTER)))
    try:
        # AutoTokenizer goes by the model: beside a Qwen2 model it puts Qwen2's own rules in place
        # of a tokenizer.json that declares a class of its own for generic tokenizers.
        declared_class = _declared(source, "tokenizer_config.json", "tokenizer_class", revision)
        loader: Any = PreTrainedTokenizerFast if declared_class in _GENERIC else AutoTokenizer
        tokenizer = loader.from_pretrained(source, revision=revision, trust_remote_code=False)
        if not tokenizer.chat_template:
            # Where processors of models with images had it; a tokenizer alone does not read it.
            template = _declared(source, "chat_template.json", "chat_template", revision)
            tokenizer.chat_template = template or None
        declared = _declared_eos(source, revision)
    except ImportError:
        raise  # it names what to install
    # Damaged files make transformers raise anything, and the bindings bare Exceptions.
    except Exception as error:
        reason = storage.hub_reason(error)
        if is_folder:
            reason = (
                f"{type(error).__name__}: {error!s:.1000}. Its tokenizer.json, or a file beside it, is "
                "cut off or none of a tokenizer: put a whole copy there"
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
    """Read the end-of-sequence ids in generation_config.json and config.json, where there are such
    files."""
    declared: list[int] = []
    for file in ("generation_config.json", "config.json"):
        eos = _declared(name, file, "eos_token_id", revision)
        if isinstance(eos, list):
            declared += eos
        elif eos is not None:
            declared.append(eos)
    return tuple(declared)


def _declared(name: str, file: str, field: str, revision: str | None) -> Any:
    """Read one field of a JSON file beside the tokenizer, None where there is no such file or
    field."""
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
    """Copy the tokenizer's Rust half, on its own: no call on the original can switch padding or
    truncation on in it."""
    from tokenizers import Tokenizer

    backend = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    backend.no_padding()
    backend.no_truncation()
    return backend
