"""Augmentation: every image is cropped from its padded self, and mirrored or not."""

from __future__ import annotations

import torch

from offbeat.experiments.tasks.augmentation import pad_crop_flip


def test_every_image_is_moved_by_at_most_the_border_and_maybe_mirrored() -> None:
    torch.manual_seed(0)
    images = torch.randint(1, 256, (400, 3, 8, 8), dtype=torch.uint8)
    seen = set()
    for before, after in zip(images, pad_crop_flip(images, pad=2), strict=True):
        padded = torch.zeros(3, 12, 12, dtype=torch.uint8)
        padded[:, 2:10, 2:10] = before
        found = [
            (down, right, mirrored)
            for down in range(5)
            for right in range(5)
            for mirrored in (False, True)
            for crop in [padded[:, down : down + 8, right : right + 8]]
            if torch.equal(crop.flip(2) if mirrored else crop, after)
        ]
        assert len(found) == 1
        seen.update(found)
    assert len(seen) == 50, "all places, plain and mirrored"


def test_the_draws_follow_the_seed() -> None:
    images = torch.randint(256, (16, 3, 32, 32), dtype=torch.uint8)
    drawn = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        drawn.append(pad_crop_flip(images))
    assert torch.equal(drawn[0], drawn[1]) and not torch.equal(drawn[0], drawn[2])
