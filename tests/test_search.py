"""Search: scores are sums over pixels, and probabilities are Bayes' rule."""

import math

import pytest
import torch
import torch.nn.functional as F

import kanerva.data
from kanerva.errors import UserError
from kanerva.memory.channels import Channel, Picture, corner_colour
from kanerva.memory.evidence import Cue, Pictures, to_levels, to_logits
from kanerva.memory.ranking import Candidates, Features
from kanerva.memory.scoring import Scorer, log_evidence
from kanerva.memory.search import Held, Hit, Hits, search

SHAPE = (1, 8, 8)


def random_pictures(count: int, seed: int = 0) -> Pictures:
    noise = torch.Generator().manual_seed(seed)
    return Pictures(to_levels(6 * torch.randn(count, *SHAPE, generator=noise)), binary=True)


def find(pictures: Pictures, cue: Picture, log_none: float = -1e4, **options) -> Hits:
    of = {name: options.pop(name, default) for name, default in OPTIONS.items()}
    one = Cue.of(cue, of["observed"], of["noise"], of["shifts"], pictures.binary)
    features = Features(pictures.features, tuple(pictures.levels.shape[1:]))
    held = Held(
        len(pictures),
        lambda cues, count: Candidates.rank(cues, features, count),
        lambda rows: pictures[rows],
        lambda cues, guesses: [log_none] * len(cues),
        lambda rows: [(r + 100, lambda r=r: pictures.means[r], "") for r in rows],
    )
    return search([one], held, **options)[0]


OPTIONS = {"observed": None, "noise": None, "shifts": 0}


def test_levels_keep_logits():
    logits = torch.linspace(-31, 31, 2001)
    back = to_logits(to_levels(logits))
    assert bool(((back - logits).abs() <= 0.03 + 0.014 * logits.abs()).all())
    assert to_levels(torch.tensor([-99.0, 0.0, 99.0])).tolist() == [0, 127, 254]


@pytest.mark.parametrize("channel", [Channel(), Channel(0.0, 0.3), Channel(0.4, 0.1)])
def test_a_score_is_the_sum_over_visible_pixels(channel: Channel):
    pictures, observed = random_pictures(20), torch.rand(8, 8) < 0.6
    cue = torch.bernoulli(torch.full(SHAPE, 0.5))
    keep, salt = 1 - channel.salt_pepper, channel.salt_pepper / 2
    p = (1 - channel.hidden) * (keep * to_logits(pictures.levels).double().sigmoid() + salt)
    terms = torch.where(cue == 1, p.log(), (1 - p).log())
    expected = (terms * observed).sum(dim=(1, 2, 3)).float()
    score = log_evidence(Cue.of(cue, observed, channel, 0, True), pictures)
    torch.testing.assert_close(score, expected, rtol=1e-4, atol=1e-3)


def test_without_noise_a_score_is_an_inner_product():
    """[x m, m] . [logit p, ln(1 - p)]: what a vector index can search for."""
    pictures, observed = random_pictures(20), torch.rand(8, 8) < 0.6
    cue = torch.bernoulli(torch.full(SHAPE, 0.5))
    logits = to_logits(pictures.levels).flatten(1)
    vectors = torch.cat([logits, F.logsigmoid(-logits)], dim=1)
    seen = observed.float().flatten()
    product = vectors @ torch.cat([cue.flatten() * seen, seen])
    score = log_evidence(Cue.of(cue, observed, "none", 0, True), pictures)
    torch.testing.assert_close(score, product, rtol=1e-4, atol=1e-3)


def test_a_score_under_gaussian_noise_is_the_sum_over_pixels():
    """To within what binning costs: values to 1/64 of their range, logits to 64 levels."""
    pictures, cue = random_pictures(20), torch.rand(SHAPE).round() + 0.7 * torch.randn(SHAPE)
    p = pictures.means.double()
    densities = [torch.distributions.Normal(b, 0.7).log_prob(cue).exp() for b in (0.0, 1.0)]
    expected = ((1 - p) * densities[0] + p * densities[1]).log().sum(dim=(1, 2, 3)).float()
    everything = torch.ones(8, 8, dtype=torch.bool)
    score = log_evidence(Cue.of(cue, everything, Channel(gaussian=0.7), 0, True), pictures)
    torch.testing.assert_close(score, expected, rtol=0, atol=0.8)


