"""A benchmark's variants, its run's folder and what is measured next; without a host."""

from __future__ import annotations

import ast
import json
import stat
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from gpu_benchmark import calls, nodes, plan, runs, settings, variants

ROOT = Path(__file__).resolve().parent.parent.parent
KIMI = {
    "algorithm": "EAGLE3",
    "num_steps": 3,
    "eagle_topk": 1,
    "num_draft_tokens": 4,
    "draft_attention_backend": "triton",
}


def sharegpt(folder: Path, count: int = 80, name: str = "prompts.json") -> str:
    turns = [
        {"conversations": [{"from": "human", "value": f"question {n}"}, {"from": "gpt", "value": "answer"}]}
        for n in range(count)
    ]
    (folder / name).write_text(json.dumps(turns))
    return str(folder / name)


@pytest.fixture
def bench(tmp_path, monkeypatch):
    """A call of benchmark_plan in a folder of its own; each `play` is a new one."""
    monkeypatch.setenv("GPU_ARTIFACTS", str(tmp_path / "artifacts"))
    return Bench(tmp_path)


class Bench:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.prompts = sharegpt(folder)
        self.now, self.seconds, self.plays = 1.8e9, 0.0, 0
        self.new_play()

    def new_play(self) -> None:
        self.plays += 1
        self.temporary = self.folder / f"play{self.plays}"
        self.temporary.mkdir()

    def call(
        self, name: str = "benchmark_plan", host: str = "a", overriding=None, check_mode=False, here=("a", "b"), **given
    ):
        spec = calls.SPECIFICATIONS[name]
        if name == "benchmark_plan":
            given = {"speculation": KIMI, "drafter": "/models/drafter", "prompts": [self.prompts], **given}
        parameters = {option: given.get(option, facts.get("default")) for option, facts in spec.items()}
        context = calls.Context(
            repository=ROOT, temporary=self.temporary, host=nodes.head(parameters.get("nodes"), host), now=self.now,
            clock=plan.Clock("boot", self.seconds), check_mode=check_mode, overriding=overriding or {},
            node=host if name == "benchmark_plan" else "", begun=("a", "b"), here=here,
        )  # fmt: skip
        return calls.CALLS[name](parameters, context)

    def measure(self, run: str, step: dict, host: str = "a", speed: float = 100.0, **data) -> None:
        for one in step["measure"]:
            measured = {"schema": 1, "requested": 16, "completed": 16, "failed_requests": 0, "concurrency": 1,
                        "output_tokens_per_s": speed, **data}  # fmt: skip
            kept = self.call("benchmark_record", host, run=run, round=step["round"], variant=step["variant"],
                             cell=one["cell"], repeat=one["repeat"], measurement=measured, server={})  # fmt: skip
            assert not kept.get("failed"), kept

    def fail(self, run: str, step: dict, cause: str = "It ran out of memory.") -> None:
        self.call("benchmark_record", run=run, round=step["round"], variant=step["variant"], cell="", repeat=1,
                  failures=[{"cause": cause, "phase": "health"}], server={})  # fmt: skip

    def next(self, run: str, host: str = "a") -> dict:
        return self.call(state="next", run=run, host=host)


# Variants


def test_the_defaults_are_the_table_of_the_original_host():
    made, problems = variants.expand(settings.read({})[0], variants.Server(KIMI, "/models/drafter"))
    assert problems == []
    shown = [(v.name, v.reference, *(v.speculation.get(key) for key in ("num_steps", "eagle_topk", "num_draft_tokens")))
             for v in made]  # fmt: skip
    assert shown == [
        ("baseline", "", None, None, None),
        ("eagle3-1-step", "baseline", 1, 1, 2),
        ("eagle3-2-step", "baseline", 2, 1, 3),
        ("eagle3-3-step", "baseline", 3, 1, 4),
    ]
    assert {v.speculation.get("draft_attention_backend") for v in made} == {None, "triton"}


