"""All settings, with their defaults, choices and bounds. A config file starts from `base()` and adds stages.

    base(), online(…), … ─► ConfigDict, the user's side: names and types are fixed, values change
    Config.of(config)    ─► frozen records, checked: what the library works with

Identity fields decide the result and are fingerprinted; those in RUNTIME may change between two starts of one run.
What has to fit between stages is checked in graph.py.
"""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, ParamSpec, TypeAlias, TypeVar, get_args

from ml_collections import ConfigDict

from g2d_jax.gone import find, refuse
from g2d_jax.records import MOST_REWARD, AnswerRule, SamplingParams, check_stop
from g2d_jax.section import Bounds, FieldError, NotNegative, Place, Positive, Section, Share, editable, record

RUNTIME = (
    *("mesh", "compute", "logging", "checkpoint", "faults", "reward.workers", "reward.model.batch_tokens"),
    "reward.folder",
    *(f"reward.judge.{name}" for name in ("url", "api_key_env", "timeout", "retries", "concurrency")),
    *(f"engine.{name}" for name in ("url", "model", "sync", "folder", "api_key_env", "timeout", "retries")),
    "engine.concurrency",
)
"""Top-level sections and fields that do not change what is computed, beyond rounding."""

LATER: Mapping[str, Any] = {"sampling.stop": [], "probe_sampling.stop": []}
"""Settings that came later, by their last two names, and the value with which everything is as it was before them: with
it they are no part of an identity, so that runs of earlier versions continue."""

Dtype = Literal["float32", "bfloat16"]
Split = Literal["dev", "test"]
Remat = Literal["none", "full", "attention"]
AttentionSetting = Literal["auto", "xla", "splash", "cudnn"]
DecodeKernel = Literal["xla", "pallas"]
SamplingWeights = Literal["", "int8"]
Unreadable = Literal["leave_out", "equal_text"]
GRPOLossType = Literal["sum", "seq-mean-token-sum", "grpo", "dr_grpo", "dapo", "bnpo", "cispo"]
ScaleRewards = Literal["none", "group", "batch"]
DPOLossType = Literal["sigmoid", "sigmoid_norm", "ipo", "simpo"]
DPONormalizer = Literal["pairs", "prompts"]
Tokens = Literal["generated", "prefilled", "scored", "trained", "tokens"]
Measure = Literal[Tokens, "flops", "seconds", "device_seconds", "verifier_cpu_seconds"]

NotNegativeFloat = Annotated[float, Bounds(least=0, below=math.inf)]

# Of servers that are asked: beyond these a run would hang, or take all connections of this machine, and not say why.
Timeout = Annotated[float, Bounds(above=0, most=86_400, why="seconds, a day at most, after which a server is given up")]
Retries = Annotated[int, Bounds(least=0, most=100, why="further attempts of one request")]
Concurrency = Annotated[int, Bounds(least=1, most=4096, why="each request under way takes a thread and a connection")]

# Texts that may name a file or folder: places.py makes them absolute.
FilePath = Annotated[str, Place("path")]
ModelPath = Annotated[str, Place("model")]
ProblemsPath = Annotated[str, Place("problems")]
Policy = Annotated[str, Place("policy")]
Policies = Annotated[tuple[str, ...], Place("policy")]
Rollouts = Annotated[str, Place("rollouts")]
Preferences = Annotated[str, Place("preferences")]


def _check_warmup(optimizer: Optimizer, steps: int) -> None:
    """Refuse a learning rate that would only rise; a stage of no steps has none."""
    if steps and optimizer.warmup_steps >= steps:
        raise FieldError(
            "optimizer.warmup_steps",
            f"({optimizer.warmup_steps}) must be less than the number of updates ({steps}): lower it or train longer",
        )


# Sections outside the stages


class Source(Section):
    """A source of problems. path: a file, "hub:owner/name", "math500" …, or "procedural:slips".

    split: "train", "dev" or "test" by id hash, "" for all. fields: our field name -> the file's.
    """

    path: ProblemsPath = ""
    revision: str | None = None  # pins data of the hub: a commit, branch or tag
    split: Literal["", "train", "dev", "test"] = ""
    limit: Positive | None = None  # the first so many
    fields: Mapping[str, str] = field(default_factory=dict)
    on_error: Literal["raise", "skip"] = "raise"


class Model(Section):
    """The model that a run starts from."""

    path: ModelPath = ""  # a Hugging Face folder or hub id; "" starts from random parameters of the shape below
    revision: str | None = None
    family: str = "qwen2"
    hidden_size: int = 96
    num_hidden_layers: int = 3
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 24
    intermediate_size: int = 256
    tie_word_embeddings: bool = True
    rope_theta: float = 10_000.0
    init_std: float = 0.02

    def check(self) -> None:
        """Refuse a spread of random parameters that is none."""
        if not 0 < self.init_std < math.inf:
            raise FieldError("init_std", f"must be positive, got {self.init_std}")


class Lora(Section):
    """Low-rank adapters beside the model's linear layers; only they are trained."""

    rank: NotNegative = 0  # 0: none, all parameters are trained
    alpha: float = 16.0  # their product is scaled by alpha / rank
    rslora: bool = False  # by alpha / sqrt(rank) instead
    dropout: float = 0.0  # of what the adapters read, in train steps only; in [0, 1)
    targets: tuple[str, ...] = ("all-linear",)  # or some of q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, …
    base_dtype: Dtype = "float32"  # of the parameters that are not trained: "bfloat16" halves their memory
    quantise: str = ""  # of them the blocks' linear layers: "int8" or "nf4" (extra quant)

    def check(self) -> None:
        """Refuse what belongs to adapters where there are none."""
        if not self.rank and self.dropout:
            raise FieldError("dropout", "is of adapters, and lora.rank is 0: set lora.rank too, or leave dropout at 0")
        if not self.rank and self.quantise:
            raise FieldError("quantise", "is of what stands beside adapters: set lora.rank too, of a recipe lora=RANK")