def test_unknown_strength_is_averaged_over():
    pictures, cue = random_pictures(5), torch.bernoulli(torch.full(SHAPE, 0.5))
    whole = torch.ones(8, 8, dtype=torch.bool)
    unknown = Cue.of(cue, whole, "salt_pepper", 0, True)
    each = torch.stack(
        [log_evidence(Cue.of(cue, whole, c, 0, True), pictures) for c in unknown.channels]
    )
    prior = torch.tensor([c.chance for c in unknown.channels])
    expected = (each + (prior / prior.sum()).log()[:, None]).logsumexp(0)
    torch.testing.assert_close(log_evidence(unknown, pictures), expected)


def test_queries_for_every_mask_are_one_product_and_sums_over_bands():
    pictures = random_pictures(300)
    cues = []
    for rows, columns in (
        (slice(2, 5), slice(0, 8)),
        (slice(0, 8), slice(0, 8)),
        (slice(1, 4),) * 2,
    ):
        cue = torch.zeros(SHAPE)
        cue[:, rows, columns] = pictures.means[4].round()[:, rows, columns]
        cue[:, rows.start, columns.start] = cue[:, rows.stop - 1, columns.stop - 1] = 1
        cues.append(Cue.of(cue, None, None, 0, True))
    quick = Candidates.rank(cues, Features(pictures.features, SHAPE), 20)
    for cue, one in zip(cues, quick, strict=True):
        best = (cue.queries()[:, 0] @ pictures.features.T).topk(20).indices.unique()
        assert cue.has_bands and torch.equal(one.rows, best)


def test_many_cues_score_as_each_alone():
    pictures, owner = random_pictures(600), torch.arange(600) % 3
    cues = [Cue.of(pictures.means[n].round() * (n > 1), None, None, 0, True) for n in range(3)]
    together = Scorer(cues)(pictures, owner)
    soft = pictures.blurred(owner)
    for n, cue in enumerate(cues):
        mine = pictures[owner.eq(n).nonzero()[:, 0]]
        torch.testing.assert_close(together[owner == n], log_evidence(cue, mine))
        assert torch.equal(soft.levels[owner == n], mine.blurred().levels)


def summed(cue: Cue, pictures: Pictures) -> torch.Tensor:
    """ln p(cue | picture) in double precision: a sum over pixels for every mask and channel."""
    p = to_logits(pictures.levels).double()
    table = cue.seen.log_table(cue.channels, p.flatten()).view(len(cue.channels), 2, *p.shape)
    scores = torch.where(cue.seen.codes == 1, table[:, 1], table[:, 0])
    prior = torch.tensor([channel.chance for channel in cue.channels], dtype=torch.float64)
    prior = (prior / prior.sum()).log()[:, None]
    each = [(scores * mask).sum(dim=(2, 3, 4)) + prior for mask in cue.masks]
    chances = cue.chances.double().log()
    return torch.stack([e.logsumexp(0) + c for e, c in zip(each, chances, strict=True)]).logsumexp(
        0
    )


@pytest.mark.parametrize("damage", ["none", "hidden", "window", "scattered", "salt & pepper"])
@pytest.mark.parametrize("given", [False, True])
def test_the_quick_score_is_the_slow_sum_over_masks_and_channels(damage: str, given: bool):
    """The table is factored, one histogram serves all masks, and small terms are dropped: together
    less than 0.001 nats, so less than 0.001 in any probability. Cues of one batch have different
    masks."""
    images = kanerva.data.load("glyphs", "test").images[:60]
    pictures = Pictures(to_levels(torch.where(images > 127, 9.0, -14.0)), binary=True)
    noise = torch.Generator().manual_seed(4)
    seen, x = torch.ones(28, 28), pictures.means[:8].round()
    if damage == "hidden":
        seen[14:] = 0
    elif damage == "window":
        seen[:9] = seen[17:] = seen[:, :9] = seen[:, 20:] = 0
    elif damage == "scattered":
        seen = (torch.rand(28, 28, generator=noise) < 0.3).float()
    elif damage == "salt & pepper":
        x = torch.where(torch.rand(x.shape, generator=noise) < 0.5, 1 - x, x)
    cues = [Cue.of(one * seen, seen.bool() if given else None, None, 0, True) for one in x]
    cues += [] if given else [Cue.of(pictures.means[9].round(), None, None, 0, True)]
    owner = torch.arange(len(pictures)) % len(cues)
    for held in (pictures, pictures.blurred(owner)):
        quick = Scorer(cues)(held, owner).double()
        slow = torch.cat([summed(cues[o], held[torch.tensor([n])]) for n, o in enumerate(owner)])
        torch.testing.assert_close(quick, slow, rtol=0, atol=1e-3)