def test_every_variant_gets_the_same_max_running_requests():
    server = variants.Server(KIMI, "/d", arguments={"tp_size": 8, "max-running-requests": 64})
    for given, expected in (({}, 64), ({"concurrencies": [1, 100]}, 100), ({"max_running_requests": 16}, 16)):
        made, problems = variants.expand(settings.read(given)[0], server)
        assert problems == [] and {v.arguments["max_running_requests"] for v in made} == {expected}
    made, _ = variants.expand(settings.read({})[0], variants.Server(KIMI, "/d"))
    assert {v.arguments["max_running_requests"] for v in made} == {48}


def test_drafters_profiles_and_adaptive_speculation_multiply():
    given = {"drafters": ["/m/one", "/m/two"], "nccl_profiles": ["latency", "plain"], "steps": [2], "adaptive": True}
    made, problems = variants.expand(settings.read(given)[0], variants.Server(KIMI, ""))
    assert problems == []
    assert [(v.name, v.reference) for v in made if v.nccl_profile == "plain"] == [
        ("baseline-plain", "baseline-latency"),
        ("eagle3-one-2-step-plain", "baseline-plain"),
        ("eagle3-one-adaptive-plain", "baseline-plain"),
        ("eagle3-two-2-step-plain", "baseline-plain"),
        ("eagle3-two-adaptive-plain", "baseline-plain"),
    ]
    adaptive = next(v for v in made if v.name == "eagle3-two-adaptive-latency")
    assert adaptive.speculation["adaptive"] is True and "num_steps" not in adaptive.speculation
    assert adaptive.steps is None