class Tokenizer(Section):
    """The tokenizer and its templates."""

    path: ModelPath = ""  # "" is the model's own
    revision: str | None = None
    chat: bool | None = None  # unset: the chat template if the tokenizer has one
    prompt_template: str = "plain"  # "plain", "paper", or any text with {problem}
    system: str | None = None  # unset: no system block; "default": what the template inserts
    date: str | None = None  # unset: the fixed date of data/template.py
    enable_thinking: bool | None = None


class Data(Section):
    """The problems of the task "main". A split without a path has no problems."""

    train: Source = Source()
    dev: Source = Source()
    test: Source = Source()
    seed: int = 0
    max_prompt_length: Positive = 256
    weight: NotNegativeFloat = 1.0  # of these problems, beside those of `tasks`


class RewardModel(Section):
    """A model that scores responses."""

    path: ModelPath = ""  # a Hugging Face folder or hub id with a scalar head
    revision: str | None = None
    tokenizer: ModelPath = ""  # "" is the reward model's own
    max_length: Positive = 4096  # tokens of prompt and response; longer ones are unscorable, never cut
    batch_tokens: Positive = 16_384  # of one forward pass, over all devices
    dtype: Dtype = "bfloat16"


class Judge(Section):
    """A language model behind an OpenAI-style endpoint that scores responses."""

    url: str = ""  # the endpoint's base, as in "http://localhost:8000/v1"
    model: str = ""
    api_key_env: str = "OPENAI_API_KEY"  # the environment variable that holds the key
    prompt: str = ""  # text with {prompt}, {response} and, if wanted, {answer}; "" is the built-in rubric
    pattern: str = r"\[\[(-?\d+(?:\.\d+)?)\]\]"  # its last match in the reply, first group, is the reward
    max_tokens: Annotated[int, Bounds(least=1, most=1_048_576, why="tokens of one reply")] = 1024
    timeout: Timeout = 120.0  # seconds of one attempt
    retries: Retries = 5
    concurrency: Concurrency = 16


class Reward(Section):
    """The scoring of responses. function: "verify" (math-verify against the reference answer), "model" (a reward
    model), "judge" (a language model behind an OpenAI-style endpoint), or "package.module:function" (TRL's signature),
    also of a file module.py in `folder`, which is the config file's where nothing else is said.

    answers: how the final answer is read that is verified, and kept beside a function's reward.
    verifiable: rewards know right and wrong; one above correct_above counts as correct. Otherwise they know better and
    worse only: pairs are the best against the worst of a group, and there is no accuracy.
    """

    function: str = "verify"
    folder: FilePath | None = None  # of the file that the function is in, unset: found by `resolve`
    answers: AnswerRule = "boxed"  # "last_line": or "Answer: x"; "hash": "#### x"; "tags": "<answer>x</answer>"
    verifiable: bool | None = None  # unset: all but those of "model" and "judge" are
    correct_above: Annotated[float, Bounds(least=-MOST_REWARD, most=MOST_REWARD, why="no reward is beyond it")] = 0.5
    cpu_seconds: Annotated[
        float, Bounds(above=0, most=3600, why="seconds of one answer; one that hangs the verifier takes them all")
    ] = 5.0
    memory_mb: Annotated[
        int, Bounds(least=512, most=1 << 20, why="MB of one answer, of which sympy itself takes about 300")
    ] = 2048
    workers: Annotated[int, Bounds(least=1, most=1024, why="each is a process of this machine")] = 1
    decimal_places: Annotated[
        int, Bounds(least=1, most=6, why="digits after the point with which a decimal may be another number, rounded")
    ] = 6
    unreadable: Unreadable = "leave_out"  # what becomes of problems whose reference answer "verify" cannot read
    model: RewardModel = RewardModel()
    judge: Judge = Judge()

    @property
    def is_verifiable(self) -> bool:
        """True if its rewards know right and wrong."""
        return self.function not in ("model", "judge") if self.verifiable is None else self.verifiable

    def check(self) -> None:
        """Refuse a kind of rewards that the function does not give, what is not its own, and a model without a name."""
        kind = {"verify": True, "model": False, "judge": False}.get(self.function, self.is_verifiable)
        if self.is_verifiable != kind:
            what = "knows right and wrong" if kind else "knows better and worse only"
            raise FieldError("verifiable", f"is {self.verifiable}, but {self.function!r} {what}: leave it unset")
        if self.answers != "boxed" and self.function in ("model", "judge"):
            raise FieldError(
                "answers", f"is {self.answers!r}, but {self.function!r} reads whole responses: leave it out"
            )
        if self.function != "verify" and self.decimal_places != 6:
            raise FieldError("decimal_places", f"is of the verifier, and function is {self.function!r}: leave it unset")
        if self.function != "verify" and self.unreadable != "leave_out":
            raise FieldError("unreadable", f"is of the verifier, and function is {self.function!r}: leave it unset")
        if self.function == "model" and not self.model.path:
            raise FieldError("model.path", "is not set: give the folder or hub id of a model with a scalar head")


class Task(Section):
    """A task: its problems, its share of every batch, and its reward."""

    train: Source = Source()
    dev: Source = Source()
    test: Source = Source()
    weight: NotNegativeFloat = 1.0
    reward: Reward = Reward()


