"""Parts of files on local disk and on an object store."""

import os

import numpy as np
import pytest

from g2d_jax.runtime import ranges


@pytest.fixture(params=["local", "store"])
def folder(request, tmp_path, bucket):
    return tmp_path if request.param == "local" else bucket


def test_a_part_is_what_was_written_there(folder):
    # more than two requests to a store
    whole = np.random.default_rng(0).integers(0, 256, 40_000_003, np.uint8)
    (folder / "file").write_bytes(whole.tobytes())
    assert ranges.size(folder / "file") == len(whole)
    for start, length in ((0, len(whole)), (5, 20_000_000), (len(whole) - 3, 3), (7, 0)):
        found = ranges.read(folder / "file", start, length)
        assert found.dtype == np.uint8 and found.shape == (length,)
        np.testing.assert_array_equal(found, whole[start : start + length])


def test_a_file_that_ends_too_early_or_is_not_there_is_named(folder):
    (folder / "file").write_bytes(b"0123456789")
    with pytest.raises(
        ValueError, match=r"file ends at byte 10, but 5 bytes from 7 were requested"
    ):
        ranges.read(folder / "file", 7, 5)
    for call in (lambda: ranges.size(folder / "none"), lambda: ranges.read(folder / "none", 0, 1)):
        with pytest.raises(FileNotFoundError, match="none"):
            call()


def test_only_the_part_is_read(tmp_path):
    path = tmp_path / "sparse"
    path.touch()
    os.truncate(path, 1 << 40)  # a terabyte that is not there
    assert not ranges.read(path, 1 << 39, 1 << 20).any()
