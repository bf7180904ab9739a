"""Deployments on a real GPU: the playbooks of a deployment, over a local connection and without systemd.

One server, `deployed`, that each scenario finds as the one before it left it: hence they run in their order (the set
`deploy`). Its models are those of the rehearsal: a target that has learnt a text, a drafter that follows it, and a
drafter that has learnt nothing. That nothing is claimed which was not seen, failures are provoked as well.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from . import procs, servers, wheels
from .play import Played, Running, play
from .scenarios import holders, holders_by_gpu, scenario
from .session import REPOSITORY, Session

NAME = "deployed"
# What the tracker calls it, and its mark: two sessions on one machine must not take each other's.
TRACKED = f"{NAME}-{os.getpid()}"
PORT = 29000
SPECULATION = {"algorithm": "EAGLE3", "num_steps": 3, "eagle_topk": 1, "num_draft_tokens": 4}
ARGUMENTS: dict[str, Any] = {
    "attention_backend": "triton",
    "sampling_backend": "pytorch",
    "grammar_backend": "none",
    "mem_fraction_static": 0.2,
    "max_total_tokens": 16384,
    "max_running_requests": 4,
    "chunked_prefill_size": 512,
    "cuda_graph_max_bs_decode": 4,
    "disable_custom_all_reduce": True,
    "enable_metrics": True,
}
# What a machine sets so that its CUDA is found; a deployed server gets nothing that is not named.
MACHINE = ("LD_LIBRARY_PATH", "LIBRARY_PATH", "CPATH", "TRITON_LIBCUDA_PATH", "TRITON_PTXAS_PATH")
NAMED_WITHIN = 30.0  # seconds from a stall to the report that names the rank


def environment(s: Session) -> dict[str, str]:
    """The server's, as servers.sglang_environment without what it would inherit from the session."""
    whole = servers.sglang_environment(s.bundle, TRACKED, s.bundle.home)
    chosen = set(servers.MULTICAST_OFF) | {procs.MARK, *MACHINE, "PYTHONPATH", "HOME", "PYTHONPYCACHEPREFIX"}
    chosen |= {"TORCHINDUCTOR_CACHE_DIR", "SGLANG_IS_FLASHINFER_AVAILABLE", "HF_HUB_OFFLINE", "CUDA_HOME"}
    return {name: whole[name] for name in sorted(chosen) if name in whole}


def variables(s: Session, *, more_environment: dict[str, str] | None = None, **more: Any) -> dict[str, Any]:
    """Of a deployment. The session's own --variables come last; their sglang_environment is merged."""
    given = {**s.variables}
    merged = {**environment(s), **given.pop("sglang_environment", {}), **(more_environment or {})}
    return {
        "sglang_server_name": NAME,
        "sglang_python": s.bundle.python,
        "sglang_model_path": str(s.bundle.models / "target"),
        "sglang_drafter_path": str(s.bundle.models / "drafter"),
        "sglang_speculation": SPECULATION,
        "sglang_port": PORT,
        "sglang_gpus": ["0"],
        "sglang_arguments": ARGUMENTS,
        "nccl_env_variables": {"NCCL_NVLS_ENABLE": "0"},
        "nccl_env_path": str(s.work / "config" / "nccl.env"),
        "server_launch_config_folder": str(s.work / "config"),
        "server_launch_log_folder": str(s.work / "logs"),
        "server_launch_logrotate_folder": "",
        "server_launch_working_folder": str(s.work),
        "gpu_reset_state_folder": str(s.work / "host-state"),
        "gpu_reset_grace": 20,
        "server_health_timeout": s.play_seconds - 30,
        "server_health_request_timeout": 30,
        "server_health_chat_tokens": 32,
        "server_health_gpu_mib": 512,
        "server_health_lossless": True,
        "deploy_soak": 40,
        # The kernel package of the bundle is a part of the published one, not to be replaced.
        "deploy_sgl_kernel": False,
        # What this machine lacks is recorded, and does not end the session.
        "preflight_fail": False,
        "reset_confirmed": True,
        **given,
        "sglang_environment": merged,
        **more,
    }


def deploy(s: Session, which: str, label: str, given: dict[str, Any], seconds: float = 0) -> Played:
    """At most so many seconds; 0: as long as the session grants a deployment."""
    if which == "baseline":
        given = {name: value for name, value in given.items() if name != "sglang_speculation"}
    return play(s, f"playbooks/deploy-{which}.yml", label, given, seconds or s.play_seconds)