def test_variants_of_ones_own_say_only_what_differs():
    own = [{"name": "plain"}, {"name": "two", "steps": 2, "arguments": {"disable_overlap_schedule": True}},
           {"name": "bare", "arguments": {"tp_size": None}, "environment": {"A": "2"}}]  # fmt: skip
    server = variants.Server(KIMI, "/d", {"tp_size": 8}, {"A": "1"})
    made, problems = variants.expand(settings.read({"variants": own})[0], server)
    assert problems == []
    assert made[1].arguments == {"tp_size": 8, "max_running_requests": 48, "disable_overlap_schedule": True}
    assert made[1].speculation["num_draft_tokens"] == 3 and made[1].drafter == "/d"
    assert (made[2].arguments, made[2].environment) == ({"max_running_requests": 48}, {"A": "2"})
    assert [v.reference for v in made] == ["", "plain", "plain"]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"steps": "0"}, "benchmark_steps: 0 is not a whole number from 1 to 16."),
        ({"output_lengths": "0"}, "benchmark_output_lengths: 0 is not a whole number from 4 to 1048576."),
        ({"seed": "a"}, "benchmark_seed: 'a' is not a whole number from 0 to 2147483648."),
        ({"steps": [1.5]}, "benchmark_steps: 1.5 is not a whole number"),
        ({"steps": [2, 2]}, "benchmark_steps: 2 stands there twice"),
        ({"steps": []}, "benchmark_steps: the list is empty"),
        ({"concurrencies": "1, many"}, "benchmark_concurrencies: 'many' is not a whole number"),
        ({"concurrencies": "[1"}, "is no list"),
        ({"concurrencies": {"a": 1}}, "is not a whole number"),
        ({"rounds": 9}, "benchmark_max_rounds: 8 is less than benchmark_rounds, 9"),
        ({"certainty": "95"}, "benchmark_certainty: 95 is not a number from 0.5 to 0.999."),
        ({"smallest_effect": float("nan")}, "benchmark_smallest_effect: nan is not a number"),
        ({"adaptive": "perhaps"}, "benchmark_adaptive: 'perhaps' is neither true nor false."),
        ({"afterwards": "leave"}, "benchmark_afterwards: 'leave' is none of restore, clean"),
        ({"drafter": ""}, "No drafter: benchmark_drafters is empty and sglang_drafter_path is not set"),
        ({"nccl_profiles": ["latncy"]}, "there is no NCCL profile 'latncy'; did you mean latency?"),
        ({"max_running_requests": 8}, "max_running_requests: 8 would keep requests waiting at concurrency 16"),
        ({"num_prompts": 8}, "8 requests never make a concurrency of 16"),
        ({"num_prompts": 500}, "has 80 usable prompts, too few for benchmark_num_prompts (500)"),
        ({"concurrencies": [200]}, "has 80 usable prompts, too few for concurrency 200"),
        ({"prompts": "nowhere.json"}, "nowhere.json can't be read"),
        ({"variable_names": ["benchmark_stepz"]}, "there is no such variable; did you mean benchmark_steps?"),
        ({"variable_names": ["benchmark_xyzzy"]}, "benchmark_xyzzy: there is no such variable; take it out"),
        ({"variants": [{"name": "a"}]}, "a is the only variant"),
        ({"variants": [{"name": "a", "steps": 1}, {"name": "b", "steps": 2}]}, "no variant without speculation"),
        ({"variants": [{"name": "a"}, {"name": "b", "step": 1}]}, "b has no key step; did you mean steps?"),
        ({"variants": [{"name": "a"}, {"name": "b", "steps": "x"}]}, "steps is 'x'"),
        ({"variants": [{"name": "a"}, {"name": "../b"}]}, "needs a name of letters, digits"),
        ({"variants": [{"name": "a"}, {"name": "a", "steps": 1}]}, "two are named a"),
        ({"variants": "baseline"}, "is no variant; give a list of"),
        (
            {"variants": [{"name": "a"}, {"name": "b", "steps": 1}, {"name": "c", "speculation": {"num_steps": 1}}]},
            "b and c are the same variant",
        ),
        (
            {"variants": [{"name": "a"}, {"name": "b", "speculation": {"num_steps": 2, "eagle_topk": 1,
                                                                       "num_draft_tokens": 5}}]},
            "b: num_draft_tokens is 5",
        ),
        ({"variants": [{"name": "a"}, {"name": "b", "speculation": {"algorithm": "EAGEL3"}}]}, "Did you mean EAGLE3?"),
        ({"variants": [{"name": "a"}, {"name": "b", "arguments": {"max_running_requests": 4}, "steps": 1}]},
         "b has max_running_requests 4, the others 48"),
        ({"variants": [{"name": "a"}, {"name": "b", "steps": 1}], "drafters": ["/x"]}, "is given together with"),
        ({"run": "../elsewhere"}, "can't be a folder's name"),
        ({"run": "latest"}, "There is no benchmark run latest"),
        ({"compare_to": "gone"}, "There is no benchmark run gone"),
    ],
    ids=lambda value: str(value)[:50] if isinstance(value, dict) else "",
)  # fmt: skip
def test_what_can_not_be_measured_is_refused_in_a_sentence_and_leaves_no_run(bench, given, words):
    answer = bench.call(**given)
    assert answer["failed"] and words in answer["msg"], answer["msg"]
    assert not list((bench.folder / "artifacts").glob("benchmarks/*/plans"))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "is empty"),
        ("[]", "no usable prompt"),
        ("{", "is no JSON"),
        ('{"conversations": []}', "not a list"),
        ('[{"conversations": [{"from": "human", "value": 7}, {"value": "b"}]}]', "not a text"),
        ('[{"conversations": "hello"}]', "not a list"),
    ],
)
def test_a_prompt_file_that_is_empty_or_malformed_is_refused_by_name(bench, content, words):
    (bench.folder / "odd.json").write_text(content)
    answer = bench.call(prompts=str(bench.folder / "odd.json"))
    assert answer["failed"] and "benchmark_prompts: " in answer["msg"] and "odd.json" in answer["msg"]
    assert words in answer["msg"]


def test_a_variable_of_the_command_line_that_would_make_all_variants_alike_is_refused(bench):
    answer = bench.call(overriding={"sglang_speculation": KIMI})
    assert answer["failed"] and "sglang_speculation is given on the command line" in answer["msg"]
    harmless = {"sglang_drafter_path": "/models/drafter", "nccl_env_profile": "latency", "sglang_port": 1}
    assert not bench.call(overriding=harmless).get("failed")