class Mesh(Section):
    """The device mesh; -1 stands for the remaining devices."""

    data: int = 1
    fsdp: int = -1
    tensor: int = 1


class Compute(Section):
    """Settings of the programs; nothing here changes a result beyond rounding."""

    row_length: NotNegative = 0  # tokens of a packed training row; 0 fits the stage's longest group
    microbatch_tokens: Positive = 16_384  # tokens of one forward and backward pass, over all devices
    remat: Remat = "attention"  # what the backward pass recomputes
    attention: AttentionSetting = "auto"  # its kernel: "xla", "splash" (TPU), "cudnn" (GPU); "auto": the platform's own
    decode_attention: DecodeKernel = "xla"  # "pallas": models/decode_kernel.py, for TPU; compiled only, not run
    offload_optimizer: bool = False  # its state lies in the host's memory but for the update itself
    max_num_seqs: Positive | None = None  # rows decoded together; unset: what memory allows
    chunk: Positive = 16  # decode steps between two checks for finished rows
    prefill_rows: Positive = 32  # prompts of one prefill, at most
    sampling_tensor: NotNegative = 0  # devices that share one copy of the weights in sampling; 0: as few as hold it
    generation_batch_size: Positive = 16_384  # of one call of the sampler, which is written when it is done
    compilation_cache: FilePath | None = None  # a folder; "" is none; unset: JAX's own setting, else the user's
    price_per_device_hour: float | None = None  # in your money: reports then have a column of it


@dataclass(frozen=True)
class Window:
    """A range of updates of a stage, `first` to `last`, numbered from 1 as in its metrics."""

    stage: str
    first: int
    last: int

    def __str__(self) -> str:
        """Return its name as a folder."""
        return f"{self.stage}-{self.first}-{self.last}"


class Engine(Section):
    """What draws responses: the library's own sampler, or an OpenAI-style server as vLLM is one (docs/engines.md).

    sync: how policies get to the server: "none" (it serves the only one that is sampled from), "folder" (vLLM reloads
    its weights from one), or "adapter" (vLLM loads the adapters beside its model).
    """

    kind: Literal["sampler", "server"] = "sampler"
    url: str = ""  # of a server: the base of its API, as in "http://localhost:8000/v1"
    model: str = ""  # the name that the server has for its model; "": the only one that it lists
    sync: Literal["none", "folder", "adapter"] = "none"
    folder: FilePath = ""  # where policies are written for the server, which sees it too; "": WORKDIR/engine
    api_key_env: str = "VLLM_API_KEY"  # the environment variable that holds the key
    timeout: Timeout = 600.0  # seconds of one attempt
    retries: Retries = 5
    concurrency: Concurrency = 64  # requests under way, of each process

    @property
    def is_server(self) -> bool:
        """True if a server samples."""
        return self.kind == "server"


class Logging(Section):
    """Settings of logging."""

    tensorboard: bool = True
    wandb: str | None = None
    trackio: str | None = None
    samples: NotNegative = 8
    every: Positive = 1
    profile: str | None = None  # updates under JAX's profiler, as STAGE:START-STOP

    def services(self, **options: str) -> dict[str, Any]:
        """Return the keywords of a Tracker for the services that a project is named of. options: name, group."""
        projects = {"wandb": self.wandb, "trackio": self.trackio}
        return {service: {"project": project, **options} for service, project in projects.items() if project}

    @property
    def window(self) -> Window | None:
        """The updates to profile. Raises FieldError for text that names none."""
        if self.profile is None:
            return None
        match = re.fullmatch(r"([A-Za-z0-9_-]+):([0-9]{1,9})-([0-9]{1,9})", self.profile)
        if not match or not 1 <= int(match[2]) <= int(match[3]):
            raise FieldError(
                "profile",
                f"is {self.profile!r}: write STAGE:START-STOP with the numbers of the first and the last update to "
                "trace, as in warmup:3-5; the first update of a stage is 1",
            )
        return Window(match[1], int(match[2]), int(match[3]))

    def check(self) -> None:
        """Refuse a window that cannot be read."""
        _ = self.window


class Checkpoint(Section):
    """Checkpoints of a stage in training: one every so many updates, of which the newest are kept."""

    every: Positive = 50
    keep: Positive = 2


class Faults(Section):
    """Limits at which a run gives up."""

    max_skipped: Positive = 5  # updates in a row skipped for a loss or gradient that is not finite: then stop
    # Seconds without a sign of life after which another process counts as lost. JAX itself ends all after 100 seconds
    # and names none.
    peer_timeout: Annotated[float, Bounds(least=5, most=90)] = 60.0
    hang_timeout: Annotated[float, Bounds(least=5)] = 3600.0  # seconds in which no process gets any further: then end


# Sections of stages


class Optimizer(Section):
    """The optimiser, AdamW or Adafactor. schedule: "constant", or "linear" or "cosine" decay over the updates after
    warmup_steps."""

    kind: Literal["adamw", "adafactor"] = "adamw"  # "adafactor" has no use for moment_dtype, b1, b2 and eps
    moment_dtype: Dtype = "float32"  # of AdamW's moments
    learning_rate: Annotated[float, Bounds(least=0, below=math.inf)] = field(default=1e-6, kw_only=False)
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: NotNegative = 0
    min_lr_ratio: Share = 0.0  # what a decay ends at, of the learning rate
    b1: Annotated[float, Bounds(least=0, below=1)] = 0.9
    b2: Annotated[float, Bounds(least=0, below=1)] = 0.999
    eps: NotNegativeFloat = 1e-8
    weight_decay: NotNegativeFloat = 0.0
    max_grad_norm: float = 1.0  # L2 over all parameters; 0: no clipping

    def check(self) -> None:
        """Refuse settings of what the optimiser or schedule does not have."""
        if self.min_lr_ratio and self.schedule == "constant":
            raise FieldError(
                "min_lr_ratio",
                f"is what a linear or cosine schedule ends at, got {self.min_lr_ratio} with schedule='constant'",
            )
        if self.kind == "adafactor" and self.moment_dtype != "float32":
            raise FieldError(
                "moment_dtype", "is of AdamW's moments, and Adafactor has none of that size: leave it at float32"
            )