def found(s: Session) -> servers.Server | None:
    """The deployed server as it runs now, by its mark; followed from here on."""
    if TRACKED not in s.tracker.names():
        s.tracker.add(TRACKED, (0, 0))
    mains = [one for one in s.tracker.alive(TRACKED) if "sglang.launch_server" in one.argv]
    if not mains:
        return None
    s.tracker.add(TRACKED, mains[-1].key)
    return servers.Server(TRACKED, PORT, s.log(NAME), mains[-1].key)


def end_all(s: Session) -> None:
    """Where the last scenario did not get its turn: what still runs of the server ends with the session."""
    if TRACKED in s.tracker.names():
        server = found(s)
        s.started += [server] if server else []
        s.sweep()


def pid_of(server: servers.Server | None) -> int:
    return server.main[0] if server else 0


def look(s: Session, moment: str) -> servers.Server | None:
    """A raw reading with the server's scheduler as what must hold the GPU, and what the server says of itself."""
    server = found(s)
    s.look(moment, {0: holders(s, server) if server else []}, [server] if server else [])
    if server:
        status, body = servers.ask(server.port, "/server_info", None, 3)
        s.write("server_info", moment=moment, status=status, body=body[:20000])
    return server


def expect_ready(s: Session, done: Played) -> bool:
    health = done.last("server_health")
    return s.check(
        "the playbook ends with the verdict ready",
        done.rc == 0 and health.get("verdict") == "ready",
        {"rc": done.rc, "failed": done.failed_action, "msg": health.get("msg", "") or done.output[-600:]},
    )


def expect_replaced(s: Session, done: Played, old: servers.Server | None, new: servers.Server | None) -> None:
    reset = done.last("gpu_reset")
    s.check("the reset before it was clean", reset.get("verdict") == "clean", reset.get("reason") or done.output[-300:])
    s.check(
        "the server of before is gone and another one runs",
        old is not None and new is not None and not procs.is_alive(old.main) and new.main != old.main,
        {"old": old and old.main, "new": new and new.main},
    )
    mains = [one.pid for one in s.tracker.alive(TRACKED) if "sglang.launch_server" in one.argv]
    s.check("one main process of it runs", len(mains) == 1, mains)


def step(done: Played, name: str) -> dict[str, Any]:
    """A step of the proof that passed."""
    return next((dict(one) for one in done.last("server_health").get("proof") or [] if one["name"] == name), {})


def expect_refused(s: Session, done: Played, at: str, words: str) -> None:
    health = done.last("server_health")
    s.check(
        f"the deployment is refused at the step {at}",
        done.rc != 0 and health.get("step") == at and health.get("verdict") == "failed" and words in health["reason"],
        {"rc": done.rc, "failed": done.failed_action, "step": health.get("step"), "msg": health.get("msg", "")},
    )


@scenario("deploy-baseline", 125)
def baseline(s: Session) -> None:
    """From nothing to a server without speculation that is proven ready; its greedy answers are kept."""
    look(s, "before")
    done = deploy(s, "baseline", "baseline", variables(s))
    if done.failed_action == "gpu_host_info":
        s.write("note", text="the checks failed to run; deployed again without them")
        done = deploy(s, "baseline", "baseline without checks", variables(s, deploy_preflight=False))
    server = look(s, "deployed")
    expect_ready(s, done)
    names = [one["name"] for one in done.last("server_health").get("proof") or []]
    wanted = ["health", "chat", "speculation", "lossless", "environment", "memory"]
    s.check("each step of the proof was taken", names == wanted, names)
    s.check("a server runs", server is not None)


@scenario("deploy-again", 14)
def again(s: Session) -> None:
    """The same once more changes nothing and restarts nothing."""
    before = found(s)
    done = deploy(s, "baseline", "baseline again", variables(s), s.play_seconds / 2)
    after = look(s, "again")
    launch = done.last("server_launch")
    s.check("a second deployment reports changed=0", (done.rc, done.changed) == (0, 0), done.output[-500:])
    s.check("nothing had to be done", launch.get("needed") is False, launch.get("reasons"))
    s.check(
        "the same main process runs",
        before is not None and after is not None and before.main == after.main,
        [pid_of(before), pid_of(after)],
    )