@pytest.mark.parametrize(
    ("overriding", "words"),
    [
        ({"serving_benchmark_concurrency": 8}, "would be that of every load; say it in benchmark_concurrencies."),
        ({"serving_benchmark_temprature": 1}, "there is no such variable; did you mean serving_benchmark_temperature?"),
        ({"nccl_env_path": "/etc/sglang/nccl.env"}, "over that of the server that ran before"),
        ({"serving_benchmark_temperature": 0.7}, ""),
    ],
    ids=str,
)
def test_a_variable_of_the_command_line_that_would_falsify_every_measurement_is_refused(bench, overriding, words):
    answer = bench.call(overriding=overriding)
    assert bool(answer.get("failed")) == bool(words) and words in answer["msg"]


def test_lists_are_read_from_a_command_line_as_well():
    given = {"steps": "1,2", "concurrencies": "[1, 8]", "drafters": "/a, /b", "output_lengths": 64}
    read, problems = settings.read(given)
    assert problems == [] and {name: read[name] for name in given} == {
        "steps": [1, 2],
        "concurrencies": [1, 8],
        "drafters": ["/a", "/b"],
        "output_lengths": [64],
    }


# The run


def test_the_hosts_of_one_play_share_a_run_and_the_next_play_makes_another(bench):
    first, second = bench.call(host="a"), bench.call(host="b")
    assert first["run"] == second["run"] and runs.existing(first["run"]).hosts() == ["a", "b"]
    bench.new_play()
    third = bench.call(host="a")
    assert third["run"] != first["run"]
    assert runs.existing("latest").name == third["run"]


def test_check_mode_judges_and_writes_nothing(bench):
    answer = bench.call(check_mode=True)
    assert not answer.get("failed") and answer["run"] == ""
    assert not (bench.folder / "artifacts").exists()
    assert bench.call(state="next", check_mode=True)["done"] is True


def test_secrets_of_the_environment_reach_the_play_and_no_file_of_the_run(bench):
    answer = bench.call(environment={"HF_TOKEN": "hf_verysecretvalue123"})
    step = bench.next(answer["run"])["step"]
    assert step["variables"]["sglang_environment"] == {"HF_TOKEN": "hf_verysecretvalue123"}
    command, environment = ["python", "--api-key", "verysecretkey"], {"HF_TOKEN": "hf_verysecretvalue123"}
    bench.measure(answer["run"], step, command=command, environment=environment)
    written = list(Path(answer["folder"]).rglob("*.json"))
    assert len(written) > 3
    assert not any("verysecret" in path.read_text() for path in written)
    private = list(bench.temporary.glob("benchmark-variants-*"))
    assert [stat.S_IMODE(path.stat().st_mode) for path in private] == [0o600]


def test_a_variant_that_is_started_gets_everything_that_the_roles_need(bench):
    answer = bench.call(arguments={"tp_size": 8}, concurrencies=[4, 1], input_lengths=[512])
    while (step := bench.next(answer["run"])["step"])["variant"] != "eagle3-2-step":
        bench.measure(answer["run"], step)
    assert step["variables"] == {
        "sglang_speculation": {"algorithm": "EAGLE3", "draft_attention_backend": "triton", "num_steps": 2,
                               "eagle_topk": 1, "num_draft_tokens": 3},
        "sglang_drafter_path": "/models/drafter",
        "sglang_arguments": {"tp_size": 8, "max_running_requests": 48},
        "sglang_environment": {},
        "nccl_env_profile": "latency",
    }  # fmt: skip
    assert [(one["cell"], one["concurrency"], one["num_prompts"], one["repeat"]) for one in step["measure"]] == [
        (f"c{concurrency}-i512-o256-prompts", concurrency, 16, repeat) for repeat in (1, 2, 3) for concurrency in (1, 4)
    ]
    assert step["measure"][0]["prompts"] == bench.prompts


def test_rounds_are_interleaved_and_no_variant_is_favoured_by_its_place():
    names = [f"v{n}" for n in range(4)]
    orders = [plan.order(names, number, seed=3) for number in range(1, 9)]
    assert all(sorted(one) == names for one in orders)
    for name in names:
        assert Counter(one.index(name) for one in orders) == dict.fromkeys(range(4), 2)
    after = Counter((one[i], one[i + 1]) for one in orders for i in range(3))
    assert max(after.values()) <= 4
    assert orders == [plan.order(names, number, seed=3) for number in range(1, 9)]
    assert plan.order(names, 1, seed=4) != plan.order(names, 1, seed=3) or plan.order(names, 1, seed=5) != orders[0]


