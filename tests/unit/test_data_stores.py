"""Image store and episode store: what is read is what was written, also after a crash."""

import os
import struct
import zlib

import pytest

from slime_cua.core.errors import DataError
from slime_cua.core.types import Episode, EpisodeGroup, ImageRef
from slime_cua.data.episodes import EpisodeStore
from slime_cua.data.images import ImageStore, ImageStoreFullError, Needs, png_size_px


def png(width, height, filling=b""):
    """A PNG of one grey level, with `filling` in a text chunk."""

    def chunk(name, body):
        return struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))

    rows = (b"\0" + b"\x80" * width) * height
    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    parts = [
        chunk(b"IHDR", header),
        chunk(b"tEXt", filling),
        chunk(b"IDAT", zlib.compress(rows)),
        chunk(b"IEND", b""),
    ]
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def test_an_image_is_kept_once_by_content_and_read_back(tmp_path):
    store = ImageStore(tmp_path)
    ref = store.put(png(30, 20))
    assert (ref.width_px, ref.height_px) == (30, 20) and ref in store
    assert store.put(png(30, 20), 30, 20) == ref
    assert ImageStore(tmp_path).get(ref) == png(30, 20)
    assert len(list(tmp_path.glob("*/*"))) == 1


def test_what_is_no_png_or_has_another_size_is_refused(tmp_path):
    store = ImageStore(tmp_path)
    with pytest.raises(DataError, match="no PNG"):
        store.put(b"\xff\xd8 a jpeg")
    with pytest.raises(DataError, match="30x20 px, not 31x20 px"):
        store.put(png(30, 20), 31, 20)
    assert png_size_px(png(1504, 832)) == (1504, 832)


def test_a_missing_or_damaged_image_is_named(tmp_path):
    store = ImageStore(tmp_path)
    ref = store.put(png(4, 4))
    store.path(ref).write_bytes(png(4, 4)[:-5])
    with pytest.raises(DataError, match="damaged"):
        store.get(ref)
    assert store.put(png(4, 4)) == ref and store.get(ref) == png(4, 4)
    with pytest.raises(DataError, match="ffffffffffff is not in"):
        store.get(ImageRef(sha256="f" * 64, width_px=1, height_px=1))


def test_the_oldest_images_go_when_the_store_is_full(tmp_path):
    store, refs = store_of_ten(tmp_path, Needs)
    store.put(png(4, 4, b"99"))
    assert store.total_bytes <= 0.9 * store.max_bytes
    assert refs[0] not in store and refs[1] not in store and refs[9] in store


def store_of_ten(tmp_path, needs):
    """A store that ten images fill, put at 0, 1, ... 9 s; their refs."""
    one = len(png(4, 4, b"00"))
    store = ImageStore(tmp_path, max_bytes=10 * one, needs=needs)
    refs = []
    for i in range(10):
        refs.append(store.put(png(4, 4, f"{i:02}".encode())))
        os.utime(store.path(refs[-1]), (i, i))
    return store, refs


def test_what_is_needed_stays_and_consumed_images_go_first(tmp_path):
    needed = set()
    store, refs = store_of_ten(tmp_path, lambda: Needs(frozenset(needed), since_s=8.0))
    needed.update(refs[n].sha256 for n in (0, 1, 3))
    store.put(png(4, 4, b"99"))
    assert [n for n, ref in enumerate(refs) if ref not in store] == [2, 4]


def test_a_store_that_only_holds_needed_images_says_so_and_goes_on_when_they_are_consumed(
    tmp_path, monkeypatch
):
    monkeypatch.setattr("slime_cua.data.images.LOOK_AGAIN_S", 0.0)
    since = [0.0]
    store, refs = store_of_ten(tmp_path, lambda: Needs(since_s=since[0]))
    with pytest.raises(
        ImageStoreFullError, match=r"still need, 0 MiB allowed: raise rollout.max_image_bytes"
    ):
        store.put(png(4, 4, b"99"))
    assert all(ref in store for ref in refs) and len(list(tmp_path.glob("*/.new-*"))) == 0
    assert store.put(png(4, 4, b"05")) == refs[5], "what is there already needs no room"
    since[0] = 100.0
    ref = store.put(png(4, 4, b"99"))
    assert ref in store and refs[0] not in store


def group(number):
    episode = Episode(
        episode_id=f"e{number}",
        group_id=f"g{number}",
        task_id="t",
        turns=(),
        reward=1 / 3,
        stop_reason="terminated",
        metadata={"note": "line\nbreak"},
    )
    return EpisodeGroup(group_id=f"g{number}", task_id="t", episodes=(episode,), admitted_version=number)


def test_groups_come_back_equal_and_in_order(tmp_path):
    store = EpisodeStore(tmp_path / "deep" / "groups.jsonl")
    assert store.read() == []
    for number in range(3):
        store.append(group(number))
    assert EpisodeStore(store.path).read() == [group(0), group(1), group(2)]
    assert store.path.read_bytes().count(b"\n") == 3


@pytest.mark.parametrize("cut", [1, 2, 40, 10_000])
def test_a_cut_last_line_is_dropped_reported_and_overwritten_by_the_next_append(tmp_path, cut):
    store = EpisodeStore(tmp_path / "groups.jsonl")
    store.append(group(0))
    whole = store.path.read_bytes()
    store.append(group(1))
    data = store.path.read_bytes()
    left = data[: max(len(whole) if cut < 10_000 else 0, len(data) - cut)] if cut < 10_000 else data[:7]
    store.path.write_bytes(left)
    kept = [group(0)] if cut < 10_000 else []
    assert store.read() == kept
    assert store.num_dropped_bytes == len(left) - (len(whole) if kept else 0)
    store.append(group(2))
    assert store.read() == [*kept, group(2)] and store.num_dropped_bytes == 0


def test_a_whole_line_that_is_no_group_is_an_error_with_its_number(tmp_path):
    store = EpisodeStore(tmp_path / "groups.jsonl")
    store.append(group(0))
    with store.path.open("ab") as file:
        file.write(b'{"group_id": 5}\n')
    with pytest.raises(DataError, match=r"groups.jsonl:2: no episode group"):
        store.read()
