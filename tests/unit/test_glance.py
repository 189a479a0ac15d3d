"""A look at encoded properties sees what reading all of them sees, and rewriting them loses not a byte."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rabbitdlq.fields import WireError, encode_table, encode_value
from rabbitdlq.glance import Glance, glance, rewritten
from rabbitdlq.wire import Headers, Properties
from tests.unit.strategies import entry, properties, quick, raw_values, short_bytes

#: few names, so that some are wanted, some noted, and some stand twice
NAMES = (b"wanted", b"too", b"x-noted", b"x-other", b"other", b"gr\xc3\xb6\xc3\x9fe", b"\xff", b"")
tables = st.lists(st.builds(entry, st.sampled_from(NAMES) | short_bytes, raw_values), max_size=6).map(b"".join)
with_headers = st.builds(
    lambda value, table: value.but(headers=None if table is None else Headers.parse(table)),
    properties,
    st.none() | tables,
)


def look(encoded: bytes) -> Glance:
    return glance(encoded, {b"wanted", b"too", b"\xff"}, lambda name: name == b"x-noted", b"x")


@quick
@given(with_headers)
def test_a_glance_sees_what_reading_sees(value: Properties) -> None:
    seen = look(value.encode())

    table = value.table
    id = None if value.message_id is None else value.message_id.encode("utf-8", "surrogateescape")
    assert seen.message_id == id
    wanted = {name: table.raw(name.decode("utf-8", "surrogateescape")) for name in (b"wanted", b"too", b"\xff")}
    assert seen.headers == {name: raw for name, raw in wanted.items() if raw is not None}
    moved = (value.reply_to, value.expiration, value.user_id)
    # a header without a name is nobody's: whoever meets it looks closely
    assert seen.noted == (any(each is not None for each in moved) or "x-noted" in table or "" in table)


@quick
@given(with_headers, st.sets(st.sampled_from(NAMES)), st.dictionaries(st.sampled_from(["new", "wanted"]), st.text()))
def test_rewriting_bytes_is_reading_changing_and_writing(
    value: Properties, drop: set[bytes], add: dict[str, str]
) -> None:
    names = {name.decode("utf-8", "surrogateescape") for name in drop}
    kept = value.table.without(names.__contains__)
    added = {name: encode_value(text) for name, text in add.items()}

    found = rewritten(value.encode(), drop, encode_table(added.items()))

    entries = b"".join([*kept.entries(), *Headers(add).entries()])
    assert found == value.but(headers=Headers.parse(entries)).encode()


@quick
@given(with_headers, st.data())
def test_what_is_cut_off_is_an_error_of_ours_or_not_seen(value: Properties, data: st.DataObject) -> None:
    encoded = value.encode()
    cut = encoded[: data.draw(st.integers(0, len(encoded) - 1))]
    for read in (look, lambda broken: rewritten(broken, {b"wanted"}, b"")):
        try:
            read(cut)
        except WireError:
            continue
        # it ends behind the headers and the message id, which is all that is looked at
        assert cut[2:] == encoded[2 : len(cut)]
        assert len(cut) >= 2 + (0 if value.headers is None else 4 + len(value.headers.encode()))
    with pytest.raises(WireError):
        look(encoded[:1])


@quick
@given(st.binary(max_size=80))
def test_noise_is_an_error_of_ours_or_read(noise: bytes) -> None:
    for flags in (b"\xff\xf8", b"\x20\x00", b"\x30\x80"):
        for read in (look, lambda broken: rewritten(broken, {b"wanted"}, b"")):
            try:
                read(flags + noise)
            except WireError:
                continue


def test_of_a_name_that_stands_twice_the_first_counts() -> None:
    """As it does where all of the headers are read."""
    table = entry(b"wanted", encode_value("first")) + entry(b"wanted", encode_value("second"))
    headers = Headers.parse(table)
    assert headers["wanted"] == "first"
    assert look(Properties(headers=headers).encode()).headers == {b"wanted": encode_value("first")}


def test_a_value_that_reaches_beyond_its_table_is_an_error() -> None:
    """Its length would take the next property for a part of it."""
    whole = Properties(headers=Headers({"wanted": "text"}), message_id="a" * 40).encode()
    longer = whole.replace(b"S\x00\x00\x00\x04text", b"S\x00\x00\x00\x0etext")
    assert longer != whole
    for broken in (longer, whole.replace(b"\x06wanted", b"\x40wanted")):
        with pytest.raises(WireError):
            look(broken)
        with pytest.raises(WireError):
            rewritten(broken, (), b"")
    unknown = whole.replace(b"S\x00\x00\x00\x04", b"?\x00\x00\x00\x04")
    with pytest.raises(WireError, match="unknown field type"):
        look(unknown)
