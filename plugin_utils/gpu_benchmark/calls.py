"""What benchmark_plan, benchmark_record and benchmark_report do; without Ansible, to be tested alone.

Each takes validated parameters and a Context and returns what the task returns. `tell` holds lines for the terminal.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gpu_control import records, whole_file

from . import before, nodes, results, runs, settings, variants, verdict
from . import plan as planning
from . import report as reports

PRIVATE = "benchmark-variants"


@dataclass(frozen=True)
class Context:
    """`temporary`: a private folder that lives as long as the play. `now`: seconds since 1970. `overriding`: variables
    of the command line, which go before what a play sets. `host`: whose results they are; `node`: the task's own host
    ('': the same). `begun` and `here`: the play's hosts, and those that have not dropped out."""

    repository: Path
    temporary: Path
    host: str
    now: float
    clock: planning.Clock
    check_mode: bool = False
    overriding: Mapping[str, Any] = field(default_factory=dict)
    node: str = ""
    begun: tuple[str, ...] = ()
    here: tuple[str, ...] = ()

    @property
    def own(self) -> str:
        return self.node or self.host

    @property
    def follows(self) -> bool:
        """Whether the host only has a part of another one's server."""
        return self.own != self.host

    @property
    def session(self) -> str:
        return self.temporary.name


def this_clock() -> planning.Clock:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        boot = ""
    return planning.Clock(boot=boot, monotonic=time.monotonic())


_RAW = {"type": "raw"}
PLAN: dict[str, dict[str, Any]] = {
    "state": {"type": "str", "choices": ["begin", "next"], "default": "begin"},
    "host": {"type": "str", "default": ""},
    # Judged one by one in settings.read, whose sentences name the variable.
    **{one.name: _RAW for one in settings.SETTINGS},
    "speculation": {"type": "dict", "default": {}},
    "drafter": {"type": "str", "default": ""},
    "arguments": {"type": "dict", "default": {}},
    "environment": {"type": "dict", "default": {}},
    "nccl_profile": {"type": "str", "default": "latency"},
    "asked": {"type": "dict", "default": {}},
    "nodes": {"type": "raw", "default": []},
    "nodes_of_others": {"type": "dict", "default": {}},
    "known_variables": {"type": "list", "elements": "str", "default": []},
    "variable_names": {"type": "list", "elements": "str", "default": []},
}
RECORD: dict[str, dict[str, Any]] = {
    "run": {"type": "str", "required": True},
    "host": {"type": "str", "default": ""},
    "round": {"type": "int", "required": True},
    "variant": {"type": "str", "required": True},
    "cell": {"type": "str", "default": ""},
    "repeat": {"type": "int", "default": 1},
    "measurement": {"type": "dict"},
    "server": {"type": "dict", "default": {}},
    "failures": {"type": "list", "elements": "dict"},
}
REPORT: dict[str, dict[str, Any]] = {
    "run": {"type": "str", "default": runs.LATEST},
    "compare_to": {"type": "str", "default": ""},
}
BEFORE: dict[str, dict[str, Any]] = {
    "run": {"type": "str", "required": True},
    "state": {"type": "str", "choices": ["noted", "given_back"], "default": "noted"},
    "servers": {"type": "list", "elements": "str", "default": []},
}
SPECIFICATIONS = {
    "benchmark_plan": PLAN,
    "benchmark_record": RECORD,
    "benchmark_report": REPORT,
    "benchmark_before": BEFORE,
}


def _refused(problems: list[str]) -> dict[str, Any]:
    return {"failed": True, "refused": True, "msg": "Nothing was done. " + " ".join(problems)}


# benchmark_plan


def plan(parameters: Mapping[str, Any], context: Context) -> dict[str, Any]:
    try:
        return _begin(parameters, context) if parameters["state"] == "begin" else _next(parameters, context)
    except runs.RunError as error:
        return _refused([str(error)])
    except OSError as error:
        return _refused([f"{error.filename or runs.root()} can't be used: {error.strerror}."])


