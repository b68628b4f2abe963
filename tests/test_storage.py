"""Files, manifests, fingerprints and log segments, on local disk and on an object store held in
memory."""

from __future__ import annotations

import dataclasses
import enum
import errno
import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import aiohttp
import numpy as np
import pytest
from etils import epath
from examples import examples
from hypothesis import given
from hypothesis import strategies as st

from g2d_jax.records import SamplingParams, Verdict
from g2d_jax.runtime import storage


@pytest.fixture(params=["local", "object store"])
def folder(request, tmp_path):
    if request.param == "local":
        return epath.Path(tmp_path) / "work"
    return request.getfixturevalue("bucket") / "work"


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


# One file


def test_json_round_trip_in_a_new_folder(folder):
    value = {"b": [1, 2.5, None, True], "a": "naïve \ud800 \x00"}
    storage.write_json(folder / "new" / "config.json", value)
    assert storage.read_json(folder / "new" / "config.json") == value
    # no temporary left
    assert [path.name for path in (folder / "new").iterdir()] == ["config.json"]


def test_json_text_is_stable_and_standard(folder):
    storage.write_json(
        folder / "a.json",
        {"b": (1, np.float32(0.5)), "a": [float("nan"), float("inf"), -float("inf")]},
    )
    expected = '{"a":["NaN","Infinity","-Infinity"],"b":[1,0.5]}'
    text = (folder / "a.json").read_bytes().decode()
    assert "".join(text.split()) == expected and text.endswith("}\n")
    assert float(storage.read_json(folder / "a.json")["a"][1]) == float("inf")


def test_missing_and_damaged_json_name_the_file(folder):
    with pytest.raises(FileNotFoundError, match=r"gone\.json"):
        storage.read_json(folder / "gone.json")
    storage.write_bytes(folder / "cut.json", b'{"a": [1,\n')
    with pytest.raises(ValueError, match=r"cut\.json is not valid JSON.*line 2"):
        storage.read_json(folder / "cut.json")


def test_a_failed_write_keeps_the_old_file_and_names_it(tmp_path):
    path = tmp_path / "config.json"
    storage.write_json(path, {"a": 1})
    with pytest.raises(TypeError, match=r"config\.json.*set"):
        storage.write_json(path, {"a": {1, 2}})
    with pytest.raises(OSError, match=r"cannot write.*config\.json/inner\.json"):
        storage.write_json(path / "inner.json", {})
    assert storage.read_json(path) == {"a": 1}
    assert os.listdir(tmp_path) == ["config.json"]


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs a device that is always full")
def test_a_full_disk_is_named():
    device = Path("/dev/full")
    with (
        pytest.raises(OSError, match=r"No space left.*the_file") as caught,
        storage.naming("write", "the_file"),
    ):
        device.write_bytes(b"x")
    assert caught.value.filename == "the_file"


@pytest.mark.parametrize("number", [errno.ECONNREFUSED, errno.ECONNRESET, errno.EHOSTUNREACH])
def test_a_store_that_cannot_be_reached_may_be_there_next_time(number):
    # an OSError with a number, as for a file
    lost = aiohttp.ClientOSError(number, os.strerror(number))
    with (
        pytest.raises(storage.StoreUnavailable, match=r"cannot read gs://b/x: "),
        storage.naming("read", "gs://b/x"),
    ):
        raise lost
    with (
        pytest.raises(OSError, match="No space left") as caught,
        storage.naming("write", "gs://b/x"),
    ):
        raise OSError(errno.ENOSPC, "No space left on device")  # of the disk here
    assert not isinstance(caught.value, storage.StoreUnavailable)


# Fingerprints


def test_fingerprint_is_the_same_everywhere():
    """Literal values: they name reference caches and work directories on disk, so they must never
    change."""
    assert storage.fingerprint({}) == "01e7b720ff566d53"  # printf '{}' | b2sum -l 64
    value = {"seed": 1, "lr": 1e-6, "mesh": (8, 1), "name": "é", "none": None}
    assert storage.fingerprint(value) == "5354c680f5f0ce3c"


def test_fingerprint_sees_values_not_containers():
    same = storage.fingerprint({"a": [1, 2], "b": 0.5, "c": "stop"})
    kind = enum.StrEnum("kind", {"STOP": "stop"})
    assert (
        storage.fingerprint({"c": kind.STOP, "b": np.float64(0.5), "a": (np.int32(1), 2)}) == same
    )
    assert (
        storage.fingerprint(
            {"a": np.array([1, 2], np.int32), "b": np.float32(0.5), "c": np.str_("stop")}
        )
        == same
    )
    different = [
        1,
        1.0,
        True,
        "1",
        None,
        0.1,
        np.float32(0.1),
        0.0,
        -0.0,
        float("nan"),
        "NaN",
        [],
        {},
        [[]],
        [1],
    ]
    assert len({storage.fingerprint(value) for value in different}) == len(different)


