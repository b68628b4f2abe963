"""Packing of prompts and responses of all lengths into rows of one length, without padding between
them.

A group is one prompt with its responses. The row holds the prompt once and every response reads it
(segment ids of models/attention.py). So G samples of a prompt, or both sides of a preference, cost
one forward pass of the prompt:

    row      | prompt A | A1 | A2 | A3 | prompt B | B1 | B2 |  pad |
    position |  0 1 2   | 3 4| 3  |3 4 5|  0 1    | ...

The first token of every response is predicted from the prompt's last token: `logit_index` is that
column.
Shapes: N micro-batches, R rows of one, T columns of a row, M slots of a row,
one a response.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

import numpy as np

from g2d_jax.records import SEGMENT_STRIDE


@dataclass(frozen=True, slots=True, eq=False)
class Response:
    """token_ids: int32 [L]. token: per-token floats [L] (or one for all). sequence: floats of the
    whole response."""

    token_ids: np.ndarray
    token: Mapping[str, np.ndarray | float] = field(default_factory=dict)
    sequence: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, eq=False)
class Group:
    """One prompt and responses to it. keep_together: keep them in one row (the two sides of a
    preference)."""

    prompt_ids: np.ndarray
    responses: Sequence[Response]
    keep_together: bool = False


Arrays: TypeAlias = dict[str, np.ndarray]


class Place(NamedTuple):
    """The place of a response: flat row (micro-batch * R + row), first column, length."""

    row: int
    column: int
    length: int


@dataclass(frozen=True, slots=True, eq=False)
class Packed:
    """Packed rows, and the place of each response.

    arrays: int32 [N, R, T] tokens, positions, segment_ids, logit_index (column whose hidden state
    predicts this token), response_index (slot of the response in its row, -1 elsewhere); float32
    [N, R, T] for every per-token value, 0 elsewhere; float32 [N, R, M] for every per-response
    value. count: micro-batches that hold anything, the first ones.
    places: for each group, its responses in order. used: tokens that are not padding; attended: the
    total of positions that these read. A repeated prompt counts as often as it is in the rows.
    """

    arrays: Arrays
    count: int
    places: list[list[Place]]
    used: int
    attended: int

    def unpack(self, values: np.ndarray) -> list[list[np.ndarray]]:
        """Cut per-token values [N, R, T] into one array a response, grouped as in `places`."""
        rows = values.reshape(-1, values.shape[-1])

        def cut(place: Place) -> np.ndarray:
            return rows[place.row, place.column : place.column + place.length]

        return [list(map(cut, places)) for places in self.places]


class _Unit(NamedTuple):
    """The content of one row that stays together: a prompt and some of its group's responses, from
    number `first` on."""

    group: int
    first: int
    prompt_ids: np.ndarray
    responses: Sequence[Response]
    size: int


def pack(
    groups: Sequence[Group],
    *,
    row_length: int,
    microbatch_rows: int,
    rows_multiple: int = 1,
    max_responses_per_row: int = 16,
    most_rows: int = 1,
) -> Packed:
    """Pack groups into rows by first fit, longest first, which is deterministic.

    row_length: T. microbatch_rows: the most rows of a micro-batch. rows_multiple: R is a multiple
    of it (devices that share the rows). max_responses_per_row: M; even, since DPO reads the chosen
    responses from even slots. most_rows: the most rows that any batch needs; it determines N and R,
    so that all batches have one shape.
    Micro-batches have one size, the largest that leaves the fewest spare rows. Groups that need not
    stay together are split if they do not fit; the prompt is then repeated. Raises ValueError for
    an empty prompt, or a response or a group to keep together that fits no row or no segment.
    """
    rows = _rows(groups, row_length, max_responses_per_row)
    per_micro, count = _micro_batches(len(rows), microbatch_rows, rows_multiple, most_rows)
    # As many rows as the fullest batch needs, even if empty: the step is compiled for one shape.
    padded = round_up(max(len(rows), most_rows, 1), per_micro)
    arrays = _blank(groups, padded, row_length, max_responses_per_row)
    places: list[list[Place]] = [[Place(0, 0, 0)] * len(group.responses) for group in groups]
    for row, units in enumerate(rows):
        _fill_row(arrays, row, units, places)
    filled = arrays["positions"][arrays["segment_ids"] > 0]
    attended = int(np.sum(filled + 1, dtype=np.int64))  # the token at position p reads p + 1
    shaped = {name: x.reshape(-1, per_micro, *x.shape[1:]) for name, x in arrays.items()}
    return Packed(shaped, count, places, filled.size, attended)


def computed_columns(
    groups: Sequence[Group],
    *,
    row_length: int,
    microbatch_rows: int,
    rows_multiple: int = 1,
    max_responses_per_row: int = 16,
    most_rows: int = 1,
) -> int:
    """Count the columns, padding included, of the micro-batches that `pack` would fill."""
    rows = len(_rows(groups, row_length, max_responses_per_row))
    return math.prod(_micro_batches(rows, microbatch_rows, rows_multiple, most_rows)) * row_length


def round_up(size: int, step: int) -> int:
    """Return the next multiple of step."""
    return divide_up(size, step) * step


def divide_up(size: int, step: int) -> int:
    """Return how many steps cover a size."""
    return -(-size // step)


def _rows(
    groups: Sequence[Group], row_length: int, max_responses_per_row: int
) -> list[list[_Unit]]:
    units: list[_Unit] = []
    for index, group in enumerate(groups):
        units += _units(index, group, row_length, max_responses_per_row)
    return _first_fit(units, row_length, max_responses_per_row)


def _micro_batches(
    rows: int, microbatch_rows: int, rows_multiple: int, most_rows: int
) -> tuple[int, int]:
    """Return the fewest rows for equal micro-batches, and the count of those that hold anything."""
    most = max(microbatch_rows // rows_multiple, 1) * rows_multiple
    room = max(rows, most_rows, 1)
    # First the number of micro-batches for the fullest batch, then its rows divided evenly among
    # them: nine rows in micro-batches of at most eight are five and four, with one spare row, not
    # eight and one, with seven spare.
    micro_batches = divide_up(room, most)
    per_micro = round_up(divide_up(room, micro_batches), rows_multiple)
    return per_micro, max(divide_up(rows, per_micro), 1)


def _units(index: int, group: Group, row_length: int, max_responses_per_row: int) -> list[_Unit]:
    """Cut a group into parts that fit a row: as many responses as fit after one copy of the
    prompt."""
    prompt = len(group.prompt_ids)
    if not prompt:
        raise ValueError(
            "a prompt has no tokens: the first token of a response is predicted from the "
            "prompt's last"
        )
    # Segment ids distinguish this many responses; one more would count as the next prompt.
    distinct = SEGMENT_STRIDE - 1
    if group.keep_together and len(group.responses) > distinct:
        raise ValueError(
            f"a prompt and its {len(group.responses)} responses must share a row, which holds at "
            f"most {distinct} responses of a prompt: lower num_generations"
        )
    most = min(max_responses_per_row, distinct)
    units: list[_Unit] = []
    first = 0
    size = prompt
    for i, response in enumerate(group.responses):
        length = len(response.token_ids)
        if prompt + length > row_length:
            raise ValueError(
                f"a prompt of {prompt} and a response of {length} tokens do not fit a row of "
                f"{row_length}: lower the maximum lengths"
            )
        if size + length > row_length or i - first == most:
            if group.keep_together:
                raise ValueError(
                    f"a prompt of {prompt} tokens and its {len(group.responses)} responses must "
                    f"share a row of {row_length} tokens and {max_responses_per_row} responses: "
                    "make rows longer"
                )
            own = group.responses[first:i]
            units.append(_Unit(index, first, group.prompt_ids, own, size))
            first = i
            size = prompt
        size += length
    if group.responses:
        own = group.responses[first:]
        units.append(_Unit(index, first, group.prompt_ids, own, size))
    return units


def _first_fit(
    units: Sequence[_Unit], row_length: int, max_responses_per_row: int
) -> list[list[_Unit]]:
    """Put each unit, the longest first, into the first row that has room for it: short ones fill
    the gaps."""
    rows: list[list[_Unit]] = []
    room: list[tuple[int, int]] = []  # free columns and free slots of each row
    for unit in sorted(units, key=lambda unit: -unit.size):
        wanted = len(unit.responses)
        row = len(rows)
        for number, (columns, free) in enumerate(room):
            if columns >= unit.size and free >= wanted:
                row = number
                break
        if row == len(rows):
            rows.append([])
            room.append((row_length, max_responses_per_row))
        rows[row].append(unit)
        room[row] = (room[row][0] - unit.size, room[row][1] - wanted)
    return rows


def _blank(groups: Sequence[Group], rows: int, length: int, max_responses_per_row: int) -> Arrays:
    names = ("tokens", "positions", "segment_ids", "logit_index")
    arrays = {name: np.zeros((rows, length), np.int32) for name in names}
    arrays["response_index"] = np.full((rows, length), -1, np.int32)
    responses = list(itertools.chain(*(group.responses for group in groups)))
    for name in sorted(set().union(*(response.token for response in responses))):
        arrays[name] = np.zeros((rows, length), np.float32)
    for name in sorted(set().union(*(response.sequence for response in responses))):
        arrays[name] = np.zeros((rows, max_responses_per_row), np.float32)
    return arrays


def _fill_row(arrays: Arrays, row: int, units: Sequence[_Unit], places: list[list[Place]]) -> None:
    """Write the units of one row, and the places of their responses."""
    column = slot = 0
    for number, unit in enumerate(units, start=1):
        size = len(unit.prompt_ids)
        span = slice(column, column + size)
        arrays["tokens"][row, span] = unit.prompt_ids
        arrays["positions"][row, span] = np.arange(size)
        arrays["segment_ids"][row, span] = number * SEGMENT_STRIDE
        column += size
        last = column - 1
        for member, response in enumerate(unit.responses, start=1):
            length = len(response.token_ids)
            span = slice(column, column + length)
            arrays["tokens"][row, span] = response.token_ids
            arrays["positions"][row, span] = np.arange(size, size + length)
            arrays["segment_ids"][row, span] = number * SEGMENT_STRIDE + member
            # A token is predicted one column earlier. The first of every response is predicted at
            # the prompt's last token, which all responses share.
            before = np.arange(column - 1, column + length - 1)
            before[:1] = last
            arrays["logit_index"][row, span] = before
            arrays["response_index"][row, span] = slot
            for name, value in response.token.items():
                arrays[name][row, span] = value
            for name, value in response.sequence.items():
                arrays[name][row, slot] = value
            places[unit.group][unit.first + member - 1] = Place(row, column, length)
            column += length
            slot += 1
