"""docker-compose.yml says the same as the code."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from rabbitdlq.local_broker import PLUGINS
from rabbitdlq.local_broker.climb import _COMPOSE_FILE

_ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def service() -> dict[str, Any]:
    compose = yaml.safe_load((_ROOT / "docker-compose.yml").read_text())
    service: dict[str, Any] = compose["services"]["rabbitmq"]
    return service


def _mounted(service: dict[str, Any], target: str) -> Path:
    """Find what is mounted read-only at a path of the container."""
    for volume in service["volumes"]:
        source, inside, *mode = str(volume).split(":")
        if inside == target:
            assert mode == ["ro"], volume
            return _ROOT / source
    raise AssertionError(f"nothing is mounted at {target}")


def test_the_climb_finds_the_compose_file_of_the_source_tree() -> None:
    assert _COMPOSE_FILE == _ROOT / "docker-compose.yml"
    assert _COMPOSE_FILE.exists()


def test_the_image_is_a_rabbitmq_4_with_the_management_ui(service: dict[str, Any]) -> None:
    assert re.fullmatch(r"rabbitmq:4(\.\d+)?-management", service["image"])


def test_the_container_has_exactly_the_plugins_of_the_private_node(service: dict[str, Any]) -> None:
    text = _mounted(service, "/etc/rabbitmq/enabled_plugins").read_text()
    found = re.fullmatch(r"\[([a-z_,\s]+)\]\.\s*", text)
    assert found, "an Erlang list that ends with a full stop"
    assert sorted(name.strip() for name in found[1].split(",")) == sorted(PLUGINS)


def test_the_demos_definitions_are_loaded_at_boot_with_an_account_to_look_at_them(service: dict[str, Any]) -> None:
    """A node that imports definitions at boot creates no guest: without a file that brings one, nobody can log in."""
    configuration = _mounted(service, "/etc/rabbitmq/conf.d/50-rabbitdlq.conf").read_text()
    folder = re.search(r"^load_definitions = (\S+)$", configuration, re.MULTILINE)
    assert folder
    assert _mounted(service, f"{folder[1]}/20-orders.json") == _ROOT / "definitions/orders.json"
    guest = json.loads(_mounted(service, f"{folder[1]}/10-guest.json").read_text())
    assert [(user["name"], user["password"], user["tags"]) for user in guest["users"]] == [
        ("guest", "guest", ["administrator"])
    ]
    assert guest["permissions"] == [
        {"user": "guest", "vhost": "/", "configure": ".*", "write": ".*", "read": ".*"},
    ]


def test_every_mounted_file_is_in_the_source_tree(service: dict[str, Any]) -> None:
    sources = [volume.split(":")[0] for volume in service["volumes"] if volume.startswith(".")]
    assert sources
    # Docker would make an empty directory in the place of a missing file
    assert [source for source in sources if not (_ROOT / source).is_file()] == []


def test_the_ports_are_open_to_this_machine_only_and_can_be_chosen(service: dict[str, Any]) -> None:
    assert service["ports"] == [
        "127.0.0.1:${RABBITDLQ_AMQP_PORT:-5672}:5672",
        "127.0.0.1:${RABBITDLQ_MANAGEMENT_PORT:-15672}:15672",
        "127.0.0.1:${RABBITDLQ_PROMETHEUS_PORT:-15692}:15692",
    ]


def test_data_outlives_the_container(service: dict[str, Any]) -> None:
    compose = yaml.safe_load((_ROOT / "docker-compose.yml").read_text())
    assert "data:/var/lib/rabbitmq" in service["volumes"]
    assert "data" in compose["volumes"]
    # the data's directory is named after the host
    assert service["hostname"]


def test_healthy_means_that_the_listeners_accept(service: dict[str, Any]) -> None:
    assert "check_running" in service["healthcheck"]["test"][1]
    assert "check_port_connectivity" in service["healthcheck"]["test"][1]
