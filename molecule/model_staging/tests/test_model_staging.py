"""What the role has left on both hosts."""

import json

FOLDERS = ("/models/target", "/models/drafter")


def test_both_hosts_have_both_models_whole_and_nothing_half(host):
    assert sorted(host.file("/models").listdir()) == ["drafter", "target"]
    for folder in FOLDERS:
        assert host.file(f"{folder}/model.safetensors").size == 74
        assert host.file(f"{folder}/config.json").exists


def test_what_a_server_does_not_need_was_left_out(host):
    assert not host.file("/models/drafter/training_state.pt").exists


def test_the_record_says_where_each_model_came_from(host):
    first = "/srv/target" if host.backend.get_hostname() == "gpu-1" else "host:gpu-1:/srv/target"
    sources = [json.loads(host.file(f"{folder}/.model-staging.json").content_string)["source"] for folder in FOLDERS]
    assert sources == [first, "/srv/drafter"]


def test_nothing_is_passed_on_any_more(host):
    assert host.run("pgrep -f '[s]warm_client'").rc == 1