class Sampling(Section):
    """Settings of sampling: temperature 0 is greedy, top_p 1 and top_k 0 are off."""

    max_new_tokens: Positive = field(default=256, kw_only=False)
    temperature: NotNegativeFloat = 1.0
    top_p: Annotated[float, Bounds(above=0, most=1)] = 1.0
    top_k: NotNegative = 0
    stop: tuple[str, ...] = ()  # texts that end a response, beside the tokenizer's stop tokens

    def check(self) -> None:
        """Refuse stop strings that cannot end a response."""
        try:
            check_stop(self.stop)
        except ValueError as error:
            raise FieldError("stop", str(error).removeprefix("stop ")) from error

    def params(self, stop_ids: tuple[int, ...] = (), **changes: Any) -> SamplingParams:
        """Return the sampler's parameters. stop_ids: tokens that end a response. changes: of the section's fields."""
        return SamplingParams(**{**self.to_dict(), "stop_ids": stop_ids, **changes})


class Probe(Section):
    """Fresh samples of the policy in training, every so many updates (0: none), on the first prompts of a split."""

    every: NotNegative = 0
    prompts: Positive = 64
    num_generations: Positive = 1
    split: Literal["train", "dev", "test"] = "dev"


class Sft(Section):
    """Supervised fine-tuning. data: messages or prompt/completion files, or an embedded task's demonstrations; it has
    to be named."""

    kind: Literal["sft"] = "sft"
    policy: Policy = "init"
    data: Source = Source()
    steps: NotNegative = 2000
    batch_size: Positive = 64
    max_length: Annotated[int, Bounds(least=2)] = 512
    optimizer: Optimizer = Optimizer(learning_rate=2e-5, schedule="cosine", warmup_steps=50)

    def check(self) -> None:
        """Refuse a warm-up longer than the stage."""
        _check_warmup(self.optimizer, self.steps)


class Budget(Section):
    """The cost limit of an online stage with stop="budget"."""

    measure: Measure = "flops"
    amount: float = 0.0


class DPOLoss(Section):
    """The DPO loss, of a stage of either kind."""

    loss_type: DPOLossType = "sigmoid"
    beta: Annotated[float, Bounds(above=0)] = 0.1
    label_smoothing: Annotated[float, Bounds(least=0, below=0.5)] = 0.0
    simpo_gamma: NotNegativeFloat = 0.5  # what beta times the gap per token is to exceed, of "simpo"

    @property
    def compares(self) -> bool:
        """True if the loss compares the policy with a reference."""
        return self.loss_type != "simpo"

    def check(self) -> None:
        """Refuse label smoothing where the loss has none."""
        if self.loss_type == "ipo" and self.label_smoothing:
            raise FieldError("label_smoothing", "belongs to the sigmoid losses; set it to 0 with 'ipo'")


class OnlineDPO(DPOLoss):
    """The DPO loss of an online stage."""

    normalizer: DPONormalizer = "pairs"  # or "prompts": all of the batch, those without a pair too
    nll_coef: NotNegativeFloat = 0.0
    nll_length_normalization: bool = True  # the NLL term is a mean over the chosen response's tokens, not a sum


class DropSolved(Section):
    """A filter of solved prompts. After so many equal rewards in a row a prompt rests so many steps (0: for ever)."""

    after: NotNegative = 0
    revisit: NotNegative = 0


class Difficulty(Section):
    """A filter by difficulty: prompts with a running pass rate outside the window are drawn with chance `outside`."""

    min_pass_rate: float = 0.0
    max_pass_rate: float = 1.0
    outside: Share = 0.1

    @property
    def window(self) -> tuple[float, float]:
        """The lowest and the highest pass rate."""
        return self.min_pass_rate, self.max_pass_rate

    def check(self) -> None:
        """Refuse a window from high to low."""
        if not self.min_pass_rate <= self.max_pass_rate:
            raise ValueError(f"the window of pass rates must go from low to high, got {self.window}")


