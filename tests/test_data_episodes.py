"""Episodes: pure functions of (seed, step) in training, one fixed protocol in evaluation."""

import pytest
import torch

from kanerva.config import DataConfig
from kanerva.data.augment import move_copies, random_affine
from kanerva.data.binarization import binarize
from kanerva.data.episodes import FixedEpisodes, TrainingEpisodes, mix_kin
from kanerva.data.image_set import ImageSet
from kanerva.data.registry import Binarization
from kanerva.errors import UserError
from kanerva.seeding import stream


def grey_set(size: int, shape: tuple[int, int, int] = (1, 4, 5), split: str = "train") -> ImageSet:
    random = torch.randint(1, 255, (size, *shape), generator=stream("grey")).to(torch.uint8)
    return ImageSet("grey", split, random)


def numbered_set(size: int) -> ImageSet:
    """Image n is all n, so that an episode tells which images it holds."""
    return ImageSet(
        "numbered", "test", torch.arange(size).to(torch.uint8).view(-1, 1, 1, 1).expand(-1, 1, 2, 3)
    )


def numbers(episode: torch.Tensor) -> list[int]:
    return (episode[:, :, 0, 0, 0] * 255).round().int().flatten().tolist()


def training(image_set: ImageSet, how: Binarization = "sample", **other) -> TrainingEpisodes:
    options = dict(episode_length=4, batch=3, seed=1) | other
    return TrainingEpisodes(image_set, binarization=how, **options)


def test_a_step_is_the_same_in_whatever_order_steps_are_asked():
    forwards = training(grey_set(50))
    steps = range(3 * forwards.steps_per_epoch)
    expected = [forwards.batch_at(step) for step in steps]
    backwards = training(grey_set(50))
    for step in reversed(steps):
        assert torch.equal(backwards.batch_at(step), expected[step])


def test_an_epoch_uses_no_image_twice_and_epochs_differ():
    episodes = training(numbered_set(50), "none")
    assert episodes.steps_per_epoch == 4
    epochs = [
        sum((numbers(episodes.batch_at(4 * epoch + step)) for step in range(4)), [])
        for epoch in range(2)
    ]
    assert all(len(set(epoch)) == 48 for epoch in epochs)
    assert epochs[0] != epochs[1]
    assert numbers(training(numbered_set(50), "none", seed=2).batch_at(0)) != epochs[0][:12]


def test_some_images_are_from_all_over_the_set():
    episodes = training(numbered_set(50), "none")
    assert numbers(episodes.some(5)[None]) == [0, 10, 20, 30, 40]
    assert numbers(episodes.some(1000)[None]) == list(range(50))
    assert training(grey_set(50), "threshold").some(9).unique().tolist() == [0.0, 1.0]
    greys = training(grey_set(50)).some(9)
    assert greys.max() <= 1 and len(greys.unique()) > 2


def test_pixels_are_drawn_afresh_each_epoch():
    whole = training(grey_set(12))  # one step is the whole set
    first, second = whole.batch_at(0), whole.batch_at(1)
    assert first.unique().tolist() == [0.0, 1.0]
    order = [torch.randperm(12, generator=stream(1, "order", epoch)) for epoch in range(2)]
    drawn = [batch.flatten(0, 1)[order[n].argsort()] for n, batch in enumerate((first, second))]
    assert not torch.equal(drawn[0], drawn[1])
    expected = binarize(grey_set(12).images, "sample", stream(1, "binarize", 1))
    assert torch.equal(drawn[1], expected.float())


def test_thresholded_pixels_stay_as_they_are():
    whole = training(grey_set(12), "threshold")
    for epoch in range(2):
        order = torch.randperm(12, generator=stream(1, "order", epoch))
        back = whole.batch_at(epoch).flatten(0, 1)[order.argsort()]
        assert torch.equal(back, (grey_set(12).images > 127).float())