def test_a_run_ends_after_its_rounds_with_every_variant_measured_once_in_each(bench):
    run = bench.call(rounds=2, max_rounds=2)["run"]
    seen = []
    while not (answer := bench.next(run))["done"]:
        seen.append((answer["step"]["round"], answer["step"]["variant"]))
        assert (answer["step"]["number"], answer["step"]["of"]) == (len(seen), 8)
        bench.measure(run, answer["step"])
    assert len(set(seen)) == len(seen) == 8 and [one[0] for one in seen] == [1] * 4 + [2] * 4


def test_the_time_left_comes_from_the_steps_so_far(bench):
    run = bench.call(rounds=3)["run"]
    first = bench.next(run)
    assert first["progress"].endswith("round 1; the time left is known after the first step")
    bench.measure(run, first["step"])
    bench.seconds += 120
    second = bench.next(run)
    assert second["progress"] == f"step 2 of 12: {second['step']['variant']}, round 1; about 22 min left"
    bench.seconds -= 500  # after a boot the count begins anew
    bench.measure(run, second["step"])
    assert bench.next(run)["step"]["seconds_left"] == 120 * 10


def test_an_interrupted_start_goes_on_with_what_is_missing(bench):
    run = bench.call()["run"]
    step = bench.next(run)["step"]
    bench.measure(run, {**step, "measure": step["measure"][:2]})
    file = sorted(Path(runs.existing(run).folder, "measurements/a").glob("*.json"))[0]
    file.write_text(file.read_text()[:40])  # cut short, as by a full disk
    bench.new_play()
    assert bench.next(run)["failed"]  # begin comes first
    again = bench.call(run=run, prompts=None)
    assert again["resumed"] and not again.get("failed")
    resumed = bench.next(run)["step"]
    assert (resumed["round"], resumed["variant"]) == (step["round"], step["variant"])
    assert len(resumed["measure"]) == len(step["measure"]) - 1


def test_a_resumed_run_keeps_its_settings_and_refuses_others(bench):
    run = bench.call(concurrencies=[1, 2], steps=[1])["run"]
    bench.new_play()
    assert bench.call(run=run)["settings"]["concurrencies"] == [1, 2]
    assert bench.call(run=run, rounds=5)["rounds"] == 5
    answer = bench.call(run=run, concurrencies=[1, 4])
    assert "benchmark_concurrencies is [1, 4] and was [1, 2] when run" in answer["msg"] and answer["failed"]
    answer = bench.call(run="latest", arguments={"tp_size": 2})
    assert "The variant baseline differs from what the run began with (arguments)" in answer["msg"]


def test_a_resumed_run_goes_on_with_its_rounds_and_its_end_where_none_are_given(bench):
    run = bench.call(rounds=2, max_rounds=3, afterwards="clean", certainty=0.9)["run"]
    bench.new_play()
    answer = bench.call(run=run)
    assert (answer["rounds"], answer["max_rounds"], answer["afterwards"]) == (2, 3, "clean")
    assert answer["settings"]["certainty"] == 0.9
    assert bench.call(run=run, max_rounds=9)["max_rounds"] == 9
    assert "benchmark_max_rounds: 9 is less than benchmark_rounds, 10" in bench.call(run=run, rounds=10)["msg"]


def test_a_run_is_not_resumed_with_other_prompts_of_the_same_number_or_another_way_of_asking(bench):
    run = bench.call(asked={"serving_benchmark_temperature": 0.7, "serving_benchmark_timeout": 60})["run"]
    bench.new_play()
    answer = bench.call(run=run, asked={"serving_benchmark_timeout": 90})
    assert "serving_benchmark_temperature is null and was 0.7 when the run began" in answer["msg"]
    same = {"serving_benchmark_temperature": 0.7}
    assert not bench.call(run=run, asked=same).get("failed")
    Path(bench.prompts).write_text(Path(bench.prompts).read_text().replace("question 7", "another question"))
    assert "The prompts or loads differ from what the run began with" in bench.call(run=run, asked=same)["msg"]