class Online(Section):
    """Online RL, and the range to offline: every `sync_every` updates the sampling policy becomes the trained one.

    An update trains on a batch of prompts_per_step prompts. At a synchronisation the rollouts of all batches up to the
    next one are drawn at once. keep: the steps K whose checkpoints stay for later stages (the last one always does).
    """

    kind: Literal["online"] = "online"
    policy: Policy = "sft"
    rollouts: Rollouts = "sample"  # or a dump's path: its groups in place of sampled ones
    reward_column: str | None = None  # of a dump, where several columns are rewards
    steps: NotNegative = 20
    keep: tuple[int, ...] = ()
    stop: Literal["steps", "budget"] = "steps"  # "budget" may end it earlier: stages/early_stopping.py
    budget: Budget = Budget()
    prompts_per_step: Positive = 32
    num_generations: Positive = 8
    sampling: Sampling = Sampling()
    sampling_weights: SamplingWeights = ""  # "int8": codes of the linear layers in place of their weights (extra quant)
    stream: str | None = None  # names the order of prompts and the random draws; unset: the stage's own
    sync_every: NotNegative = 1  # updates; 0 is never: offline
    reference_sync: bool = False  # whether the reference becomes the sampling policy at each synchronisation
    num_iterations: Positive = 1  # updates on every batch of rollouts; sync_every must be a multiple
    loss: Literal["grpo", "dpo", "group_dpo"] = "grpo"
    # GRPO
    loss_type: GRPOLossType = "sum"
    scale_rewards: ScaleRewards = "none"
    scale_rewards_eps: Annotated[float, Bounds(above=0)] = 1e-4  # beside the standard deviation
    epsilon: NotNegativeFloat = 0.2
    epsilon_high: NotNegativeFloat | None = None
    beta: NotNegativeFloat = 0.0
    importance_sampling_level: Literal["token", "sequence"] = "token"  # "sequence" is GSPO
    importance_cap: NotNegativeFloat = 0.0  # truncated importance sampling of trainer against sampler; 0: off
    # DPO
    dpo: OnlineDPO = OnlineDPO()
    grpo_coef: NotNegativeFloat = 0.0  # times the GRPO loss, beside "group_dpo"
    # both
    entropy_coef: NotNegativeFloat = 0.0  # times the mean next-token entropy of the responses, which is rewarded
    mask_truncated: bool = False  # leave responses that reached max_new_tokens out of the loss
    overlong_buffer: NotNegative = 0  # tokens before max_new_tokens over which a reward falls linearly by 1 (DAPO)
    dynamic_sampling: NotNegative = 0  # more rounds of prompts, at most, in place of those without a signal
    drop_solved: DropSolved = DropSolved()
    difficulty: Difficulty = Difficulty()
    patience: Positive = 50  # stop after so many steps in a row without any reward signal
    probe: Probe = Probe()
    optimizer: Optimizer = Optimizer(eps=1e-4)

    @property
    def compares(self) -> bool:
        """True if the loss compares the policy with a reference."""
        return bool(self.beta or (self.loss != "grpo" and self.dpo.compares))

    @property
    def has_ratio(self) -> bool:
        """True if the loss weighs tokens by a ratio of policies, as GRPO's does.

        Responses of another policy than the trainer's own then need importance_cap: those of a server, of weights in
        int8, and of a dump with log-probabilities.
        """
        return self.loss == "grpo" or bool(self.grpo_coef)

    @property
    def filters(self) -> bool:
        """True if other prompts take the place of some that are skipped."""
        return bool(self.dynamic_sampling) or self.targeted

    @property
    def targeted(self) -> bool:
        """Whether earlier results decide which prompts are drawn."""
        return bool(self.drop_solved.after) or self.difficulty.window != (0, 1)

    def check(self) -> None:
        """Refuse settings that cannot work together, or that would change nothing."""
        if self.num_generations < 2:
            raise FieldError("num_generations", "must be at least 2: an online stage compares responses of a group")
        if not self.sampling.temperature > 0:
            raise FieldError("sampling.temperature", "must be above 0: greedy responses to a prompt are all the same")
        _check_warmup(self.optimizer, self.steps)
        self._check_windows()
        self._check_stop()
        if self.reference_sync and not self.compares:
            raise ValueError(
                "reference_sync is set, but the loss has no reference: GRPO has one in its KL term only, set beta too; "
                "SimPO has none"
            )
        _check_reward_column(self.reward_column, self.rollouts)
        if self.rollouts != "sample":
            self._check_dump()
        if self.loss == "grpo" and self.grpo_coef:
            raise ValueError('grpo_coef weighs GRPO beside loss="group_dpo"; with loss="grpo" leave it at 0')
        if self.loss == "dpo" and self.grpo_coef:
            raise ValueError(
                'loss="dpo" trains on one pair a prompt, GRPO on all responses: grpo_coef needs "group_dpo"'
            )
        if self.has_ratio:
            self._check_grpo()
            return
        for name, meant in (("beta", "; did you mean dpo.beta?"), ("importance_cap", ""), ("overlong_buffer", "")):
            if getattr(self, name):
                raise FieldError(name, f"is a setting of GRPO, and loss={self.loss!r} has none: leave it at 0{meant}")

    def _check_windows(self) -> None:
        """Refuse settings that do not fit between two synchronisations."""
        if self.sync_every % self.num_iterations:
            raise ValueError(
                f"sync_every is {self.sync_every} updates, so a batch cannot serve num_iterations="
                f"{self.num_iterations} of them: make sync_every a multiple of num_iterations"
            )
        if self.stop != "steps" and self.sync_every != 1:
            raise ValueError(
                f"stop={self.stop!r} weighs step by step, and with sync_every={self.sync_every} the rollouts of later "
                'steps are paid for already: use sync_every=1 or stop="steps"'
            )
        if not self.sync_every and self.targeted:
            raise ValueError(
                "sync_every=0 chooses all prompts before any is seen: drop_solved and difficulty need another one"
            )

    def _check_dump(self) -> None:
        """Refuse settings of sampling where the groups are those of a dump."""
        without = f"rollouts={self.rollouts!r} samples nothing"
        if self.sync_every != self.num_iterations:
            raise ValueError(f"{without}, so no policy is synchronised: set sync_every to num_iterations")
        if self.filters:
            raise ValueError(f"{without} in place of other prompts: leave dynamic_sampling, drop_solved and difficulty")
        for name in ("sampling_weights", "stream"):
            if getattr(self, name):
                raise FieldError(name, f"is set, but {without}: leave it unset")

    def _check_stop(self) -> None:
        """Refuse a budget of nothing."""
        if self.stop == "budget" and not self.budget.amount > 0:
            raise FieldError("budget.amount", f"must be positive, got {self.budget.amount}")

    def _check_grpo(self) -> None:
        """Refuse what GRPO's ratio of policies, or a group's shared forward pass, does not allow."""
        if self.sampling.top_p < 1 or self.sampling.top_k > 0:
            raise ValueError(
                "with a GRPO loss an online stage needs sampling.top_p 1 and top_k 0: it compares the trained policy "
                "with the distribution that was sampled from, which filters would change"
            )
        if self.sampling_weights and not self.importance_cap:
            raise ValueError(
                f"sampling_weights={self.sampling_weights!r} samples from a slightly other policy than GRPO trains: "
                "set importance_cap too, such as 2, which weighs tokens by the ratio of the two, or leave it empty"
            )
        if self.loss == "group_dpo" and self.sampling.temperature != 1:
            raise ValueError("GroupDPO and GRPO share one forward pass at temperature 1: set sampling.temperature to 1")
        if self.overlong_buffer > self.sampling.max_new_tokens:
            raise ValueError("overlong_buffer is a part of sampling.max_new_tokens and cannot be larger")


