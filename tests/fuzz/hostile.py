"""Hostile files for hypothesis, and the one rule for all: a result, or an error of a known kind
that names the file."""

import datetime
import decimal
import json
import shutil
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import pyarrow as pa
from examples import examples
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

# of processor time that reading a small file may take at most; far more than it does
SECONDS = 10.0

_Result = TypeVar("_Result")


def tries(count: int) -> settings:
    """Settings for so many examples."""
    return settings(
        examples(count), suppress_health_check=list(HealthCheck), report_multiple_bugs=False
    )


def accepted(call: Callable[[], _Result], name: str) -> _Result | None:
    """The result of a call, or None when it is refused with a message that names the file, in
    bounded time."""
    started = time.process_time()
    try:
        return call()
    except (ValueError, OSError) as error:
        assert name in str(error), f"{type(error).__name__} does not name {name}: {error!s:.500}"
        assert len(str(error)) < 20_000, "a message is no place for the whole file"
        return None
    finally:
        assert time.process_time() - started < SECONDS


TEXTS = st.text(st.characters(), max_size=8) | st.sampled_from(
    [
        "",
        " ",
        "\0",
        "\ud800",
        "\udfff\ud800",
        "\ufeff",
        "\r\n",
        "\x1b[2J",
        "e\u0301",
        "\U0010ffff",
        "NaN",
        "None",
        "-0",
    ]
)
NAMES = (
    st.sampled_from(
        ["items", "keys", "update", "lock", "a.b", "", "__class__", "_fields", "answer"]
    )
    | TEXTS
)
"""Keys, some of which are methods of a dictionary or of a config."""
NUMBERS = (
    st.integers()
    | st.floats()
    | st.sampled_from(
        [0, -1, 2**31, 2**63, 2**64, 10**400, -(10**400), 1e308, float("inf"), float("nan")]
    )
)
VALUES = st.recursive(
    st.none() | st.booleans() | NUMBERS | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=6,
)
"""What JSON can hold, and Python's writer of it: NaN, infinities, lone surrogates and integers of
any size."""

DEEP = [
    b"[" * 100_000,
    b'{"a":' * 100_000,
    b"[" * 5000 + b"]" * 5000,
    b'{"a":' * 5000 + b"1" + b"}" * 5000,
]
ODD = [
    *DEEP,
    *(
        b"",
        b"\n",
        b"\0",
        b"\xef\xbb\xbf",
        b"\xff\xfe{\0}\0",
        b"null",
        b"[]",
        b"{}",
        b'"',
        b"NaN",
        b"1e999",
        b"\x80",
    ),
    *(
        b"-" + b"9" * 5000,
        b'{"a": 1, "a": 2}',
        b'{"\\ud800": "\\udfff"}',
        b"PAR1",
        b"PAR1" * 3,
        b"\x1f\x8b\x08\0",
    ),
]
"""Whole files or lines that a reader may not expect."""


