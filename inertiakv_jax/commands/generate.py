"""``inertiakv generate``: continue one prompt."""

import dataclasses
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from tyro.conf import Positional, UseAppendAction, arg

from inertiakv_jax.commands.devices import (
    CoordinatorOption,
    MeshOption,
    NumberOption,
    mesh_of,
)
from inertiakv_jax.commands.terminal import console, plain_table

if TYPE_CHECKING:  # heavy, and not needed for --help
    from inertiakv_jax.generation import GenerationOutput
    from inertiakv_jax.language_model import LanguageModel
    from inertiakv_jax.policies import Policy
    from inertiakv_jax.sampling import Sampling

DESCRIPTION = """Continue a prompt, or answer it.

A model with a chat template answers, unless --raw is given. The text goes to standard output, what
it cost to standard error.

Examples:
  inertiakv generate "Why is the sky blue?" --policy full
  inertiakv generate "What does it say about storms?" --file log.txt --ratio 0.8
  cat report.txt | inertiakv generate - --raw --policy lazy4 --tokens 512 --stream
"""
STDIN = "-"
FEW_TOKENS = 32
"""A prompt of which a ratio leaves fewer is worth a word: hardly any question is among them."""


@dataclasses.dataclass(frozen=True)
class Generate:
    """Options of ``inertiakv generate``."""

    prompt: Positional[str] = ""
    """The prompt; - reads it from standard input."""
    file: Annotated[Path | None, arg(metavar="PATH", help_behavior_hint="")] = None
    """Text that the prompt is about, put before it with a blank line between, or the whole prompt
    if there is no other; - is standard input."""
    raw: bool = False
    """Continue the text as it is, without the chat template."""
    model: str = "smollm2-135m"
    """Catalogue name, hub id, folder with config.json, or .gguf file."""
    dtype: str = "float32"
    """float32 or bfloat16."""
    mesh: MeshOption = None
    """Devices that share the work, like data=4,model=2: rows over data, heads over model."""
    coordinator: CoordinatorOption = None
    """Of several processes with one mesh, all started with this command: where the first one
    listens, which prints; auto on TPU pods and under Slurm."""
    num_processes: NumberOption = None
    """Processes with that mesh."""
    process_id: NumberOption = None
    """Which of them this is, from 0."""

    policy: str = "inertiakv"
    """A method (full, inertiakv, lazy4, score-free, tova, h2o, snapkv, ...), with options behind
    commas if wanted (inertiakv,decay=0.5,retention=per_layer), A+B, or a .yaml file."""
    ratio: Annotated[float | None, arg(metavar="FLOAT", help_behavior_hint="(default: 0.9)")] = None
    """Fraction of the prompt's cache removed, in [0, 1)."""
    tokens: Annotated[int | None, arg(metavar="INT", help_behavior_hint="")] = None
    """Tokens that the cache keeps, instead of --ratio."""
    protect_first: Annotated[int | None, arg(metavar="INT", help_behavior_hint="")] = None
    """Tokens at the beginning that are never evicted."""
    protect_recent: Annotated[int | None, arg(metavar="INT", help_behavior_hint="")] = None
    """Latest tokens that are never evicted."""
    alpha: Annotated[float | None, arg(metavar="FLOAT", help_behavior_hint="")] = None
    """Coefficient of the moving average, in [0, 1); higher forgets slower. The paper's is 0.8."""

    implementation: Annotated[str | None, arg(metavar="{xla,tpu,gpu}", help_behavior_hint="")] = (
        None
    )
    """Of the kernels that decode: plain JAX, or those for TPUs or NVIDIA GPUs. Default: the best
    for the device."""

    max_new_tokens: int = 128
    """Tokens to generate, at most."""
    stop: UseAppendAction[tuple[str, ...]] = ()
    """A text that ends the answer and is not part of it."""
    temperature: float = 0.0
    """0 takes the most likely token; above, tokens are drawn."""
    top_k: int = 0
    """Draw from the k most likely tokens; 0: from all."""
    top_p: float = 1.0
    """Draw from the fewest tokens that have this probability together, in (0, 1]."""
    min_p: float = 0.0
    """Draw from tokens at least this fraction as likely as the likeliest, in [0, 1]."""
    seed: int = 0
    """Of the draws."""

    stream: bool = False
    """Print the text as it is decoded."""
    json: bool = False
    """Print one JSON object with text, tokens and statistics instead."""

    def run(self) -> None:
        """Generate and print."""
        if self.stream and self.json:
            raise ValueError("--stream and --json cannot be combined: JSON is one object")
        policy, sampling = self._policy(), self._sampling()
        text = read_prompt(self.prompt, self.file)
        import jax

        from inertiakv_jax import distributed
        from inertiakv_jax.attention import check_implementation
        from inertiakv_jax.weights.load import load

        distributed.join(self.coordinator, self.num_processes, self.process_id)
        check_implementation(self.implementation, platform=jax.devices()[0].platform)
        mesh = mesh_of(self.mesh, batch=1)
        prints = jax.process_index() == 0
        log = console() if prints and not self.json else None
        if log is not None:
            log.print(f"Loading {self.model}")
        lm = distributed.together(lambda: load(self.model, dtype=self.dtype, mesh=mesh))
        ids = self._encode(lm, text)
        if log is not None:
            log.print("\n".join(notes(lm, len(ids), policy)), soft_wrap=True)
        output = self._generate(lm, ids, policy, sampling, stream=self.stream and prints)
        if not prints:
            return
        if self.json:
            result = summary(output, lm, policy)
            sys.stdout.write(json.dumps(result, ensure_ascii=False) + "\n")
        else:
            if not self.stream:
                sys.stdout.write(output.texts[0])
            sys.stdout.write("\n")
            sys.stdout.flush()
            print_statistics(output, policy)

    def _policy(self) -> "Policy":
        from inertiakv_jax import policies

        names = ("tokens", "alpha", "protect_first", "protect_recent")
        options = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        return policies.by_name(self.policy, ratio=self.ratio, **options)

    def _sampling(self) -> "Sampling | None":
        from inertiakv_jax.sampling import Sampling

        filters = {"top_k": self.top_k, "top_p": self.top_p, "min_p": self.min_p}
        if self.temperature != 0.0:
            return Sampling(self.temperature, **filters)
        Sampling(**filters)  # refuses what is out of range
        set_ones = [f"--{k.replace('_', '-')}" for k, v in filters.items() if v != _default(k)]
        if set_ones:
            raise ValueError(f"{', '.join(set_ones)} needs --temperature above 0, got 0 (greedy)")
        return None

    def _encode(self, lm: "LanguageModel", text: str) -> list[int]:
        from inertiakv_jax.text import encode_prompts

        chat = bool(lm.tokenizer.chat_template) and not self.raw
        (ids,) = encode_prompts(lm, [[{"role": "user", "content": text}] if chat else text])
        return ids

    def _generate(
        self,
        lm: "LanguageModel",
        ids: list[int],
        policy: "Policy",
        sampling: "Sampling | None",
        *,
        stream: bool,
    ) -> "GenerationOutput":
        from inertiakv_jax import generation

        chunks = generation.stream(
            lm,
            [ids],
            policy=policy,
            max_new_tokens=self.max_new_tokens,
            sampling=sampling,
            seed=self.seed,
            stop=self.stop,
            implementation=self.implementation,
        )
        while True:
            try:
                (new,) = next(chunks)
            except StopIteration as end:
                return end.value
            if stream:
                sys.stdout.write(new)
                sys.stdout.flush()