@pytest.mark.parametrize("noisy", [False, True])
def test_a_picture_that_is_not_moved_scores_the_same_if_cues_may_be(noisy: bool):
    pictures = random_pictures(30)
    cue = pictures.means[3].round()
    cue[:, 5:] = 0
    cue = cue + 0.5 * torch.randn(SHAPE) if noisy else cue
    still, moving = (Cue.of(cue, None, None, shifts, True) for shifts in (0, 2))
    expected = log_evidence(still, pictures)
    torch.testing.assert_close(log_evidence(moving, pictures), expected)
    zeros = torch.zeros(30, dtype=torch.long)
    torch.testing.assert_close(log_evidence(moving, pictures, zeros), expected)


def test_probabilities_follow_from_bayes_rule():
    pictures, whole = random_pictures(6), torch.ones(8, 8, dtype=torch.bool)
    cue = pictures.means[2].round()
    cue[0, :2] = 1 - cue[0, :2]
    log_none = -300.0
    hits = find(pictures, cue, log_none, observed=whole, noise="salt_pepper", k=6, prior_none=0.3)
    one = Cue.of(cue, whole, "salt_pepper", 0, True)
    joint = log_evidence(one, pictures).double() + math.log(0.7 / 6)
    kin = log_evidence(one, pictures.blurred()).logsumexp(0).double() - math.log(6)
    none = torch.logaddexp(kin, kin.new_tensor(log_none)) + math.log(0.3 / 2)
    total = torch.cat([joint, none[None]]).logsumexp(0)
    expected = {100 + n: math.exp(joint[n] - total) for n in range(6)}
    assert hits.none == pytest.approx(math.exp(none - total), rel=1e-4)
    for hit in hits:
        assert hit.probability == pytest.approx(expected[hit.id], rel=1e-4, abs=1e-12)
    assert sum(hits.probabilities) + hits.none == pytest.approx(1.0)
    assert hits.probabilities == sorted(hits.probabilities, reverse=True)


def test_posterior_is_right_as_often_as_it_says():
    """The world is as assumed: a picture at random, or pixels at random; salt & pepper of 0.5."""
    torch.manual_seed(1)
    pictures, whole = random_pictures(30), torch.ones(8, 8, dtype=torch.bool)
    said, right, none = [], [], []
    for _ in range(300):
        n = int(torch.randint(30, ()))
        clean = torch.bernoulli(pictures.means[n])
        cue = torch.where(torch.rand(SHAPE) < 0.75, torch.rand(SHAPE).round(), clean)
        hits = find(pictures, cue, 64 * math.log(0.5), observed=whole, prior_none=0.0)
        said.append(hits[0].probability)
        right.append(hits[0].id == 100 + n)
        none.append(hits.none)
    assert abs(sum(said) / 300 - sum(right) / 300) < 0.07
    assert 0.3 < sum(right) / 300 < 0.95 and max(none) == 0


def test_a_hidden_band_need_not_be_told():
    pictures = random_pictures(200)
    for n in range(10):
        cue = pictures.means[n].round()
        cue[:, 4:] = 0
        assert find(pictures, cue)[0].id == 100 + n


def test_few_scattered_pixels_rank_a_picture_of_much_ink():
    """Most ink of picture 0 is hidden, which counts little; the others lack ink that is seen."""
    logits, seen = torch.full((500, 64), -20.0), [0, 7, 28, 56, 63]
    logits[0, [*seen, *range(10, 50)]] = 20
    for n in range(1, 500):
        logits[n, [seen[n % 5], seen[(n + 1) % 5], seen[(n + 2) % 5], 1 + n % 6]] = 20
    pictures = Pictures(to_levels(logits.view(500, *SHAPE)), binary=True)
    cue = torch.zeros(64)
    cue[seen] = 1
    one = Cue.of(cue.view(SHAPE), None, None, 0, True)
    (found,) = Candidates.rank([one], Features(pictures.features, SHAPE), 12)
    assert 0 in found.rows


def test_a_moved_cue_is_found_and_its_shift_told():
    pictures = random_pictures(200)
    cue = torch.zeros(SHAPE)
    cue[:, 2:, :-1] = pictures.means[7].round()[:, :-2, 1:]
    hits = find(pictures, cue, shifts=2, noise="none")
    assert hits[0].id == 107 and hits[0].shift == (2, -1)
    assert hits[0].probability > 0.9


def test_more_is_scored_where_what_is_left_out_could_matter():
    """All pictures alike: nothing may be ruled out by rank, and each has its share."""
    same = Pictures(random_pictures(1).levels.expand(500, -1, -1, -1), True)
    hits = find(same, same.means[0].round(), prior_none=0.0, k=3)
    assert hits.left_out == 0
    assert hits.probabilities == pytest.approx([1 / 500] * 3)


