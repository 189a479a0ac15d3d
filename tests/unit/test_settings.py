"""``rabbitdlq.toml``: what is read from it, and what a person is told who got it wrong."""

from datetime import timedelta
from pathlib import Path

import pytest

from rabbitdlq.errors import ConfigurationError
from rabbitdlq.settings import QueueSettings, load_topologies, pick_topology
from rabbitdlq.topology import Topology, WorkBinding

ORDERS = '[queues.orders]\ndelays = ["5s", "30s"]\n'


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "rabbitdlq.toml"


def refusal(file: Path, text: str | bytes) -> str:
    """What is said about this text, without the file's name, which has to come first."""
    file.write_bytes(text.encode() if isinstance(text, str) else text)
    with pytest.raises(ConfigurationError) as error:
        load_topologies(file)
    said = str(error.value)
    assert said.startswith(f"{file}: ")
    return said.removeprefix(f"{file}: ")


class TestReading:
    def test_two_lines_are_a_topology(self, file: Path) -> None:
        file.write_text(ORDERS)

        assert load_topologies(file) == {"orders": Topology("orders", ["5s", "30s"])}

    def test_every_key_has_its_place(self, file: Path) -> None:
        file.write_text(
            """
            [queues."shop.orders"]
            delays = ["500ms", "5s", "2m", "1h"]
            bindings = [
                { exchange = "shop", type = "topic", key = "order.*" },
                { exchange = "amq.headers", type = "headers", arguments = { x-match = "all", total = 5 } },
            ]
            queue_type = "classic"
            crash_limit = 3
            journal = "live"
            journal_max_age = "2d"
            journal_max_bytes = 5_000_000
            dlq_type = "quorum"

            [queues.mails]
            delays = ["1m"]
            """
        )

        found = load_topologies(file)

        assert list(found) == ["shop.orders", "mails"]
        assert found["shop.orders"] == Topology(
            "shop.orders",
            [timedelta(milliseconds=500), timedelta(seconds=5), timedelta(minutes=2), timedelta(hours=1)],
            bindings=[
                WorkBinding("shop", "order.*", "topic"),
                WorkBinding("amq.headers", "", "headers", {"x-match": "all", "total": 5}),
            ],
            queue_type="classic",
            crash_limit=3,
            journal="live",
            journal_max_age=timedelta(days=2),
            journal_max_bytes=5_000_000,
            dlq_type="quorum",
        )

    def test_what_is_left_out_is_as_in_python(self, file: Path) -> None:
        assert QueueSettings(delays=["5s"]).topology("orders") == Topology("orders", ["5s"])

    def test_a_byte_order_mark_and_windows_line_ends_are_no_trouble(self, file: Path) -> None:
        file.write_bytes(b"\xef\xbb\xbf" + ORDERS.replace("\n", "\r\n").encode())

        assert list(load_topologies(file)) == ["orders"]

    def test_one_of_them_is_picked_by_name(self, file: Path) -> None:
        file.write_text(ORDERS)
        topologies = load_topologies(file)

        assert pick_topology(topologies, "orders", str(file)) is topologies["orders"]
        with pytest.raises(ConfigurationError, match=r"rabbitdlq\.toml: no queue 'order' in it; there are: orders$"):
            pick_topology(topologies, "order", str(file))


