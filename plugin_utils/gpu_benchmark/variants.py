"""Which server configurations are compared, and at what load: a matrix from variables, equal in everything else.

Pure functions: nothing is read but the prompt files, nothing is written.
"""

from __future__ import annotations

import difflib
import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from gpu_host import nccl_environment, prompt_set, speculation

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,79}")
KEYS = ("name", "steps", "speculation", "drafter", "nccl_profile", "arguments", "environment")
# What SGLang takes for itself with speculation, and therefore what both sides of a comparison get.
USUAL_MAX_RUNNING_REQUESTS = 48
LIMIT = "max_running_requests"
DEFAULT_ALGORITHM = "EAGLE3"


@dataclass(frozen=True)
class Server:
    """What the host serves by its variables: sglang_speculation, sglang_drafter_path, sglang_arguments,
    sglang_environment and nccl_env_profile."""

    speculation: Mapping[str, Any] = field(default_factory=dict)
    drafter: str = ""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, Any] = field(default_factory=dict)
    nccl_profile: str = "latency"


@dataclass(frozen=True)
class Variant:
    """One configuration. `reference`: the variant that it is compared with, '' for one that others are compared with.
    `arguments` and `environment` are complete, the host's own included."""

    name: str
    speculation: Mapping[str, Any]
    drafter: str
    nccl_profile: str
    arguments: Mapping[str, Any]
    environment: Mapping[str, Any]
    reference: str = ""

    @property
    def speculates(self) -> bool:
        return bool(self.speculation.get("algorithm"))

    @property
    def steps(self) -> int | None:
        """Draft steps, None for a baseline and for adaptive speculation."""
        steps = self.speculation.get("num_steps")
        return steps if isinstance(steps, int) and not self.speculation.get("adaptive") else None

    def variables(self) -> dict[str, Any]:
        """The variables that make the roles start this variant."""
        return {
            "sglang_speculation": dict(self.speculation),
            "sglang_drafter_path": self.drafter,
            "sglang_arguments": dict(self.arguments),
            "sglang_environment": dict(self.environment),
            "nccl_env_profile": self.nccl_profile,
        }

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Cell:
    """One load at which each variant is measured. `input_length` 0: prompts as they are. `prompts`: absolute path on
    the control node, `digest` of what is asked in it."""

    name: str
    concurrency: int
    input_length: int
    output_length: int
    prompts: str
    prompt_set: str
    num_prompts: int
    digest: str = ""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def load(self) -> tuple[str, int, int]:
        """All but the concurrency."""
        return (self.prompt_set, self.input_length, self.output_length)


def variant_from(data: Mapping[str, Any]) -> Variant:
    return Variant(**{key: data[key] for key in Variant.__dataclass_fields__ if key in data})


def cell_from(data: Mapping[str, Any]) -> Cell:
    return Cell(**{key: data[key] for key in Cell.__dataclass_fields__ if key in data})


# Variants


def expand(settings: Mapping[str, Any], server: Server) -> tuple[list[Variant], list[str]]:
    """The variants, references first in each NCCL profile, and what is wrong, one sentence each."""
    limit, problems = _limit(settings, server)
    if settings["variants"]:
        named, more = _given(settings, server)
    else:
        named, more = _matrix(settings, server)
    problems += more
    if problems:
        return [], problems
    arguments = {**speculation.normalized(server.arguments), LIMIT: limit}
    made = [_complete(one, arguments, server) for one in named]
    problems = _unequal_limits(made, limit) + _alike(made) + _judged(made)
    if problems:
        return [], problems
    return _with_references(made)


def _limit(settings: Mapping[str, Any], server: Server) -> tuple[int, list[str]]:
    largest = max(settings["concurrencies"])
    own = speculation.normalized(server.arguments).get(LIMIT)
    chosen = settings["max_running_requests"]
    if chosen and chosen < largest:
        return chosen, [
            f"benchmark_max_running_requests: {chosen} would keep requests waiting at concurrency {largest}; give at "
            f"least {largest}, or leave it out."
        ]
    usual = own if isinstance(own, int) and not isinstance(own, bool) else USUAL_MAX_RUNNING_REQUESTS
    return chosen or max(usual, largest), []


def _common(server: Server) -> dict[str, Any]:
    """The speculation of the host without its counts: algorithm, the drafter's backend and quantization."""
    kept = {key: value for key, value in server.speculation.items() if key not in speculation.COUNTS}
    kept.pop("adaptive", None)
    return {"algorithm": DEFAULT_ALGORITHM, **{key: value for key, value in kept.items() if value not in (None, "")}}