def test_as_many_answers_come_as_were_asked_for():
    pictures, whole = random_pictures(300), torch.ones(8, 8, dtype=torch.bool)
    assert len(find(pictures, pictures.means[3].round(), observed=whole, k=40)) == 40


def test_an_answer_is_as_sure_as_if_everything_had_been_scored():
    """Few pixels seen and no mask given: most candidates are those of masks that do not fit, and
    tell nothing of how much was left out."""
    noise = torch.Generator().manual_seed(3)
    images = kanerva.data.load("glyphs", "test").images[:800]
    pictures = Pictures(to_levels(torch.where(images > 127, 3.0, -5.0)), binary=True)
    gaps = []
    for n in range(24):
        seen = torch.rand(images.shape[1:], generator=noise) < 0.04
        cue = pictures.means[n].round() * seen
        exact = log_evidence(Cue.of(cue, None, None, 0, True), pictures).softmax(0).max()
        gaps.append(find(pictures, cue, prior_none=0.0)[0].probability - float(exact))
    assert max(map(abs, gaps)) < 0.1


def test_eight_bit_pictures_are_found_by_squared_error():
    levels = torch.randint(0, 256, (300, 3, 8, 8), dtype=torch.uint8)
    pictures, observed = Pictures(levels, binary=False), torch.rand(8, 8) < 0.5
    cue = pictures.means[5] + 0.05 * torch.randn(3, 8, 8)
    one = Cue.of(cue, observed, None, 0, False)
    product = (pictures.features @ one.queries()[0, 0]).argsort(descending=True)
    error = ((pictures.means - cue).square() * observed).sum(dim=(1, 2, 3)).argsort()
    assert torch.equal(product[:20], error[:20])
    hits = find(pictures, cue, observed=observed)
    assert hits[0].id == 105 and hits[0].probability > 0.99
    cue[:, 4:] = 0
    assert find(pictures, cue.clamp(0, 1))[0].id == 105  # not told


def test_an_eight_bit_score_is_the_sum_over_pixels():
    levels = torch.randint(0, 256, (10, 1, 8, 8), dtype=torch.uint8)
    pictures, whole = Pictures(levels, binary=False), torch.ones(8, 8, dtype=torch.bool)
    cue = (pictures.means[3] + 0.1 * torch.randn(1, 8, 8)).clamp(0.01, 0.99)  # nothing was cut off
    normal = torch.distributions.Normal(pictures.means, 0.3)
    expected = (normal.log_prob(cue) - math.log(255)).sum(dim=(1, 2, 3))
    score = log_evidence(Cue.of(cue, whole, Channel(gaussian=0.3), 0, False), pictures)
    torch.testing.assert_close(score, expected, rtol=0.02, atol=1.0)


def smooth_pictures(count: int) -> Pictures:
    """Colours that change slowly, as in photographs."""
    noise = torch.Generator().manual_seed(5)
    coarse = torch.rand(count, 3, 4, 4, generator=noise)
    levels = F.interpolate(coarse, size=(16, 16), mode="bilinear") * 253 + 1
    return Pictures(levels.round().to(torch.uint8), binary=False)


@pytest.mark.parametrize("std", [0.5, 1.0])
def test_an_eight_bit_score_under_folded_noise_is_the_sum_over_pixels(std: float):
    """|mean + noise|, clipped at 1; to within what shades and bins of residuals cost."""
    pictures, whole = smooth_pictures(12), torch.ones(16, 16, dtype=torch.bool)
    noise = torch.Generator().manual_seed(0)
    cue = (pictures.means[4] + std * torch.randn(3, 16, 16, generator=noise)).abs().clamp(max=1)
    mean, normal = pictures.means.double(), torch.distributions.Normal(0.0, std)
    inside = sum(normal.log_prob(cue + sign * mean).exp() / 255 for sign in (-1, 1))
    white = 1 - normal.cdf(1 - mean) + normal.cdf(-1 - mean)
    expected = torch.where(cue == 1, white, inside).log().sum(dim=(1, 2, 3)).float()
    channel = Channel(gaussian=std, folded=True)
    score = log_evidence(Cue.of(cue, whole, channel, 0, False), pictures)
    torch.testing.assert_close(score - score.max(), expected - expected.max(), rtol=0, atol=1.5)
    assert int(score.argmax()) == 4


