"""Collectives of a compiled program, parsed from its HLO text and multiplied by loop trip counts.

XLA's own cost analysis counts a loop's body once. This module walks every computation from the
entry, with the number of times it runs. The trip count of a `while` is stated in the text, or is
the constant that its condition compares with.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

KINDS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")

_HEAD = re.compile(r"^(ENTRY )?%?([\w.-]+) \(.*\) -> .+ \{$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.-]+) = (.*)$")
_SHAPE = re.compile(r"\b(pred|bf16|[suf]\d+|f8\w+|c\d+)\[([\d,]*)\]")
_CALLS = re.compile(r"\b(?:calls|to_apply|true_computation|false_computation)=%?([\w.-]+)")
_LISTS = re.compile(r"\b(?:branch_computations|called_computations)=\{([^}]*)\}")
_WHILE = re.compile(r"condition=%?([\w.-]+), body=%?([\w.-]+)")
_CONSTANT = re.compile(r"\bconstant\((\d+)\)")
# "[4,2]T(1,0)": consecutive numbers in this shape, then transposed.
_IOTA = r"\[([\d,]+)\](?:T\(([\d,]+)\))?"
_TRANSFER = re.compile(r'_xla_megascale_transfer_type="(\w+)"')
_SLICES = re.compile(r'_xla_megascale_target="\{([\d,:]+)\}x')
_OPCODE = re.compile(r"[)\]}] ([a-z][\w-]*)\(")


@dataclass(frozen=True)
class Collective:
    """One collective instruction. size: bytes of its full array on a device. group: devices that
    take part. Both are None for an unknown form of text.

    times: how often it runs in one call of the program. within: for groups over several slices or
    GPU hosts, the fewest devices of a group in one of them; None for other groups.
    """

    kind: str
    size: int | None
    group: int | None
    times: int
    within: int | None = None

    @property
    def sent(self) -> float | None:
        """The bytes that a device sends in one call; None if unknown. A ring sends (n-1)/n of the
        array, twice for an all-reduce."""
        if self.size is None or self.group is None:
            return None
        share = (self.group - 1) / self.group
        factor = {"all-reduce": 2 * share, "collective-permute": 1.0}.get(self.kind, share)
        return factor * self.size * self.times

    @property
    def far(self) -> float:
        """The bytes that leave a slice or host in one call, per device of the group in it; 0 if
        unknown.

        A ring visits all devices of a slice before the next slice. So one device's bytes leave the
        slice, and its devices share the network. An all-to-all sends different bytes to every
        device.
        """
        if self.within is None or self.sent is None or self.size is None or self.group is None:
            return 0.0
        if self.kind == "all-to-all":
            return self.size * self.times * (self.group - self.within) / self.group
        return self.sent / self.within


_Lines = dict[str, str]
"""A computation: instruction -> the text after its "="."""


def collectives(text: str, dynamic: int = 1, near: int | None = None) -> list[Collective]:
    """List all collectives of a module that move data. text: `compiled.as_text()`.

    dynamic: trips of the outermost loop on each path without a constant count; further such loops
    inside it count once. near: devices of a slice or GPU host, numbered one slice after another;
    None: all.

    A compiler may cut an asynchronous collective into pieces, each fused with other work. Pieces
    share channel and size, and count once for every start; pieces in between may be in a concurrent
    loop. A channel alone does not identify a collective: all collectives of a shard_map share one.
    """
    entry, computations = _parse(text)
    by_place: dict[tuple[str, ...], tuple[bool, Collective]] = {}
    for place, starts, collective in _walk(computations, entry, 1, dynamic, near):
        previous = by_place.get(place)
        if previous is None or (starts, collective.times) > (previous[0], previous[1].times):
            by_place[place] = starts, collective
    sending = []
    for _, collective in by_place.values():
        if collective.group != 1 and collective.size != 0:
            sending.append(collective)
    return sending


def bytes_sent(sending: list[Collective]) -> dict[str, float]:
    """Sum the known bytes that each device sends in one call of the program, by kind of
    collective."""
    sent = dict.fromkeys(KINDS, 0.0)
    for collective in sending:
        sent[collective.kind] += collective.sent or 0.0
    return sent


def bytes_by_group(sending: list[Collective]) -> dict[int, float]:
    """Sum the known bytes that each device sends in one call of the program, by the number of
    devices in the collective."""
    sent: dict[int, float] = {}
    for collective in sending:
        if collective.group is not None and collective.sent is not None:
            sent[collective.group] = sent.get(collective.group, 0.0) + collective.sent
    return sent


def _parse(text: str) -> tuple[str, dict[str, _Lines]]:
    """Return the name of a module's entry, and its computations by name."""
    computations: dict[str, _Lines] = {}
    entry = ""
    lines: _Lines | None = None
    for line in text.splitlines():
        if head := _HEAD.match(line):
            if head[1]:
                entry = head[2]
            lines = computations.setdefault(head[2], {})
        # Only a line with nothing else: a kernel's metadata may span several lines.
        elif line.rstrip() == "}":
            lines = None
        elif lines is not None and (instruction := _INSTRUCTION.match(line)):
            lines[instruction[1]] = instruction[2]
    return entry, computations