@scenario("deploy-simulated-acceptance", 75)
def simulated_acceptance(s: Session) -> None:
    """Acceptance that is only pretended: the accept length is fine, the text is not, and the lossless gate says so."""
    settings: dict[str, Any] = {
        "more_environment": {"SGLANG_SIMULATE_ACC_LEN": "3.0"},
        "sglang_drafter_path": str(s.bundle.models / "random-drafter"),
        "server_health_chat_expect": "",  # the text is wrong from its second token on
    }
    old = found(s)
    done = deploy(s, "eagle3", "simulated acceptance", variables(s, **settings, server_health_lossless=False))
    server = look(s, "deployed")
    expect_ready(s, done)
    expect_replaced(s, done, old, server)
    length = done.last("server_health").get("accept_length")
    s.check("the accept length is about 3.0", length is not None and 2.6 <= length <= 3.4, length)
    s.check(
        "the speculation asked for was found",
        "EAGLE3" in step(done, "speculation").get("found", ""),
        step(done, "speculation"),
    )
    if server is None:
        return
    done = deploy(s, "eagle3", "simulated acceptance, lossless", variables(s, **settings), s.play_seconds / 2)
    expect_refused(s, done, "lossless", "differs from token")
    now = look(s, "refused")
    s.check("it was looked at, not restarted", pid_of(now) == pid_of(server), [pid_of(server), pid_of(now)])


@scenario("deploy-random-drafter", 75)
def random_drafter(s: Session) -> None:
    """A drafter that has learnt nothing: no draft is accepted, which is refused, though the answers are right."""
    settings: dict[str, Any] = {"sglang_drafter_path": str(s.bundle.models / "random-drafter")}
    old = found(s)
    done = deploy(s, "eagle3", "random drafter", variables(s, **settings))
    server = look(s, "refused")
    expect_refused(s, done, "acceptance", "below 1.05")
    expect_replaced(s, done, old, server)
    length = done.last("server_health").get("accept_length")
    s.check("the accept length is 1.0", length is not None and length < 1.05, length)
    if server is None:
        return
    done = deploy(
        s,
        "eagle3",
        "random drafter, any length",
        variables(s, **settings, server_health_accept_length=1.0),
        s.play_seconds / 2,
    )
    expect_ready(s, done)
    text = step(done, "lossless").get("found", "")
    s.check(
        "its greedy answers are the baseline's", "greedy answers equal" in text and not text.startswith("0 of"), text
    )
    now = look(s, "looked at again")
    s.check("it was looked at, not restarted", pid_of(now) == pid_of(server), [pid_of(server), pid_of(now)])


@scenario("deploy-eagle3", 75)
def eagle3(s: Session) -> None:
    """A drafter that has learnt: ready by the checks as they are shipped, with accepted drafts and equal answers."""
    old = found(s)
    done = deploy(s, "eagle3", "eagle3", variables(s))
    server = look(s, "deployed")
    expect_ready(s, done)
    expect_replaced(s, done, old, server)
    length = done.last("server_health").get("accept_length")
    s.check("drafts are accepted", length is not None and length > 1.5, length)
    chat, text = step(done, "chat").get("found", ""), step(done, "lossless").get("found", "")
    s.check("the chat completion answers the question", "paris" in chat.lower(), chat)
    s.check("greedy answers are the baseline's", "greedy answers equal" in text and not text.startswith("0 of"), text)


