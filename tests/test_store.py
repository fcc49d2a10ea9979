"""Store: what was added is found, what was freed is gone, and a killed writer loses nothing."""

import contextlib
import inspect
import os
import signal
import sqlite3
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch

import kanerva
from kanerva.errors import UserError
from kanerva.files import read_tensors
from kanerva.memory import refine
from kanerva.models.kpp_bits import KppBits
from kanerva.models.loading import shipped_folder
from kanerva.store import codec, database, index
from kanerva.store.codec import BITS, INT8, decode, encode
from kanerva.store.store import Store
from test_bits import CONFIG, shaken


@pytest.fixture(scope="module")
def model():
    return kanerva.load("glyphs")


@pytest.fixture(scope="module")
def glyphs() -> torch.Tensor:
    from kanerva import data

    pixels = data.load("glyphs", "test").images[:60]
    return data.to_float(data.binarize(pixels, "threshold"), True)


def names(count: int, start: int = 0) -> list[str]:
    return [f"pictures/number-{n:05}.png" for n in range(start, start + count)]


def raw_bytes(store: Store) -> bytes:
    return b"".join(path.read_bytes() for path in store.files)


def half(image: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    seen = torch.zeros(image.shape[-2:])
    seen[: len(seen) // 2] = 1
    return image * seen, seen


def test_blocks_come_back_to_within_half_a_step():
    block = torch.randn(3, 4, 5)
    back = decode(INT8, encode(block), block.shape)
    assert (back - block).abs().max() <= block.abs().max() / 127 / 2 + 1e-6
    with pytest.raises(UserError, match="codec 9"):
        decode(9, encode(block), block.shape)


def test_what_was_added_is_found_from_half(tmp_path: Path, model, glyphs: torch.Tensor):
    store = Store(tmp_path / "a.kanerva", model=model)
    ids = store.add(glyphs[:40], names(40))
    assert ids == list(range(1, 41)) == list(store) and len(store) == 40
    cue, seen = half(glyphs[7])
    hits = store.find(cue, observed=seen)
    assert hits[0].id == 8 and hits[0].probability > 0.9
    assert hits[0].payload == "pictures/number-00007.png"
    assert (hits[0].image - glyphs[7]).abs().mean() < 0.02
    assert torch.equal(store.get([8])[0], hits[0].image)
    assert store.find(glyphs[50]).none > 0.9
    many = store.find(glyphs[:3])
    assert [one[0].id for one in many] == [1, 2, 3]


def test_a_store_and_a_memory_answer_alike(tmp_path: Path, model, glyphs: torch.Tensor):
    store, memory = Store(tmp_path / "a.kanerva", model=model), model.write(glyphs[:30])
    store.add(glyphs[:30])
    cue, seen = half(glyphs[3])
    one, other = store.find(cue, observed=seen), model.find(memory, cue, observed=seen)
    assert one[0].id - 1 == other[0].id
    assert one[0].probability == pytest.approx(other[0].probability, abs=0.05)
    assert one.none == pytest.approx(other.none, abs=0.05)


def test_it_is_there_after_closing(tmp_path: Path, model, glyphs: torch.Tensor):
    path = tmp_path / "a.kanerva"
    with Store(path, model="glyphs") as store:
        store.add(glyphs[:5], names(5))
    store = Store(path)  # it knows its model
    assert store.info()["model"] == shipped_folder("glyphs").name and len(store) == 5
    assert store.find(glyphs[4])[0].id == 5
    assert store.add(glyphs[5:6]) == [6]


def test_freed_bytes_are_in_no_file(tmp_path: Path, model, glyphs: torch.Tensor):
    store = Store(tmp_path / "a.kanerva", model=model)
    store.add(glyphs[:40], names(40))
    rows = store._db.rows([3, 17])
    levels = [store._pictures(np.array([id])).levels.numpy().tobytes() for id in (3, 17)]
    needles = [*(row[1] for row in rows), *(row[2] for row in rows), *levels]
    assert all(needle in raw_bytes(store) for needle in needles)
    receipt = store.free([3, 17])
    assert not receipt.pending and receipt.found == 0
    assert receipt.bytes == sum(len(row[1]) + len(row[2]) for row in rows)
    assert not any(needle in raw_bytes(store) for needle in needles)
    assert len(store) == 38 and 3 not in store and 4 in store
    assert store.find(glyphs[2]).none > 0.9
    assert store.add(glyphs[2:3]) == [41]  # ids are not used twice
    assert store.find(glyphs[2])[0].id == 41
    with pytest.raises(UserError, match="does not hold id 3"):
        store.get([3])
    with pytest.raises(UserError, match="named twice"):
        store.free([4, 4])


def test_a_twin_that_stays_is_no_trace(tmp_path: Path, model, glyphs: torch.Tensor):
    store = Store(tmp_path / "a.kanerva", model=model)
    store.add(glyphs[[1, 1]], ["the same name", "the same name"])
    assert store.free(1).found == 0
    assert store.find(glyphs[1])[0].id == 2


@pytest.mark.parametrize("payload", ["photo-1.png", "AUTOINCREMENT", "fingerprint"])
def test_a_part_of_what_stays_is_no_trace(
    payload: str, tmp_path: Path, model, glyphs: torch.Tensor
):
    """The search finds these bytes in another payload, or in what every store's file has."""
    store = Store(tmp_path / "a.kanerva", model=model)
    store.add(glyphs[:2], [payload, "scans/photo-1.png"])
    assert store.free(1).found == 0 and store.verify().ids == []


def test_bytes_that_nothing_stored_explains_are_a_trace(
    tmp_path: Path, model, glyphs: torch.Tensor
):
    store = Store(tmp_path / "a.kanerva", model=model)
    store.add(glyphs[:2], ["scans/photo-1.png", "photo-1.png"])
    with sqlite3.connect(store.path) as db:
        db.execute("INSERT INTO about VALUES ('note', 'scans/photo-1.png')")
    db.close()
    assert store.free(1).found == 1 and store.verify().ids == [1]


def test_free_waits_for_readers_then_says_so(
    tmp_path: Path, model, glyphs: torch.Tensor, monkeypatch
):
    monkeypatch.setattr("kanerva.store.database._WAIT", 0.2)
    store = Store(tmp_path / "a.kanerva", model=model)
    store.add(glyphs[:4], names(4))
    reader = sqlite3.connect(store.path, isolation_level=None)
    reader.execute("BEGIN")
    reader.execute("SELECT count(*) FROM items").fetchone()
    assert store.free(2).pending
    assert store.verify().pending
    reader.execute("COMMIT")
    receipt = store.verify()
    assert not receipt.pending and receipt.ids == [2]
    assert b"number-00001" not in raw_bytes(store)
    assert store.verify().ids == []


def test_two_processes_see_each_other(tmp_path: Path, model, glyphs: torch.Tensor):
    path = tmp_path / "a.kanerva"
    writer, reader = Store(path, model=model), Store(path, model=model)
    writer.add(glyphs[:3])
    assert len(reader) == 3 and reader.find(glyphs[1])[0].id == 2
    writer.add(glyphs[3:5])
    assert reader.find(glyphs[4])[0].id == 5
    writer.free(2)
    assert reader.find(glyphs[1]).none > 0.9
    assert reader.add(glyphs[6:7]) == [6]


def test_caches_are_made_again(tmp_path: Path, model, glyphs: torch.Tensor):
    path = tmp_path / "a.kanerva"
    with Store(path, model=model) as store:
        store.add(glyphs[:6])
        before = store.get([1, 6])
    levels = tmp_path / "a.kanerva-levels"
    damaged = bytearray(levels.read_bytes())
    damaged[200] ^= 255  # a pixel of the first picture
    levels.write_bytes(damaged)
    assert torch.equal(Store(path, model=model).get([1, 6]), before)
    levels.unlink()
    store = Store(path, model=model)
    store.verify()
    assert torch.equal(store.get([1, 6]), before)
    assert store.find(glyphs[5])[0].id == 6
    levels.unlink()
    twice = Store(path, model=model).get([6, 1, 6])  # an id may be named twice
    assert torch.equal(twice, before[[1, 0, 1]])


def test_a_model_in_training_is_refused_and_its_weights_are_not_frozen(tmp_path: Path):
    model = shaken(CONFIG)
    store = Store(tmp_path / "a.kanerva", model=model)
    (id,) = store.add(torch.zeros(1, *CONFIG.image))
    (tmp_path / "a.kanerva-levels").unlink()
    assert not store.get(id).requires_grad
    assert all(p.requires_grad for p in model.parameters())
    with pytest.raises(UserError, match=r"model\.eval\(\)"):
        Store(tmp_path / "b.kanerva", model=model.train())


def test_large_stores_rank_by_product_quantisation(
    tmp_path: Path, model, glyphs: torch.Tensor, monkeypatch
):
    pytest.importorskip("faiss")
    monkeypatch.setattr(index, "EXACT", 20)
    store = Store(tmp_path / "a.kanerva", model=model)
    store.add(glyphs[:40])
    cue, seen = half(glyphs[30])
    assert store.find(cue, observed=seen)[0].id == 31
    assert (tmp_path / "a.kanerva-index").is_file()
    store.add(glyphs[40:60])
    assert store.find(glyphs[55])[0].id == 56
    store.free(31)
    assert store.find(glyphs[30], k=60).none > 0.9
    assert 31 not in store.find(glyphs[30], k=60).ids
    again = Store(store.path, model=model)
    assert again.find(glyphs[55])[0].id == 56
    codes = read_tensors(tmp_path / "a.kanerva-index")[0]["codes"]
    assert len(codes) == 60 and not codes[30].any() and codes[31].any()


@pytest.fixture
def small_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stores of more than 20 images use product quantisation."""
    pytest.importorskip("faiss")
    monkeypatch.setattr(index, "EXACT", 20)


def test_freed_images_take_no_place_among_the_candidates(
    tmp_path: Path, model, glyphs: torch.Tensor, small_exact
):
    """A cue of ink alone fits a row of zeros better than most images."""
    store = Store(tmp_path / "a.kanerva", model=model)
    store.add(torch.cat([glyphs, glyphs[:40]]))
    cue, whole = torch.ones_like(glyphs[0]), torch.ones(glyphs.shape[-2:])
    store.find(cue)  # makes the index
    store.free(range(1, 77))
    for opened in (store, Store(store.path, model=model)):  # codes in memory, and in the file
        assert set(opened.find(cue, observed=whole, noise="none", k=24).ids) == {*range(77, 101)}
        assert opened.find(glyphs[37], observed=whole, noise="none", k=1).ids == [98]


def test_a_large_index_is_made_again_only_if_ids_have_changed(
    tmp_path: Path, model, glyphs: torch.Tensor, small_exact, monkeypatch: pytest.MonkeyPatch
):
    import faiss

    store, made, fetched = Store(tmp_path / "a.kanerva", model=model), [], []
    build, fetch = faiss.IndexPQFastScan, store._index._fetch
    monkeypatch.setattr(faiss, "IndexPQFastScan", lambda codes: made.append(1) or build(codes))
    store._index._fetch = lambda ids: fetched.extend(ids.tolist()) or fetch(ids)
    store.add(glyphs[:40])
    for _ in range(2):
        assert store.find(glyphs[7])[0].id == 8
    assert len(made) == 1 and set(fetched) == {*range(1, 41)}
    fetched.clear()
    store.free([40, 3])  # the newest too: its row stays, so no other needs to be encoded
    for _ in range(2):
        assert store.find(glyphs[7])[0].id == 8
        store.verify()
    assert len(made) == 2 and not fetched


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda data: b"a picture, perhaps" * 100, "no store"),
        (lambda data: data[:3000], "damaged|malformed|no store"),
        (lambda data: data[:60] + (7).to_bytes(4, "big") + data[64:], "version 7"),
        (lambda data: data[:68] + bytes(4) + data[72:], "no store"),
    ],
)
def test_a_file_that_is_no_store_is_refused(
    damage, says: str, tmp_path: Path, model, glyphs: torch.Tensor
):
    path = tmp_path / "a.kanerva"
    with Store(path, model=model) as store:
        store.add(glyphs[:8])
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(UserError, match=says):
        store = Store(path, model=model)
        store.verify()


def test_other_weights_are_refused(tmp_path: Path, model, glyphs: torch.Tensor):
    path = tmp_path / "a.kanerva"
    with Store(path, model=model):
        pass
    with pytest.raises(UserError, match="written with other weights"):
        Store(path, model="mnist")
    with pytest.raises(UserError, match="say which model"):
        Store(tmp_path / "none.kanerva")
    with pytest.raises(UserError, match="no such folder"):
        Store(tmp_path / "no" / "a.kanerva", model=model)
    with pytest.raises(UserError, match="2 images came with 1 payloads"):
        Store(path, model=model).add(glyphs[:2], ["one"])


def test_mistakes_in_a_call_are_named(tmp_path: Path, model, glyphs: torch.Tensor):
    store = Store(tmp_path / "a.kanerva", model=model)
    ids = store.add(glyphs[:3])
    store.free(ids[0])
    find = inspect.unwrap(Store.find)  # without the type checks that only tests make
    for wrong, says in (
        ({"k": 1.5}, "k must be a whole number, got 1.5"),
        ({"k": 0}, "k must be at least 1, got 0"),
        ({"prior_none": "a"}, "prior_none must be a number on .0, 1., got 'a'"),
        ({"prior_none": None}, "prior_none must be a number on .0, 1., got None"),
        ({"prior_none": 1.5}, "prior_none must be a number on .0, 1., got 1.5"),
    ):
        with pytest.raises(UserError, match=says):
            find(store, glyphs[0], **wrong)
    assert 2 in store and np.int64(3) in store
    for other in (0, 1, 4, -1, 10**30, [1, 2], [2], "2", None, 2.5, torch.ones(2), model):
        assert other not in store


def test_a_store_in_another_thread_is_refused_by_its_reason(
    tmp_path: Path, model, glyphs: torch.Tensor
):
    store = Store(tmp_path / "a.kanerva", model=model)
    (id,) = store.add(glyphs[:1])
    with ThreadPoolExecutor(1) as pool:
        for call in (lambda: store.get(id), store.verify, store.close):
            with pytest.raises(UserError, match="in the thread that opened it"):
                pool.submit(call).result()
    assert store.find(glyphs[0])[0].id == id  # it is still open
    store.close()
    with pytest.raises(UserError, match="was closed"):
        store.get(id)


# Blocks that are bits


@pytest.fixture
def bits() -> KppBits:
    return shaken(pixel_code=0.2, prior=0.05)


@pytest.fixture
def noise() -> torch.Tensor:
    return (torch.rand(70, 1, 10, 7) < 0.3).float()  # more than are decoded at once


def test_a_store_of_bits_gives_back_the_very_pixels(
    tmp_path: Path, bits: KppBits, noise: torch.Tensor
):
    store = Store(tmp_path / "a.kanerva", model=bits)
    ids = store.add(noise, names(70))
    assert ids == list(range(1, 71)) == list(store)
    assert torch.equal(store.get(ids), noise)
    (tmp_path / "a.kanerva-levels").unlink()  # all of it is in the rows
    assert torch.equal(store.get(ids[::-1]), noise.flip(0))
    cue, seen = half(noise[7])
    hits = store.find(cue, observed=seen)
    assert hits[0].id == 8 and hits[0].probability > 0.9
    assert torch.equal(hits[0].image, noise[7])
    assert store.find(1 - noise[7]).none > 0.9
    rows = store._db.rows([8])
    needle, receipt = rows[0][1], store.free(8)
    assert receipt.found == 0 and not receipt.pending and receipt.bytes == len(needle) + 25
    assert needle not in raw_bytes(store) and 8 not in store
    assert store.verify().ids == [] and len(store) == 69


def test_a_row_is_the_bytes_of_its_bits(
    tmp_path: Path, bits: KppBits, noise: torch.Tensor, monkeypatch: pytest.MonkeyPatch
):
    store = Store(tmp_path / "a.kanerva", model=bits)
    rows = store._db.rows(store.add(noise[:9]))
    refined = bits.write(noise[:9]).bits
    monkeypatch.setattr(refine, "_ROUNDS", 0)  # as stores write
    claim = bits.write(noise[:9]).bits  # of the same blocks in a memory
    assert float(refined.sum()) < float(claim.sum())
    extra = torch.tensor([8 * len(block) for _, block, _ in rows]) - claim
    assert {codec for codec, _, _ in rows} == {BITS}
    assert float(extra.max()) < 8.5 and float(extra.mean()) < 5


def test_a_store_and_a_memory_of_bits_answer_alike(
    tmp_path: Path, bits: KppBits, noise: torch.Tensor, monkeypatch: pytest.MonkeyPatch
):
    """Also where pixels are held back: a model's cap is that of what it adds."""
    monkeypatch.setattr(refine, "_ROUNDS", 0)  # a store does not refine
    capped = bits.within(170)
    store, memory = Store(tmp_path / "a.kanerva", model=capped), capped.write(noise[:9])
    assert memory.detail is not None and 0 < memory.detail.stored.max() < 70
    store.add(noise[:9])
    (tmp_path / "a.kanerva-levels").unlink()
    close = {"atol": 0.01, "rtol": 0}  # pictures of a store are bytes
    torch.testing.assert_close(store.get(list(store)), capped.get(memory), **close)
    cue, seen = half(noise[3])
    one, other = store.find(cue, observed=seen), capped.find(memory, cue, observed=seen)
    assert one[0].id - 1 == other[0].id == 3
    assert one[0].probability == pytest.approx(other[0].probability, abs=0.01)
    with Store(store.path, model=bits) as whole:  # the same weights
        assert torch.equal(whole.get(whole.add(noise[9:12])), noise[9:12])
        torch.testing.assert_close(whole.get(1), capped.get(memory)[:1], **close)


def test_next_to_nothing_of_an_image_is_freed_too(
    tmp_path: Path, bits: KppBits, noise: torch.Tensor
):
    """Its block is so short that its bytes stand in any file."""
    store = Store(tmp_path / "a.kanerva", model=bits.within(0))
    store.add(noise[:3])
    assert len(store._db.rows([2])[0][1]) < 3
    assert store.free(2).found == 0 and list(store) == [1, 3]


def test_a_fresh_process_reads_the_very_pixels(tmp_path: Path, bits: KppBits, noise: torch.Tensor):
    bits.save_pretrained(tmp_path / "model")
    with Store(tmp_path / "a.kanerva", model=bits) as store:
        store.add(noise[:5])
    (tmp_path / "a.kanerva-levels").unlink()
    torch.save(noise, tmp_path / "noise.pt")
    script = """
import sys, torch, kanerva
store = kanerva.Store(sys.argv[1] + "/a.kanerva", model=sys.argv[1] + "/model")
print(torch.equal(store.get(list(store)), torch.load(sys.argv[1] + "/noise.pt")[:5]))
"""
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "True"


def test_bits_of_other_weights_and_forged_ones_are_refused(
    tmp_path: Path, bits: KppBits, noise: torch.Tensor
):
    path = tmp_path / "a.kanerva"
    with Store(path, model=bits) as store:
        store.add(noise[:3])
    with pytest.raises(UserError, match="other weights"):
        Store(path, model=KppBits(CONFIG).eval())
    forged = [
        (INT8, b"12345", "codec 0"),
        (BITS, bytes(10**6), "1000000 bytes"),
        (1, b"", "add its image again"),
    ]
    for codec_id, block, says in forged:
        with sqlite3.connect(path) as db:  # whoever writes a store can write digests
            digest = database._digest(2, codec_id, block, b"")
            question = "UPDATE items SET codec = ?, block = ?, digest = ? WHERE id = 2"
            db.execute(question, (codec_id, block, digest))
        db.close()
        (tmp_path / "a.kanerva-levels").unlink(missing_ok=True)
        with Store(path, model=bits) as store, pytest.raises(UserError, match=says):
            store.verify()
    reader = codec.BitsCodec(bits)
    for size in range(0, 60, 3):  # nothing but a picture, or one line
        with contextlib.suppress(UserError):
            assert reader.read([(BITS, os.urandom(size))]).levels.shape == (1, 1, 10, 7)


def add_and_free(store: Store, images: torch.Tensor, pipe: int) -> None:
    while True:
        ids = store.add(images, ["acknowledged"] * len(images))
        os.write(pipe, b"".join(b"+%d " % id for id in ids))
        store.free(ids[:1])
        os.write(pipe, b"-%d " % ids[0])


@pytest.mark.slow
def test_a_thousand_kills_lose_nothing(tmp_path: Path, model, glyphs: torch.Tensor):
    """Forked from a process that is warm, killed at any moment."""
    path, added, freed = tmp_path / "a.kanerva", set[int](), set[int]()
    chance = np.random.default_rng(0)
    for _ in range(1000):
        reader, writer = os.pipe()
        if (child := os.fork()) == 0:
            add_and_free(Store(path, model=model), glyphs[:2], writer)
        os.close(writer)
        time.sleep(chance.uniform(0.02, 0.25))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        with os.fdopen(reader, "rb") as file:
            words = file.read().split(b" ")[:-1]  # the last may be cut short
        added |= {int(word) for word in words if word[:1] == b"+"}
        freed |= {-int(word) for word in words if word[:1] == b"-"}
        with Store(path, model=model) as store:
            held = set(store)
            assert not freed & held
            lost = added - freed - held  # freed, and killed before it said so
            assert len(lost) <= 1
            freed |= lost
    with Store(path, model=model) as store:
        assert not store.verify().pending and store.verify().ids == []
        assert len(store.get(sorted(held))) == len(held)


KILLED = """
import sys, torch, kanerva
from kanerva.store.store import Store
store = Store(sys.argv[1], model="glyphs")
images = torch.load(sys.argv[2])
while True:
    for id in store.add(images[:3], ["acknowledged"] * 3):
        print("added", id, flush=True)
    store.free(id)
    print("freed", id, flush=True)
"""


def test_a_killed_writer_loses_nothing_it_acknowledged(tmp_path: Path, glyphs: torch.Tensor):
    path, images = tmp_path / "a.kanerva", tmp_path / "images.pt"
    torch.save(glyphs[:3], images)
    for lines in (4, 7):
        process = subprocess.Popen(
            [sys.executable, "-c", KILLED, str(path), str(images)],
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
        assert process.stdout is not None
        said = [process.stdout.readline().split() for _ in range(lines)]
        process.send_signal(signal.SIGKILL)
        said += [line.split() for line in process.communicate()[0].splitlines()]
        store = Store(path)
        store.verify()
        freed = {int(id) for word, id in said if word == "freed"}
        added = {int(id) for word, id in said if word == "added"}
        held = set(store)
        assert not freed & held
        assert len(added - freed - held) <= 1  # freed, and killed before it said so
        assert len(store.get(sorted(held))) == len(held)
        store.close()


def test_a_store_made_with_a_model_object_opens_by_its_weights(tmp_path: Path):
    """Such a store cannot name its model. The shipped ones are tried."""
    model = kanerva.load("glyphs")
    images = (torch.rand(2, 1, 28, 28) < 0.2).float()
    with Store(tmp_path / "digits", model=model.within(56)) as store:
        ids = store.add(images)
    with Store(tmp_path / "digits") as store:
        assert store.model.fingerprint() == model.fingerprint() and list(store) == ids