def counted(steps: int) -> dict[str, int]:
    """1-step is 1/1/2, 2-step 2/1/3, 3-step 3/1/4: with topk 1 SGLang drafts steps + 1 tokens, its bonus token one."""
    return {"num_steps": steps, "eagle_topk": 1, "num_draft_tokens": steps + 1}


def _matrix(settings: Mapping[str, Any], server: Server) -> tuple[list[dict[str, Any]], list[str]]:
    drafters = settings["drafters"] or ([server.drafter] if server.drafter else [])
    if not drafters:
        return [], [
            "No drafter: benchmark_drafters is empty and sglang_drafter_path is not set; set one of them to the "
            "drafter's folder on the host."
        ]
    profiles = settings["nccl_profiles"] or [server.nccl_profile]
    common = _common(server)
    word = str(common["algorithm"]).lower()
    made: list[dict[str, Any]] = []
    for profile in profiles:
        tail = f"-{profile}" if len(profiles) > 1 else ""
        made.append({"name": f"baseline{tail}", "nccl_profile": profile})
        for drafter, label in zip(drafters, _labels(drafters), strict=True):
            head = f"{word}-{label}-" if len(drafters) > 1 else f"{word}-"
            each = {"drafter": drafter, "nccl_profile": profile}
            for steps in settings["steps"]:
                made.append({"name": f"{head}{steps}-step{tail}", "speculation": {**common, **counted(steps)}, **each})
            if settings["adaptive"]:
                adaptive = {**common, "adaptive": True}
                made.append({"name": f"{head}adaptive{tail}", "speculation": adaptive, **each})
    return made, _profile_problems(profiles, "benchmark_nccl_profiles")


def _labels(paths: Sequence[str]) -> list[str]:
    """A short name for each folder; a number where two end alike."""
    names = [_word(Path(path).name) or f"unnamed{number}" for number, path in enumerate(paths, 1)]
    return [f"{name}-{number}" if names.count(name) > 1 else name for number, name in enumerate(names, 1)]


def _word(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9._]+", "-", text).strip("-.").lower()


def _profile_problems(names: Sequence[str], variable: str) -> list[str]:
    known = sorted(nccl_environment.PROFILES)
    found = []
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(str(name), known, 1)
            cure = f"did you mean {near[0]}?" if near else f"choose from {', '.join(known)}."
            found.append(f"{variable}: there is no NCCL profile {name!r}; {cure}")
    return found


def _given(settings: Mapping[str, Any], server: Server) -> tuple[list[dict[str, Any]], list[str]]:
    made, problems = [], []
    for number, one in enumerate(settings["variants"], 1):
        name = one.get("name")
        where = f"benchmark_variants: {name if isinstance(name, str) and name else f'variant {number}'}"
        if not isinstance(name, str) or not NAME.fullmatch(name):
            problems.append(
                f"{where} needs a name of letters, digits and . _ -, not {name!r}; it becomes part of file names."
            )
            continue
        wrong = [key for key in one if key not in KEYS]
        if wrong:
            near = difflib.get_close_matches(str(wrong[0]), KEYS, 1)
            cure = f"did you mean {near[0]}?" if near else f"it may have {', '.join(KEYS)}."
            problems.append(f"{where} has no key {wrong[0]}; {cure}")
            continue
        for key in ("speculation", "arguments", "environment"):
            if one.get(key) is not None and not isinstance(one[key], Mapping):
                problems.append(f"{where}: {key} is {one[key]!r}, not a dictionary.")
        chosen, problem = _speculation_of(one, server)
        if problem:
            problems.append(f"{where}: {problem}")
        made.append({**one, "speculation": chosen})
    names = [one["name"] for one in made]
    problems += [f"benchmark_variants: two are named {name}; rename one." for name in sorted(set(names)) if
                 names.count(name) > 1]  # fmt: skip
    profiles = [one["nccl_profile"] for one in made if one.get("nccl_profile")]
    problems += _profile_problems(list(dict.fromkeys(profiles)), "benchmark_variants")
    if settings["nccl_profiles"] or settings["drafters"]:
        problems.append(
            "benchmark_variants is given together with benchmark_drafters or benchmark_nccl_profiles, which make the "
            "default variants; say it in each variant."
        )
    return made, problems


def _speculation_of(one: Mapping[str, Any], server: Server) -> tuple[dict[str, Any], str]:
    given = one.get("speculation") or {}
    steps = one.get("steps")
    if steps is None and not given:
        return {}, ""
    if not isinstance(given, Mapping):
        return {}, ""  # said already
    if steps is not None:
        if not isinstance(steps, int) or isinstance(steps, bool) or not 1 <= steps <= 16:
            return {}, f"steps is {steps!r}, not a whole number from 1 to 16."
        if any(key in given for key in speculation.COUNTS):
            return {}, "steps and the counts of speculation say the same; give one of them."
        return {**_common(server), **given, **counted(steps)}, ""
    number = given.get("num_steps")
    if isinstance(number, int) and not any(given.get(key) for key in ("eagle_topk", "num_draft_tokens")):
        given = {**given, **counted(number)}
    return {**_common(server), **given}, ""