def _check_reward_column(column: str | None, rollouts: str) -> None:
    if column is not None and rollouts in ("sample", "archive"):
        raise FieldError("reward_column", f"is a column of a dump, and rollouts is {rollouts!r}: leave it unset")


class Collect(Section):
    """Rollouts of a frozen policy, and preference pairs from them.

    rollouts: "sample"; "archive" takes the groups that the policy's own online stage drew; the name of another collect
    stage takes those it has, whatever this one says of prompts and sampling; or a dump's path, see `data.dumps`.
    reward_column: of a dump, where several columns are rewards.
    """

    kind: Literal["collect"] = "collect"
    policy: Policy = "warmup"
    rollouts: Rollouts = "sample"
    reward_column: str | None = None
    prompts: Positive = 1024
    part: Positive = 128  # prompts of a file
    num_generations: Positive = 8
    sampling: Sampling = Sampling()
    sampling_weights: SamplingWeights = ""  # "int8": codes of the linear layers in place of their weights (extra quant)
    stream: str | None = None  # names the order of prompts and the random draws; unset: the stage's own
    pairs_per_prompt: Positive = 4
    min_pass_rate: float = 0.0  # prompts outside this window of pass rates give no pair
    max_pass_rate: float = 1.0
    select: Literal["all", "random", "uncertain", "confident"] = "all"  # which pairs to keep when max_pairs is set
    max_pairs: Positive | None = None  # unset: all pairs

    def check(self) -> None:
        """Refuse settings that cannot work together, or that would change nothing."""
        _check_reward_column(self.reward_column, self.rollouts)
        if self.sampling_weights and self.rollouts != "sample":
            raise ValueError(f"sampling_weights is set, but rollouts={self.rollouts!r} samples nothing: leave it empty")
        if self.select in ("uncertain", "confident") and self.max_pairs is None:
            raise ValueError(f'select={self.select!r} chooses among pairs: set max_pairs to how many, or select="all"')
        if not 0 <= self.min_pass_rate <= self.max_pass_rate <= 1:
            raise ValueError(f"the pass rates {self.min_pass_rate} to {self.max_pass_rate} are no window within 0 to 1")


class Offline(DPOLoss):
    """Offline DPO from a policy on a preference dataset; the reference is the policy it starts from.

    diagnose: measure the pairs under the policy, before and after; its cost is counted apart. The trained policy is the
    same without.
    """

    kind: Literal["offline"] = "offline"
    policy: Policy = "warmup"
    preferences: Preferences = "collect"
    epochs: Positive = 1
    batch_size: Positive = 64
    shuffle: bool = True  # False takes the pairs in the order in which they were collected
    max_length: Positive | None = None  # of prompt and response, of a set without token ids; longer pairs are left out
    probe: Probe = Probe()
    probe_sampling: Sampling = Sampling()
    diagnose: bool = True
    optimizer: Optimizer = Optimizer(eps=1e-4)


class BestCheckpoint(Section):
    """The best of a policy's kept checkpoints by its reward on held-out problems; a policy's name like any other.

    steps: which of the kept ones, () for all. length_normalise: a mean reward that is no accuracy is divided by
    the mean length.
    """

    kind: Literal["best_checkpoint"] = "best_checkpoint"
    policy: Policy = "train"
    steps: tuple[int, ...] = ()
    num_generations: Positive = 1
    sampling: Sampling = Sampling(temperature=0.6, top_p=0.9)
    length_normalise: bool = True


class Evaluate(Section):
    """Accuracy of policies on held-out problems."""

    kind: Literal["evaluate"] = "evaluate"
    policies: Policies = ("sft", "warmup", "dpo")
    split: Split = "test"  # which of data.dev and data.test
    num_generations: Positive = 4
    sampling: Sampling = Sampling()
    pass_at: tuple[int, ...] = (1, 2, 4)
    greedy: bool = True

    def check(self) -> None:
        """Refuse an evaluation of nothing."""
        if not self.policies:
            raise FieldError("policies", "is empty: name at least one policy")

    @property
    def told_at(self) -> tuple[int, ...]:
        """The k of pass_at that so many answers tell. Of the default some may go; graph.py refuses that of others."""
        return tuple(k for k in self.pass_at if k <= self.num_generations)


Stage: TypeAlias = Sft | Online | Collect | Offline | BestCheckpoint | Evaluate
TrainingStage: TypeAlias = Sft | Online | Offline
SamplingStage: TypeAlias = Online | Collect | BestCheckpoint | Evaluate