def test_an_eight_bit_score_under_clipped_noise_is_the_sum_over_pixels():
    pictures, whole = smooth_pictures(12), torch.ones(16, 16, dtype=torch.bool)
    noise = torch.Generator().manual_seed(0)
    cue = (pictures.means[4] + 0.5 * torch.randn(3, 16, 16, generator=noise)).clamp(0, 1)
    mean, normal = pictures.means.double(), torch.distributions.Normal(0.0, 0.5)
    inside = normal.log_prob(cue - mean).exp() / 255
    p = torch.where(
        cue == 1, normal.cdf(mean - 1), torch.where(cue == 0, normal.cdf(-mean), inside)
    )
    score = log_evidence(Cue.of(cue, whole, Channel(gaussian=0.5), 0, False), pictures)
    expected = p.log().sum(dim=(1, 2, 3)).float()
    torch.testing.assert_close(score, expected, rtol=0.003, atol=3.0)


@pytest.mark.parametrize("damage", ["grey half", "colour around a window", "dropped", "folded"])
def test_eight_bit_damage_need_not_be_given(damage: str):
    pictures, right = smooth_pictures(300), 0
    noise = torch.Generator().manual_seed(1)
    for n in range(12):
        cue = pictures.means[n].clone()
        if damage == "grey half":
            cue[:, 8:] = 0.5
        elif damage == "colour around a window":
            cue = torch.tensor([0.2, 0.4, 0.9])[:, None, None].expand(3, 16, 16).clone()
            cue[:, 4:13, 4:13] = pictures.means[n, :, 4:13, 4:13]
        elif damage == "dropped":
            cue = cue * (torch.rand(16, 16, generator=noise) < 0.25)
        else:
            cue = (cue + 0.4 * torch.randn(cue.shape, generator=noise)).abs().clamp(max=1)
        right += find(pictures, cue)[0].id == 100 + n
    assert right >= 11


def test_a_moved_eight_bit_cue_with_one_black_pixel_is_found():
    """Some shifts move that pixel out of the frame."""
    pictures = smooth_pictures(40)
    cue = pictures.means[7].roll((1, 1), (1, 2))
    cue[:, 0, 5] = 0
    hits = find(pictures, cue, shifts=2)
    assert hits[0].id == 107 and hits[0].shift == (1, 1)


def test_a_corner_tells_what_hidden_pixels_show():
    cue = torch.rand(3, 5, 6)
    assert corner_colour(cue).tolist() == [0, 0, 0]  # all differ
    cue[:, -1] = torch.tensor([0.1, 0.2, 0.3])[:, None]
    torch.testing.assert_close(corner_colour(cue), torch.tensor([0.1, 0.2, 0.3]))


def test_nothing_held_is_none():
    hits = find(Pictures(torch.zeros(0, *SHAPE, dtype=torch.uint8), True), torch.zeros(SHAPE))
    assert len(hits) == 0 and hits.none == 1.0


def test_hits_print_short_and_say_when_there_are_none():
    nothing = Hits([], 1.0)
    assert repr(nothing) == "Hits(nothing held; none of these: 1.0000)"
    assert nothing[:1] == []
    with pytest.raises(IndexError, match="nothing is held"):
        nothing[0]
    with pytest.raises(UserError, match="nothing is held"):
        _ = nothing.images
    one = Hits([Hit(7, 0.75, (0, 0), "", lambda: torch.zeros(1, 2, 2))], 0.25)
    assert repr(one) == "Hits(7: 0.7500; none of these: 0.2500)"


def test_images_come_when_asked_for():
    pictures = random_pictures(3)
    hits = find(pictures, pictures.means[1].round(), k=2)
    assert torch.equal(hits[0].image, pictures.means[1])
    assert hits.images.shape == (2, *SHAPE) and hits.ids[0] == 101


def test_an_eight_bit_picture_that_lost_detail_is_still_the_one():
    """What is held is known to within a residual; its own blurred copy is not another image."""
    noise = torch.Generator().manual_seed(0)
    images = torch.rand(60, 3, 4, 4, generator=noise).repeat_interleave(2, 2)
    images = 0.2 + 0.6 * images.repeat_interleave(2, 3)  # all shades alike would be strong noise
    lossy = (images + 0.08 * torch.randn(images.shape, generator=noise)).clamp(0, 1)
    pictures = Pictures((lossy[:40] * 255).round().to(torch.uint8), binary=False)
    held = [find(pictures, image, log_none=-1e9) for image in images[:40]]
    assert all(hits[0].id == 100 + n and hits.none < 0.1 for n, hits in enumerate(held))
    assert min(find(pictures, image, log_none=-1e9).none for image in images[40:]) > 0.9