def test_fingerprint_of_records_and_refusals():
    params = SamplingParams(max_new_tokens=4)
    assert storage.fingerprint(params) == storage.fingerprint(dataclasses.asdict(params))
    assert storage.plain({"v": Verdict.TIMEOUT}) == {"v": "timeout"}
    with pytest.raises(TypeError, match=r"keys of JSON objects must be strings, got 10"):
        storage.fingerprint({10: "checkpoint"})
    with pytest.raises(TypeError, match="cannot write a type as JSON"):
        storage.fingerprint(SamplingParams)


@examples(50)
@given(st.dictionaries(st.text(), json_values, max_size=5))
def test_fingerprint_ignores_the_order_of_keys(value):
    backwards = dict(reversed(value.items()))
    assert storage.fingerprint(backwards) == storage.fingerprint(value)
    assert storage.fingerprint(json.loads(json.dumps(value))) == storage.fingerprint(value)


def test_what_only_informs_is_left_out_whatever_is_wrong_with_it(tmp_path):
    (tmp_path / "environment.json").mkdir()

    assert "environment.json" in storage.read_informing(tmp_path / "environment.json")[1]
    assert storage.read_informing(tmp_path / "none.json") == ({}, "")
    (tmp_path / "log" / "00000.jsonl").mkdir(parents=True)
    (tmp_path / "log" / "00001.jsonl").write_text('{"a": 1}\n')
    damaged = []
    assert storage.read_segments(tmp_path / "log", damaged.append) == [{"a": 1}]
    assert len(damaged) == 1 and "00000.jsonl" in damaged[0]
    assert (
        storage.read_segments(tmp_path / "log" / "00001.jsonl", damaged.append) == []
        and len(damaged) == 2
    )
    with pytest.raises(OSError, match=r"00000\.jsonl"):
        storage.read_segments(tmp_path / "log")


def test_no_more_of_a_json_file_is_read_than_the_most(tmp_path, monkeypatch):
    (tmp_path / "a.json").write_text('"' + "x" * 98 + '"')
    monkeypatch.setattr(storage, "MOST_JSON", 100)
    assert storage.read_json(tmp_path / "a.json") == "x" * 98
    with open(tmp_path / "a.json", "r+b") as file:
        file.truncate(2**40)  # of a terabyte, of which the disk holds nothing
    with pytest.raises(ValueError, match=r"a\.json has more than 100 bytes"):
        storage.read_json(tmp_path / "a.json")


@pytest.mark.parametrize("opening", ["[", '{"a":', '[{"b":'])
def test_json_that_is_nested_too_deeply_is_named(tmp_path, opening):
    (tmp_path / "a.json").write_text(opening * 100_000)
    with pytest.raises(ValueError, match=r"a\.json is not valid JSON.*recursion"):
        storage.read_json(tmp_path / "a.json")
    (tmp_path / "00000.jsonl").write_text(f'{{"a": 1}}\n{opening * 100_000}\n{{"b": 2}}\n')
    damaged = []
    assert storage.read_segments(tmp_path, damaged.append) == [{"a": 1}, {"b": 2}]
    assert len(damaged) == 1 and "line 2" in damaged[0]
    with pytest.raises(ValueError, match="line 2: not valid JSON"):
        storage.read_segments(tmp_path)


# Logs


def test_each_start_opens_a_new_segment(folder):
    assert storage.read_segments(folder / "metrics") == []
    for start in range(3):
        log = storage.Segments(folder / "metrics")
        for i in range(2):
            log.append({"step": 2 * start + i})
        log.close()
    storage.Segments(folder / "metrics").close()  # logged nothing: no file
    assert sorted(path.name for path in (folder / "metrics").iterdir()) == [
        f"0000{i}.jsonl" for i in range(3)
    ]
    assert [record["step"] for record in storage.read_segments(folder / "metrics")] == list(
        range(6)
    )


def test_segments_are_bounded_and_ordered_by_number(folder):
    storage.write_bytes(folder / "99999.jsonl", b'{"i":-1}\n')
    storage.write_bytes(folder / "notes.txt", b"not a segment")
    log = storage.Segments(folder, limit=64)
    for i in range(40):
        log.append({"i": i})
    log.close()
    assert [record["i"] for record in storage.read_segments(folder)] == list(range(-1, 40))
    assert {path.name for path in folder.iterdir()} > {"100000.jsonl", "100001.jsonl"}
    assert all(len(path.read_bytes()) <= 64 for path in folder.iterdir())