def notes(lm: "LanguageModel", length: int, policy: "Policy") -> list[str]:
    """What to know before a prompt is read: how long it may take, and how little a ratio leaves."""
    found = [f"Reading {length:,} tokens; the first run of a shape compiles"]
    by_ratio = [part for part in (policy, policy.prefill) if part is not None and part.ratio]
    kept = min((int(part.budgets([length], lm.model)[0]) for part in by_ratio), default=None)
    if kept is not None and kept < FEW_TOKENS:
        found.append(
            f"Keeps {kept} of the prompt's {length:,} tokens: a ratio is meant for long "
            "prompts. Give a lower --ratio, or a number with POLICY,tokens=N"
        )
    return found


def _default(field: str) -> Any:
    return Generate.__dataclass_fields__[field].default


def read_prompt(prompt: str, file: Path | None) -> str:
    """The prompt's text, from where the user says it is.

    Raises:
      ValueError: there is none, it is empty or no UTF-8, or standard input is named twice.
    """
    parts = []
    if file is not None:
        if str(file) == STDIN == prompt:
            raise ValueError("standard input (-) can be the file or the prompt, not both")
        parts.append(_read_stdin() if str(file) == STDIN else _read_file(file))
    elif not prompt:
        raise ValueError("the prompt is empty: give a text, --file PATH, or - for standard input")
    if prompt:
        parts.append(_read_stdin() if prompt == STDIN else prompt)
    text = "\n\n".join(part.strip("\n") for part in parts) if len(parts) > 1 else parts[0]
    if not text.strip():
        raise ValueError("the prompt is empty")
    try:
        text.encode()
    except UnicodeEncodeError as error:  # the shell handed over bytes that are no UTF-8
        raise ValueError(f"the prompt is not valid UTF-8: {error}") from error
    return text


def _read_stdin() -> str:
    if sys.stdin is None:  # closed by the caller (<&-)
        raise ValueError("standard input is closed")
    return _decoded(sys.stdin.buffer.read(), "standard input")


def _read_file(path: Path) -> str:
    try:
        return _decoded(path.read_bytes(), str(path))
    except OSError as error:
        raise ValueError(f"cannot read --file {path}: {error.strerror}") from error


def _decoded(content: bytes, source: str) -> str:
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{source} is not valid UTF-8: {error}") from error


def summary(output: "GenerationOutput", lm: "LanguageModel", policy: "Policy") -> dict[str, Any]:
    """What ``--json`` prints: the one row's text, tokens and statistics."""
    stats = dataclasses.asdict(output.stats)
    return {
        "model": lm.name,
        "dtype": str(lm.model.dtype),
        "policy": dataclasses.asdict(policy),
        "text": output.texts[0],
        "tokens": output.tokens[0],
        "stats": {key: v[0] if isinstance(v, tuple) else v for key, v in stats.items()},
    }


def print_statistics(output: "GenerationOutput", policy: "Policy") -> None:
    """Print what the run cost, on standard error."""
    stats = output.stats
    rate = stats.decode_tokens_per_s
    table = plain_table(show_header=False)
    table.add_column(style="dim")
    table.add_column(justify="right")
    table.add_column(style="dim")
    for row in (
        ("policy", policy.name, ""),
        ("prompt", f"{stats.prompt_tokens[0]:,}", "tokens"),
        ("new", f"{stats.new_tokens[0]:,}", "tokens"),
        ("kept", f"{stats.kept_tokens[0]:,}", f"tokens, {stats.evicted[0]:,} evicted"),
        ("KV cache", f"{stats.kv_bytes_kept / 2**20:.1f}", "MiB held"),
        ("full cache", f"{stats.kv_bytes_full / 2**20:.1f}", "MiB for the same text"),
        ("prefill", f"{stats.prefill_s:.2f}", "s, compilation included"),
        ("decode", f"{rate:.1f}" if rate else "-", "tokens/s" if rate else "too short to time"),
    ):
        table.add_row(*row)
    console().print(table)