STAGES: Mapping[str, type[Stage]] = {kind.kind: kind for kind in get_args(Stage)}
"""The kinds of stages."""

RESERVED = ("init", "sample", "archive", "hf", "run", "main", "reward")
"""Words that mean something else where the name of a stage or a task could stand: policies, rollouts, tasks, and the
function that a run is given from Python."""

P = ParamSpec("P")
StageT = TypeVar("StageT", Sft, Online, Collect, Offline, BestCheckpoint, Evaluate)


# All settings


class Config(Section):
    """The settings of a run. tasks: further tasks of a mixed run, by name. stages: by name, in no order."""

    name: str = "run"
    seed: int = 0
    dtype: Dtype = "float32"  # of activations; parameters are float32
    model: Model = Model()
    lora: Lora = Lora()
    tokenizer: Tokenizer = Tokenizer()
    data: Data = Data()
    reward: Reward = Reward()
    tasks: Mapping[str, Task] = field(default_factory=dict)
    mesh: Mesh = Mesh()
    compute: Compute = Compute()
    engine: Engine = Engine()
    logging: Logging = Logging()
    checkpoint: Checkpoint = Checkpoint()
    faults: Faults = Faults()
    stages: Mapping[str, Stage] = field(default_factory=dict)

    @classmethod
    def of(cls, config: ConfigDict) -> Config:
        """Return the checked settings of a user's config; what makes a study of it (`sweep`) is left out.

        Raises ValueError naming the field, with its full path, or the stage; also for a setting that is gone.
        """
        refuse(config.to_dict())
        tasks = {name: record(Task, task, f"tasks.{name}") for name, task in config.tasks.items()}
        stages = {name: record(STAGES[stage.kind], stage, f"stages.{name}") for name, stage in config.stages.items()}
        return record(cls, config, tasks=tasks, stages=stages)

    @property
    def all_tasks(self) -> dict[str, Task]:
        """Every task by name: "main", of the sections data and reward, and the further ones."""
        data = self.data
        main = Task(train=data.train, dev=data.dev, test=data.test, weight=data.weight, reward=self.reward)
        return {"main": main, **self.tasks}

    def stage(self, name: str, kind: type[StageT]) -> StageT:
        """Return a stage that is known to be of this kind. Raises TypeError otherwise."""
        stage = self.stages[name]
        if not isinstance(stage, kind):
            raise TypeError(f"stages.{name} is of kind {stage.kind}, not {kind.kind}")
        return stage

    def check(self) -> None:
        """Refuse what sections and stages do not allow each other; what stages read of each other is in graph.py."""
        weights = [task.weight for task in self.all_tasks.values()]
        if not sum(weights):
            raise ValueError("data.weight and all tasks.*.weight are 0: one of them must be positive")
        self._check_attention()
        self._check_profile()
        if self.engine.is_server:
            self._check_engine()
        for name, stage in self.stages.items():
            if isinstance(stage, Online) and self.tasks and stage.filters:
                raise ValueError(
                    f"stages.{name}: dynamic_sampling, drop_solved and difficulty put other prompts, of whatever task, "
                    "in place of those they skip, and so change the ratio of the tasks of a mixed run: leave them off"
                )

    def _check_attention(self) -> None:
        """Refuse cuDNN where it cannot serve on any devices; models/kernels.py says the rest."""
        if self.compute.attention == "cudnn" and self.dtype == "float32":
            raise ValueError(
                "compute.attention is 'cudnn', which computes in bfloat16 only: set dtype to bfloat16, or auto"
            )

    def _check_engine(self) -> None:
        """Refuse what a server cannot do: to follow a policy update by update, or to hold several without sync."""
        drawn: set[str] = set()
        for name, stage in self.stages.items():
            try:
                _check_served(stage)
            except ValueError as error:
                raise ValueError(f"stages.{name}: with engine.kind='server' {error}") from error
            if isinstance(stage, Sft) or (isinstance(stage, Collect) and stage.rollouts != "sample"):
                continue
            if isinstance(stage, Evaluate):
                drawn |= {*stage.policies}
            elif isinstance(stage, Collect):
                drawn.add(stage.policy)
            elif not isinstance(stage, Offline) or stage.probe.every:
                drawn |= {f"{name}'s", "its later ones"}
        if self.engine.sync == "none" and len(drawn) > 1:
            raise FieldError(
                "engine.sync",
                f"is 'none', so the server holds one policy, and stages sample from {', '.join(sorted(drawn))}: set it "
                "to 'folder' or 'adapter'",
            )
        if self.engine.sync == "adapter" and not self.lora.rank:
            raise FieldError("engine.sync", "is 'adapter', and lora.rank is 0: use 'folder'")

    def _check_profile(self) -> None:
        """Refuse a window of updates that cannot come."""
        if (window := self.logging.window) is None:
            return
        training = [name for name, stage in self.stages.items() if isinstance(stage, TrainingStage)]
        if window.stage not in training:
            raise FieldError(
                "logging.profile",
                f"is {self.logging.profile!r}: the stages with updates are {', '.join(training) or 'none'}",
            )
        steps = getattr(self.stages[window.stage], "steps", None)  # those of an offline stage are known later
        if steps is not None and window.last > steps:
            raise FieldError("logging.profile", f"is {self.logging.profile!r}, but {window.stage} has {steps} updates")


