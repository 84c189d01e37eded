# SPDX-License-Identifier: Apache-2.0
"""The command line of `kvcore generate`, read and checked before anything is done."""

import argparse
from pathlib import Path

import attrs
import torch

from kvcore import Config
from kvcore.cli.arguments import parse
from kvcore_runtime.attention.visibility import FULL, STATE, Visibility
from kvcore_runtime.cache.layer_groups import make_groups
from kvcore_runtime.engine.drafts import PromptLookup
from kvcore_runtime.engine.engine import EngineOptions
from kvcore_runtime.errors import KvcoreRuntimeError
from kvcore_runtime.generate.options import DEFAULTS, NEUTRAL, TINY, make_parser
from kvcore_runtime.generate.prompts import Prompt, read_prompts
from kvcore_runtime.model.sampling import Sampling


@attrs.frozen(kw_only=True)
class Arguments:
    """A checked call: everything but the model.

    visibilities: of the tiny model's layers, () for full attention. directory: where blocks are
    stored, or None.
    """

    prompts: list[Prompt]
    config: Config
    options: EngineOptions
    model: str
    visibilities: tuple[Visibility, ...]
    directory: Path | None
    device: torch.device
    threads: int
    verify: bool
    require_all: bool
    picture: Path | None
    as_json: bool


class WrongCall(KvcoreRuntimeError):
    """The command line cannot be executed."""


def read_arguments(argv: list[str]) -> Arguments:
    """Parse and check a command line and its prompts; argparse exits with 2 by itself.

    Raises KvcoreError or KvcoreRuntimeError.
    """
    given = parse(make_parser(), argv)
    if given.tiny and given.model not in (None, "tiny"):
        raise WrongCall(f"--tiny with --model {given.model}: --tiny stands for the tiny model")
    preset = TINY if given.tiny else DEFAULTS
    if given.require_all is None:
        given.require_all = given.tiny and _is_as_preset(given)
    for name, value in preset.items():
        if getattr(given, name) is None:
            setattr(given, name, value)
    if given.prompts is None:
        raise WrongCall("--prompts FILE is needed (or --tiny, which brings its own)")
    defaults = Sampling(
        temperature=given.temperature,
        top_k=given.top_k,
        top_p=given.top_p,
        seed=given.seed,
        max_tokens=given.max_tokens,
    )
    if given.picture is not None:
        _check_picture(given.picture)
    if given.threads < 1:
        raise WrongCall(f"--threads {given.threads}: expected 1 or more")
    device = _read_device(given.device)
    visibilities = _read_visibilities(given)
    options = EngineOptions(
        backend=given.backend,
        token_budget=given.token_budget,
        preemption=given.preempt,
        drafter=PromptLookup(num_drafts=given.drafts) if given.drafts else None,
        guard=given.guard,
        keep_logits=given.verify and given.model == "tiny",
    )
    return Arguments(
        prompts=read_prompts(given.prompts, defaults),
        config=_read_config(given, visibilities),
        options=options,
        model=given.model,
        visibilities=visibilities,
        directory=given.directory,
        device=device,
        threads=given.threads,
        verify=given.verify,
        require_all=given.require_all,
        picture=given.picture,
        as_json=given.json,
    )


def _is_as_preset(given: argparse.Namespace) -> bool:
    """Tell whether no given option changes the effect of a preset's prompts on its pool."""
    plain = vars(make_parser().parse_args([]))
    return all(getattr(given, name) == plain[name] for name in plain if name not in NEUTRAL)


def _read_visibilities(given: argparse.Namespace) -> tuple[Visibility, ...]:
    if given.states:
        if given.model != "tiny":
            raise WrongCall(f"--states: {given.model} has no states, --model tiny may")
        if given.directory:
            raise WrongCall("--states with --directory: not for states yet")
    if given.hash_block_size is not None and given.directory is not None:
        raise WrongCall("--hash-block-size with --directory: files keep whole blocks")
    kinds = [FULL, *([STATE] if given.states else [])]
    if given.window is not None:
        if given.model != "tiny":
            reason = f"{given.model} has no windows, --model tiny may"
            raise WrongCall(f"--window {given.window}: {reason}")
        kinds.append(Visibility(kind="sliding_window", window=given.window))
    return tuple(kinds * 2) if len(kinds) > 1 else ()


def _read_config(given: argparse.Namespace, visibilities: tuple[Visibility, ...]) -> Config:
    return Config(
        given.blocks,
        groups=make_groups(visibilities or (FULL,), given.block_size, given.drafts),
        hash_block_size=given.hash_block_size,
        num_host_blocks=given.host_blocks,
        # The most that a window holds: itself and one step's tokens.
        max_num_batched_tokens=given.token_budget,
        max_in_flight=given.max_in_flight,
        publish=given.publish,
    )


def _check_picture(path: Path) -> None:
    if path.is_dir():
        raise WrongCall(f"--picture {path}: that is a directory")
    if path.suffix.lower() != ".png":
        raise WrongCall(f"--picture {path}: expected a name that ends in .png")
    if not path.absolute().parent.is_dir():
        raise WrongCall(f"--picture {path}: there is no such directory")


def _read_device(name: str) -> torch.device:
    try:
        device = torch.device(name)
    except RuntimeError:
        raise WrongCall(f"--device {name}: torch knows no such device") from None
    if device.type not in ("cpu", "cuda"):
        raise WrongCall(f"--device {name}: expected cpu or cuda")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise WrongCall(f"--device {name}: torch finds no CUDA device here")
    return device