def _walk(
    computations: Mapping[str, _Lines],
    name: str,
    times: int,
    dynamic: int,
    near: int | None,
    path: str = "",
    fused: bool = False,
) -> Iterator[tuple[tuple[str, ...], bool, Collective]]:
    """Yield each collective that a computation runs, after its identity and whether this
    computation starts it asynchronously. The identity is the shared text of a fused collective's
    pieces, else the path to it."""
    starts = any('"AsyncCollectiveStart"' in rest for rest in computations[name].values())
    for instruction, rest in computations[name].items():
        opcode = _opcode(rest)
        if opcode == "while" and (loop := _WHILE.search(rest)):
            trips = _trips(computations, rest, loop[1], loop[2])
            inner, left = (dynamic, 1) if trips is None else (trips, dynamic)
            yield from _walk(
                computations, loop[2], times * inner, left, near, f"{path}/{instruction}"
            )
            continue
        kind = opcode.removesuffix("-start")
        if kind in KINDS:
            size, group, within = _size_and_group(rest, kind, opcode != kind, near)
            pieces = re.findall(r'channel_id=\d+|chain_id="\d+"', rest)
            place = (kind, str(size), *pieces) if fused and pieces else (f"{path}/{instruction}",)
            yield place, starts, Collective(kind, size, group, times, within)
        if opcode == "send" and (transfer := _TRANSFER.search(rest)):
            yield (f"{path}/{instruction}",), starts, _between_slices(rest, transfer[1], times)
        if opcode.endswith(("-done", "-update")):
            continue
        listed = ",".join(_LISTS.findall(rest))
        for callee in _CALLS.findall(rest) + re.findall(r"[\w.-]+", listed):
            if callee in computations and kind not in KINDS:
                inside = f"{path}/{instruction}"
                yield from _walk(
                    computations, callee, times, dynamic, near, inside, fused or opcode == "fusion"
                )


def _opcode(rest: str) -> str:
    """Return the operation's name: the word before "(", after the result's shape."""
    match = _OPCODE.search(rest)
    return match[1] if match else ""