_STAMP = pa.timestamp("ns", "Nowhere/At_All")
_MESSAGES = pa.list_(pa.struct({"role": pa.string(), "content": pa.string()}))
COLUMNS = {
    "texts": pa.array(["a", "", "7"]),
    "large texts": pa.array(["a", "b", "7"], pa.large_string()),
    "texts by number": pa.array(["7", "b", "7"]).dictionary_encode(),
    "nulls": pa.nulls(3),
    "null texts": pa.array([None, "a", None], pa.string()),
    "bytes": pa.array([b"a", b"\xff", b""]),
    "broken texts": pa.array([b"\xff", b"a", b""]).view(pa.string()),
    "integers": pa.array([1, -1, 2**40]),
    "numbers": pa.array([float("nan"), 1.5, float("-inf")]),
    "halves": pa.array([1.5] * 3, pa.float16()),
    "decimals": pa.array([decimal.Decimal("1.50")] * 3),
    "wide decimals": pa.array([decimal.Decimal(10**70)] * 3, pa.decimal256(76)),
    "booleans": pa.array([True, False, True]),
    "long ids": pa.array([[2**40], [1], []]),
    "ids": pa.array([[1], [], [-5, 2**31 - 1]], pa.list_(pa.int32())),
    "ids with nulls": pa.array([[1, None], [None], []], pa.list_(pa.int32())),
    "null ids": pa.array([None, [1], []], pa.list_(pa.int32())),
    "large ids": pa.array([[1], [], [2]], pa.large_list(pa.int32())),
    "three ids": pa.array([[1], [2], [3]], pa.list_(pa.int32(), 1)),
    "fractions": pa.array([[1.5], [], [float("nan")]]),
    "ids of ids": pa.array([[[1]], [], [[]]]),
    "lists of texts": pa.array([["7", None]] * 3),
    "messages": pa.array([[{"role": "user", "content": "7?"}]] * 3, _MESSAGES),
    "replies": pa.array([[{"role": "assistant", "content": "a"}]] * 3, _MESSAGES),
    "no messages": pa.array([[]] * 3, _MESSAGES),
    "null messages": pa.array([[None]] * 3, _MESSAGES),
    "null roles": pa.array([[{"role": None, "content": "a"}]] * 3, _MESSAGES),
    "other messages": pa.array([[{"from": "user", "value": "a"}]] * 3),
    "a message": pa.array([{"role": "user", "content": "a"}] * 3),
    "structs of null": pa.array(
        [{"ground_truth": None}] * 3, pa.struct({"ground_truth": pa.string()})
    ),
    "structs with a name twice": pa.StructArray.from_arrays([pa.array(["1"] * 3)] * 2, ["a", "a"]),
    "maps": pa.array([[("ground_truth", "7")]] * 3, pa.map_(pa.string(), pa.string())),
    "maps with a key twice": pa.array(
        [[("a", "1"), ("a", "2")]] * 3, pa.map_(pa.string(), pa.string())
    ),
    "times beyond the calendar": pa.array([2**62] * 3, pa.timestamp("s")),
    "times of a zone that is none": pa.array([1] * 3, _STAMP),
    "nested times of a zone that is none": pa.array([[1]] * 3, pa.list_(_STAMP)),
    "nanoseconds": pa.array([1] * 3, pa.timestamp("ns")),
    "dates beyond the calendar": pa.array([2**31 - 1] * 3, pa.date32()),
    "times of day": pa.array([datetime.time(1)] * 3),
    "times of day beyond the day": pa.array([2**62] * 3, pa.time64("ns")),
    "durations": pa.array([2**62] * 3, pa.duration("s")),
}
"""Three rows of every type that a Parquet file may hold where another one is needed."""


def as_json(value: Any) -> bytes:
    """The value as Python writes it, NaN and lone surrogates included."""
    return json.dumps(value).encode()


def write_folder(folder: Path, files: Mapping[str, bytes]) -> Path:
    """Make the folder anew, of these files alone."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for name, data in files.items():
        (folder / name).write_bytes(data)
    return folder


@st.composite
def damaged(draw: st.DrawFn, whole: bytes) -> bytes:
    """A copy that is cut off, has bits flipped, a piece doubled, lost, zeroed or exchanged, or
    other line ends."""
    data = bytearray(whole)
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, max(len(data) - 1, 0)))
        size = draw(st.integers(1, 16))
        match draw(
            st.sampled_from(
                ["cut", "flip", "double", "lose", "zero", "noise", "insert", "lines", "mark"]
            )
        ):
            case "cut":
                del data[at:]
            case "flip" if data:
                data[at] ^= 1 << draw(st.integers(0, 7))
            case "double":
                data[at:at] = data[at : at + size]
            case "lose":
                del data[at : at + size]
            case "zero":
                data[at : at + size] = bytes(len(data[at : at + size]))
            case "noise":
                data[at : at + size] = draw(st.binary(max_size=16))
            case "insert":
                data[at:at] = draw(st.sampled_from(ODD[4:]))
            case "lines":
                data = bytearray(bytes(data).replace(b"\n", b"\r\n\r\n"))
            case "mark":
                data[:0] = b"\xef\xbb\xbf"
    return bytes(data)


def changed(good: Any) -> st.SearchStrategy[Any]:
    """A JSON value with one to three places, at any depth, exchanged, left out or added."""
    return st.integers(1, 3).flatmap(lambda count: _changed(good, count))


@st.composite
def _changed(draw: st.DrawFn, good: Any, count: int) -> Any:
    value = json.loads(json.dumps(good))
    for _ in range(count):
        value = _change(draw, value)
    return value


def _change(draw: st.DrawFn, value: Any) -> Any:
    keys: list[Any] = (
        list(value)
        if isinstance(value, dict)
        else list(range(len(value)))
        if isinstance(value, list)
        else []
    )
    if not keys or draw(st.integers(0, 4)) == 0:
        return draw(VALUES)
    key = draw(st.sampled_from(keys))
    match draw(st.sampled_from(["go on", "go on", "leave out", "add"])):
        case "go on":
            value[key] = _change(draw, value[key])
        case "leave out":
            del value[key]
        case "add" if isinstance(value, dict):
            value[draw(NAMES)] = draw(VALUES)
        case "add":
            value.insert(key, draw(VALUES))
    return value