def _begin(parameters: Mapping[str, Any], context: Context) -> dict[str, Any]:
    given = {one.name: parameters[one.name] for one in settings.SETTINGS if parameters.get(one.name) is not None}
    problems = settings.unknown(parameters["variable_names"], parameters["known_variables"])
    chosen, more = settings.read(given)
    problems += more + _of_the_play(parameters["asked"], context.overriding)
    shared = parameters["nodes"]
    problems += nodes.problems(shared, context.own, parameters["nodes_of_others"], context.here, context.begun)
    if problems:
        return _refused(problems)

    earlier = _earlier(chosen["run"], context)
    if earlier is not None:
        chosen, problems = _as_before(chosen, set(given), earlier)
    problems += settings.too_few_rounds(chosen)
    server = variants.Server(
        speculation=parameters["speculation"],
        drafter=parameters["drafter"],
        arguments=parameters["arguments"],
        environment={str(key): value for key, value in parameters["environment"].items()},
        nccl_profile=parameters["nccl_profile"],
    )
    made, more = variants.expand(chosen, server)
    cells, more_cells = variants.cells(chosen, context.repository)
    problems += more + more_cells + _overridden(made, context.overriding)
    if chosen["compare_to"]:
        chosen["compare_to"], more = _compared(chosen, context.temporary / "benchmark-compared.json")
        problems += more
    over = {"nodes": list(shared)} if len(shared) > 1 else {}
    if not problems and earlier is not None:
        problems = _differences(earlier, made, cells, list(over.get("nodes", [])), parameters["asked"])
    if problems:
        return _refused(problems)

    one = _plan(chosen, made, cells)
    answer = {
        "variants": [variant.name for variant in made],
        "servers": [{"variant": variant.name, "variables": variant.variables()} for variant in made],
        "cells": [cell.as_dict() for cell in cells],
        "steps": len(made) * one.rounds,
        "rounds": one.rounds,
        "max_rounds": one.max_rounds,
        "afterwards": chosen["afterwards"],
        "settings": chosen,
    }
    loads = f"{len(cells)} load{'s' if len(cells) > 1 else ''}"
    what = f"{len(made)} variants ({', '.join(answer['variants'])}) at {loads}, {one.rounds} rounds or more"
    if context.check_mode:
        return {**answer, "run": "", "folder": "", "resumed": False, "changed": True, "msg": f"Would measure {what}."}
    run, resumed = runs.begin(chosen["run"], context.now, reserve=context.temporary / "benchmark-run")
    content = {
        "settings": chosen,
        "variants": [runs.masking.mask_value(variant.as_dict()) for variant in made],
        "cells": [cell.as_dict() for cell in cells],
        "asked": dict(parameters["asked"]),
        **over,
    }
    verb = "Resuming" if resumed and earlier is not None else "Measuring"
    run.write_plan(context.own, content, part=context.follows)
    _keep_private(context, run, made)
    if over:
        what += f", one server over {', '.join(shared)}"
    return {
        **answer,
        "run": run.name,
        "folder": str(run.folder),
        "resumed": resumed,
        "changed": True,
        "msg": f"{verb} {what}; run {run.name}.",
        "tell": _tell(context, f"{what}; run {run.name} in {run.folder}"),
    }


def _tell(context: Context, line: str) -> list[str]:
    """For the terminal; of a server over several hosts one of them speaks."""
    return [] if context.follows else [f"  {context.host}: {line}"]


def _plan(chosen: Mapping[str, Any], made: list[variants.Variant], cells: list[variants.Cell]) -> planning.Plan:
    return planning.Plan(
        variants=tuple(made),
        cells=tuple(cells),
        repeats=chosen["repeats_per_start"],
        rounds=chosen["rounds"],
        max_rounds=chosen["max_rounds"],
        seed=chosen["seed"],
    )


def _earlier(name: str, context: Context) -> dict[str, Any] | None:
    """The host's plan in a run that is to be resumed."""
    if not name:
        return None
    try:
        return runs.existing(name).plan(context.own, part=context.follows)
    except runs.RunError:
        if name == runs.LATEST:
            raise
        return None


