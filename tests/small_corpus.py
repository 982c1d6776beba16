"""A corpus like Multi30k with a dozen sentences, and random ones."""

import gzip

import torch

ENGLISH = ["a man rides a red bike .", "two dogs run .", "a woman reads a book in the park ."] * 4
GERMAN = ["ein mann fährt rad .", "zwei hunde rennen .", "eine frau liest im park ein buch ."] * 4


def write_corpus(folder):
    """Write the files of Multi30k below a folder."""
    files = folder / "multi30k"
    files.mkdir(parents=True)
    for language, lines in (("en", ENGLISH), ("de", GERMAN)):
        for split in ("train", "val", "test_2016_flickr"):
            with gzip.open(files / f"{split}.lc.norm.tok.{language}.gz", "wt") as file:
                file.write("\n".join(lines) + "\n")


def random_pairs(lengths, vocab_size=330):
    """Draw sources that end with 2, and targets of the reversed lengths."""
    generator = torch.Generator().manual_seed(1)

    def draw(length):
        return torch.randint(3, vocab_size, (length,), generator=generator).tolist()

    return [[*draw(n), 2] for n in lengths], [draw(n + 2) for n in reversed(lengths)]