class TestFiles:
    def test_a_missing_file_is_told_with_the_way_to_name_another(self, file: Path) -> None:
        with pytest.raises(ConfigurationError) as error:
            load_topologies(file)

        assert str(error.value) == f"{file}: no such file; name the topology file with --topology or RABBITDLQ_TOPOLOGY"

    def test_a_directory_is_no_file(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigurationError) as error:
            load_topologies(tmp_path)

        assert str(error.value) == f"{tmp_path}: cannot be read: Is a directory"

    def test_a_file_that_is_not_utf8_is_told_by_line_and_byte(self, file: Path) -> None:
        said = refusal(file, ORDERS.encode() + b"# gr\xf6\xdfe\n")

        assert said == "line 3: byte 0xf6 is not UTF-8; save the file as UTF-8"

    @pytest.mark.parametrize("text", ["", "# nothing yet\n"])
    def test_an_empty_file_is_told_what_to_write(self, file: Path, text: str) -> None:
        said = refusal(file, text)

        assert said == 'queues: missing; write a table [queues.NAME] with delays = ["5s", "30s"]'

    def test_an_empty_table_of_queues_is_told_what_to_write(self, file: Path) -> None:
        said = refusal(file, "[queues]\n")

        assert said == 'queues: no queue in it; write a table [queues.NAME] with delays = ["5s", "30s"]'

    @pytest.mark.parametrize(
        ("text", "place"),
        [
            ('[queues.orders\ndelays = ["5s"]\n', "line 1, column 15"),
            ('[queues.orders]\ndelays = "5s\n', "line 2, column 13"),
            ("[queues.orders]\ndelays = [5s]\n", "line 2, column 12"),
            ('[queues.orders]\ndelays = ["5s"', "line 2, column 15, the end of the file"),
            (ORDERS + ORDERS, "line 3, column 15"),
        ],
    )
    def test_broken_toml_is_told_by_line_and_column(self, file: Path, text: str, place: str) -> None:
        """C70: a broken file was told without its place."""
        said = refusal(file, text)

        assert said.startswith("not valid TOML: ")
        assert said.endswith(f"(at {place})")

    @pytest.mark.parametrize("text", ["a = " + "[" * 50_000, "a = " + "9" * 5_000], ids=["nesting", "digits"])
    def test_toml_that_breaks_its_reader_is_only_broken_toml(self, file: Path, text: str) -> None:
        assert refusal(file, text).startswith("not valid TOML: ")


class TestKeys:
    """Each line is what a person wrote and, whole, what the person is told."""

    @pytest.mark.parametrize(
        ("lines", "said"),
        [
            ("delay = 5", "queues.orders.delay: unknown key"),
            ("queue_type = 'quroum'", "queues.orders.queue_type: should be 'quorum' or 'classic', not \"quroum\""),
            ("journal = 'none'", "queues.orders.journal: should be 'stream' or 'live', not \"none\""),
            ("crash_limit = '3'", 'queues.orders.crash_limit: should be a whole number, not "3"'),
            ("crash_limit = true", "queues.orders.crash_limit: should be a whole number, not true"),
            ("crash_limit = 1.5", "queues.orders.crash_limit: should be a whole number, not 1.5"),
            ("crash_limit = 0", "queues.orders.crash_limit: 0 is not between 1 and 1,000,000"),
            ("journal_max_age = 5", "queues.orders.journal_max_age: should be a text, not 5"),
            ("journal_max_age = '-1d'", "queues.orders.journal_max_age: '-1d' is negative"),
            ("journal_max_age = '10ms'", "queues.orders.journal_max_age: a journal keeps at least one second"),
            ("bindings = 'shop'", 'queues.orders.bindings: should be a list, not "shop"'),
            ("bindings = ['shop']", 'queues.orders.bindings[0]: should be a table, not "shop"'),
            ("bindings = [{ key = 'x' }]", "queues.orders.bindings[0].exchange: missing"),
            (
                "bindings = [{ exchange = 'a' }, { exchange = 'b', kye = 'x' }]",
                "queues.orders.bindings[1].kye: unknown key",
            ),
            (
                "bindings = [{ exchange = 'shop', type = 'direkt' }]",
                "queues.orders.bindings[0].type: should be 'direct', 'fanout', 'headers' or 'topic', not \"direkt\"",
            ),
            (
                "bindings = [{ exchange = '' }]",
                "queues.orders.bindings[0].exchange: the default exchange takes no bindings",
            ),
            (
                "bindings = [{ exchange = 'orders.dead' }]",
                "queues.orders.bindings[0].exchange: 'orders.dead' is this topology's own",
            ),
            (
                "bindings = [{ exchange = 'shop', arguments = { since = 2024-01-01 } }]",
                "queues.orders.bindings[0].arguments: a header cannot carry date",
            ),
            (
                "[queues.orders.dlq]",
                "queues.orders.dlq: unknown key",
            ),
        ],
    )
    def test_a_wrong_key_beside_good_delays(self, file: Path, lines: str, said: str) -> None:
        assert refusal(file, ORDERS + lines) == said

    @pytest.mark.parametrize(
        ("delays", "said"),
        [
            ("", 'queues.orders.delays: missing; write delays = ["5s", "30s"] for three attempts'),
            ("delays = '5s'", 'queues.orders.delays: should be a list, not "5s"'),
            ("delays = []", "queues.orders.delays: 0 given; a ladder has 1 to 32 rungs"),
            (f"delays = {['5s'] * 33}", "queues.orders.delays: 33 given; a ladder has 1 to 32 rungs"),
            ("delays = ['5s', 30]", "queues.orders.delays[1]: should be a text, not 30"),
            ("delays = ['5s', '-5s']", "queues.orders.delays[1]: '-5s' is negative"),
            (
                "delays = ['0s']",
                "queues.orders.delays[0]: 0s is not above zero; a failed message has to wait",
            ),
            (
                "delays = ['5s', '49.8d']",
                "queues.orders.delays[1]: 49.8d is longer than RabbitMQ's 32-bit milliseconds, 49.7 days",
            ),
            ("delays = ['0.5ms']", "queues.orders.delays[0]: 0.5ms is not a whole number of milliseconds"),
            (
                "delays = ['5 seconds']",
                "queues.orders.delays[0]: '5 seconds' is not a duration; write a number and a unit, like 500ms, 5s, "
                "2m, 1h or 7d",
            ),
        ],
    )
    def test_wrong_delays(self, file: Path, delays: str, said: str) -> None:
        assert refusal(file, f"[queues.orders]\n{delays}\n") == said

    @pytest.mark.parametrize(
        ("text", "said"),
        [
            ("queues = 5", "queues: should be a table, not 5"),
            ("queues = []", "queues: should be a table"),
            ("[queues]\norders = 5", "queues.orders: should be a table, not 5"),
            (
                ORDERS + "[queue.mails]\ndelays = ['5s']",
                "queue: unknown key",
            ),
            (
                "[queues.orders]\ndelays = [1, 's', 2]\nkey = 1",
                "queues.orders.delays[0]: should be a text, not 1; queues.orders.delays[2]: should be a text, not 2; "
                "queues.orders.key: unknown key",
            ),
        ],
    )
    def test_wrong_tables(self, file: Path, text: str, said: str) -> None:
        assert refusal(file, text) == said