def _trips(computations: Mapping[str, _Lines], rest: str, condition: str, body: str) -> int | None:
    """Count a loop's trips; None if they are known only at run time."""
    if stated := re.search(r'known_trip_count"?[=:]\{"?n"?:"?(\d+)', rest):
        return int(stated[1])
    lines = computations[condition]
    constants = _constants(lines)
    compares = [line for line in lines.values() if _opcode(line) in ("compare", "fusion")]
    # lax.scan and fori_loop with a constant bound count up from 0 and compare once, with that
    # bound.
    if len(constants) != 1 or len(compares) != 1:
        return None
    ((name, bound),) = constants.items()
    if not re.search(rf"%?{re.escape(name)}\b", compares[0]):
        return None
    return -(-bound // _stride(lines, compares[0], computations[body]))


def _constants(lines: Mapping[str, str]) -> dict[str, int]:
    constants = {}
    for name, line in lines.items():
        if match := _CONSTANT.search(line):
            constants[name] = int(match[1])
    return constants


def _stride(condition: Mapping[str, str], compare: str, body: Mapping[str, str]) -> int:
    """Return the step of a loop's counter: 1, or more if XLA merged several trips into one body."""
    place = None
    for name in _operands(compare):
        if match := re.search(r"index=(\d+)", condition.get(name, "")):
            place = int(match[1])
            break
    result = next((line for line in reversed([*body.values()]) if _opcode(line) == "tuple"), None)
    if place is None or result is None:
        return 1
    step = body.get(_operands(result)[place], "")
    constants = _constants(body)
    if _opcode(step) != "add":
        return 1
    return next((constants[name] for name in _operands(step) if name in constants), 1)


def _operands(rest: str) -> list[str]:
    """List the names of an instruction's operands."""
    match = _OPCODE.search(rest)
    if match is None:
        return []
    return re.findall(r"%([\w.-]+)", rest[match.end() :].split(")", 1)[0])


def _size_and_group(
    rest: str, kind: str, start: bool, near: int | None
) -> tuple[int | None, int | None, int | None]:
    """Return the full array's bytes, a group's devices and `Collective.within`; all None for an
    unknown form.

    Pairs count as a group of two, and as one if every device sends to itself.
    """
    try:
        groups = _groups(rest)
        pairs = "source_target_pairs=" in rest
        group = max(map(len, map(set, groups)), default=1) if pairs else len(groups[0])
        return _size(rest, kind, start, group), group, _within(groups, near)
    except (ValueError, KeyError):
        return None, None, None


def _between_slices(rest: str, transfer: str, times: int) -> Collective:
    """Return the collective that a TPU's send to the host belongs to, between devices at the same
    place of each slice.

    The part within each slice is a separate collective. The target has the form "{1,2}x{0:7}":
    slices, and devices of each.
    """
    kind = {"ONE_TO_ONE": "collective-permute"}.get(transfer, transfer.lower().replace("_", "-"))
    shape = _SHAPE.search(rest)
    slices = _SLICES.search(rest)
    if kind not in KINDS or not shape or not slices:
        return Collective(kind if kind in KINDS else "collective-permute", None, None, times)
    count = 0
    for span in slices[1].split(","):
        first, _, last = span.partition(":")
        count += int(last or first) - int(first) + 1
    size = _bytes(shape[1], shape[2])
    if kind == "all-gather":
        size *= count  # it sends its part
    return Collective(kind, size, count, times, within=1)


def _within(groups: list[list[int]], near: int | None) -> int | None:
    """Count the fewest devices that a group has in one slice of `near` devices; None if no group
    spans slices."""
    if near is None:
        return None
    fewest = []
    for members in groups:
        in_slices = Counter(device // near for device in members)
        if len(in_slices) > 1:
            fewest.append(min(in_slices.values()))
    return min(fewest, default=None)


def _size(rest: str, kind: str, start: bool, group: int) -> int:
    """Count the bytes of the full array: the gathered result, or the scattered or summed
    operand."""
    shapes = rest.split(f" {kind}{'-start' * start}(", 1)[0]
    if start and kind != "all-reduce":  # (operand or operands, result or results, context)
        operands, results, *_ = _elements(shapes)
        shapes = results if kind == "all-gather" else operands
    sizes = [_bytes(*shape) for shape in _SHAPE.findall(shapes)]
    if not sizes:
        raise ValueError(f"no shape found in this collective: {rest[:300]}")
    if kind == "reduce-scatter" and not start:
        return sum(sizes) * group
    return sum(sizes)


def _elements(shape: str) -> list[str]:
    """Split a tuple's shape into its elements' shapes, which may be tuples. Raises ValueError for
    other shapes."""
    if not (shape.startswith("(") and shape.endswith(")")):
        raise ValueError(f"not a tuple: {shape[:300]}")
    elements = [""]
    depth = 0
    for letter in shape[1:-1]:
        depth += (letter in "([{") - (letter in ")]}")
        if letter == "," and not depth:
            elements.append("")
        else:
            elements[-1] += letter
    return elements


def _bytes(kind: str, dimensions: str) -> int:
    bits = 8 if kind == "pred" else int(re.findall(r"\d+", kind)[0])
    return math.prod(int(size) for size in dimensions.split(",") if size) * bits // 8


def _groups(rest: str) -> list[list[int]]:
    """List the devices of every group or pair, from any of XLA's forms. Raises ValueError for an
    unknown form."""
    if pairs := re.search(r"source_target_pairs=\{((?:\{\d+,\d+\},?\s*)*)\}", rest):
        return list(map(_integers, re.findall(r"\d+,\d+", pairs[1])))
    if listed := re.search(r"replica_groups=\{(\{[\d,{} ]+?\})\}", rest):
        return list(map(_integers, re.findall(r"\{([\d,]+)\}", listed[1])))
    if iota := re.search(rf"replica_groups=\[(\d+),(\d+)\]<={_IOTA}", rest):
        return list(_iota(iota[3], iota[4]).reshape(int(iota[1]), int(iota[2])).tolist())
    if named := re.search(r"replica_groups=@?mesh\w*\[([^\]]*)\]([^{]*?)\{([^}]*)\}", rest):
        return _mesh_groups(*named.groups())
    raise ValueError(f"no device groups found in this collective: {rest[:300]}")


def _integers(text: str) -> list[int]:
    return list(map(int, text.split(",")))


def _iota(shape: str, order: str | None) -> np.ndarray:
    """Return the devices in a text such as [4,2]T(1,0), as a flat array."""
    sizes = _integers(shape)
    devices = np.arange(math.prod(sizes)).reshape(sizes)
    return devices.transpose(_integers(order) if order else None).reshape(-1)


def _mesh_groups(axes: str, assignment: str, chosen: str) -> list[list[int]]:
    """List the groups along some of a mesh's axes. axes: "'a'=2,'b'=4"; assignment: "" or ",
    device_ids=(…)".

    chosen: such as "'a','b':(1)2", where (1)2 is a part of the axis: of size 2, after parts whose
    sizes multiply to 1.
    """
    names, listed_sizes = zip(*re.findall(r"'?([\w.-]+)'?=(\d+)", axes), strict=True)
    sizes = list(map(int, listed_sizes))
    devices = np.arange(math.prod(sizes))
    if iota := re.search(rf"device_ids=\({_IOTA}\)", assignment):
        devices = _iota(iota[1], iota[2])
    elif listed := re.search(r"device_ids=\(([\d,]+)\)", assignment):
        devices = np.array(_integers(listed[1]))
    elif assignment.strip():
        raise ValueError(f"an unknown order of devices: {assignment}")
    at = np.indices(sizes).reshape(len(sizes), -1)
    place = at.copy()  # without the part along the chosen axes: equal within a group
    for name, before, part in re.findall(r"'?([\w.-]+)'?(?::\((\d+)\)(\d+))?", chosen):
        axis = names.index(name)
        size = int(part or sizes[axis])
        below = sizes[axis] // (int(before or 1) * size)
        place[axis] -= at[axis] // below % size * below
    groups: dict[tuple[int, ...], list[int]] = {}
    for device, key in zip(devices.tolist(), place.T.tolist(), strict=True):
        groups.setdefault(tuple(key), []).append(device)
    return [*groups.values()]