def expect_named(
    s: Session, server: servers.Server, worker: procs.Facts, given: dict[str, Any], seconds: float
) -> None:
    """This scheduler is stopped under a soak, and a request waits: the state, and a report with rank, pid and frame.

    The soak is over after at most so many seconds.
    """
    given = {**given, "server_health_soak": 4000, "server_health_request_timeout": 8, "server_health_lossless": False}
    given["server_health_accept_length"] = 0
    before = _requests(server)
    running = Running(s, "playbooks/deploy-eagle3.yml", "soak of a server that stalls", given, ())
    soaked = procs.wait_until(lambda: _requests(server) - before > 60 or running.over(), seconds / 2)
    s.check("the soak is under way", soaked and not running.over(), _requests(server) - before)
    s.kill(worker.key, signal.SIGSTOP)
    began = time.monotonic()
    servers.generate_in_background(server.port)  # waits beyond the soak, until the reset
    look_at_it = Running(s, "tests/gpu/playbooks/server-info.yml", "server_info of it", given, ())
    state = look_at_it.wait(40).last("server_info")
    s.write("seconds", what="server_info after the stall", seconds=round(time.monotonic() - began, 1))
    s.check("server_info says hung", (state.get("states") or {}).get(NAME) == "hung", state.get("servers"))
    done = running.wait(seconds)
    health = done.last("server_health")
    took = done.ended - began
    name, pid = worker.title, worker.pid
    s.check("the deployment says stuck", health.get("verdict") == "stuck", health.get("msg") or done.output[-500:])
    s.check("it names the rank and its pid", f"{name} (pid {pid})" in health.get("rank", ""), health.get("rank"))
    s.check("it names the frame", f"(pid {pid}) is stopped in " in health.get("reason", ""), health.get("reason"))
    s.check(f"all that within {NAMED_WITHIN:.0f} s of the stall", took <= NAMED_WITHIN, round(took, 1))
    stacks = Path(health.get("artifacts", "") or "/nonexistent") / "stacks.txt"
    text = stacks.read_text(errors="replace") if stacks.exists() else ""
    s.write("evidence", files=sorted(one.name for one in stacks.parent.glob("*")), stacks=text[:6000])
    s.check("the stack of the rank is in the evidence", f"==== {name} (pid {pid}) ====" in text, text[:300])


def expect_reset(s: Session, server: servers.Server, gpus: int = 1) -> None:
    s.started.append(server)
    s.start_samples()
    reset = s.reset("a stalled deployment", grace=8)
    s.stop_samples()
    s.look("after", {gpu: [] for gpu in range(gpus)})
    s.expect_clean(reset, gone=[server])
    signals = {int(one["pid"]): str(one.get("signal")) for one in reset.record.get("killed", [])}
    s.check("the main was ended by KILL after the grace", "KILL" in signals.get(server.main[0], ""), signals)


@scenario("deploy-stalled", 80)
def stalled(s: Session) -> None:
    """The scheduler stopped under a soak: the report names rank, pid and frame within 30 s. Then reset.yml."""
    server = found(s)
    workers = s.workers(server) if server else []
    if server is None or not workers:
        s.check("a server is there to be stalled", False)
        return
    expect_named(s, server, workers[0], variables(s), s.play_seconds)
    look(s, "stalled")
    expect_reset(s, server)


@scenario("deploy-stalled-tp2", 150, gpus=2)
def stalled_tp2(s: Session) -> None:
    """From nothing to a server on two GPUs, then the same with the scheduler of rank 1. It needs no server of before.

    Without a baseline there is nothing that its answers could be compared with.
    """
    own = {"sglang_gpus": ["0", "1"], "sglang_arguments": {**ARGUMENTS, "tp_size": 2}, "server_health_lossless": False}
    given = variables(s, **own)
    s.look("before", {0: [], 1: []})
    done = deploy(s, "eagle3", "eagle3 on two GPUs", given)
    server = found(s)
    expect_ready(s, done)
    length = done.last("server_health").get("accept_length")
    s.check("drafts are accepted", length is not None and length > 1.5, length)
    if server is None:
        s.check("a server is there to be stalled", False, done.output[-600:])
        return
    off = {name: procs.variable(server.main[0], name) for name in servers.MULTICAST_OFF}
    s.check("NVLink multicast is off in the server", off == servers.MULTICAST_OFF, off)
    ranks = {facts.title: facts for facts in s.workers(server)}
    names = sorted(ranks)
    if not s.check("there are two schedulers", names == ["sglang::scheduler_TP0", "sglang::scheduler_TP1"], names):
        expect_reset(s, server, 2)
        return
    s.look("deployed", holders_by_gpu(s, server), [server])
    expect_named(s, server, ranks["sglang::scheduler_TP1"], given, 60)
    s.look("stalled", holders_by_gpu(s, server), [server])
    expect_reset(s, server, 2)