def test_the_latest_run_to_compare_with_is_the_one_before_this(bench):
    before = bench.call()["run"]
    bench.new_play()
    run = bench.call(compare_to="latest")
    assert run["settings"]["compare_to"] == before != run["run"]
    assert bench.call(host="b", compare_to="latest")["settings"]["compare_to"] == before
    bench.new_play()
    assert bench.call(run="latest")["settings"]["compare_to"] == before
    answer = bench.call(run="latest", compare_to="latest")
    assert answer["failed"] and f"{run['run']} is the run that is resumed; name another one." in answer["msg"]


def test_a_variant_that_fails_twice_is_left_out_and_the_rest_goes_on(bench):
    run = bench.call(rounds=3, max_rounds=3)["run"]
    tried = 0
    while not (answer := bench.next(run))["done"]:
        if answer["step"]["variant"] == "eagle3-3-step":
            tried += 1
            bench.fail(run, answer["step"])
        else:
            bench.measure(run, answer["step"])
    assert tried == 2
    kept = runs.existing(run)
    assert Counter(one.variant for one in kept.measurements("a")) == dict.fromkeys(
        ["baseline", "eagle3-1-step", "eagle3-2-step"], 3 * 9
    )
    assert {one.cause for one in kept.failures("a")} == {"It ran out of memory."}


def test_a_failed_baseline_ends_the_run_with_its_cause(bench):
    run = bench.call()["run"]
    while not (answer := bench.next(run))["done"]:
        if answer["step"]["variant"] == "baseline":
            bench.fail(run, answer["step"])
        else:
            bench.measure(run, answer["step"])
    assert answer["reason"] == "baseline, which the others are compared with, failed 2 times: It ran out of memory."


def test_more_rounds_are_made_only_for_what_is_open_and_its_reference():
    names = ["baseline", "one", "two"]
    made = tuple(
        variants.Variant(name, {}, "", "latency", {}, {}, "" if name == "baseline" else "baseline") for name in names
    )
    cell = variants.Cell("c1", 1, 0, 256, "/p", "p", 16)
    one = plan.Plan(made, (cell,), repeats=1, rounds=2, max_rounds=4)
    measured: set[plan.Key] = set()
    open_names = {2: ["two"], 3: []}
    seen = []
    while isinstance(step := plan.following(one, measured, [], "s", lambda rounds: open_names[rounds]), plan.Step):
        seen.append((step.round, step.variant))
        measured.update(step.missing)
    assert sorted(seen[6:]) == [(3, "baseline"), (3, "two")]
    assert step.reason == "Nothing is open after 3 rounds."
    always = plan.following(one, measured, [], "s", lambda rounds: ["one", "two"])
    assert isinstance(always, plan.Step) and (always.round, always.variant) == (3, "one")
    for number in (3, 4):
        measured.update((number, name, "c1", 1) for name in names)
    last = plan.following(one, measured, [], "s", lambda rounds: ["two"])
    assert last == plan.Done("Something is open after 4 rounds, the most that were asked for.")


def test_a_variant_that_failed_earlier_gets_rounds_of_its_own_when_the_run_is_resumed(bench):
    failures = [runs.Failure("one", number, "x", session="before") for number in (1, 2)]
    names = ["baseline", "one", "two"]
    made = tuple(
        variants.Variant(name, {}, "", "latency", {}, {}, "" if name == "baseline" else "baseline") for name in names
    )
    cell = variants.Cell("c1", 1, 0, 256, "/p", "p", 16)
    one = plan.Plan(made, (cell,), repeats=1, rounds=2, max_rounds=2)
    measured = {(number, name, "c1", 1) for number in (1, 2) for name in ("baseline", "two")}
    step = plan.following(one, measured, failures, "now", lambda rounds: ["one"])
    assert isinstance(step, plan.Step) and step.round == 3


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ({"completed": 0}, "none of 16 requests completed"),
        ({"failed_requests": 2}, "2 of 16 requests failed"),
        ({"output_tokens_per_s": None, "not_measured": {"output_tokens_per_s": "no clock"}}, "no clock"),
        ({"output_tokens_per_s": float("inf")}, "can't be told"),
        ({"schema": 2}, "schema 2"),
    ],
    ids=str,
)  # fmt: skip
def test_a_measurement_that_tells_nothing_is_kept_as_a_failure(bench, data, words):
    run = bench.call()["run"]
    step = bench.next(run)["step"]
    measured = {"schema": 1, "requested": 16, "completed": 16, "failed_requests": 0, "output_tokens_per_s": 9.0, **data}
    kept = bench.call("benchmark_record", run=run, round=1, variant=step["variant"], cell=step["measure"][0]["cell"],
                      repeat=1, measurement=measured, server={})  # fmt: skip
    assert kept["usable"] is False and words in kept["msg"]
    assert bench.next(run)["step"]["variant"] != step["variant"]