def test_static_pixels_are_drawn_once_whatever_the_seed():
    images = grey_set(12)
    drawn = binarize(images.images, "sample", stream("binarize", images.name, "train"))
    assert 0 < drawn.sum() < drawn.numel()
    for seed in (1, 2):
        whole = TrainingEpisodes(
            images, episode_length=3, batch=4, seed=seed, binarization="static"
        )
        for epoch in range(2):
            order = torch.randperm(12, generator=stream(seed, "order", epoch))
            back = whole.batch_at(epoch).flatten(0, 1)[order.argsort()]
            assert torch.equal(back, drawn.float())
    assert set(whole.some(12).unique().tolist()) == {0.0, 1.0}
    fixed = [FixedEpisodes(images, episode_length=3, binarization=b) for b in ("static", "sample")]
    assert fixed[0].fingerprint() == fixed[1].fingerprint()  # scored on the same pixels


@pytest.mark.parametrize("binarization", ["static", "threshold"])
def test_pixels_of_augmented_images_are_binary_and_what_is_measured_on_them_grey(binarization):
    options = {"episode_length": 3, "batch": 4, "seed": 1, "augment": "affine"}
    whole = TrainingEpisodes(grey_set(12), binarization=binarization, **options)
    assert set(whole.batch_at(0).unique().tolist()) <= {0.0, 1.0}
    assert whole.some(12).max() <= 1 and len(whole.some(12).unique()) > 2


def test_processes_share_a_batch_and_nothing_is_done_twice():
    colour = grey_set(60, (3, 4, 4))
    whole = training(colour, batch=6)
    for step in (0, 1, 5):
        shares = [
            training(colour, batch=6, rank=rank, world_size=3).batch_at(step) for rank in range(3)
        ]
        assert shares[0].shape == (2, 4, 3, 4, 4)
        assert torch.equal(torch.cat(shares), whole.batch_at(step))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"episode_length": 13}, "episode_length=13 is larger than the data: grey train holds 12"),
        ({"batch": 4}, "batch=4 episodes of 4, and grey train holds 3: use batch 3 or less"),
        ({"episode_length": 0}, "episode_length=0: use 1"),
        ({"batch": 0}, "batch=0: use 1"),
        ({"world_size": 2}, "batch=3 does not divide among 2 processes"),
    ],
)
def test_impossible_requests_are_named(options: dict[str, int], message: str):
    with pytest.raises(UserError, match=message):
        training(grey_set(12), **options)


@pytest.mark.parametrize(
    ("size", "length", "episodes"), [(10, 4, 3), (12, 4, 3), (5, 5, 1), (7, 1, 7)]
)
def test_every_image_counts_once_and_the_last_episode_wraps(size: int, length: int, episodes: int):
    fixed = FixedEpisodes(numbered_set(size), episode_length=length, binarization="none")
    assert len(fixed) == episodes
    batch = fixed.batch(0, episodes)
    shown = torch.tensor(numbers(batch.images)).view(episodes, length)
    assert sorted(shown[batch.counted].tolist()) == list(range(size))
    assert torch.equal(shown, batch.indices)
    assert all(len(set(episode)) == length for episode in shown.tolist())
    filling = shown.flatten()[size:]
    assert torch.equal(filling, shown.flatten()[: len(filling)])


def test_the_draw_is_fixed_and_each_split_has_its_own():
    def pixels(image_set: ImageSet) -> torch.Tensor:
        fixed = FixedEpisodes(image_set, episode_length=4, binarization="sample")
        return fixed.batch(0, len(fixed)).images

    torch.manual_seed(0)
    first = pixels(grey_set(30))
    torch.manual_seed(1)
    assert torch.equal(first, pixels(grey_set(30)))
    assert not torch.equal(first, pixels(grey_set(30, split="test")))


def test_the_fingerprint_is_of_the_pixels_scored_whatever_the_episode_length():
    def fixed(length: int, how: Binarization, size: int = 30) -> FixedEpisodes:
        return FixedEpisodes(grey_set(size), episode_length=length, binarization=how)

    reference = fixed(4, "sample").fingerprint()
    assert len(reference) == 64 and fixed(7, "sample").fingerprint() == reference
    others = {fixed(4, "threshold").fingerprint(), fixed(4, "none").fingerprint()}
    others |= {fixed(4, "sample", 29).fingerprint(), fixed(4, "sample").fingerprint(limit=2)}
    assert len(others | {reference}) == 5