def _check_served(stage: Stage) -> None:
    """Raise ValueError for a stage that needs more of sampling than a server gives."""
    if getattr(stage, "sampling_weights", ""):
        raise ValueError("sampling_weights must be empty: the server says in what form it holds weights")
    if isinstance(stage, Collect) and stage.rollouts == "sample" and stage.select in ("uncertain", "confident"):
        raise ValueError(f"select={stage.select!r} has no token entropies to go by: use all or random")
    if not isinstance(stage, Online):
        return
    if stage.sync_every == 1:
        raise ValueError(
            "sync_every=1 would load weights there for every update: set it to 0 or from 2 on, 10 say, or "
            "engine.kind='sampler'"
        )
    if stage.has_ratio and not stage.importance_cap:
        raise ValueError(
            "a GRPO loss needs importance_cap, 2 say: the server's arithmetic is not the trainer's, and each token is "
            "weighed by the ratio of their probabilities"
        )


# The user's side: what config files are made of


def _parameters_of(section: Callable[P, Section]) -> Callable[[Callable[..., ConfigDict]], Callable[P, Any]]:
    """Give a function the parameters of a section, which editors and notebooks then complete."""

    def decorate(function: Callable[..., ConfigDict]) -> Callable[P, Any]:
        function.__signature__ = inspect.signature(section)  # type: ignore[attr-defined]
        return function

    return decorate


def _changed(section: Section, changes: Mapping[str, Any]) -> ConfigDict:
    config = editable(section)
    return _filled(config, _without_gone(config, changes) if isinstance(section, Stage) else changes)


def _without_gone(stage: ConfigDict, changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the changes of a stage without those of fields that are gone. Raises ValueError for one that was used."""
    kept = {}
    for name, value in changes.items():
        gone = find(f"stages.*.{name}")
        if gone is not None and gone.used(value):
            raise gone.refusal(name, value)
        if gone is None or name in stage:
            kept[name] = value
    return kept


def base() -> ConfigDict:
    """Return the settings that every run has; problems and stages are added by the config file."""
    return editable(Config())


def source(
    path: str,
    split: Literal["", "train", "dev", "test"] = "",
    limit: int | None = None,
    fields: Mapping[str, str] | None = None,
) -> ConfigDict:
    """Return a source of problems: see `Source`. fields: such as {"problem": "question"}, the file's for ours."""
    return editable(Source(path=path, split=split, limit=limit, fields=fields or {}))


@_parameters_of(Reward)
def reward(**changes: Any) -> ConfigDict:
    """Return the scoring of responses: see `Reward`."""
    return _changed(Reward(), changes)


def task(train: ConfigDict, dev: ConfigDict, test: ConfigDict, *, weight: float = 1.0, **changes: Any) -> ConfigDict:
    """Return a further task of a mixed run: its problems, its share of every batch, its own reward (`changes`)."""
    return ConfigDict({"train": train, "dev": dev, "test": test, "weight": weight, "reward": reward(**changes)})


@_parameters_of(Optimizer)
def optimizer(learning_rate: float, **changes: Any) -> ConfigDict:
    """Return an optimiser's settings: see `Optimizer`."""
    return _changed(Optimizer(), {"learning_rate": learning_rate, **changes})


@_parameters_of(Sampling)
def sampling(max_new_tokens: int, **changes: Any) -> ConfigDict:
    """Return settings of sampling: see `Sampling`."""
    return _changed(Sampling(), {"max_new_tokens": max_new_tokens, **changes})


@_parameters_of(Probe)
def probe(**changes: Any) -> ConfigDict:
    """Return the settings of a stage's probes: see `Probe`."""
    return _changed(Probe(), changes)


@_parameters_of(Sft)
def sft(**changes: Any) -> ConfigDict:
    """Return a stage of supervised fine-tuning: see `Sft`."""
    return _changed(Sft(), changes)


@_parameters_of(Online)
def online(**changes: Any) -> ConfigDict:
    """Return a stage of online RL: see `Online`."""
    return _changed(Online(), changes)


@_parameters_of(Collect)
def collect(**changes: Any) -> ConfigDict:
    """Return a stage that collects rollouts and pairs: see `Collect`."""
    return _changed(Collect(), changes)


@_parameters_of(Offline)
def offline(**changes: Any) -> ConfigDict:
    """Return a stage of offline DPO: see `Offline`."""
    return _changed(Offline(), changes)


@_parameters_of(BestCheckpoint)
def best_checkpoint(**changes: Any) -> ConfigDict:
    """Return a stage that chooses the best checkpoint: see `BestCheckpoint`."""
    return _changed(BestCheckpoint(), changes)


@_parameters_of(Evaluate)
def evaluate(**changes: Any) -> ConfigDict:
    """Return a stage that evaluates policies: see `Evaluate`."""
    return _changed(Evaluate(), changes)


def sweep(**changes: Any) -> ConfigDict:
    """Return a study: the config under many overrides. seeds: () keeps the config's own. Fill `arms` with `arm(…)`.

    folder: what the paths in arms are relative to; reading a config file sets it, "" is the working directory.
    """
    return _filled(ConfigDict({"seeds": (), "arms": {}, "folder": ""}), changes)


def arm(**changes: Any) -> ConfigDict:
    """Return points of a study that vary alike, written as overrides of the config.

    fixed: for all of them ("stages.dpo.beta=0.5"). product: every combination of "field=value,value,…"; a value with
    commas stands in brackets. zip: fields that go together, value by value. stages: those the points keep, () for all.
    """
    return _filled(ConfigDict({"fixed": (), "product": (), "zip": (), "stages": ()}), changes)


def _filled(config: ConfigDict, changes: Mapping[str, Any]) -> ConfigDict:
    config.lock()
    for name, value in changes.items():
        setattr(config, name, value)
    return config