def test_what_is_recorded_for_nothing_that_was_planned_is_refused(bench):
    run = bench.call()["run"]
    base = {"run": run, "round": 1, "variant": "baseline", "cell": "c1-o256-prompts", "repeat": 1, "server": {}}
    measured = {"schema": 1, "requested": 1, "completed": 1, "output_tokens_per_s": 1.0}
    for wrong, words in (
        ({"variant": "other"}, "has no variant other"),
        ({"cell": "c9"}, "has no load 'c9'"),
        ({"run": "gone"}, "There is no benchmark run gone"),
        ({"measurement": None}, "needs one of measurement and failures"),
        ({"failures": [{"cause": "x"}]}, "needs one of measurement and failures"),
    ):
        answer = bench.call("benchmark_record", **{**base, "measurement": measured, **wrong})
        assert answer["failed"] and words in answer["msg"]


# A server over several hosts

PAIR = ["a", "b"]


def test_the_hosts_of_one_server_take_the_same_steps_each_with_its_own_environment_and_the_first_keeps_the_results(
    bench,
):
    given = {"nodes": PAIR, "steps": [1], "rounds": 1, "max_rounds": 1}
    first = bench.call(host="a", environment={"NCCL_SOCKET_IFNAME": "eth0"}, **given)
    second = bench.call(host="b", environment={"NCCL_SOCKET_IFNAME": "eth1"}, **given)
    run = runs.existing(first["run"])
    assert first["run"] == second["run"] and run.hosts() == ["a"] and (run.plan("a") or {})["nodes"] == PAIR
    assert "one server over a, b" in first["tell"][0] and second["tell"] == []
    seen = []
    while True:
        steps = [bench.call(state="next", run=run.name, host=host, nodes=PAIR) for host in PAIR]
        bench.seconds += 60
        if steps[0]["done"]:
            break
        one, other = (each["step"] for each in steps)
        assert all(one[key] == other[key] for key in ("number", "of", "round", "variant", "measure"))
        assert [each["variables"]["sglang_environment"]["NCCL_SOCKET_IFNAME"] for each in (one, other)] == [
            "eth0",
            "eth1",
        ]
        seen.append(one["variant"])
        bench.measure(run.name, one)
    assert sorted(seen) == ["baseline", "eagle3-1-step"] and steps[1]["done"]
    assert [step["seconds"] for step in run.progress("a")["steps"]] == [60.0, 60.0]
    assert run.progress("b") == {} and not list(run.folder.glob("*/b/*"))