def test_more_samples_than_images_cannot_be_scored():
    with pytest.raises(UserError, match="episode_length=13 is larger than the data"):
        FixedEpisodes(grey_set(12), episode_length=13, binarization="sample")


def test_an_image_sets_fingerprint_sees_pixels_and_shape():
    images = grey_set(6, (1, 4, 5)).images
    reference = ImageSet("grey", "train", images).fingerprint()
    assert ImageSet("other", "test", images.clone()).fingerprint() == reference
    assert ImageSet("grey", "train", images.view(6, 1, 5, 4)).fingerprint() != reference
    assert ImageSet("grey", "train", images.flip(0)).fingerprint() != reference


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_the_order_is_the_same_on_the_device():
    here, there = (training(numbered_set(50), "none", device=device) for device in ("cpu", "cuda"))
    assert numbers(here.batch_at(5)) == numbers(there.batch_at(5).cpu())
    sampled = training(grey_set(50), device="cuda")
    assert sampled.batch_at(0).is_cuda


# Episodes that have kin


def labelled(count: int = 60, each: int = 10) -> ImageSet:
    images = torch.randint(0, 256, (count, 1, 8, 8), dtype=torch.uint8)
    return ImageSet("some", "train", images, labels=torch.arange(count) // each)


@pytest.mark.parametrize("share, expected", [(0.0, 0), (0.5, 6), (1.0, 12)])
def test_a_share_of_episodes_has_one_label(share: float, expected: int):
    labels, shuffle = torch.arange(60) // 10, torch.Generator().manual_seed(0)
    runs = mix_kin(labels, 5, 12, share, shuffle)
    assert runs.shape == (12, 5)
    alike = (labels[runs] == labels[runs][:, :1]).all(dim=1).sum()
    assert expected <= int(alike) <= expected + 1  # by chance a mixed one may be too
    assert all(len(set(run)) == 5 for run in runs.tolist())


def test_half_of_the_kin_may_have_two_labels():
    labels, shuffle = torch.arange(400) // 20, torch.Generator().manual_seed(0)
    runs = mix_kin(labels, 10, 40, 1.0, shuffle, 2)
    assert sorted(runs.flatten().tolist()) == list(range(400))  # every image once
    numbers = torch.tensor([len(labels[run].unique()) for run in runs])
    assert int((numbers == 1).sum()) in (20, 21, 22) and int(numbers.max()) == 2
    two = runs[numbers == 2]
    assert bool((labels[two][:, :5] != labels[two][:, :1]).any())  # shuffled within an episode


def test_training_episodes_take_two_labels():
    images = torch.arange(60, dtype=torch.uint8)[:, None, None, None] // 10 * 20
    images = ImageSet("some", "train", images.expand(-1, 1, 8, 8), labels=torch.arange(60) // 10)
    options = {"episode_length": 5, "batch": 12, "seed": 0, "binarization": "none", "kin": 1.0}
    for most in (1, 2):
        episodes = TrainingEpisodes(images, kin_labels=most, **options).batch_at(0)
        greys = torch.tensor([len(episode.unique()) for episode in episodes])
        assert int(greys.max()) == most and (greys == 1).any()


@pytest.mark.parametrize("options", [{}, {"kin": 0.5, "augment": "copies"}])
def test_two_labels_need_kin_with_labels(options: dict):
    assert DataConfig(kin=0.5, kin_labels=2).kin_labels == 2
    with pytest.raises(UserError, match="needs data.kin above 0, and labels"):
        DataConfig(**options, kin_labels=2)


def test_no_episode_has_three_labels():
    with pytest.raises(UserError, match="data.kin_labels must be at most 2, got 3"):
        DataConfig(kin=0.5, kin_labels=3)


def test_training_on_kin_is_the_same_for_the_same_seed_and_another_each_epoch():
    options = {"episode_length": 5, "batch": 4, "binarization": "sample", "kin": 0.5}
    images = labelled()
    first, same, other = (
        TrainingEpisodes(images, seed=seed, augment="affine", **options) for seed in (0, 0, 1)
    )
    assert torch.equal(first.batch_at(1), same.batch_at(1))
    assert not torch.equal(first.batch_at(1), other.batch_at(1))
    assert not torch.equal(first.batch_at(0), first.batch_at(first.steps_per_epoch))


@pytest.mark.parametrize(("share", "expected"), [(0.25, 3), (0.5, 6), (1.0, 12)])
def test_copies_make_kin_without_labels(share: float, expected: int):
    """Squares of a grey each, whose middle keeps it wherever they are moved."""
    images = torch.zeros(60, 1, 28, 28, dtype=torch.uint8)
    images[:, 0, 4:24, 4:24] = (4 * torch.arange(60) + 1).to(torch.uint8)[:, None, None]
    bare = ImageSet("bare", "train", images)
    options = {"episode_length": 5, "batch": 4, "binarization": "none", "augment": "copies"}
    first, same, other = (
        TrainingEpisodes(bare, seed=seed, kin=share, **options) for seed in (0, 0, 1)
    )
    assert torch.equal(first.batch_at(4), same.batch_at(4))
    assert not torch.equal(first.batch_at(4), other.batch_at(4))
    epoch = torch.cat([first.batch_at(step) for step in range(first.steps_per_epoch)])
    shown = (255 * epoch[:, :, 0, 14, 14]).round().int().tolist()
    assert sorted(len(set(row)) for row in shown) == [1] * expected + [5] * (12 - expected)
    assert all((level - 1) % 4 == 0 for row in shown for level in row)


def test_copies_of_one_image_differ_and_half_of_them_are_as_sharp_as_it_is():
    image = torch.zeros(1, 1, 28, 20, dtype=torch.uint8)
    image[:, :, 9:19, 7:12] = torch.arange(50, 255, 4, dtype=torch.uint8)[:50].view(10, 5)
    copies = move_copies(image.expand(400, -1, -1, -1), torch.Generator().manual_seed(0))
    exact = {}
    for down in range(-2, 3):
        for across in range(-2, 3):
            moved = image.roll((down, across), (-2, -1))
            exact[down, across] = (copies == moved).flatten(1).all(dim=1)
    sharp = torch.stack(list(exact.values())).any(dim=0)
    assert 150 < int(sharp.sum()) < 250 and len(exact) == 25
    assert all(0 < int(found.sum()) < 40 for found in exact.values())
    turned = copies[~sharp]
    assert len(turned.flatten(1).unique(dim=0)) == len(turned)


def test_kin_needs_labels():
    bare = ImageSet("bare", "train", labelled().images)
    with pytest.raises(UserError, match="copies makes kin without them"):
        TrainingEpisodes(bare, episode_length=5, batch=2, seed=0, binarization="sample", kin=0.5)
    with pytest.raises(UserError, match=r"data\.kin"):
        DataConfig(augment="copies")
    with pytest.raises(UserError, match="at most 1"):
        DataConfig(kin=1.5)


def test_an_affine_map_moves_half_of_the_images_and_all_of_a_label_alike():
    images = torch.zeros(40, 1, 28, 28, dtype=torch.uint8)
    images[:, :, 10:18, 10:18] = 255
    moved = random_affine(images, torch.Generator().manual_seed(0))
    changed = (moved != images).flatten(1).any(dim=1)
    assert 10 < int(changed.sum()) < 30
    ink = moved.float().sum(dim=(1, 2, 3)) / images.float().sum(dim=(1, 2, 3))
    assert bool(((ink > 0.6) & (ink < 1.7)).all())  # scaled by at most 15 % along each axis
    by_label = random_affine(images, torch.Generator().manual_seed(0), torch.arange(40) // 8)
    assert all(
        torch.equal(by_label[8 * i], by_label[8 * i + j]) for i in range(5) for j in range(8)
    )