def _complete(one: Mapping[str, Any], arguments: Mapping[str, Any], server: Server) -> Variant:
    chosen = dict(one.get("speculation") or {})
    return Variant(
        name=one["name"],
        speculation=chosen,
        drafter=str(one.get("drafter") or server.drafter) if chosen else "",
        nccl_profile=str(one.get("nccl_profile") or server.nccl_profile),
        arguments=speculation.normalized({**arguments, **(one.get("arguments") or {})}),
        environment=_merged(server.environment, one.get("environment") or {}),
    )


def _merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """`over` over `base`; null takes one away."""
    return {key: value for key, value in {**base, **over}.items() if value is not None}


def _unequal_limits(made: Sequence[Variant], limit: int) -> list[str]:
    return [
        f"benchmark_variants: {one.name} has {LIMIT} {one.arguments.get(LIMIT)}, the others {limit}; set "
        "benchmark_max_running_requests, which holds for all."
        for one in made
        if one.arguments.get(LIMIT) != limit
    ]


def _alike(made: Sequence[Variant]) -> list[str]:
    found = []
    for first, second in itertools.combinations(made, 2):
        if first.variables() == second.variables():
            found.append(
                f"{first.name} and {second.name} are the same variant; change one (speculation, drafter, nccl_profile, "
                "arguments or environment) or take it out."
            )
    return found


def _judged(made: Sequence[Variant]) -> list[str]:
    found = []
    for one in made:
        for finding in speculation.judge(one.speculation, one.arguments, one.drafter):
            if finding.severity == "error":
                found.append(f"{one.name}: {finding.found} {finding.cure}")
    return list(dict.fromkeys(found))


def _with_references(made: Sequence[Variant]) -> tuple[list[Variant], list[str]]:
    """Each is compared with the first variant without speculation of its NCCL profile, or of all."""
    plain = [one for one in made if not one.speculates]
    if not plain:
        return [], ["There is no variant without speculation to compare with; add {name: baseline}."]
    if len(made) < 2:
        return [], [f"{made[0].name} is the only variant; give at least two to compare."]
    first: dict[str, str] = {}
    for one in plain:
        first.setdefault(one.nccl_profile, one.name)
    result = []
    for one in made:
        reference = first.get(one.nccl_profile, plain[0].name)
        if one.name == reference:
            reference = "" if one.name == plain[0].name else plain[0].name
        result.append(Variant(**{**one.__dict__, "reference": reference}))
    return result, []


# Cells


def cells(settings: Mapping[str, Any], repository: Path) -> tuple[list[Cell], list[str]]:
    """The loads, lowest concurrency first, and what is wrong with the prompts, one sentence each."""
    files: list[tuple[Path, prompt_set.PromptSet]] = []
    problems: list[str] = []
    for name in settings["prompts"]:
        path = Path(name).expanduser()
        path = path if path.is_absolute() else repository / path
        try:
            files.append((path, prompt_set.load(str(path))))
        except prompt_set.PromptError as error:
            problems.append(f"benchmark_prompts: {error}")
    if problems:
        return [], problems
    largest, number = max(settings["concurrencies"]), settings["num_prompts"]
    for path, given in files:
        count = len(given.conversations)
        if count < max(largest, number):
            what = f"benchmark_num_prompts ({number})" if number >= largest else f"concurrency {largest}"
            problems.append(
                f"benchmark_prompts: {path} has {count} usable prompts, too few for {what}; give a longer file or a "
                "smaller number."
            )
    if number and number < largest:
        problems.append(
            f"benchmark_num_prompts: {number} requests never make a concurrency of {largest}; give at least {largest}, "
            "or leave it out."
        )
    if problems:
        return [], problems
    labels = _labels([str(path.with_suffix("")) for path, _ in files])
    made = []
    for ((path, given), label), input_length, output_length, concurrency in itertools.product(
        zip(files, labels, strict=True), settings["input_lengths"], settings["output_lengths"],
        sorted(settings["concurrencies"]),
    ):  # fmt: skip
        part = f"-i{input_length}" if input_length else ""
        made.append(
            Cell(
                name=f"c{concurrency}{part}-o{output_length}-{label}",
                concurrency=concurrency,
                input_length=input_length,
                output_length=output_length,
                prompts=str(path),
                prompt_set=label,
                num_prompts=number or min(len(given.conversations), max(16, 4 * concurrency)),
                digest=given.digest,
            )
        )
    return made, []