def _as_before(chosen: dict[str, Any], given: set[str], earlier: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The run's own settings where none are given now; those that say what is measured must be the same."""
    problems = []
    kept = {name: value for name, value in earlier.get("settings", {}).items() if name in settings.BY_NAME}
    result = {**chosen, **{name: value for name, value in kept.items() if name not in given and name != "run"}}
    for name in settings.SHAPE:
        before = earlier.get("settings", {}).get(name, chosen[name])
        if name in given and chosen[name] != before:
            problems.append(
                f"benchmark_{name} is {json.dumps(chosen[name], default=str)} and was "
                f"{json.dumps(before, default=str)} when run {chosen['run']} began; leave it out, or begin a new run."
            )
        result[name] = before
    return result, problems


def _compared(chosen: Mapping[str, Any], note: Path) -> tuple[str, list[str]]:
    """The earlier run by a name that still means the same when this one is the latest: noted before the first host of
    the play has made it so. RunError."""
    if chosen["compare_to"] == runs.LATEST and (noted := runs.read(note)):
        return str(noted), []
    earlier = runs.existing(chosen["compare_to"])
    if chosen["run"] and earlier.folder == (runs.root() / chosen["run"]).resolve():
        return "", [f"benchmark_compare_to: {earlier.name} is the run that is resumed; name another one."]
    name = earlier.name if earlier.folder.parent == runs.root().resolve() else str(earlier.folder)
    if chosen["compare_to"] == runs.LATEST:
        runs.write(note, name)
    return name, []


def _of_the_play(asked: Mapping[str, Any], overriding: Mapping[str, Any]) -> list[str]:
    """What of the roles' variables is no such variable, or would go before what the play sets for each measurement."""
    found = []
    known = [f"serving_benchmark_{name}" for name in (*settings.ASKED, "sample_seconds", "timeout")]
    for name in sorted({*asked, *overriding}):
        if name in settings.EACH_TIME:
            if name in overriding:
                found.append(f"{name} is given on the command line and would be that of every load; say it in "
                             f"{settings.EACH_TIME[name]}.")  # fmt: skip
        elif name in overriding and name in ("nccl_env_path", "server_launch_environment_file"):
            found.append(f"{name} is given on the command line, where the benchmark would write its NCCL profiles over "
                         "that of the server that ran before, or start without them; leave it out.")  # fmt: skip
        elif name.startswith("serving_benchmark_") and name not in known:
            near = difflib.get_close_matches(name, [*known, *settings.EACH_TIME], 1, 0.6)
            cure = f"did you mean {near[0]}?" if near else f"there are {', '.join(known)}."
            found.append(f"{name}: there is no such variable; {cure}")
    return found


def _differences(
    earlier: Mapping[str, Any],
    made: list[variants.Variant],
    cells: list[variants.Cell],
    shared: list[str],
    asked: Mapping[str, Any],
) -> list[str]:
    """Where the host's variables now make other variants than when the run began."""
    if shared != earlier.get("nodes", []):
        hosts = ", ".join(earlier.get("nodes", [])) or "this host alone"
        return [f"The server ran over {hosts} when the run began; put sglang_nodes back, or begin a new run."]
    before = {one["name"]: one for one in earlier.get("variants", [])}
    for variant in made:
        now = runs.masking.mask_value(variant.as_dict())
        was = before.get(variant.name)
        if was is None or json.loads(json.dumps(now, default=str)) != was:
            what = [key for key in now if was is None or json.loads(json.dumps(now[key], default=str)) != was.get(key)]
            return [
                f"The variant {variant.name} differs from what the run began with ({', '.join(what)}); put the host's "
                "variables back, or begin a new run."
            ]
    if cells != [variants.cell_from(one) for one in earlier.get("cells", [])]:
        return ["The prompts or loads differ from what the run began with; put them back, or begin a new run."]
    asked_before = earlier.get("asked", {})
    for name in (f"serving_benchmark_{one}" for one in settings.ASKED):
        here, there = asked.get(name), asked_before.get(name)
        if here != there:
            return [
                f"{name} is {json.dumps(here)} and was {json.dumps(there)} when the run began (null: not given); put "
                "it back, or begin a new run."
            ]
    return []


def _overridden(made: list[variants.Variant], overriding: Mapping[str, Any]) -> list[str]:
    """A variable of the command line goes before what makes the variants differ: all would be the same server."""
    found = []
    for name, value in overriding.items():
        for one in made:
            wanted = one.variables().get(name)
            if name == "sglang_drafter_path" and not one.speculates:
                continue
            if name in one.variables() and json.loads(json.dumps(wanted, default=str)) != value:
                found.append(
                    f"{name} is given on the command line, where it would go before what each variant sets; write it "
                    "into the inventory, or say it in benchmark_variants, benchmark_drafters, benchmark_nccl_profiles "
                    "or benchmark_max_running_requests."
                )
                break
    return found


def _keep_private(context: Context, run: runs.Run, made: list[variants.Variant]) -> None:
    """The variants with their secrets, for as long as the play lives."""
    text = json.dumps([one.as_dict() for one in made], default=str)
    whole_file.write(_private_path(context, run), text, 0o600)


def _private_path(context: Context, run: runs.Run) -> Path:
    word = hashlib.sha256(f"{run.name}\0{context.own}".encode()).hexdigest()[:16]
    return context.temporary / f"{PRIVATE}-{word}.json"


def _next(parameters: Mapping[str, Any], context: Context) -> dict[str, Any]:
    nothing = {"changed": False, "step": {}, "progress": ""}
    if context.check_mode:
        return {**nothing, "done": True, "reason": "Check mode: nothing is measured.", "msg": "Nothing is measured."}
    if not parameters.get("run"):
        return _refused(["benchmark_plan with state: next needs run, the name that state: begin returned."])
    run = runs.existing(str(parameters["run"]))
    shared = parameters["nodes"]
    if gone := nodes.lost(shared, context.here):
        reason = (
            f"{gone}{nodes.SHARED} dropped out of this play (failed, or can't be reached): set that right, then "
            f"-e benchmark_run={run.name} goes on."
        )
        return {**nothing, "done": True, "reason": reason, "msg": reason, "tell": _tell(context, reason)}
    kept = run.plan(context.host)
    try:
        private = json.loads(_private_path(context, run).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        private = None
    if kept is None or private is None:
        return _refused([f"benchmark_plan with state: begin comes first, in the same play, for {context.host}."])
    made = [variants.variant_from(one) for one in private]
    cells = {one["name"]: variants.cell_from(one) for one in kept["cells"]}
    one = _plan(kept["settings"], made, list(cells.values()))
    measured = run.measurements(context.host)
    following = planning.following(
        one,
        {each.key for each in measured},
        run.failures(context.host),
        context.session,
        lambda rounds: _undecided(one, measured, kept["settings"], rounds),
    )
    progress = planning.closed(run.progress(context.host), context.clock)
    if isinstance(following, planning.Done):
        if not context.follows:
            run.write_progress(context.host, progress)
        return {
            **nothing, "done": True, "reason": following.reason, "msg": following.reason,
            "tell": _tell(context, following.reason),
        }  # fmt: skip
    left = planning.seconds_left(progress, following)
    if not context.follows:
        run.write_progress(context.host, planning.opened(progress, following, context.clock))
    line = planning.progress_line(following, left)
    variant = one.variant(following.variant)
    return {
        "changed": False,
        "done": False,
        "reason": "",
        "progress": line,
        "msg": line,
        "tell": _tell(context, line),
        "step": {
            "number": following.number,
            "of": following.of,
            "round": following.round,
            "variant": following.variant,
            "seconds_left": left,
            "variables": variant.variables(),
            "speculates": variant.speculates,
            "measure": [
                {**cells[cell].as_dict(), "cell": cell, "repeat": repeat} for _, _, cell, repeat in following.missing
            ],
        },
    }


def _undecided(
    one: planning.Plan, measured: list[runs.Measurement], chosen: Mapping[str, Any], rounds: int
) -> list[str]:
    """The variants whose outcome is open after so many rounds."""
    rules = verdict.rules_of(chosen)
    return list(verdict.judge(one.variants, one.cells, measured, rules, up_to_round=rounds).open_variants)


# benchmark_record


def record(parameters: Mapping[str, Any], context: Context) -> dict[str, Any]:
    try:
        run = runs.existing(parameters["run"])
        kept = run.plan(context.host)
        if kept is None:
            return _refused([f"Run {run.name} has no plan for {context.host}; benchmark_plan comes first."])
        known = [one["name"] for one in kept["variants"]]
        if parameters["variant"] not in known:
            return _refused([f"Run {run.name} has no variant {parameters['variant']}; it has {', '.join(known)}."])
        if bool(parameters.get("measurement")) == bool(parameters.get("failures")):
            return _refused(["benchmark_record needs one of measurement and failures."])
        if context.check_mode:
            return {"changed": True, "path": "", "usable": True, "msg": "Would be recorded."}
        if parameters.get("failures"):
            return _record_failure(run, parameters, context)
        return _record_measurement(run, kept, parameters, context)
    except runs.RunError as error:
        return _refused([str(error)])
    except OSError as error:
        return {"failed": True, "msg": f"The record could not be written to {error.filename}: {error.strerror}."}


def _record_failure(run: runs.Run, parameters: Mapping[str, Any], context: Context) -> dict[str, Any]:
    masked = runs.masking.mask_value(nodes.failure(parameters["failures"]))
    texts = {key: str(masked[key]) for key in ("cause", "cure", "phase", "evidence_line", "log") if masked.get(key)}
    if gone := nodes.lost((run.plan(context.host) or {}).get("nodes", []), context.here):
        texts["cause"] = f"{texts.get('cause', '')} Also, {gone} failed or can't be reached any more.".strip()
    failure = runs.Failure(
        variant=parameters["variant"],
        round=parameters["round"],
        session=context.session,
        when=records.timestamp(context.now),
        **{"cause": "The cause is not known.", **texts},
    )
    path = run.write_failure(context.host, failure)
    line = f"{failure.variant} failed in round {failure.round}: {failure.cause}"
    return {"changed": True, "path": str(path), "usable": False, "msg": line, "tell": [f"  {context.host}: {line}"]}


def _record_measurement(
    run: runs.Run, kept: Mapping[str, Any], parameters: Mapping[str, Any], context: Context
) -> dict[str, Any]:
    cells = [one["name"] for one in kept["cells"]]
    if parameters["cell"] not in cells:
        return _refused([f"Run {run.name} has no load {parameters['cell']!r}; it has {', '.join(cells)}."])
    data = _without_odd_numbers(dict(parameters["measurement"]))
    problem = unusable(data)
    measurement = runs.Measurement(
        variant=parameters["variant"],
        round=parameters["round"],
        cell=parameters["cell"],
        repeat=parameters["repeat"],
        data={**data, **runs.masked_server({key: data[key] for key in ("command", "environment") if key in data})},
        server=runs.masked_server(parameters["server"]),
        session=context.session,
    )
    if problem:
        failure = {**parameters, "failures": [{"cause": f"At {parameters['cell']}: {problem}", "phase": "measure"}]}
        return {**_record_failure(run, failure, context), "usable": False}
    path = run.write_measurement(context.host, measurement)
    line = _measured_line(measurement)
    return {"changed": True, "path": str(path), "usable": True, "msg": line, "tell": [f"  {context.host}: {line}"]}


def unusable(data: Mapping[str, Any]) -> str:
    """Why nothing can be concluded from a measurement, '' where it can."""
    if data.get("schema") != 1:
        return f"the measurement has schema {data.get('schema')!r}, and 1 is known."
    requested, completed = data.get("requested") or 0, data.get("completed") or 0
    failed = data.get("failed_requests") or 0
    if not completed:
        return f"none of {requested} requests completed."
    if failed * 20 > requested:
        return f"{failed} of {requested} requests failed."
    speed = data.get("output_tokens_per_s")
    if not isinstance(speed, (int, float)) or not math.isfinite(speed) or speed <= 0:
        why = (data.get("not_measured") or {}).get("output_tokens_per_s", "it is missing")
        return f"the output tokens per second can't be told: {why}."
    return ""


def _without_odd_numbers(value: Any) -> Any:
    """Infinity and NaN, which JSON lacks, become null."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {str(key): _without_odd_numbers(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_without_odd_numbers(item) for item in value]
    return value


def _measured_line(one: runs.Measurement) -> str:
    accept = one.data.get("accept_length")
    part = f", accept length {accept:.2f}" if isinstance(accept, (int, float)) else ""
    return (
        f"{one.variant}, round {one.round}, concurrency {one.data.get('concurrency')}: "
        f"{one.data['output_tokens_per_s']:.1f} tokens/s{part}"
    )


# benchmark_report


def report(parameters: Mapping[str, Any], context: Context) -> dict[str, Any]:
    try:
        run = runs.existing(parameters["run"])
        kept = [run.plan(host) or {} for host in run.hosts()]
        wanted = [one.get("settings", {}).get("compare_to") for one in kept]
        name = parameters["compare_to"] or next((one for one in wanted if one), "")
        earlier = runs.existing(name) if name else None
        troubles: list[str] = []
        if context.check_mode:
            data = results.build(run, earlier, context.now)
        else:
            data, troubles = reports.write(run, earlier, context.now)
    except runs.RunError as error:
        return _refused([str(error)])
    except OSError as error:
        return {"failed": True, "msg": f"The report could not be written to {error.filename}: {error.strerror}."}
    path = run.folder / "report.html"
    verdicts = {
        one["host"]: {
            key: one["verdict"][key]
            for key in ("kind", "sentence", "variant", "steps", "up_to_concurrency", "more_repeats")
        }
        for one in data["hosts"]
    }
    return {
        "changed": not context.check_mode,
        "folder": str(run.folder),
        "report": "" if context.check_mode else str(path),
        "verdicts": verdicts,
        "warnings": troubles,
        "msg": " ".join(f"{host}: {one['sentence']}" for host, one in verdicts.items()) or "Nothing was measured.",
        "tell": [*reports.terminal(data), *([] if context.check_mode else [f"Report: {path}"])],
    }


def before_it(parameters: Mapping[str, Any], context: Context) -> dict[str, Any]:
    try:
        return before.call(parameters, runs.existing(parameters["run"]), context.host, context.check_mode)
    except runs.RunError as error:
        return _refused([str(error)])
    except OSError as error:
        return {"failed": True, "msg": f"What ran before could not be noted in {error.filename}: {error.strerror}."}


Call = Callable[[Mapping[str, Any], Context], dict[str, Any]]
CALLS: dict[str, Call] = {
    "benchmark_plan": plan,
    "benchmark_record": record,
    "benchmark_report": report,
    "benchmark_before": before_it,
}
