"""Conversion of a server's answers (engine.*) to rollouts.

Everything that can be checked is checked: an answer that breaks the contract of a Rollout raises
EngineError.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from g2d_jax.data.stops import Watch
from g2d_jax.data.tokenizer import PromptTokenizer
from g2d_jax.records import LEAST_LOGPROB, Request, Rollout, SamplingParams, is_logprob
from g2d_jax.sampler.connection import EngineError


@dataclass(eq=False, repr=False)
class Reader:
    """A reader of answers, used by one thread.

    wrong: builds the error from the problem and the advice. say: shows the user a message.
    """

    tokenizer: PromptTokenizer
    vocab_size: int
    wrong: Callable[[str, str], EngineError]
    say: Callable[[str], None]

    def rollout(
        self,
        request: Request,
        number: int,
        answer: dict[str, Any],
        is_scored: Callable[[Request], bool],
    ) -> Rollout:
        """Convert the answer to one sample of a request. Raises EngineError if it breaks the
        contract.

        is_scored: returns whether the server's log-probabilities are those of the sampling
        distribution.
        """
        choice = self._choice(request, answer)
        params = request.params
        finish = choice["finish_reason"]
        ids = choice.get("token_ids")
        if ids is None:
            tokens = self._tokenised(choice, params, answer.get("usage"))
        else:
            tokens = self._received_ids(ids, params)
        drawn = len(tokens)
        end = self._end(tokens, params)
        # The server may detokenise differently, for example by the prompt: trust its stop_reason.
        named = finish == "stop" and choice.get("stop_reason") in params.stop
        stopped = end is not None or named or int(tokens[-1]) in params.stop_ids
        if finish == "stop" and not stopped and ids is not None:
            raise self.wrong(
                f"a response ended at token {tokens[-1]}, which is not in {list(params.stop_ids)}"
                + " and completes no stop string" * bool(params.stop),
                "start it with --generation-config vllm, which removes its own stop tokens",
            )
        if not stopped and ids is not None and len(tokens) < params.max_new_tokens:
            raise self.wrong(
                f"a response was cut off at {len(tokens)} of {params.max_new_tokens} tokens",
                "raise its --max-model-len to at least data.max_prompt_length + max_new_tokens",
            )
        tokens = tokens[:end]
        logprobs = self._logprobs(choice, drawn, request, is_scored)[:end]
        entropies = np.full(len(tokens), np.nan, np.float32)
        if params.temperature == 0:
            entropies[:] = 0.0
        names = request.problem_id, request.visit, number
        reason: Literal["stop", "length"] = "stop" if stopped else "length"
        return Rollout(*names, request.prompt_ids, tokens, logprobs, entropies, reason)

    def _choice(self, request: Request, answer: dict[str, Any]) -> dict[str, Any]:
        """Return the response in an answer. Raises EngineError if there is not exactly one, if it
        did not end, or if it belongs to another prompt."""
        choices = answer.get("choices")
        if not isinstance(choices, list) or len(choices) != 1 or not isinstance(choices[0], dict):
            what = "no choices"
            if isinstance(choices, list):
                what = f"{len(choices)} choices"
            raise self.wrong(
                f"an answer has {what}; the request was for one",
                "check that engine.url is /v1 of vLLM",
            )
        choice: dict[str, Any] = choices[0]
        finish = choice.get("finish_reason")
        if finish not in ("stop", "length"):
            raise self.wrong(f"a response ended with finish_reason {finish!r:.50}", "check its log")
        prompt = choice.get("prompt_token_ids")
        if prompt is not None and prompt != request.prompt_ids.tolist():
            raise self.wrong(
                "it used another prompt than the one sent",
                "switch off anything there that changes prompts",
            )
        return choice

    def _end(self, tokens: np.ndarray, params: SamplingParams) -> int | None:
        """Count the tokens up to the first stop string, as the sampler does; None without one."""
        if not params.stop:
            return None
        return Watch(self.tokenizer.decode, params.stop).add(tokens)

    def _received_ids(self, ids: Any, params: SamplingParams) -> np.ndarray:
        """Return a response's ids, int32 [T]. Raises EngineError for ids that cannot be a
        sample."""
        if not isinstance(ids, list) or not ids or any(type(i) is not int for i in ids):
            raise self.wrong(
                f"token_ids is {str(ids)!r:.80}, not a list of numbers", "check its version"
            )
        outermost = min(ids)
        if outermost >= 0:
            outermost = max(ids)
        if not 0 <= outermost < self.vocab_size:
            raise self.wrong(
                f"a response has token {outermost}, but the vocabulary has {self.vocab_size}",
                "serve the model of this run, with its tokenizer",
            )
        if len(ids) > params.max_new_tokens or set(ids[:-1]) & set(params.stop_ids):
            raise self.wrong(
                f"a response has {len(ids)} tokens and goes beyond max_new_tokens "
                f"{params.max_new_tokens} or a stop token",
                "it ignores max_tokens or stop_token_ids: use vLLM, or another version",
            )
        return np.array(ids, np.int32)

    def _tokenised(self, choice: dict[str, Any], params: SamplingParams, usage: Any) -> np.ndarray:
        """Tokenise a response's text: int32 [T]. The sampled ids may have been others."""
        text = choice.get("text")
        if not isinstance(text, str):
            raise self.wrong(
                "a response has neither token_ids nor text", "check that engine.url is /v1 of vLLM"
            )
        self.say("engine: the server returns no token ids, so its text is tokenised again")
        by_text = choice["finish_reason"] == "stop" and self._ended_by_text(choice, params)
        if by_text and not any(string in text for string in params.stop):
            text += choice["stop_reason"]  # the server removed it
        try:
            ids = self.tokenizer.encode_text(text)
        except ValueError as error:  # half of a surrogate pair, or text without a token
            raise self.wrong(
                f"a response's text cannot be tokenised again: {error}",
                "let it return token ids, or serve the model of this run, with its tokenizer",
            ) from error
        if choice["finish_reason"] == "stop" and not by_text:
            ids.append(self.tokenizer.stop_id)
        reported = usage.get("completion_tokens") if isinstance(usage, dict) else None
        if self.tokenizer.decode(ids) != text or reported not in (None, len(ids)):
            self.say("engine: some texts tokenised again have other ids than the server sampled")
        if not ids:
            raise self.wrong("a response is empty, and no stop token ended it", "check its log")
        return np.array(ids[: params.max_new_tokens], np.int32)

    def _ended_by_text(self, choice: dict[str, Any], params: SamplingParams) -> bool:
        """Return whether a stop string ended a response: it is in the text or in stop_reason."""
        return choice.get("stop_reason") in params.stop or any(
            string in choice["text"] for string in params.stop
        )

    def _logprobs(
        self,
        choice: dict[str, Any],
        length: int,
        request: Request,
        is_scored: Callable[[Request], bool],
    ) -> np.ndarray:
        """Return log-probabilities, float32 [T]; NaN where the server has none of the sampling
        distribution."""
        if request.params.temperature == 0:
            return np.zeros(length, np.float32)  # a point mass, as in the sampler
        given = choice.get("logprobs")
        if not given or choice.get("token_ids") is None or not is_scored(request):
            return self._without_logprobs(length, request)
        values = given.get("token_logprobs") if isinstance(given, dict) else None
        if not isinstance(values, list) or len(values) != length:
            raise self.wrong(
                f"not all of the {length} tokens have a log-probability", "check its version"
            )
        for value in values:
            if type(value) not in (int, float) or not is_logprob(value):
                raise self.wrong(
                    f"a token has the log-probability {value!r:.50}; a sampled token has a "
                    f"number from {LEAST_LOGPROB:g} to 0",
                    "its weights or activations may not be finite: check what it serves, and its "
                    "dtype",
                )
        return np.minimum(np.array(values, np.float32), 0.0)

    def _without_logprobs(self, length: int, request: Request) -> np.ndarray:
        why = (
            "the server returns none for the ids it sampled, or none after temperature and filters"
        )
        if request.needs_logprobs:
            raise self.wrong(
                f"a GRPO loss needs log-probabilities, and {why}",
                "start vLLM with --logprobs-mode processed_logprobs, or sample at temperature 1",
            )
        self.say(f"engine: log-probabilities are NaN: {why}")
        return np.full(length, np.nan, np.float32)
