"""The files of deploy/kubernetes fit Kubernetes' API, the command and the code."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

from patience import patience
import pytest

ROOT = Path(__file__).parents[2]
FILES = [*sorted((ROOT / "deploy/kubernetes").glob("*.yaml")), ROOT / "deploy/network-policy.yaml"]

#: The Python that has kubernetes-validate.
PYTHON = "WEIGHTSYNC_OBJECTS_PYTHON"
COMMAND = Path(sys.executable).with_name("weightsync")

#: The oldest and the newest version of Kubernetes whose schema the files are checked with.
VERSIONS = ["1.30", "1.37"]

#: Reads YAML; prints its documents and, for each version, what is wrong with each of them.
CHECK = """
import json, sys
import kubernetes_validate, yaml

def wrong(document, version):
    try:
        kubernetes_validate.validate(document, version, strict=True)
    except kubernetes_validate.ValidationError as error:
        return ["/".join(map(str, error.path)) + ": " + error.message]
    return []

documents = list(yaml.safe_load_all(sys.stdin))
found = [wrong(one, version) for version in sys.argv[1:] for one in documents]
print(json.dumps([documents, sum(found, [])]))
"""


def checked(text):
    """The documents of a text, and what is wrong with them."""
    assert PYTHON in os.environ, f"{PYTHON} is not set: run `cargo xtask pytest`, which sets it"
    command = [os.environ[PYTHON], "-c", CHECK, *VERSIONS]
    done = subprocess.run(command, input=text, capture_output=True, text=True, timeout=patience(30))
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def documents():
    return checked("\n---\n".join(path.read_text() for path in FILES))[0]


@pytest.fixture(scope="module")
def pods(documents):
    """What each workload says of its pods, by the workload's name."""
    workloads = [one for one in documents if "template" in one.get("spec", {})]
    return {one["metadata"]["name"]: one["spec"]["template"]["spec"] for one in workloads}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_documents_fit_the_schema(path):
    documents, wrong = checked(path.read_text())
    assert documents and not wrong


def test_schema_refuses_a_misspelt_field():
    text = (ROOT / "deploy/kubernetes/relay.yaml").read_text()
    for right, other in [("hostNetwork:", "hostNetworks:"), ("memory: 61Gi", "memory: [61]")]:
        assert right in text
        _, wrong = checked(text.replace(right, other))
        assert len(wrong) >= len(VERSIONS), (other, wrong)


def test_recipe_has_all_parts(pods):
    assert set(pods) == {"relay", "synchronizer", "trainer", "worker"}


def test_commands_have_the_flags_that_are_used(pods):
    lines = []
    for container in (one for pod in pods.values() for one in pod["containers"]):
        lines.append(" ".join(container["command"]))
        probe = container.get("readinessProbe", {})
        lines.append(" ".join(probe.get("exec", {}).get("command", [])))
    used = re.findall(r"\bweightsync ([a-z]+)([^|\n]*)", "\n".join(lines))
    assert sorted(name for name, _ in used) == ["relay", "serve", "status"]
    for name, arguments in used:
        helped = subprocess.run(
            [COMMAND, name, "--help"], capture_output=True, text=True, timeout=patience(30), check=True
        )
        flags = re.findall(r"--[a-z-]+", arguments)
        missing = set(flags) - set(re.findall(r"--[a-z-]+", helped.stdout))
        assert not missing, (name, missing)


def test_variables_are_those_of_the_code(pods):
    sources = [*ROOT.glob("crates/*/src/**/*.rs"), *ROOT.glob("python/weightsync/**/*.py")]
    code = "".join(source.read_text() for source in sources)
    used = {
        one["name"]
        for pod in pods.values()
        for container in pod["containers"]
        for one in container.get("env", [])
        if one["name"].startswith("WEIGHTSYNC_")
    }
    assert used == {"WEIGHTSYNC_TOKEN", "WEIGHTSYNC_TLS_DIR"}
    assert all(f'"{name}"' in code for name in used)


def test_secrets_have_the_files_of_certs_new(pods, tmp_path):
    hosts = "trainer,synchronizer"
    made = [COMMAND, "certs", "new", "--out", tmp_path / "pki", "--hosts", hosts]
    subprocess.run(made, stdout=subprocess.DEVNULL, timeout=patience(30), check=True)
    parts = {"synchronizer": "trainer"}
    for name, pod in pods.items():
        part = parts.get(name, name)
        (secret,) = [one["secret"] for one in pod["volumes"] if "secret" in one]
        assert secret["secretName"] == f"weightsync-{part}-tls"
        (item,) = secret["items"]
        assert item["key"] == item["path"] == f"{part}.pem"
        assert (tmp_path / "pki" / item["path"]).is_file()
        # The group may read a key; others may not, and the group may not write.
        assert secret["defaultMode"] & 0o027 == 0
        container = pod["containers"][0]
        (folder,) = [one["value"] for one in container["env"] if one["name"] == "WEIGHTSYNC_TLS_DIR"]
        (mount,) = [one for one in container["volumeMounts"] if one["name"] == "tls"]
        # Files of a subPath do not follow their Secret.
        assert mount["mountPath"] == folder and "subPath" not in mount


def test_services_have_the_names_that_are_joined(documents, pods):
    services = {
        one["metadata"]["name"]: [port["port"] for port in one["spec"]["ports"]]
        for one in documents
        if one["kind"] == "Service"
    }
    assert services == {"synchronizer": [7100], "trainer": [7070]}
    assert "trainer:7070" in pods["relay"]["containers"][0]["command"]
    assert "trainer:7070" in pods["relay"]["containers"][0]["readinessProbe"]["exec"]["command"][-1]
    assert "0.0.0.0:7100" in pods["synchronizer"]["containers"][0]["command"]


def test_policies_admit_to_the_ports_of_services(documents, pods):
    policies = {one["metadata"]["name"]: one["spec"] for one in documents if one["kind"] == "NetworkPolicy"}
    for service in (one for one in documents if one["kind"] == "Service"):
        policy = policies.pop(service["metadata"]["name"])
        assert policy["podSelector"]["matchLabels"] == service["spec"]["selector"]
        assert policy["policyTypes"] == ["Ingress"]
        (rule,) = policy["ingress"]
        assert [one["port"] for one in rule["ports"]] == [one["port"] for one in service["spec"]["ports"]]
        # Labels tell nothing of pods in the network of their node.
        named = [one["podSelector"]["matchLabels"]["app"] for one in rule["from"] if "podSelector" in one]
        assert not any(pods[name].get("hostNetwork") for name in named)
        assert any("ipBlock" in one for one in rule["from"])
    assert not policies


def test_workers_share_network_and_user_with_relays(pods):
    relay, worker = pods["relay"], pods["worker"]
    for field in ["hostNetwork", "dnsPolicy", "nodeSelector"]:
        assert relay[field] == worker[field]
    assert relay["hostNetwork"] is True
    assert relay["securityContext"] == worker["securityContext"]


def test_limits_are_what_the_page_says(pods):
    page = (ROOT / "docs/kubernetes.md").read_text()
    for name in ["relay", "trainer", "worker"]:
        resources = pods[name]["containers"][0]["resources"]
        memory = resources["limits"]["memory"]
        assert resources["requests"]["memory"] == memory
        assert re.search(rf"\| {name} \|.*\b{memory[:-2]} GiB \|", page), (name, memory)