def test_a_resumed_run_is_held_against_what_each_host_of_the_server_began_with(bench):
    for host in PAIR:
        run = bench.call(host=host, nodes=PAIR, environment={"A": host})["run"]
    bench.new_play()
    for host in PAIR:
        assert not bench.call(host=host, nodes=PAIR, environment={"A": host}, run=run).get("failed")
    answer = bench.call(host="b", nodes=PAIR, environment={"A": "other"}, run=run)
    assert "The variant baseline differs from what the run began with (environment)" in answer["msg"]
    answer = bench.call(host="a", environment={"A": "a"}, run=run)
    assert "The server ran over a, b when the run began; put sglang_nodes back" in answer["msg"]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"nodes": "a,b"}, "sglang_nodes is 'a,b', not a list of inventory names."),
        ({"nodes": ["b", "c"]}, "sglang_nodes is b, c: give each host of the server once, a among them."),
        ({"nodes": ["a", "a"]}, "give each host of the server once"),
        ({"nodes": ["a", "c"]}, "One server runs over a, c, and this play has not all of them; say --limit a,c."),
        ({"nodes": PAIR, "nodes_of_others": {"a": PAIR, "b": []}}, "sglang_nodes of b differs from that of a (a, b)"),
        ({"nodes": PAIR, "here": ("a",)}, "b, which shares this server, failed or could not be reached"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_hosts_that_can_not_be_measured_as_one_server_are_refused(bench, given, words):
    answer = bench.call(**given)
    assert answer["failed"] and words in answer["msg"], answer["msg"]
    assert not (bench.folder / "artifacts").exists()


def test_where_a_host_of_the_server_drops_out_the_others_stop_and_say_how_to_go_on(bench):
    for host in PAIR:
        run = bench.call(host=host, nodes=PAIR)["run"]
    answer = bench.call(state="next", run=run, nodes=PAIR, here=("a",))
    assert answer["done"] and f"-e benchmark_run={run} goes on" in answer["reason"]
    assert "b, which shares this server, dropped out of this play" in answer["tell"][0]


def test_of_what_the_hosts_of_one_server_say_the_cause_is_kept_with_host_and_rank():
    head = {"node": "a", "rank": 0, "cause": "It failed: b, which shares this server, failed.", "cure": "x"}
    died = {"node": "b", "rank": 1, "cause": "CUDA error.", "phase": "health", "evidence_line": "an illegal access"}
    also = {"node": "c", "rank": 2, "cause": "Connection closed by peer."}
    kept = nodes.failure([head, also, died])
    assert kept == {"cause": "b (node rank 1): CUDA error.", "phase": "health", "evidence_line": "an illegal access"}
    late = {**died, "node": "a", "rank": 0, "cause": "The ranks did not meet.", "seconds": 60.5}
    assert nodes.failure([late, {**died, "seconds": 2}])["cause"] == "b (node rank 1): CUDA error."
    lost = {"node": "a", "rank": 0, "cause": "b, which shares this server, failed or could not be reached."}
    assert nodes.failure([lost])["cause"].startswith("a (node rank 0): b, which shares this server")
    assert nodes.failure([{"node": "", "rank": 0, "seconds": 0, "cause": "Alone."}]) == {"cause": "Alone."}


def test_a_failure_says_which_host_of_the_server_has_dropped_out(bench):
    for host in PAIR:
        run = bench.call(host=host, nodes=PAIR)["run"]
    failure = {"node": "a", "rank": 0, "cause": "The server died."}
    bench.call("benchmark_record", here=("a",), run=run, round=1, variant="baseline", failures=[failure])
    (kept,) = runs.existing(run).failures("a")
    assert kept.cause == "a (node rank 0): The server died. Also, b failed or can't be reached any more."


# Documentation


def documented(name: str) -> dict:
    tree = ast.parse((ROOT / f"library/{name}.py").read_text())
    text = next(ast.literal_eval(node.value) for node in tree.body
                if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "DOCUMENTATION")  # fmt: skip
    return yaml.safe_load(text)["options"]


@pytest.mark.parametrize("name", sorted(calls.SPECIFICATIONS))
def test_the_documentation_of_the_action_modules_says_what_their_options_are(name):
    spec = dict(calls.SPECIFICATIONS[name])
    spec.pop("variable_names", None)  # the action plugin's own
    if name == "benchmark_plan":
        spec.update(settings.specification())
    shown = {
        option: {key: value for key, value in facts.items() if key != "description"}
        for option, facts in documented(name).items()
    }
    assert shown == spec
    if name == "benchmark_plan":
        meanings = {option: " ".join(facts["description"].split()) for option, facts in documented(name).items()}
        assert {one.name: one.meaning for one in settings.SETTINGS}.items() <= meanings.items()
    assert replace(settings.SETTINGS[0], name="x").variable == "benchmark_x"
