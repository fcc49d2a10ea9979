"""What a memory of blocks answers: recall with answers, get, and whose memory it is."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import kanerva
from kanerva import data
from kanerva.cli import main
from kanerva.errors import UserError
from kanerva.memory.heap import Memory
from kanerva.models.kpp import Kpp
from kanerva.models.kpp_paper import KppPaper

Draw = Callable[..., torch.Tensor]


@pytest.fixture(scope="module")
def model() -> Kpp:
    model = kanerva.load("glyphs-1")
    assert isinstance(model, Kpp)
    return model


@pytest.fixture(scope="module")
def images() -> torch.Tensor:
    """Sixteen characters, none like another."""
    every = data.load("glyphs", "test").images
    return (every[:: len(every) // 16][:16] > 127).float()


def test_recall_answers_on_request(model: Kpp, images: torch.Tensor):
    memory, seen = model.write(images[:8]), torch.ones(28, 28)
    seen[14:] = 0
    cues = images * seen
    found = model.recall(memory, cues, answers=True, observed=seen)
    assert torch.equal(found.pictures, model.recall(memory, cues, observed=seen))
    assert [hits[0].id for hits in found.hits[:8]] == list(range(8))
    held = torch.tensor([hits.none for hits in found.hits])
    assert bool((held[:8] < 0.5).all()) and held[8:].mean() > 0.9


def test_recall_answers_for_batches_of_memories(model: Kpp, images: torch.Tensor):
    episodes = images.view(2, 8, 1, 28, 28)
    memory = model.write(episodes)
    seen = torch.ones(2, 8, 28, 28)
    for observed in (None, seen[0, 0], seen):
        found = model.recall(memory, episodes, answers=True, observed=observed)
        assert [[h[0].id for h in hits] for hits in found.hits] == [list(range(8))] * 2
    swapped = model.recall(memory, episodes.flip(0), answers=True)
    assert min(h.none for hits in swapped.hits for h in hits) > 0.5


def test_an_answer_does_not_depend_on_other_cues():
    """Up to rounding: the model judges by the same samples for every cue."""
    model = kanerva.load("mnist")
    images = model.generate(model.empty(), 40, generator=torch.Generator().manual_seed(0)).round()
    memory, cues = model.write(images[:12]), images.clone()
    cues[..., :14, :] = cues[..., :14] = 0  # a quarter is left
    together = model.find(memory, cues)
    for cue, hits in zip(cues, together, strict=True):
        alone = model.find(memory, cue)
        assert alone.none == pytest.approx(hits.none, abs=5e-3)
        assert alone[0].probability == pytest.approx(hits[0].probability, abs=5e-3)
    assert any(0.02 < hits.none < 0.98 for hits in together)  # some are in doubt


def test_recall_stops_when_the_picture_stands(model: Kpp, images: torch.Tensor):
    memory = model.write(images)
    noisy = (images + 0.3 * torch.randn(images.shape)).clamp(0, 1)
    found, ten = model.recall(memory, noisy), model.recall(memory, noisy, steps=10)
    assert 1 <= len(found) < 10 and len(ten) == 10
    assert torch.equal(found[-1], ten[-1]) and torch.equal(found, ten[: len(found)])
    assert len(model.recall(memory, noisy, sample=True)) == 10  # nothing stands


def test_pictures_are_those_of_reading_again(model: Kpp, images: torch.Tensor):
    """Each step against reading and decoding the best block itself."""
    memory, picture = model.write(images), images + 0.5 * torch.randn(images.shape)
    pictures = model.recall(memory, picture, steps=3)
    for step in range(3):
        best = model.score_cues(memory, picture).argmax(dim=-1)
        prior = model.read_maps(memory.map[None], model.keys_at(memory, best).mean)
        picture = model.likelihood.mean(model.decoder(prior.mean))[0]
        torch.testing.assert_close(pictures[step], picture, rtol=1e-4, atol=1e-5)


def test_an_empty_memory_recalls_nothing(model: Kpp, images: torch.Tensor):
    with pytest.raises(UserError, match="holds nothing"):
        model.recall(model.empty(), images)
    with pytest.raises(UserError, match="holds nothing"):
        model.recall(model.empty(), images, sample=True)
    half = Memory.stack([model.write(images), model.empty()])
    with pytest.raises(UserError, match="holds nothing"):
        model.recall(half, images.repeat(2, 1, 1, 1, 1))
    found = model.find(model.empty(), images)
    assert isinstance(found, list) and [hits.none for hits in found] == [1.0] * len(images)


def test_get_gives_pictures_by_handle(model: Kpp, images: torch.Tensor):
    memory = model.append(model.write(images[:6]), images[6:8]).free(2)
    every = model.get(memory)
    assert every.shape == (7, 1, 28, 28)
    assert float((every - images[[0, 1, 3, 4, 5, 6, 7]]).abs().mean()) < 0.05
    some = model.get(memory, [7, 0])
    torch.testing.assert_close(some, every[[6, 0]])
    prior = model.read(memory, handles=[7, 0]).mean
    by_hand = model.likelihood.mean(model.decoder(prior))[0]
    torch.testing.assert_close(some, by_hand, rtol=1e-4, atol=1e-5)
    pair = Memory.stack([memory, model.write(images[8:15])])
    torch.testing.assert_close(
        model.get(pair, torch.tensor([[7, 0], [1, 6]]))[1], model.get(pair[1], [1, 6])
    )
    with pytest.raises(UserError, match="handle 2 is not held"):
        model.get(memory, [2])


def test_a_model_without_blocks_has_no_pictures_to_get(tiny, draw: Draw):
    model = KppPaper(tiny).eval()
    with pytest.raises(UserError, match="no handles"):
        model.get(model.write(draw(tiny, 3)), [0])


# More room


@pytest.mark.parametrize("capacity", [1, 37, 100])
def test_a_model_with_more_room_writes_the_same_blocks(
    model: Kpp, images: torch.Tensor, capacity: int
):
    large = kanerva.load("glyphs-1", capacity=capacity)
    assert isinstance(large, Kpp) and large.config.memory.capacity in (1, 49, 100)
    assert large.writer.shape == model.writer.shape
    some = images[: min(capacity, 16)]
    memory = large.write(some.repeat(7, 1, 1, 1)[:capacity])
    assert memory.capacity == large.config.memory.capacity >= len(memory) == capacity
    first, mine = large.get(memory, range(len(some))), model.get(model.write(some))
    torch.testing.assert_close(first, mine, atol=1e-5, rtol=1e-4)
    with pytest.raises(UserError, match="cells"):
        model.recall(memory, some)


def test_cells_that_are_not_square_grow_too(draw: Draw):
    preset = kanerva.preset("images", image=(3, 8, 8)).model  # 4 x 8 cells
    torch.manual_seed(0)
    model = kanerva.build(preset).eval()
    large = model.with_capacity(60)
    memory = large.write(draw(preset, 60))
    assert (memory.capacity, memory.grid.block) == (98, model.empty().grid.block)


def test_a_memory_is_carried_over_to_more_cells(model: Kpp, images: torch.Tensor):
    memory = model.write(images[:12]).free(3)
    large = model.with_capacity(64)
    assert model.with_capacity(memory.capacity) is model  # which reads what it wrote
    grown = large.append(memory, images[12:])
    assert grown.capacity == 64 and grown.handles == [*memory.handles, *range(12, len(images))]
    torch.testing.assert_close(large.get(grown, memory.handles), model.get(memory))
    hits = large.find(grown, images[14])
    assert hits[0].id == 14 and hits[0].probability > 0.9
    assert large.find(grown, images[3]).none > 0.9
    again = large.with_capacity(100).append(grown.free(0), images[3:4])
    assert again.handles[-1] == len(images)  # no handle is used twice
    both = large.append(Memory.stack([memory, memory.free(5)]), images[12:14].repeat(2, 1, 1, 1, 1))
    assert both[0].handles == [*memory.handles, 12, 13] and 5 not in both[1].handles
    with pytest.raises(UserError, match=r"capacity=64\) reads it"):
        model.get(grown)
    other = model.resized(model.config)
    with torch.no_grad():
        next(other.parameters()).add_(1)
    with pytest.raises(UserError, match="other weights"):
        other.with_capacity(64).append(memory, images[12:])


def test_a_memory_written_as_a_whole_has_no_capacity(tiny):
    with pytest.raises(UserError, match="no capacity"):
        KppPaper(tiny).with_capacity(8)


def test_batches_of_memories_grow_and_shrink(model: Kpp, images: torch.Tensor):
    """Each memory of a batch as if it were alone."""
    episodes = images.view(2, 8, 1, 28, 28)
    memory = model.append(model.write(episodes[:, :5]), episodes[:, 5:])
    assert memory.is_batch
    for one, written in zip((memory[0], memory[1]), episodes, strict=True):
        assert one.handles == list(range(8))
        assert float((model.get(one) - written).abs().mean()) < 0.05
    less = memory.free([[0, 3], [7, 1]])
    assert less[0].handles == [1, 2, 4, 5, 6, 7] and less[1].handles == [0, 2, 3, 4, 5, 6]
    again = model.append(less, episodes[:, :2])
    assert again[0].handles == [1, 2, 4, 5, 6, 7, 8, 9]
    torch.testing.assert_close(model.get(again[1], [8]), model.get(memory[1], [0]))
    with pytest.raises(UserError, match="full"):
        model.append(again, episodes.repeat(1, 4, 1, 1, 1))
    with pytest.raises(UserError, match="batches of the same size"):
        model.append(memory, images)


# What a notebook and an editor show


def test_terms_and_sets_print_in_a_line(model: Kpp, images: torch.Tensor):
    terms = model.elbo(images)
    assert repr(terms).startswith(f"ElboTerms(nll_nats {terms.loss.item():.2f}, log_likelihood ")
    assert repr(terms).endswith("means of 16 images)")
    assert repr(kanerva.data.load("glyphs", "test")).startswith("ImageSet(glyphs test: .images ")


def test_a_memory_says_which_handles_it_holds(model: Kpp, images: torch.Tensor):
    memory = model.write(images).free(3)
    assert 2 in memory and 3 not in memory and 99 not in memory


def test_a_model_and_a_memory_are_shown_in_short(model: Kpp, images: torch.Tensor):
    assert repr(model).startswith("Kpp(kpp: images 1 x 28 x 28, 0 or 1, as floats; memory 3x64x64;")
    assert len(repr(model)) < 150 and model.replays
    assert model.write(images)._repr_png_().startswith(b"\x89PNG")
    assert model.write(images.view(2, 8, 1, 28, 28))._repr_png_().startswith(b"\x89PNG")


def test_show_puts_images_into_rows(images: torch.Tensor):
    row = kanerva.show(images)
    two = kanerva.show(written=images, again=images)
    assert two.width == row.width and two.height > 1.8 * row.height
    steps = images.expand(3, *images.shape)
    assert kanerva.show({"recalled": steps}).height > 2.5 * row.height
    assert kanerva.show(images[0], scale=1).width < row.width
    assert kanerva.show(images, columns=4).height > 2 * row.height
    assert kanerva.show(list(images)).size == kanerva.show(images.numpy()).size == row.size
    for wrong in (images[0, 0], torch.zeros(2, 5, 8, 8), torch.zeros(0, 1, 8, 8)):
        with pytest.raises(UserError, match="show takes images"):
            kanerva.show({"wrong": wrong})
    with pytest.raises(UserError, match="nothing to show"):
        kanerva.show()


def test_the_command_says_that_a_store_replays(tmp_path: Path, capsys):
    words = ["generate", "glyphs-1", "--num", "2", "--device", "cpu"]
    assert main([*words, "--out", str(tmp_path / "out.png")]) == 0
    assert "--model kpp-bits" in capsys.readouterr().out
    assert not kanerva.build(kanerva.preset("glyphs", "kpp-bits").model).replays


# Whose memory


def test_a_memory_is_read_by_its_own_model_only(model: Kpp, images: torch.Tensor, tmp_path: Path):
    memory, other = model.write(images), kanerva.load("omniglot-1")  # blocks of the same shape
    memory.save(tmp_path / "memory.safetensors")
    loaded = Memory.load(tmp_path / "memory.safetensors")
    assert loaded.writer == memory.writer == model.fingerprint() != other.fingerprint()
    torch.testing.assert_close(
        kanerva.load("glyphs-1").recall(loaded, images), model.recall(memory, images)
    )
    for mine in (memory, loaded, memory.free(3), memory.quantise("int8"), model.empty()):
        uses = (
            lambda m=mine: other.recall(m, images),
            lambda m=mine: other.append(m, images[:1]),
            lambda m=mine: other.familiarity(m, images),
            lambda m=mine: other.find(m, images),
            lambda m=mine: other.get(m, [0]),
            lambda m=mine: other.read(m, torch.zeros(1, 2)),
            lambda m=mine: other.elbo(images, m),
            lambda m=mine: other.generate(m, 1),
        )
        for use in uses:
            with pytest.raises(UserError, match="another model"):
                use()
    unsigned = replace(memory, writer=None)  # of a file from before, or made by hand
    assert model.recall(unsigned, images).isfinite().all()
    with pytest.raises(UserError, match="different models"):
        Memory.stack([memory, replace(memory, writer="other")])


def test_other_weights_are_another_model(tiny, draw: Draw):
    torch.manual_seed(0)
    model, images = KppPaper(tiny).eval(), draw(tiny, 3)
    memory, first = model.write(images), model.fingerprint()
    assert model.fingerprint() == first
    with torch.no_grad():
        next(model.parameters()).add_(1)
    assert model.fingerprint() != first
    with pytest.raises(UserError, match="other weights"):
        model.recall(memory, images)
    weight = next(model.parameters())
    second = model.fingerprint()
    weight.data = weight.data * 2  # leaves no trace, until the model is trained or moved
    model.train()
    assert model.fingerprint() != second


def test_the_command_says_what_is_not_held(images: torch.Tensor, tmp_path: Path, capsys):
    from PIL import Image

    for number in range(3):
        pixels = (images[number, 0] * 255).byte().numpy()
        Image.fromarray(pixels).save(tmp_path / f"{number}.png")
    memory, out = str(tmp_path / "memory.safetensors"), ["--out", str(tmp_path / "out.png")]
    clean = ["--cue", "clean", "--device", "cpu", *out]
    files = [str(tmp_path / f"{number}.png") for number in range(3)]
    assert main(["recall", "glyphs", *files[:2], "--save-memory", memory, *clean]) == 0
    assert "2 of 2 cues found, 0 not held" in capsys.readouterr().out
    assert main(["recall", "glyphs", files[0], files[2], "--memory", memory, *clean]) == 0
    said = capsys.readouterr().out
    assert "cue 0: handle 0 (" in said and "cue 1: not held (" in said
    with Image.open(tmp_path / "out.png") as sheet:
        assert (128, 128, 128) in [colour for _, colour in sheet.getcolors(1 << 16)]
    assert main(["recall", "omniglot", files[0], "--memory", memory, *clean]) == 2
    assert "another model" in capsys.readouterr().err
    assert main(["recall", "glyphs", files[2], "--memory", memory, *clean]) == 0
    said = capsys.readouterr().out
    assert "0 of 1 cues found, 1 not held" in said and "pixel error" not in said


def test_a_file_asked_for_alone_is_the_image_that_was_written(tmp_path: Path, capsys):
    """Greys are black and white by a threshold: by chance, files would depend on their company."""
    from PIL import Image

    from kanerva import data

    files = []
    for number, picture in enumerate(data.load("glyphs", "test").images[:4000:1000]):
        soft = Image.fromarray(picture[0].numpy()).point(lambda level: level * 7 // 10)
        soft.save(tmp_path / f"{number}.png")
        files.append(str(tmp_path / f"{number}.png"))
    memory, out = str(tmp_path / "memory.safetensors"), ["--out", str(tmp_path / "out.png")]
    clean = ["--cue", "clean", "--device", "cpu", *out]
    assert main(["recall", "glyphs", *files, "--save-memory", memory, *clean]) == 0
    assert main(["recall", "glyphs", files[3], "--memory", memory, *clean]) == 0
    assert "cue 0: handle 3 (probability 1.000)" in capsys.readouterr().out


def test_commands_make_room_for_all_files(tmp_path: Path, capsys):
    from PIL import Image

    from kanerva import data

    for number, picture in enumerate(data.load("glyphs", "test").images[:3200:80]):
        (tmp_path / "glyphs").mkdir(exist_ok=True)
        Image.fromarray(picture[0].numpy()).save(tmp_path / "glyphs" / f"{number}.png")
    memory, out = str(tmp_path / "memory.safetensors"), ["--out", str(tmp_path / "out.png")]
    clean = ["--cue", "clean", "--device", "cpu", *out]
    assert (
        main(["recall", "glyphs", str(tmp_path / "glyphs"), "--save-memory", memory, *clean]) == 0
    )
    assert "40 of 40 cues found" in capsys.readouterr().out
    one = str(tmp_path / "glyphs" / "7.png")
    assert main(["recall", "glyphs", one, "--memory", memory, *clean]) == 0
    assert "1 of 1 cues found" in capsys.readouterr().out
    assert main(["memory", "glyphs", str(tmp_path / "glyphs"), "--device", "cpu", *out]) == 0
    assert "40 of 49 blocks held" in capsys.readouterr().out