class TestNames:
    def test_a_name_that_cannot_be_sent_is_told_as_it_stands_in_the_file(self, file: Path) -> None:
        said = refusal(file, '[queues."größe"]\ndelays = ["5s"]\n')

        assert said == ("queues.\"größe\": 'größe': a name is made of a-z, A-Z, 0-9, space and - _ . : @ # , / +")

    @pytest.mark.parametrize(
        ("name", "reason"),
        [
            ("x" * 115, "derived from it, is longer than 127 bytes"),
            ("x" * 255, "derived from it, is longer than 127 bytes"),
            ("x" * 300, "is longer than 255 bytes"),
            ("ä" * 130, "a name is made of"),
        ],
    )
    def test_a_name_too_long_for_what_is_derived_from_it_is_told(self, file: Path, name: str, reason: str) -> None:
        said = refusal(file, f'[queues."{name}"]\ndelays = ["5s"]\n')

        assert said.startswith(f"queues.{name}: " if name.isascii() else f'queues."{name}": ')
        assert reason in said

    def test_the_brokers_own_names_are_refused(self, file: Path) -> None:
        said = refusal(file, '[queues."amq.orders"]\ndelays = ["5s"]\n')

        assert said.startswith("queues.\"amq.orders\": 'amq.orders' cannot name a queue")

    def test_a_key_of_a_name_with_dots_is_written_as_toml_writes_it(self, file: Path) -> None:
        said = refusal(file, '[queues."orders.eu"]\ndelays = ["5s", "x"]\n')

        assert said.startswith("queues.\"orders.eu\".delays[1]: 'x' is not a duration")

    @pytest.mark.parametrize(
        ("other", "shared"),
        [
            ("orders.dlq", "queue 'orders.dlq'"),
            ("orders.dlq.lock", "queue 'orders.dlq.lock'"),
            ("orders.journal", "queue 'orders.journal'"),
            ("orders.retry.1.5s", "queue 'orders.retry.1.5s'"),
            ("orders.retry.2.30s", "queue 'orders.retry.2.30s'"),
        ],
    )
    def test_two_work_queues_that_would_share_a_queue_are_refused(self, file: Path, other: str, shared: str) -> None:
        for first, second in (("orders", f'"{other}"'), (f'"{other}"', "orders")):
            said = refusal(file, f"[queues.{first}]\ndelays = ['5s', '30s']\n[queues.{second}]\ndelays = ['5s', '30s']")

            assert said == f"queues.{second}: duplicate {shared}: queues.{first} has it too; rename one"

    def test_names_that_only_look_alike_are_fine_together(self, file: Path) -> None:
        file.write_text("".join(f'[queues."{name}"]\ndelays=["5s"]\n' for name in ("orders", "orders.eu", "orders2")))

        assert list(load_topologies(file)) == ["orders", "orders.eu", "orders2"]