def test_an_object_is_rewritten_at_a_bounded_rate(bucket):
    log = storage.Segments(bucket / "log", pause=3600.0)
    lengths = []
    for then in (None, None, log.flush, log.close):
        log.append({})
        if then:
            then()
        lengths.append(len(storage.read_segments(bucket / "log")))
    assert lengths == [1, 1, 3, 4]


def test_a_killed_process_loses_nothing_it_logged(tmp_path, forks):
    code = """
import os, signal, sys
from g2d_jax.runtime.storage import Segments
log = Segments(sys.argv[1])
for i in range(100):
    log.append({"i": i})
os.kill(os.getpid(), signal.SIGKILL)
"""
    assert forks.run(tmp_path, code=code).returncode == -9
    assert [record["i"] for record in storage.read_segments(tmp_path)] == list(range(100))


@examples(50)
@given(
    records=st.lists(st.dictionaries(st.text(max_size=4), json_values, max_size=3), min_size=1),
    data=st.data(),
)
def test_a_log_cut_anywhere_loses_only_its_last_record(records, data, tmp_path_factory):
    folder = tmp_path_factory.mktemp("log")
    log = storage.Segments(folder)
    for record in records:
        log.append(record)
    log.close()
    whole = (folder / "00000.jsonl").read_bytes()
    cut = data.draw(st.integers(0, len(whole)))
    (folder / "00000.jsonl").write_bytes(whole[:cut])
    read = storage.read_segments(folder)
    assert read == records[: len(read)] and len(read) >= whole[:cut].count(b"\n")
    (folder / "00001.jsonl").write_bytes(b'{"next":1}\n')
    assert storage.read_segments(folder) == [*read, {"next": 1}]


@pytest.mark.parametrize("damage", [b'{"a": \n{"b": 1}\n', b"[1]\n", b'{"b": 1}\n\xff\n', b"\n{}"])
def test_other_damage_names_file_and_line(damage, tmp_path):
    (tmp_path / "00000.jsonl").write_bytes(b'{"ok": 1}\n' + damage)
    with pytest.raises(ValueError, match=r"00000\.jsonl, line [23]:"):
        storage.read_segments(tmp_path)
    said: list[str] = []  # of a log that only informs it is left out and told
    assert {"ok": 1} in storage.read_segments(
        tmp_path, said.append
    ) and "00000.jsonl, line " in said[0]
    # as a power cut leaves it: torn
    (tmp_path / "00000.jsonl").write_bytes(b'{"ok": 1}\n' + bytes(100))
    assert storage.read_segments(tmp_path) == [{"ok": 1}]


@pytest.mark.skipif(
    sys.platform != "linux", reason="limits the size of a file, with SIGXFSZ ignored by Python"
)
def test_a_torn_write_is_followed_by_a_new_segment(tmp_path):
    import resource

    log = storage.Segments(tmp_path)
    log.append({"i": 0})
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20, limits[1]))
    try:
        with pytest.raises(OSError, match=r"00000\.jsonl"):
            log.append({"i": 1, "long": "x" * 50})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    log.append({"i": 2})
    log.close()
    assert storage.read_segments(tmp_path) == [{"i": 0}, {"i": 2}]


@pytest.mark.parametrize(
    ("status", "said"),
    [(401, "log in with `hf auth login`"), (403, "accept its licence"), (404, "check the name")],
)
def test_what_the_hub_answers_is_said_in_a_line(status: int, said: str) -> None:
    class Answered(
        Exception
    ):  # requests' and httpx's errors, on which huggingface_hub's are built, have this
        response = SimpleNamespace(status_code=status)

    outer = ValueError("what a library makes of it")
    outer.__cause__ = Answered("two\nlines")
    assert said in storage.hub_reason(outer) and "\n" not in storage.hub_reason(outer)


def test_a_hub_that_is_silent_is_said_in_a_line() -> None:
    from huggingface_hub.errors import LocalEntryNotFoundError

    for error in (
        LocalEntryNotFoundError("pages of\nadvice"),
        ConnectionError("reset"),
        TimeoutError("slow"),
    ):
        assert storage.hub_reason(error).startswith("this machine cannot reach the hub")
    assert storage.hub_reason(KeyError("one\ntwo")) == "KeyError: 'one\\ntwo'"
    assert storage.hub_reason(ValueError("one\ntwo")) == "ValueError: one"