@scenario("all-reduce", 50, gpus=2, sglang=False)
def all_reduce(s: Session) -> None:
    """NCCL among all GPUs, with multicast off (kernel_package.py)."""
    command = [sys.executable, "-m", "tests.gpu.kernel_package", "all-reduce", "--python", s.bundle.python]
    done = subprocess.run(
        [*command, "--seconds", "25"],
        cwd=REPOSITORY,
        env={**os.environ, **servers.MULTICAST_OFF},
        capture_output=True,
        text=True,
        timeout=75,
        check=False,
    )
    (s.out / "all_reduce.json").write_text(done.stdout)
    s.check(
        "an all-reduce among all GPUs gives the right sums", done.returncode == 0, (done.stdout + done.stderr)[-900:]
    )
    s.look("after", {gpu: [] for gpu in range(2)})


def _requests(server: servers.Server) -> int:
    """Completions that the server's log tells of."""
    try:
        return server.log.read_text(errors="replace").count("POST /generate")
    except OSError:
        return 0


@scenario("deploy-kernel", 75, sglang=False)
def kernel(s: Session) -> None:
    """The kernel package of the tests, compiled for this GPU by the role sgl_kernel and run on it."""
    tools = s.work / "build-tools"
    trouble = wheels.repack(s.bundle.python, ["scikit-build-core", "cmake", "ninja", "wheel"], tools)
    s.check("the machine's build tools are there as wheels", not trouble, trouble)
    package = REPOSITORY / "tests" / "kernel_package"
    own = {
        "TINY_KERNEL_CAPABILITY": "9.0",
        "CUDA_HOME": servers.sglang_environment(s.bundle, NAME, s.work)["CUDA_HOME"],
    }
    given = {
        "sglang_python": s.bundle.python,
        "sglang_environment": own,
        "sgl_kernel_package": "tiny_kernel",
        "sgl_kernel_source": str(package),
        "sgl_kernel_offline": True,
        "sgl_kernel_dependencies": str(package / "dependencies"),
        "sgl_kernel_wheels": str(tools),
        "sgl_kernel_build_folder": str(s.work / "kernel"),
        **{name: value for name, value in s.variables.items() if name not in ("sglang_environment", "sglang_python")},
    }
    playbook = "tests/gpu/playbooks/kernel.yml"
    done = play(s, playbook, "kernel package", given, 120)
    built = done.last("kernel_build")
    s.check("it was built and installed", bool(done.rc == 0 and built.get("built") and built.get("installed")), built)
    s.check("for the architecture of this GPU", built.get("architecture") == "sm_90a", built.get("architecture"))
    check = built.get("check") or {}
    s.check("its libraries hold code for it", "90a" in str(check.get("architectures")), check)
    script = (
        "import json, tiny_kernel as k; n = 100000; v = [1.0] * n;"
        "print(json.dumps([k.scale([1.0, 2.0, 3.0], 2.5), k.total(v), k.VARIANT]))"
    )
    ran = subprocess.run(
        [s.bundle.python, "-c", script],
        env={**os.environ, **own},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    said = ran.stdout.strip() or ran.stderr[-400:]
    s.check("its kernels compute on the GPU", said == json.dumps([[2.5, 5.0, 7.5], 100000.0, "sm90"]), said)
    second = play(s, playbook, "kernel package again", given, 60)
    result = second.last("kernel_build")
    s.check("a second run builds nothing", second.rc == 0 and second.changed == 0 and not result.get("built"), result)


@scenario("deploy-readings", 30, sglang=False)
def readings(s: Session) -> None:
    """Our readings beside the raw ones, and the probe (probe_and_readings.py)."""
    s.look("before the probe", {0: holders(s, *([server] if (server := found(s)) else []))})
    done = subprocess.run(
        [sys.executable, "tests/gpu/probe_and_readings.py", "--fraction", "0.2", "--seconds", "20"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    (s.out / "probe_and_readings.json").write_text(done.stdout)
    try:
        wrong = json.loads(done.stdout).get("differences")
    except ValueError:
        wrong = done.stderr[-400:]
    s.check("our readings agree with the raw ones and the probe passes", done.returncode == 0, wrong)
    s.look("after the probe")


@scenario("deploy-end", 25, sglang=False)
def end(s: Session) -> None:
    """Whatever still serves is reset, and the bystanders of all deployments are alive."""
    server = found(s)
    s.started += [server] if server else []
    s.look("before the end", {0: holders(s, *s.started)})
    done = s.reset("the end", grace=20)
    s.look("after", {0: []})
    s.expect_clean(done, gone=list(s.started))
